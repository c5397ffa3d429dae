"""The columns of a regression whose coefficients are read: reference categories, and units."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed.data.encoding import Schema, TableEncoding


@dataclass(frozen=True)
class Design(TableEncoding):
    """The columns of a regression: numbers standardised without clipping, categories against a reference category.

    The reference is a column's most common category, or "missing" where it has missing values. Missing numbers become the
    mean and are marked by a column of their own. Computed in float64.
    """

    def __call__(self, x: np.ndarray, schema: Schema, where: str = "The table") -> Tensor:
        """Return model inputs, (n, columns)."""
        values = self.align(x, schema, where)
        missing = ~np.isfinite(values)
        scaled = np.where(missing, 0.0, (values - self.mean) / self.deviation)
        return torch.from_numpy(np.concatenate([scaled[:, self.kept], missing[:, self.marked].astype(float)], 1))

    @classmethod
    def of(cls, encoding: TableEncoding) -> Design:
        """Return the design with the columns and scales of an encoding."""
        return cls(**{f.name: getattr(encoding, f.name) for f in fields(TableEncoding)})

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the columns."""
        return self.columns

    def to_json(self) -> dict[str, Any]:
        """Return the encoding as JSON."""
        return super().to_json() | {"kind": "design"}

    @property
    def kept(self) -> np.ndarray:
        """The positions of the features without the reference categories."""
        kept, first = [], 0
        for column in self.schema:
            places = list(range(first, first + len(column)))
            # Every row has a category: one of the features is redundant.
            if column.categories and self.mean[places].sum() > 1 - 1e-12:
                places.remove(first + int(self.mean[places].argmax()))
            kept += places
            first += len(column)
        return np.array(kept, np.int64)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return (*(self.features[i] for i in self.kept), *(f"{self.features[i]} is missing" for i in self.marked))

    def units(self, *, intercept: bool) -> np.ndarray:
        """Return the matrix that turns coefficients of the inputs into those of the columns in their own units."""
        kept = self.kept
        scale = np.concatenate([1 / self.deviation[kept], np.ones(len(self.marked))])
        if not intercept:
            return np.diag(scale)
        made = np.diag(np.concatenate([[1.0], scale]))
        made[0, 1 : len(kept) + 1] = -self.mean[kept] / self.deviation[kept]
        return made
