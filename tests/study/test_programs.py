"""The exported programs compute what the released model computes, in other software."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from nestfed.core import NestfedError
from nestfed.data.encoding import FAR
from nestfed.study.model import StudyModel
from nestfed.study.programs import onnx_graph, torch_program
from tests.study.released import KINDS, released

pytestmark = pytest.mark.filterwarnings("ignore::nestfed.study.advice.NestfedWarning")


def rows(model: StudyModel) -> np.ndarray:
    """Return features with gaps, infinite values and values far out."""
    rng = np.random.default_rng(0)
    encoding = model.encoding
    x = encoding.mean + encoding.deviation * rng.normal(0, 2 * FAR, (200, len(encoding.mean)))
    if encoding.scaled:
        x[rng.random(x.shape) < 0.1] = np.nan
        x[0, 0], x[1, 0] = np.inf, -np.inf
    return x.astype(np.float32)


def expected(model: StudyModel, x: np.ndarray) -> np.ndarray:
    """Return the model's own predictions of aligned features."""
    inputs = model.encoding(x.astype(np.float64), model.encoding.schema)
    values = model.predictions(model.scores(inputs.double()))
    return values[:, 1] if model.binary else values


@pytest.mark.parametrize("kind", KINDS)
def test_torch_export(kind: str) -> None:
    model = released(kind)
    program = torch.export.load(io.BytesIO(torch_program(model))).module()
    for some in (rows(model), rows(model)[:1]):
        found = program(torch.from_numpy(some)).detach().numpy()
        assert_allclose(found, expected(model, some), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_onnx(kind: str) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = released(kind)
    session = runtime.InferenceSession(onnx_graph(model), providers=["CPUExecutionProvider"])
    for some in (rows(model), rows(model)[:1]):
        (found,) = session.run(None, {"x": some})
        assert_allclose(found, expected(model, some), rtol=1e-12, atol=1e-15)
    assert [one.name for one in session.get_outputs()] == ["prediction" if kind == "linear" else "probability"]
    facts = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
    assert facts == {"features": list(model.encoding.features), "target": model.target, "classes": list(model.classes)}


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(NestfedError, match=r"pip install 'nestfed\[onnx\]'"):
        onnx_graph(released("auc"))


@pytest.mark.long
def test_onnx_runs_without_nestfed(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = released("hidden")
    (tmp_path / "m.onnx").write_bytes(onnx_graph(model))
    np.save(tmp_path / "x.npy", rows(model))
    code = (
        "import sys, numpy as np, onnxruntime as o\n"
        "p = o.InferenceSession('m.onnx').run(None, {'x': np.load('x.npy')})[0]\n"
        "np.save('p.npy', p); assert 'torch' not in sys.modules and 'nestfed' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert_allclose(np.load(tmp_path / "p.npy"), expected(model, rows(model)), rtol=1e-12, atol=1e-15)
