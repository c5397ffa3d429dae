"""The high-level interface: estimators in the style of scikit-learn, trained over sites."""

from nestfed.study.exact import FederatedCox, FederatedLinear, FederatedLogistic
from nestfed.study.labelled import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.study.meta import FederatedMAML
from nestfed.study.saddle import FederatedMinimax

__all__ = [
    "FederatedAUC",
    "FederatedAUPRC",
    "FederatedClassifier",
    "FederatedCox",
    "FederatedLinear",
    "FederatedLogistic",
    "FederatedMAML",
    "FederatedMinimax",
]
