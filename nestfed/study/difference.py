"""What changed between two released models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nestfed.data.encoding import TableEncoding
from nestfed.metrics import Estimate
from nestfed.report.page import Table
from nestfed.study.coefficients import coefficients
from nestfed.study.model import StudyModel


def difference(a: StudyModel, b: StudyModel) -> list[Table]:
    """Return tables of what differs; no table if the models are equal."""
    parts = [
        ("Model", ["property", "first", "second"], _facts(a, b)),
        ("Columns", ["column", "first", "second"], _columns(a.encoding, b.encoding)),
        ("Scale", ["feature", "mean", "mean of the second", "deviation", "deviation of the second"], _scale(a, b)),
        ("Coefficients per unit", ["input", "first", "second", "change"], _coefficients(a, b)),
        ("Calibration", ["site", "slope a", "a of the second", "intercept b", "b of the second"], _calibration(a, b)),
        ("Thresholds", ["rule", "first", "second"], _thresholds(a, b)),
        ("Metrics", ["metric", "first", "second"], _pairs(a.provenance.metrics, b.provenance.metrics)),
        ("Training rows", ["site", "first", "second"], _pairs(a.provenance.sites, b.provenance.sites)),
        ("Settings", ["setting", "first", "second"], _pairs(a.provenance.settings, b.provenance.settings)),
    ]
    return [Table(title, columns, rows) for title, columns, rows in parts if rows]


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[list[Any]]:
    """Return the entries of two mappings that differ."""
    return [[k, _shown(a.get(k)), _shown(b.get(k))] for k in {**a, **b} if _shown(a.get(k)) != _shown(b.get(k))]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Estimate):
        return f"{value.value:.4f} ({value.low:.4f} to {value.high:.4f})"
    if isinstance(value, tuple):
        return " / ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _facts(a: StudyModel, b: StudyModel) -> list[list[Any]]:
    def facts(model: StudyModel) -> dict[str, Any]:
        origin = model.provenance
        return {
            "network": str(model.architecture),
            "target": model.target,
            "classes": model.classes or "a number",
            "encoding": model.encoding.to_json()["kind"],
            "objective": origin.objective,
            "method": origin.method,
            "date": origin.date,
            "study": origin.study,
            "adapted from": origin.parent,
            "nestfed": origin.nestfed,
            "torch": origin.torch,
            "notes": " ".join(origin.notes),
        }

    return _pairs(facts(a), facts(b))


def _columns(a: TableEncoding, b: TableEncoding) -> list[list[Any]]:
    """Return the columns that only one model has, or whose categories or marks of missing values differ."""

    def kinds(encoding: TableEncoding, other: Mapping[str, Sequence[str]]) -> dict[str, str]:
        marked = {encoding.features[i] for i in encoding.marked}
        found = {}
        for column in encoding.schema:
            if column.categories is None:
                found[column.name] = "number" + (", with a mark of missing values" if column.name in marked else "")
            else:
                extra = [c for c in column.categories if c not in other.get(column.name, ())]
                found[column.name] = f"{len(column.categories)} categories" + (
                    f", with {', '.join(extra)}" if extra else ""
                )
        return found

    own = [{c.name: c.categories or () for c in encoding.schema} for encoding in (a, b)]
    return _pairs(kinds(a, own[1]), kinds(b, own[0]))


def _scale(a: StudyModel, b: StudyModel) -> list[list[Any]]:
    """Return the features whose mean or deviation differs, those with the largest shift of the mean first."""
    first, second = (dict(zip(m.encoding.features, zip(m.encoding.mean, m.encoding.deviation))) for m in (a, b))
    both = [name for name in first if name in second and first[name] != second[name]]
    both.sort(key=lambda name: -abs(first[name][0] - second[name][0]) / first[name][1])
    return [
        [n, *(f"{v:.5g}" for v in (first[n][0], second[n][0], first[n][1], second[n][1]))] for n in both
    ]  # fmt: skip


def _coefficients(a: StudyModel, b: StudyModel) -> list[list[Any]]:
    """Return the coefficients that differ, the largest changes first; of networks, the distance of the parameters."""
    first, second = ({one.name: one.per_unit for one in coefficients(model)} for model in (a, b))
    if first and second:
        names = [n for n in {**first, **second} if first.get(n) != second.get(n)]
        change = {n: second.get(n, 0.0) - first.get(n, 0.0) for n in names}
        names.sort(key=lambda n: -abs(change[n]))
        return [[n, _shown(first.get(n)), _shown(second.get(n)), f"{change[n]:+.6g}"] for n in names]
    shapes = [{k: tuple(v.shape) for k, v in model.parameters.items()} for model in (a, b)]
    if shapes[0] != shapes[1]:
        return [
            ["(parameters)", *(str(sum(v.numel() for v in m.parameters.values())) for m in (a, b)), "of other shapes"]
        ]
    rows = []
    for name in a.parameters:
        old, new = a.parameters[name].double(), b.parameters[name].double()
        if not bool((old == new).all()):
            rows.append(
                [name, *(f"norm {float(v.norm()):.5g}" for v in (old, new)), f"norm {float((new - old).norm()):.5g}"]
            )
    return rows


def _calibration(a: StudyModel, b: StudyModel) -> list[list[Any]]:
    names = ["", *dict.fromkeys([*a.calibration.sites, *b.calibration.sites])]
    rows = []
    for name in names:
        old, new = a.calibration.at(name), b.calibration.at(name)
        if old != new:
            rows.append([name or "all sites", *(f"{v:.6g}" for v in (old[0], new[0], old[1], new[1]))])
    return rows


def _thresholds(a: StudyModel, b: StudyModel) -> list[list[Any]]:
    return _pairs(*({one.rule: one.probability for one in model.thresholds} for model in (a, b)))
