"""NestFed: federated learning for objectives that are not a plain average of losses."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nestfed.core import __version__ as __version__

if TYPE_CHECKING:
    from nestfed.algorithms import (
        AFL,
        AMS,
        BSGD,
        CODA,
        CODASCA,
        FAFED,
        FCSG,
        FCSGM,
        FMGDA,
        KLDRO,
        QFFL,
        SCGD,
        SOX,
        STEM,
        AccFCSGM,
        AdaFCSGM,
        AdaFMGDA,
        Adagrad,
        Adam,
        Alone,
        Average,
        BSpiderBoost,
        CODAPlus,
        CVaRDRO,
        Ditto,
        FedAdagrad,
        FedAdam,
        FedAMS,
        FedAvg,
        FedDyn,
        FedNova,
        FedProx,
        FedRep,
        FeDXL1,
        FeDXL2,
        FedYogi,
        LocalBSGD,
        LocalMOML,
        LocalSCGD,
        LocalSCGDM,
        LocalSCGDMTasks,
        LocalSGDA,
        Momentum,
        MomentumLocalSGDA,
        NaiveAdaptive,
        Scaffold,
        Yogi,
    )
    from nestfed.algorithms import build as algorithm
    from nestfed.core import METRICS, Metric, NestfedError
    from nestfed.data.clients import Balanced, CrossPairs, Examples, Opposites, Paced, Pairs
    from nestfed.data.loaders import Loaders
    from nestfed.engine.callbacks import Callback
    from nestfed.engine.options import Evaluation, Exchange, Execution, Gaussian
    from nestfed.engine.simulate import Result, simulate
    from nestfed.engine.warm_up import WarmUp
    from nestfed.experiment.direct import compare, sweep, tune
    from nestfed.models import held_out
    from nestfed.problems import Compositional, Conditional, Minimax, Minimize
    from nestfed.problems.agnostic import Agnostic
    from nestfed.problems.auprc import AUPRC
    from nestfed.problems.auroc import AUROC
    from nestfed.problems.classify import Classify
    from nestfed.problems.multilabel import MultiLabelAP, MultiLabelAUROC
    from nestfed.problems.paired import PairedAP, PairedAUROC
    from nestfed.problems.partial import PairedPartialAUROC, PartialAUROC
    from nestfed.report.callbacks import MLflow, TensorBoard, WandB
    from nestfed.study import (
        Fair,
        FederatedAUC,
        FederatedAUPRC,
        FederatedClassifier,
        FederatedCox,
        FederatedLinear,
        FederatedLogistic,
        FederatedMAML,
        FederatedMinimax,
    )

# Looked up when first used: `import nestfed` and the command line's help need no torch.
_NAMES = {
    "nestfed.algorithms": (
        "AFL",
        "AccFCSGM",
        "AdaFCSGM",
        "AdaFMGDA",
        "Adagrad",
        "Adam",
        "Alone",
        "AMS",
        "Average",
        "BSGD",
        "BSpiderBoost",
        "CODA",
        "CODAPlus",
        "CODASCA",
        "CVaRDRO",
        "Ditto",
        "FAFED",
        "FCSG",
        "FCSGM",
        "FMGDA",
        "KLDRO",
        "FeDXL1",
        "FeDXL2",
        "FedAMS",
        "FedAdagrad",
        "FedAdam",
        "FedAvg",
        "FedDyn",
        "FedNova",
        "FedProx",
        "FedRep",
        "FedYogi",
        "LocalBSGD",
        "LocalMOML",
        "LocalSCGD",
        "LocalSCGDM",
        "LocalSCGDMTasks",
        "LocalSGDA",
        "Momentum",
        "MomentumLocalSGDA",
        "NaiveAdaptive",
        "QFFL",
        "SCGD",
        "SOX",
        "STEM",
        "Scaffold",
        "Yogi",
        "algorithm",
    ),
    "nestfed.core": (
        "METRICS",
        "Metric",
        "NestfedError",
    ),
    "nestfed.data.clients": (
        "Balanced",
        "CrossPairs",
        "Examples",
        "Opposites",
        "Paced",
        "Pairs",
    ),
    "nestfed.data.loaders": ("Loaders",),
    "nestfed.engine.callbacks": ("Callback",),
    "nestfed.engine.options": (
        "Evaluation",
        "Exchange",
        "Execution",
        "Gaussian",
    ),
    "nestfed.engine.simulate": (
        "Result",
        "simulate",
    ),
    "nestfed.engine.warm_up": ("WarmUp",),
    "nestfed.experiment.direct": (
        "compare",
        "sweep",
        "tune",
    ),
    "nestfed.models": ("held_out",),
    "nestfed.problems": (
        "Compositional",
        "Conditional",
        "Minimax",
        "Minimize",
    ),
    "nestfed.problems.agnostic": ("Agnostic",),
    "nestfed.problems.auprc": ("AUPRC",),
    "nestfed.problems.auroc": ("AUROC",),
    "nestfed.problems.classify": ("Classify",),
    "nestfed.report.callbacks": (
        "MLflow",
        "TensorBoard",
        "WandB",
    ),
    "nestfed.problems.paired": (
        "PairedAP",
        "PairedAUROC",
    ),
    "nestfed.problems.multilabel": (
        "MultiLabelAP",
        "MultiLabelAUROC",
    ),
    "nestfed.problems.partial": (
        "PairedPartialAUROC",
        "PartialAUROC",
    ),
    "nestfed.study": (
        "Fair",
        "FederatedAUC",
        "FederatedAUPRC",
        "FederatedClassifier",
        "FederatedCox",
        "FederatedLinear",
        "FederatedLogistic",
        "FederatedMAML",
        "FederatedMinimax",
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "AFL",
    "AMS",
    "AUPRC",
    "AUROC",
    "BSGD",
    "CODA",
    "CODASCA",
    "FAFED",
    "FCSG",
    "FCSGM",
    "FMGDA",
    "KLDRO",
    "METRICS",
    "QFFL",
    "SCGD",
    "SOX",
    "STEM",
    "AccFCSGM",
    "AdaFCSGM",
    "AdaFMGDA",
    "Adagrad",
    "Adam",
    "Agnostic",
    "Alone",
    "Average",
    "BSpiderBoost",
    "Balanced",
    "CODAPlus",
    "CVaRDRO",
    "Callback",
    "Classify",
    "Compositional",
    "Conditional",
    "CrossPairs",
    "Ditto",
    "Evaluation",
    "Examples",
    "Exchange",
    "Execution",
    "Fair",
    "FeDXL1",
    "FeDXL2",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedDyn",
    "FedNova",
    "FedProx",
    "FedRep",
    "FedYogi",
    "FederatedAUC",
    "FederatedAUPRC",
    "FederatedClassifier",
    "FederatedCox",
    "FederatedLinear",
    "FederatedLogistic",
    "FederatedMAML",
    "FederatedMinimax",
    "Gaussian",
    "Loaders",
    "LocalBSGD",
    "LocalMOML",
    "LocalSCGD",
    "LocalSCGDM",
    "LocalSCGDMTasks",
    "LocalSGDA",
    "MLflow",
    "Metric",
    "Minimax",
    "Minimize",
    "Momentum",
    "MomentumLocalSGDA",
    "MultiLabelAP",
    "MultiLabelAUROC",
    "NaiveAdaptive",
    "NestfedError",
    "Opposites",
    "Paced",
    "PairedAP",
    "PairedAUROC",
    "PairedPartialAUROC",
    "Pairs",
    "PartialAUROC",
    "Result",
    "Scaffold",
    "TensorBoard",
    "WandB",
    "WarmUp",
    "Yogi",
    "algorithm",
    "compare",
    "held_out",
    "simulate",
    "sweep",
    "tune",
]

logging.getLogger("nestfed").addHandler(logging.NullHandler())  # silent unless the user configures logging


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nestfed' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), "build" if name == "algorithm" else name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
