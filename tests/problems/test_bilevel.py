"""The public base classes: the bilevel problem of the tutorial against its closed form, and in every engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nestfed import FCSGM, Examples, Execution, FedAvg, simulate
from nestfed.core import Batch, NestfedError
from nestfed.problems import Modelled
from nestfed.testing import check_algorithm, check_problem

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "bilevel.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the tutorial's code defines; its second block trains."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), scope)
    return scope


def bilevel(page: dict[str, Any], steps: int, **options: Any) -> tuple[Any, Examples]:
    generator = torch.Generator().manual_seed(1)
    rows = [
        tuple(torch.randn(12, *shape, generator=generator, dtype=torch.float64) for shape in ((3,), (), (3,), ()))
        for _ in range(3)
    ]
    start = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    problem = page["Bilevel"](
        page["f"], page["g"], start, torch.zeros(3, dtype=torch.float64), steps=steps, lr=0.3, **options
    )
    return problem, Examples.of({str(n): held for n, held in enumerate(rows)}, batch=8, seed=0)


def closed_form(x: np.ndarray, batch: Any) -> np.ndarray:
    """With H = AᵀA/m + diag(eˣ), y* = H⁻¹Aᵀb/m and ∂y*/∂x_j = −e^{x_j} y*_j H⁻¹e_j, dF/dx_j = ∇fᵀ∂y*/∂x_j."""
    A, b, V, c = (leaf.numpy() for leaf in batch)
    H = A.T @ A / len(A) + np.diag(np.exp(x))
    y = np.linalg.solve(H, A.T @ b / len(A))
    slope = V.T @ (V @ y - c) / len(V)
    return -np.exp(x) * y * np.linalg.solve(H, slope)


@pytest.mark.parametrize(("n", "eager"), [(0, True), (1, False)])
def test_many_inner_steps_give_the_closed_form(page: dict[str, Any], n: int, eager: bool) -> None:
    problem, clients = bilevel(page, steps=120)
    data = clients.sample(n, 0)
    found = problem.grad(problem.x0, Batch(data, eager=eager))
    np.testing.assert_allclose(found.numpy(), closed_form(problem.x0.numpy(), data), rtol=1e-9)


def test_few_inner_steps_match_finite_differences_and_keep_the_contract(page: dict[str, Any]) -> None:
    problem, clients = bilevel(page, steps=3, penalty=lambda x: 0.1 * x.square().sum())
    check_problem(problem, clients)
    check_algorithm(FCSGM(alpha=0.1), problem, clients)
    batch = Batch(clients.sample(0, 0))
    problem.grad(problem.x0, batch)
    assert batch.tape.examples == 4 * 8


def test_engines_agree_and_clipping_works(page: dict[str, Any]) -> None:
    problem, clients = bilevel(page, steps=3, clip=0.01)
    assert float(problem.grad(problem.x0, clients.sample(0, 0)).norm()) == pytest.approx(0.01)
    runs = [
        simulate(problem, FedAvg(eta=0.5), clients, rounds=3, q=2, execution=Execution(mode=mode, workers=workers)).x
        for mode, workers in (("loop", 1), ("vmap", 1), ("loop", 2))
    ]
    for x in runs[1:]:
        torch.testing.assert_close(x, runs[0], rtol=1e-12, atol=1e-14)


def test_the_tutorial_says_what_it_finds(page: dict[str, Any]) -> None:
    assert set(page["result"].x.topk(2, largest=False).indices.tolist()) == {0, 1}


class Mean(Modelled):
    """A kind without `grad`: E of one number."""

    def slope(self, x: Tensor, batch: Batch) -> Tensor:
        (found,) = self.estimate(lambda y, data: self.penalised((y * data).mean(), self.model_at(y)), (x,), batch)
        return found


def test_estimate_notes_cost_and_loss_and_works_in_pieces() -> None:
    problem = Mean(torch.tensor([2.0]), penalty=lambda x: x.square().sum())
    data = torch.tensor([[1.0], [2.0], [6.0]])
    for pieces in (1, 2, 3):
        batch = Batch(data, eager=True, pieces=pieces)
        torch.testing.assert_close(problem.slope(problem.x0, batch), torch.tensor([7.0]))
        assert (batch.tape.examples, batch.tape.evaluations, float(batch.tape.loss)) == (3, 1, 10.0)  # type: ignore[arg-type]
    with pytest.raises(NestfedError, match="penalty must return one number"):
        Mean(torch.tensor([2.0]), penalty=lambda x: x).slope(problem.x0, Batch(data))
