"""The high-level interface: estimators in scikit-learn's conventions, trained over sites."""

from nestfed.estimators.labelled import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.estimators.meta import FederatedMAML
from nestfed.estimators.saddle import FederatedMinimax

__all__ = ["FederatedAUC", "FederatedAUPRC", "FederatedClassifier", "FederatedMAML", "FederatedMinimax"]
