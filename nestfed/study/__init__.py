"""The high-level interface: estimators in the style of scikit-learn, trained over sites."""

from nestfed.study.exact import FederatedLinear, FederatedLogistic
from nestfed.study.fair import Fair
from nestfed.study.labelled import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.study.meta import FederatedMAML
from nestfed.study.saddle import FederatedMinimax
from nestfed.study.survival import FederatedCox

__all__ = [
    "Fair",
    "FederatedAUC",
    "FederatedAUPRC",
    "FederatedClassifier",
    "FederatedCox",
    "FederatedLinear",
    "FederatedLogistic",
    "FederatedMAML",
    "FederatedMinimax",
]
