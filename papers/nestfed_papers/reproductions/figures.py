"""The figures that do not compare training runs: the saddle, the counter-example, the fitted curves, the rates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nestfed.algorithms.adaptive import FAFED, NaiveAdaptive
from nestfed.core import Batch, as_batch
from nestfed.engine.options import Execution
from nestfed.engine.simulate import simulate
from nestfed.files import write_atomically
from nestfed.problems.base import Minimize
from nestfed.report.drawing import pyplot, save
from nestfed.report.plot import COLOURS
from nestfed_papers.reproductions.base import Workshop
from nestfed_papers.toys import PLSaddle, Theorem1

if TYPE_CHECKING:
    from nestfed.problems.maml import Adaptable


def surface(workshop: Workshop) -> dict[str, Any]:
    """Draw the surface of Figure 1 of the FMGDA paper, locate its saddle, and show that the PL inequality fails there."""
    toy = PLSaddle()
    m = toy.saddle()
    eigenvalues, vectors = torch.linalg.eigh(toy.hessian(m))
    approach = []
    for distance in 10.0 ** np.arange(0, -7, -1):
        at = m + float(distance) * vectors[:, 0]  # along the descent direction, where S < 0
        sides = toy.pl_sides(at, 1.0)
        approach.append({"distance": float(distance), "quotient": sides.left / sides.right})
    plt = pyplot()
    figure = plt.figure(figsize=(11, 4.4), layout="constrained")
    grid = torch.linspace(-4, 4, 161, dtype=torch.float64)
    m1, m2 = torch.meshgrid(grid, grid, indexing="ij")
    values = toy.surface(torch.stack([m1, m2], -1))
    solid = figure.add_subplot(1, 2, 1, projection="3d")
    solid.plot_surface(m1, m2, values.clamp(max=2.0), cmap="viridis", linewidth=0, rcount=80, ccount=80)
    solid.scatter(*m.tolist(), float(toy.surface(m)), color="#d9480f", s=40, depthshade=False, label="saddle")
    solid.set_xlabel("m1")
    solid.set_ylabel("m2")
    solid.set_title("min over a, b of Φ (cut off at 2)", fontsize=10)
    flat = figure.add_subplot(1, 2, 2)
    levels = flat.contourf(m1, m2, values.clamp(max=1.0), levels=24, cmap="viridis")
    figure.colorbar(levels, ax=flat, label="S(m)")
    flat.plot(*m.tolist(), "o", color="#d9480f", label=f"saddle, S = {float(toy.surface(m)):.2f}")
    valley = torch.linspace(0.55, 4, 100)
    for sign in (1, -1):  # h separates the points by 1 where m1·tanh(m2/2) = 1
        m1_best = 1 / torch.tanh(valley / 2)
        flat.plot(
            sign * m1_best,
            sign * valley,
            "--",
            color="white",
            label="optimum, S* = −0.25" if sign == 1 else None,
        )
    flat.set_xlim(-4, 4)
    flat.set_xlabel("m1")
    flat.set_ylabel("m2")
    flat.legend(loc="lower right", fontsize=8, facecolor="#343a40", labelcolor="white")
    save(figure, workshop.place / "surface.png")
    return {
        "saddle": [float(v) for v in m],
        "gradient_norm": float(toy.gradient(m).norm()),
        "eigenvalues": [float(v) for v in eigenvalues],
        "value": float(toy.surface(m)),
        "optimum": toy.optimum,
        "approach": approach,
        "figures": ["surface.png"],
    }


def theorem1(workshop: Workshop) -> dict[str, Any]:
    """Run the counter-example of FAFED's Theorem 1: the naive method for several η and β, FAFED for several q."""
    quick = workshop.budget == "quick"
    steps = 40 if quick else 400
    naive, paths = [], {}
    for eta in (0.5, 0.1, 0.01):
        for beta in (0.1, 0.5, 0.9):
            toy = Theorem1()
            path = np.abs(_path(toy, NaiveAdaptive(eta, beta), steps, 1))
            moves = [eta / (3 * math.sqrt(1 - beta**t)) for t in range(1, steps + 1)]
            grows = bool((np.diff(path) > 0).all())
            error = float(np.abs(np.diff(path) - moves).max())
            ends = {"start": float(path[0]), "end": float(path[-1])}
            naive.append({"eta": eta, "beta": beta, **ends, "monotone": grows, "error": error})
            if beta == 0.5:
                paths[f"naive, η = {eta:g}"] = path
    fafed = []
    # (q, η, α, ρ, rounds, start): from 10, the slowest settings only take longer on the same straight line.
    for q, eta, alpha, rho, rounds, expected in (
        (1, 0.1, 0.5, 0.1, 700, "converges"),
        (5, 0.05, 0.05, 1.0, 400, "converges"),
        (20, 0.01, 0.01, 1.0, 600, "converges"),
        (5, 0.1, 0.5, 0.1, 250, "stalls"),
        (5, 0.05, 0.5, 1.0, 250, "stalls"),
    ):
        start = 2.0 if quick or expected == "stalls" else 10.0
        toy = Theorem1(start=start)
        path = np.abs(_path(toy, FAFED(eta, alpha, beta=0.5, rho=rho), rounds // 4 if quick and q == 20 else rounds, q))
        ends = {"end": float(path[-1]), "change": float(abs(path[-1] - path[-2]))}
        fafed.append({"q": q, "eta": eta, "alpha": alpha, "rho": rho, "expected": expected, **ends})
        paths[f"FAFED, q = {q}, η/ρ = {eta / rho:g}, α = {alpha:g}"] = path
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for colour, (name, path) in zip(COLOURS, paths.items()):
        panels[int(name.startswith("FAFED"))].plot(path, color=colour, label=name, linewidth=1.7)
    for panel, title in zip(
        panels, ("naive local adaptivity goes away", "FAFED comes home unless η/ρ or α is large at q > 1")
    ):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("communication rounds")
        panel.set_ylabel("|x|, the optimum is 0")
        panel.grid(alpha=0.25)
        panel.legend(frameon=False, fontsize=8)
    panels[1].set_yscale("log")
    save(figure, workshop.place / "theorem1.png")
    return {"naive": naive, "fafed": fafed, "figures": ["theorem1.png"]}


class _ByHand(Minimize):
    """The counter-example with its gradient in closed form, several times faster than autodiff."""

    def grad(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        (weight,) = as_batch(batch).data
        as_batch(batch).note(1)
        return weight * x.clamp(-1, 1)


def _path(toy: Theorem1, algorithm: Any, rounds: int, q: int) -> list[float]:
    """Return the common point after every round; for FAFED after the move that follows a synchronisation."""
    adaptive = isinstance(algorithm, FAFED)

    def measure(shared: Any, private: Any) -> dict[str, float]:
        x = shared["x"]
        if adaptive:
            x = x - algorithm.eta * shared["m"] / (shared["v"].sqrt() + algorithm.rho)
        return {"x": float(x)}

    problem = _ByHand(toy.problem.f, toy.problem.x0)
    found = simulate(
        problem,
        algorithm,
        toy.clients,
        rounds=rounds,
        q=q,
        measure=measure,
        execution=Execution(mode="loop", workers=1),
        progress=False,
    )
    return [record["x"] for record in found.history if record.get("x") is not None]


def fitted(workshop: Workshop) -> dict[str, Any]:
    """Draw the curves that the trained models fit to the unseen task of Figure 1 of the Local-SCGDM paper."""
    from nestfed_papers.sine import draw_fit

    ((data, folder),) = workshop.folders.items()
    experiment = workshop.experiments[data]
    models: dict[str, Adaptable] = {}
    errors: dict[str, dict[str, list[float]]] = {}
    for method in experiment.methods:
        for seed in range(workshop.seeds):
            model = trained(experiment.for_method(method), folder / method / f"seed-{experiment.run.seed + seed}")
            models.setdefault(method, model)
            before, after = (_fit_error(model, steps) for steps in (0, 1))
            row = errors.setdefault(method, {"before": [], "after": []})
            row["before"].append(before)
            row["after"].append(after)
    draw_fit(models, workshop.place / "fit.png")
    return {"fits": errors, "figures": ["fit.png"]}


def _fit_error(model: Adaptable, steps: int, a: float = 2.5, b: float = 1.5, points: int = 10) -> float:
    """Return the mean squared error on the task of `draw_fit`, over the whole interval, after some inner steps."""
    from nestfed.data.random import Purpose, Streams
    from nestfed_papers.sine import HIGH, LOW, wave

    known = torch.from_numpy(Streams(0).at(Purpose.TASKS, 2**41, 0).uniform(LOW, HIGH, (1, points))).to(model.x)
    grid = torch.linspace(LOW, HIGH, 300).to(model.x)[None]
    amplitude, phase = torch.tensor(a), torch.tensor(b)
    u = model.adapt((known[..., None], wave(known, amplitude, phase)), steps)
    return float((model.predict(u, grid[..., None]) - wave(grid, amplitude, phase)).square().mean())


def trained(experiment: Any, place: Path) -> Any:
    """Return the model of a finished run."""
    from nestfed.experiment.build import assemble

    made = assemble(experiment)
    return made.problem.bind(_vector(made.problem, place))


def _vector(problem: Any, place: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    tensors = load_file(place / "model.safetensors")
    return torch.cat([tensors[name].reshape(-1) for name in problem.flat.names])


def training_loss(experiment: Any, place: Path, tasks: int = 120) -> float | None:
    """Return a meta-learner's training objective at the final model of a run; None for other problems.

    The loss in a record is taken where a method takes it. For those that track the inner function that is the tracked
    value, not g(x), so that curves of different methods (or of one with another γ) could not be compared. Here all are
    judged by f(g(x)), on the same tasks of every client: those of iterations that no run gets to.
    """
    from nestfed.experiment.build import assemble
    from nestfed.problems.maml import MAML

    if experiment.problem.name not in ("sine", "omniglot"):
        return None
    held = place / "training.json"
    if held.exists():
        return float(json.loads(held.read_text(encoding="utf-8")))
    made = assemble(experiment)
    assert isinstance(made.problem, MAML)
    x, clients = _vector(made.problem, place), made.clients
    drawn = range(2**30, 2**30 + -(-tasks // (len(clients) * experiment.problem.tasks)))
    with torch.no_grad():
        found = fmean(float(made.problem.loss(x, clients.sample(n, t))) for t in drawn for n in range(len(clients)))
    write_atomically(held, json.dumps(found).encode())
    return found


def complexity(workshop: Workshop) -> dict[str, Any]:
    """Measure the complexity claims; skip parts that are already measured."""
    from nestfed_papers.complexity import measure, show

    plan = {"quick": measure.QUICK, "standard": measure.Plan(), "full": measure.FULL}[workshop.budget]
    parts = workshop.place / "parts"
    parts.mkdir(exist_ok=True)

    def kept(name: str, make: Any) -> Any:
        path = parts / f"{name}.json"
        if not path.exists():
            write_atomically(path, json.dumps(make(), indent=1).encode())
        return json.loads(path.read_text(encoding="utf-8"))

    results = measure.everything(plan, kept)
    write_atomically(workshop.place / "results.json", json.dumps(results).encode())
    show.everything(results, workshop.place)
    return {
        "rates": {n: {**r["slope"], "theory": r["theory"]} for n, r in results["rates"].items()},
        "speedup": {n: r["slope"]["T"] for n, r in results["speedup"].items()},
        "bias": {n: r["slope"] for n, r in results["bias"].items()},
        "bounds": {n: max(row["measured"] / row["bound"] for row in r["rows"]) for n, r in results["bounds"].items()},
        "figures": [f"{name}.png" for name in ("rates", "speedup", "bias", "bounds")],
    }
