"""The papers' figures and tables, beside the library: problems, experiments, claims and results.

Importing this module registers what it brings; nothing heavy is imported until it is used.
"""

from pathlib import Path

from nestfed.core import COMMANDS, EXPERIMENTS, OBJECTIVES

OBJECTIVES.add("sine", "nestfed_papers.sine:SineOptions")
OBJECTIVES.add("omniglot", "nestfed_papers.omniglot:OmniglotOptions")
OBJECTIVES.add("language", "nestfed_papers.language:LanguageOptions")
for _path in sorted((Path(__file__).parent / "experiments").glob("*.toml")):
    EXPERIMENTS.add(_path.stem, _path)
COMMANDS.add("reproduce", "nestfed_papers.commands:reproduce")
COMMANDS.add("results", "nestfed_papers.commands:results")
