"""Problems: the four kinds of objective, and one file per named objective."""

from nestfed.core import OBJECTIVES
from nestfed.problems.base import Ball, Box, Compositional, Conditional, Direct, Minimax, Minimize, Modelled, Simplex

OBJECTIVES.add("classify", "nestfed.problems.classify:ClassifyOptions")
OBJECTIVES.add("regress", "nestfed.problems.regress:RegressOptions")
OBJECTIVES.add("cox", "nestfed.problems.cox:CoxOptions")
OBJECTIVES.add("auroc", "nestfed.problems.auroc:AUROCOptions")
OBJECTIVES.add("auprc", "nestfed.problems.auprc:AUPRCOptions")
OBJECTIVES.add("agnostic", "nestfed.problems.agnostic:AgnosticOptions")
OBJECTIVES.add("paired-auroc", "nestfed.problems.paired:PairedAUROCOptions")
OBJECTIVES.add("paired-ap", "nestfed.problems.paired:PairedAPOptions")
OBJECTIVES.add("partial-auroc", "nestfed.problems.partial:PartialAUROCOptions")
OBJECTIVES.add("paired-partial-auroc", "nestfed.problems.partial:PairedPartialAUROCOptions")
OBJECTIVES.add("multi-label-auroc", "nestfed.problems.multilabel:MultiLabelAUROCOptions")
OBJECTIVES.add("multi-label-ap", "nestfed.problems.multilabel:MultiLabelAPOptions")
OBJECTIVES.add("invariant", "nestfed.problems.invariant:InvariantOptions")

__all__ = [
    "OBJECTIVES",
    "Ball",
    "Box",
    "Compositional",
    "Conditional",
    "Direct",
    "Minimax",
    "Minimize",
    "Modelled",
    "Simplex",
]
