"""One of the targets under atheris, whose inputs follow the branches that earlier ones reached.

python -m tests.system.guided TARGET RUNS FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["nestfed"]):
    from nestfed.core import NestfedError
    from tests.system.targets import TARGETS

name, runs, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
target = TARGETS[name]()
inside, corpus = folder / "inside", folder / "corpus"
inside.mkdir()
corpus.mkdir()
for i, seed in enumerate(target.seeds):
    (corpus / f"seed-{i}").write_bytes(seed)


def one(content: bytes) -> None:
    try:
        target.read(inside, content)
    except NestfedError as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            raise AssertionError(f"not one sentence: {error}") from error


limits = [
    f"-runs={runs}",
    "-max_len=4096",
    "-timeout=10",
    "-rss_limit_mb=3000",
    "-seed=1",
    f"-artifact_prefix={folder}/",
]
atheris.Setup([sys.argv[0], str(corpus), *limits], one)
atheris.Fuzz()
