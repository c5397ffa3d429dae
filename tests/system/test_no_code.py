"""No code from data: nothing in the library unpickles, evaluates or imports what a file names."""

from __future__ import annotations

import ast
import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestfed.core import NestfedError
from nestfed.data.formats import read_arrays, read_npz
from nestfed.experiment.spec import from_tables, packaged, read

PACKAGE = Path(__file__).parents[2] / "nestfed"
SOURCES = sorted(PACKAGE.rglob("*.py"))

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "runpy", "imp", "code"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
ATTRIBUTES = {
    ("torch", "load"), ("torch.jit", "load"), ("torch.package", "PackageImporter"), ("numpy", "fromfile"), ("os", "system"),
    ("os", "popen"), ("pandas", "read_pickle"), ("pandas", "eval"), ("pandas", "read_hdf"), ("torch.hub", "load"),
}  # fmt: skip
LOADS = {"load", "save", "savez", "savez_compressed", "read_array", "open_memmap"}
"""numpy's, which must say allow_pickle=False unless they cannot unpickle."""


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names(tree: ast.AST) -> dict[str, str]:
    """Return what every imported name stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def sins(text: str) -> list[str]:
    """Return every place in a source that could turn data into code."""
    tree = ast.parse(text)
    known = names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{node.lineno}: imports {m}" for m in modules if m.split(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        head, _, rest = name.partition(".")
        full = f"{known.get(head, head)}.{rest}" if rest else known.get(head, head)
        owner, _, last = full.rpartition(".")
        if full in CALLS or full.removeprefix("builtins.") in CALLS:
            found.append(f"{node.lineno}: {full}")
        said = {k.arg: k.value for k in node.keywords}
        safe = isinstance(weights := said.get("weights_only"), ast.Constant) and weights.value is True
        if (owner, last) in ATTRIBUTES and not (full == "torch.load" and safe):
            found.append(f"{node.lineno}: {full}")
        if owner.startswith("numpy") and last in LOADS:
            allowed = said.get("allow_pickle")
            if not (isinstance(allowed, ast.Constant) and allowed.value is False):
                found.append(f"{node.lineno}: {full} without allow_pickle=False")
        if last == "extractall" or (last == "extract" and "tar" in owner):
            found.append(f"{node.lineno}: {full} writes where an archive says")
        if any(k == "shell" and isinstance(v, ast.Constant) and v.value for k, v in said.items()):
            found.append(f"{node.lineno}: {full} runs a shell")
        if last == "import_module" and node.args and not _literal(node.args[0]):
            found.append(f"{node.lineno}: imports a computed name")
    return found


def _literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


ALLOWED = {
    # The library's own lazy names: a fixed table of its own modules.
    ("__init__.py", "imports a computed name"),
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_source_turns_data_into_code(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    found = [s for s in sins(path.read_text(encoding="utf-8")) if (name, s.partition(": ")[2]) not in ALLOWED]
    assert not found, f"{name}: {'; '.join(found)}"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from cloudpickle import loads", "eval('1')", "exec(open('x').read())", "__import__('os')",
        "import torch\ntorch.load('x')", "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load\nload('x')", "import numpy as np\nnp.load('x')", "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import zipfile\nzipfile.ZipFile('x').extractall('.')", "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')", "from importlib import import_module\nimport_module(name)", "import pandas as pd\npd.read_pickle('x')",
    ],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(text: str) -> None:
    assert sins(text)


@pytest.mark.parametrize(
    "text",
    ["import torch\ntorch.load('x', weights_only=True)", "import numpy as np\nnp.load('x', allow_pickle=False)", "m.eval()",
     "from importlib import import_module\nimport_module('pandas')"],
)  # fmt: skip
def test_the_search_leaves_the_harmless_alone(text: str) -> None:
    assert not sins(text)


# --- what such files do when they are tried ---

FIRED: list[str] = []


def fire(word: str) -> None:
    FIRED.append(word)


class Bomb:
    def __reduce__(self) -> Any:
        return fire, ("boom",)


@pytest.fixture(autouse=True)
def _nothing_fires() -> Any:
    FIRED.clear()
    yield
    assert FIRED == []


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_the_bomb_works() -> None:
    pickle.loads(pickle.dumps(Bomb()))
    assert FIRED == ["boom"]
    FIRED.clear()


def test_npz_with_objects(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy(np.array([Bomb()], dtype=object)))
    with pytest.raises(NestfedError, match="Python objects"):
        read_npz(path, 10_000)


def test_npy_in_the_cache(tmp_path: Path) -> None:
    import json
    import zlib

    content = npy(np.array([Bomb()], dtype=object))
    (tmp_path / "x.npy").write_bytes(content)
    body = json.dumps({"sums": {"x": zlib.crc32(content)}, "note": None})
    (tmp_path / "index.json").write_text(f"{zlib.crc32(body.encode()):08x}\n{body}")
    assert read_arrays(tmp_path) is None


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_a_pickle_under_another_name(suffix: str, tmp_path: Path) -> None:
    from nestfed.data.tables import load_table

    path = tmp_path / f"patients{suffix}"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(NestfedError):
        load_table(path, "died")


def test_a_torch_file_as_a_checkpoint(tmp_path: Path) -> None:
    import hashlib

    from nestfed.engine import checkpoint

    buffer = io.BytesIO()
    torch.save({"x": Bomb()}, buffer)
    content = buffer.getvalue()
    (tmp_path / f"round-00000001-{hashlib.sha256(content).hexdigest()[:16]}.safetensors").write_bytes(content)
    found, skipped = checkpoint.read(tmp_path, "any", torch.device("cpu"))
    assert found is None
    assert "cannot be read" in skipped[0]


EVIL = "import pathlib; pathlib.Path(__file__).with_name('fired').touch()"


@pytest.mark.parametrize("section", ["data", "model", "problem", "algorithm"])
@pytest.mark.parametrize("form", ["evil_module", "evil_module:make", "evil_module.make", "./evil_module.py", "{path}"])
def test_an_experiment_file_cannot_name_a_module(
    section: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a name in it looks like, it is looked up in the library's own tables."""
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    from nestfed.experiment.build import assemble

    tables: dict[str, Any] = {
        "data": {"name": "digits", "binary": True}, "problem": {"name": "auprc"}, "algorithm": {"name": "fcsg", "alpha": 0.1},
        "model": {"name": "mlp", "hidden": []}, "partition": {"clients": 4},
    }  # fmt: skip
    assemble(from_tables(tables))  # as it is, it works
    tables[section] = {**tables[section], "name": form.format(path=tmp_path / "evil_module.py")}
    with pytest.raises(NestfedError):
        assemble(from_tables(tables))
    assert not (tmp_path / "fired").exists()
    assert "evil_module" not in sys.modules


def test_text_in_an_experiment_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text("[algorithm]\nname = \"fedavg\"\neta = \"__import__('os').system('touch fired')\"\n")
    assert isinstance(read(path).algorithm.hyper["eta"], str)


def test_packaged_experiments_are_data() -> None:
    assert all(p.suffix == ".toml" for p in packaged().values())


WITHOUT = """
import sys
for name in ("flwr", "pyarrow", "dp_accounting", "matplotlib", "optuna", "cryptography", "tensorboard"):
    sys.modules[name] = None  # as if it were not installed
import nestfed
from nestfed.algorithms import FedAvg
from nestfed_papers.toys import Quadratic
toy = Quadratic(3, 2)
exchange = nestfed.Exchange(reduce="median")
result = nestfed.simulate(toy.problem, FedAvg(0.1), toy.clients, rounds=2, q=2, exchange=exchange)
assert len(result.history) == 2
"""


@pytest.mark.slow
def test_the_core_needs_no_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
