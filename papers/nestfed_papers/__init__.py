"""The papers' figures and tables: problems, networks, experiments, claims and results.

Importing this module registers what it adds to nestfed. Nothing heavy is imported until it is used.
"""

from pathlib import Path

from nestfed.core import COMMANDS, EXPERIMENTS, METRICS, NETWORKS, OBJECTIVES, Metric

OBJECTIVES.add("sine", "nestfed_papers.sine:SineOptions")
OBJECTIVES.add("omniglot", "nestfed_papers.omniglot:OmniglotOptions")
OBJECTIVES.add("language", "nestfed_papers.language:LanguageOptions")
for _name in ("mnist", "fashion", "cifar", "omniglot", "sine", "lstm"):
    NETWORKS.add(_name, f"nestfed_papers.networks:{_name.upper()}")
for _path in sorted((Path(__file__).parent / "experiments").glob("*.toml")):
    EXPERIMENTS.add(_path.stem, _path)
COMMANDS.add("reproduce", "nestfed_papers.commands:reproduce")
COMMANDS.add("results", "nestfed_papers.commands:results")
# What the measures of convergence and the few-shot test return.
for _name in ("gradient_norm", "estimator_error", "inner_error", "M", "accuracy_ci95"):
    METRICS.add(_name, Metric(_name, higher=False))
