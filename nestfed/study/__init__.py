"""The high-level interface: estimators in the style of scikit-learn, trained over sites."""

from nestfed.study.labelled import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.study.meta import FederatedMAML
from nestfed.study.saddle import FederatedMinimax

__all__ = ["FederatedAUC", "FederatedAUPRC", "FederatedClassifier", "FederatedMAML", "FederatedMinimax"]
