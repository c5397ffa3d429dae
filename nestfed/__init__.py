"""NestFed: federated learning for objectives that are not a plain average of losses."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nestfed.core import __version__ as __version__

if TYPE_CHECKING:
    from nestfed.algorithms import build as algorithm
    from nestfed.core import Metric, NestfedError
    from nestfed.data.clients import Examples, Pairs
    from nestfed.engine.simulate import Result, simulate
    from nestfed.problems import Compositional, Conditional, Minimax, Minimize
    from nestfed.problems.auprc import AUPRC
    from nestfed.problems.auroc import AUROC
    from nestfed.problems.classify import Classify
    from nestfed.study import FederatedAUC, FederatedAUPRC, FederatedClassifier, FederatedMAML, FederatedMinimax

# Looked up when first used: `import nestfed` and the command line's help need no torch.
_HOMES = {
    "AUPRC": "nestfed.problems.auprc",
    "AUROC": "nestfed.problems.auroc",
    "Classify": "nestfed.problems.classify",
    "Compositional": "nestfed.problems",
    "Conditional": "nestfed.problems",
    "Examples": "nestfed.data.clients",
    "FederatedAUC": "nestfed.study",
    "FederatedAUPRC": "nestfed.study",
    "FederatedClassifier": "nestfed.study",
    "FederatedMAML": "nestfed.study",
    "FederatedMinimax": "nestfed.study",
    "Metric": "nestfed.core",
    "Minimax": "nestfed.problems",
    "Minimize": "nestfed.problems",
    "NestfedError": "nestfed.core",
    "Pairs": "nestfed.data.clients",
    "Result": "nestfed.engine.simulate",
    "algorithm": "nestfed.algorithms",
    "simulate": "nestfed.engine.simulate",
}

__all__ = [
    "AUPRC",
    "AUROC",
    "Classify",
    "Compositional",
    "Conditional",
    "Examples",
    "FederatedAUC",
    "FederatedAUPRC",
    "FederatedClassifier",
    "FederatedMAML",
    "FederatedMinimax",
    "Metric",
    "Minimax",
    "Minimize",
    "NestfedError",
    "Pairs",
    "Result",
    "algorithm",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nestfed' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), "build" if name == "algorithm" else name)
