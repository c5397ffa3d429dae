"""A released model as a program for other software: from raw features to probabilities, by torch.export and ONNX.

Both take the features in order (`features` in the metadata), one row each, NaN where missing; a category is one 0/1
feature. ONNX and safetensors files hold numbers and a fixed set of operations; a `.pt2` file can run code when it is loaded.
"""

from __future__ import annotations

import io
import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nestfed.core import NestfedError
from nestfed.data.design import Design
from nestfed.data.encoding import FAR, TableEncoding

if TYPE_CHECKING:
    from nestfed.study.model import StudyModel

OPSET = 17
"""The version of ONNX's operations; ONNX Runtime reads it since 1.12."""


class Encode(nn.Module):
    """Maps aligned features, NaN where missing, to model inputs in float64, as an encoding does."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, encoding: TableEncoding) -> None:
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(np.asarray(encoding.mean, np.float64)))
        self.register_buffer("deviation", torch.from_numpy(np.asarray(encoding.deviation, np.float64)))
        exact = isinstance(encoding, Design)
        self.far = float("inf") if exact else FAR
        self.kept = [int(i) for i in encoding.kept] if isinstance(encoding, Design) else list(range(len(encoding.mean)))
        self.marked, self.scaled, self.narrow = encoding.marked, encoding.scaled or exact, not exact

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, features) to (n, inputs)."""
        values = x.double()
        if self.scaled:
            missing = ~torch.isfinite(values)
            values = torch.where(missing, 0.0, ((values - self.mean) / self.deviation).clamp(-self.far, self.far))
            values = torch.cat([values[:, self.kept], missing[:, self.marked].double()], 1)
        return values.float().double() if self.narrow else values


class Scorer(nn.Module):
    """Maps raw features to probabilities (or to numbers, for a numeric target).

    With two classes it returns the probability of the positive class, otherwise one per class.
    """

    def __init__(self, model: StudyModel) -> None:
        super().__init__()
        self.encode, self.network = Encode(model.encoding), model.network
        self.numeric, (self.a, self.b) = not model.classes, model.calibration.at()

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, features) to (n,) or (n, classes)."""
        scores = self.network(self.encode(x))
        if self.numeric:
            return scores
        return torch.sigmoid(self.a * scores + self.b) if scores.dim() == 1 else torch.softmax(scores, 1)


def programs(model: StudyModel) -> dict[str, bytes]:
    """Return the model as files for other software; the ONNX file only if the package onnx is installed."""
    from nestfed.study.model import GRAPH, PROGRAM

    made = {PROGRAM: torch_program(model)}
    if find_spec("onnx") is not None and model.architecture.name == "mlp":
        made[GRAPH] = onnx_graph(model)
    return made


def torch_program(model: StudyModel) -> bytes:
    """Return a program for `torch.export.load`."""
    example = torch.zeros(2, len(model.encoding.features))
    made = torch.export.export(Scorer(model).eval(), (example,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    file = io.BytesIO()
    torch.export.save(made, file)
    return file.getvalue()


def onnx_graph(model: StudyModel) -> bytes:
    """Return an ONNX model that computes in float64: input `x`, output `probability` (or `prediction`)."""
    try:
        import onnx
    except ImportError as error:
        raise NestfedError("ONNX needs the package onnx: pip install 'nestfed[onnx]'.") from error
    if model.architecture.name != "mlp":
        raise NestfedError(f"ONNX is available for the network mlp, not for {model.architecture.name}.")
    graph = _Graph(onnx)
    scores = graph.network(graph.encoded(model.encoding), model)
    out = graph.answer(scores, model)
    features = len(model.encoding.features)
    shape: list[Any] = ["rows"] if model.architecture.outputs == 1 else ["rows", model.architecture.outputs]
    kind = onnx.TensorProto
    made = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "nestfed",
            [onnx.helper.make_tensor_value_info("x", kind.FLOAT, ["rows", features])],
            [onnx.helper.make_tensor_value_info(out, kind.DOUBLE, shape)],
            graph.constants,
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=8,
        producer_name="nestfed",
    )
    facts = {"features": list(model.encoding.features), "target": model.target, "classes": list(model.classes)}
    onnx.helper.set_model_props(made, {name: json.dumps(value, ensure_ascii=False) for name, value in facts.items()})
    onnx.checker.check_model(made)
    return made.SerializeToString()


class _Graph:
    """The nodes of an ONNX graph as they are added."""

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, operation: str, *inputs: Any, name: str = "", **attributes: Any) -> str:
        """Add a node; arrays among the inputs become constants. Return the name of its output."""
        out = name or f"v{len(self.nodes)}"
        names = [i if isinstance(i, str) else self.constant(i) for i in inputs]
        self.nodes.append(self.onnx.helper.make_node(operation, names, [out], **attributes))
        return out

    def constant(self, value: Any) -> str:
        """Add a constant; return its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def encoded(self, encoding: TableEncoding) -> str:
        """Add what `Encode` does to the input `x`; return the name of the model inputs."""
        encode, kind = Encode(encoding), self.onnx.TensorProto
        values = self.add("Cast", "x", to=kind.DOUBLE)
        if encode.scaled:
            missing = self.add("Or", self.add("IsNaN", values), self.add("IsInf", values))
            scaled = self.add("Div", self.add("Sub", values, encode.mean.numpy()), encode.deviation.numpy())
            if np.isfinite(encode.far):
                scaled = self.add("Clip", scaled, np.float64(-encode.far), np.float64(encode.far))
            filled = self.add("Where", missing, np.float64(0), scaled)
            values = self.add("Gather", filled, np.array(encode.kept, np.int64), axis=1)
            if encode.marked:
                marks = self.add("Gather", self.add("Cast", missing, to=kind.DOUBLE), np.array(encode.marked), axis=1)
                values = self.add("Concat", values, marks, axis=1)
        return self.add("Cast", self.add("Cast", values, to=kind.FLOAT), to=kind.DOUBLE) if encode.narrow else values

    def network(self, inputs: str, model: StudyModel) -> str:
        """Add a fully connected network; return the name of the scores, (rows, outputs)."""
        state = {name: tensor.numpy() for name, tensor in model.network.state_dict().items()}
        layers = [f"hidden.{i}" for i in range(len(model.architecture.options.get("hidden", (64,))))]
        for layer in layers:
            inputs = self.add("Gemm", inputs, state[f"{layer}.weight"], state[f"{layer}.bias"], transB=1)
            inputs = self.add("Relu", inputs)
        return self.add("Gemm", inputs, state["head.weight"], state["head.bias"], transB=1)

    def answer(self, scores: str, model: StudyModel) -> str:
        """Add what turns scores into the answer; return its name."""
        if len(model.classes) > 2:
            return self.add("Softmax", scores, axis=1, name="probability")
        flat = self.add("Squeeze", scores, np.array([1], np.int64), name="" if model.classes else "prediction")
        if not model.classes:
            return flat
        a, b = model.calibration.at()
        logit = self.add("Add", self.add("Mul", flat, np.float64(a)), np.float64(b))
        return self.add("Sigmoid", logit, name="probability")
