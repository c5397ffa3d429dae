"""What a study found: which model to release and why, how good it is, its calibration and thresholds. All by queries."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scipy.stats import norm

from nestfed.core import Metric
from nestfed.experiment.spec import Experiment
from nestfed.queries import VALIDATION
from nestfed.queries.tally import Tally
from nestfed.study import conduct as conducting
from nestfed.study import decide
from nestfed.study import judge as judging
from nestfed.study import recalibrate as recalibrating
from nestfed.study.conduct import LOG, Conducted, Sites, Way, asking, choosing, conduct
from nestfed.study.counts import Candidate, Counts, count
from nestfed.study.decide import Calibration, Threshold
from nestfed.study.importance import Importance, importance, inputs_by_column
from nestfed.study.judge import judge
from nestfed.study.metric_table import Entry, MetricTable
from nestfed.study.protect import Protection, safest
from nestfed.study.recalibrate import Agreement, Recalibration, agreement, calibrate, recalibrate

QUERIES = (*conducting.QUERIES, *judging.QUERIES, *recalibrating.QUERIES)
"""What a study asks besides what every run over tables asks."""
LEAST = 1e-3
"""A gain that is not larger is no reason to release another model."""
ALONE = "every site alone"
"""Every site's own exact regression, judged on its own rows."""
COMMON, BY_SITE, UNCALIBRATED = "common calibration", "calibration by site", "scores"
"""The released model with either calibration, and its scores alone."""


@dataclass(frozen=True)
class Outcome:
    """The result of a study: all that the report and the released model need."""

    conducted: Conducted
    released: Way
    why: str
    """Why this model is released, in a sentence."""
    validation: MetricTable
    """The models of the chosen trials on validation rows, on which the choice rests."""
    test: MetricTable
    """The last models on test rows."""
    calibration: Calibration = field(default_factory=Calibration)
    # The following is only known for two classes.
    counts: Counts | None = None
    """The counts of the released model's scores of the test rows, with either calibration."""
    recalibrated: MetricTable | None = None
    """The Brier score of the released model with either calibration."""
    recalibration: Recalibration | None = None
    agreements: Mapping[str, Agreement] | None = None
    """Calibration slope and intercept on test rows, by group."""
    thresholds: tuple[Threshold, ...] = ()
    importances: Sequence[Importance] = ()
    """Empty for a linear score, whose coefficients say more."""
    protection: Protection | None = None
    """The worst site against all rows, if the study protects sites."""
    seconds: float = 0.0

    @property
    def metric(self) -> str:
        """The metric that decides."""
        return choosing(self.conducted.study).name

    @property
    def tally(self) -> Tally:
        """The counts of the released model's calibrated scores of the test rows."""
        assert self.counts is not None
        return self.counts.tally(BY_SITE if self.calibration.sites else COMMON)

    @property
    def plain(self) -> Tally:
        """The counts of the released model's scores of the test rows, before calibration."""
        assert self.counts is not None
        return self.counts.tally(UNCALIBRATED)

    @property
    def ways(self) -> Sequence[Way]:
        """All trained models, exact regression last."""
        return (*self.conducted.ways, self.conducted.exact.way)


def find_out(study: Experiment, sites: Sites, tell: Callable[[str], None] = LOG.info) -> Outcome:
    """Conduct a study; choose the model on validation rows, and judge it on test rows."""
    began = time.perf_counter()
    found = conduct(study, sites, tell)
    tell("judging on validation and test rows")
    metric, names = choosing(study).name, list(sites.names)
    ways = [*found.ways, found.exact.way]
    kind = found.target.scores
    trial, final = asking(sites, final=False), asking(sites)
    fallback = found.exact.way if found.network.is_linear else _way(ways, study.study.baseline)
    validation = judge(
        trial, {way.name: way.trial for way in ways}, kind=kind, metrics=[metric], reference=fallback.name, sites=names,
        part=VALIDATION,
    )  # fmt: skip
    released, why = _choose(study, ways, fallback, validation)
    if study.study.protect and study.study.release == "best":
        safer, reason = safest(study, ways, fallback, validation)
        released, why = (safer, reason) if safer is not None else (released, f"{why} {reason}")
    alone = {ALONE: Candidate(None)}
    if not found.target.binary:
        last = {way.name: Candidate(way.x) for way in ways}
        test = judge(
            final, last | alone, kind=kind, subgroups=study.data.subgroups, reference=released.name, sites=names
        )
        protection = None
        if study.study.protect:
            protection = Protection.of(study, final, last, fallback.name, None, validation, kind=kind, sites=names)
        return Outcome(
            found, released, why, validation, test, importances=_importances(sites, found, last[released.name], metric, tell),
            protection=protection, seconds=time.perf_counter() - began,
        )  # fmt: skip
    # Every model is calibrated on the validation rows, which its trial has not seen, so that probabilities compare.
    # Logistic regression needs no map: on its own rows its probabilities agree with the frequencies.
    maps = {way.name: Calibration() if way is found.exact.way else calibrate(trial, way.trial) for way in ways}
    common = maps[released.name]
    adapted = recalibrate(trial, released.trial, common, names)
    used = common if study.study.calibration == "common" else adapted.calibration
    last = {way.name: Candidate(way.x, maps[way.name]) for way in ways} | {released.name: Candidate(released.x, used)}
    test = judge(
        final, last | alone, kind=kind, metrics=_metrics(metric), subgroups=study.data.subgroups,
        reference=study.study.baseline, sites=names,
    )  # fmt: skip
    both = {COMMON: Candidate(released.x, common), BY_SITE: Candidate(released.x, adapted.calibration)}
    recalibrated = judge(final, both, kind=kind, metrics=["brier"], sites=names)
    counts = count(final, both | {UNCALIBRATED: Candidate(released.x)}, kind, sites=names)
    chosen = count(trial, {"": Candidate(released.trial, used)}, kind, sites=names, part=VALIDATION)
    thresholds = decide.thresholds(
        chosen.tally(""), counts.tally(COMMON if used is common else BY_SITE), study.study.thresholds
    )
    importances = _importances(sites, found, last[released.name], metric, tell)
    agreements = agreement(final, released.x, used, names)
    protection = None
    if study.study.protect:
        own = recalibrate(trial, fallback.trial, maps[fallback.name], names).calibration
        every = {way.name: Candidate(way.x, maps[way.name]) for way in ways}
        protection = Protection.of(
            study, final, every, fallback.name, Candidate(fallback.x, own), validation, kind=kind, sites=names
        )
    return Outcome(
        found, released, why, validation, test, used, counts, recalibrated, adapted, agreements, thresholds, importances,
        protection, time.perf_counter() - began,
    )  # fmt: skip


def _importances(
    sites: Sites, found: Conducted, model: Candidate, metric: str, tell: Callable[[str], None]
) -> Sequence[Importance]:
    """Return what a network loses without each column; nothing for a linear score, whose coefficients say more."""
    if found.network.is_linear:
        return ()
    tell("permuting columns")
    columns = inputs_by_column(found.agreement.encoding)
    return importance(asking(sites), model, columns, kind=found.target.scores, metric=metric)


def _metrics(metric: str) -> list[str]:
    return list(dict.fromkeys([metric, "auroc", "ap", "brier", "log_loss"]))


def _way(ways: Sequence[Way], name: str) -> Way:
    return next(way for way in ways if way.name == name)


def _clearly(entry: Entry, metric: Metric, candidates: int) -> bool:
    """Return whether a model is better than the reference, with 95 % confidence for all candidates together (Bonferroni)."""
    gain = entry.difference
    if gain is None or not all(map(math.isfinite, (gain.value, gain.low, gain.high))):
        return False
    half = (gain.high - gain.low) / 2 * float(norm.ppf(1 - 0.025 / candidates) / norm.ppf(0.975))
    return (gain.value if metric.higher else -gain.value) - half > LEAST


def _choose(study: Experiment, ways: Sequence[Way], fallback: Way, validation: MetricTable) -> tuple[Way, str]:
    """Return the model to release and the reason, in a sentence."""
    metric = choosing(study)
    if study.study.release == "first":
        return ways[0], f"{ways[0].name} is released because the study names it; see how it compares with the others."
    others = [way for way in ways if way is not fallback]
    better = [way for way in others if _clearly(validation.entry(way.name, metric.name), metric, len(others))]
    if not better:
        return fallback, (
            f"{fallback.name} is released: on the validation rows, no other model's {metric.name} is better with 95 % confidence."
        )
    best = max(better, key=lambda way: metric.signed(validation.entry(way.name, metric.name).value.value))
    gain = validation.entry(best.name, metric.name).difference
    assert gain is not None
    return best, (
        f"{best.name} is released: on the validation rows its {metric.name} is better than that of {fallback.name} by "
        f"{abs(gain.value):.3f} (95 % interval {gain.low:+.3f} to {gain.high:+.3f})."
    )
