"""What estimators of labelled tables share: the columns of X, which of them names the site, and their encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.utils.validation import _check_feature_names, _check_n_features, check_is_fitted
from torch import Tensor

from nestfed.data.encoding import Schema, TableEncoding, numbered
from nestfed.data.schema import EMPTY, TableSchema
from nestfed.study.sites import DataError, InputEncoding, as_table, inputs

if TYPE_CHECKING:
    from nestfed.study.adapt import Adapted, Way
    from nestfed.study.model import StudyModel


class TableInputs:
    """Turns a user's X into model inputs, for prediction; a part of estimators."""

    site_column: str | int | None
    scale_: InputEncoding
    n_features_in_: int
    feature_names_in_: np.ndarray

    def to_model(self, target: str = "y") -> StudyModel:
        """Return the released model, which `nestfed predict`, `monitor` and `adapt` use; `target` names what it predicts."""
        from nestfed.study.convert import model_of

        check_is_fitted(self)
        return model_of(self, target)

    def adapt(self, X: Any, y: Any, *, groups: Any = None, way: Way = "auto") -> Adapted:
        """Return a released model adapted to the labelled rows of a new site; see `nestfed.study.adapt`.

        - `groups`: for each row, a value such as a patient, whose rows are left out together.
        - `way`: "auto", "recalibrate" or "coefficients".
        """
        import pandas as pd

        from nestfed.study.adapt import adapt_table

        model = self.to_model()
        named = X if hasattr(X, "columns") else pd.DataFrame(X, columns=[c.name for c in model.encoding.schema])
        return adapt_table(model, named, y, where="X", groups=None if groups is None else np.asarray(groups), way=way)

    @property
    def _table(self) -> TableSchema:
        """How the training data were read."""
        return self.scale_.table if isinstance(self.scale_, TableEncoding) else EMPTY

    def _without_sites(self, X: Any) -> tuple[Any, Any]:
        """Return X without the column that names the sites, and that column; None if X lacks it, as for prediction."""
        if hasattr(X, "columns"):
            if self.site_column not in X.columns:
                return X, None
            return X.drop(columns=[self.site_column]), X[self.site_column].to_numpy()
        values = np.asarray(X)
        if not isinstance(self.site_column, int) or values.ndim != 2:
            raise DataError(f"site_column={self.site_column!r} names a column, but X is not a data frame.")
        return np.delete(values, self.site_column, axis=1), values[:, self.site_column]

    def _remember(self, X: Any) -> None:
        """Set the names of the features, as scikit-learn requires of a fitted estimator."""
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        if X is not None and hasattr(X, "columns"):
            _check_feature_names(self, X, reset=True)

    def _scaled(self, x: np.ndarray, schema: Schema, where: str = "X") -> Tensor:
        if schema == numbered(len(schema)) and len(schema) not in (0, self.n_features_in_):
            raise DataError(
                f"X has {len(schema)} features, but {type(self).__name__} is expecting {self.n_features_in_} features as "
                "input."
            )
        return inputs(self.scale_, x, schema, where)

    def _input(self, X: Any) -> Tensor:
        named = isinstance(self.site_column, str)
        if named or (self.site_column is not None and np.ndim(X) == 2 and np.shape(X)[1] == self.n_features_in_ + 1):
            X = self._without_sites(X)[0]
        # Columns of a list of data frames are matched by name below; scikit-learn checks the rest.
        unnamed = self.scale_.schema == numbered(len(self.scale_.schema))
        if hasattr(self, "feature_names_in_") or unnamed:
            _check_feature_names(self, X, reset=False)
        values, schema = as_table(X, table=self._table)
        if not hasattr(X, "columns") and values.ndim == 2:
            _check_n_features(self, values, reset=False)
        return self._scaled(values, schema)
