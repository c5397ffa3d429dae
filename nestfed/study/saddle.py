"""Train your own minimax objective over sites, for fair, robust, adversarial or worst-case training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from nestfed import models
from nestfed.data.clients import Examples
from nestfed.engine.options import Exchange
from nestfed.problems import Minimax
from nestfed.study.base import Federated
from nestfed.study.sites import DataError, InputEncoding, as_table, common_encoding, encoding_from_json, gather, inputs


class FederatedMinimax(Federated):
    """Solve min over a model, max over w of E f(model, w, (x, y, site)), over sites that keep their rows.

    - `objective(model, w, batch)`: returns the mean loss of a batch, whose third array is the site number of each row.
    - `w0`: the starting point of w.
    - `dual_domain`: the set that contains w, such as `Simplex()`.
    - `lr`: the step of both players; `method=functools.partial(FMGDA, c=0.1)` sets another one for w.

    After `fit`, `w_` is the last w.
    """

    kind = "minimax"

    def __init__(
        self,
        module: Any = None,
        *,
        objective: Callable[[Any, Tensor, Any], Tensor] | None = None,
        w0: Any = None,
        dual_domain: Any = None,
        outputs: int = 1,
        method: Any = "auto",
        lr: Any = None,
        rounds: int = 50,
        q: int = 10,
        batch_size: int = 32,
        hidden: Sequence[int] | None = None,
        standardize: bool = True,
        exchange: Exchange | None = None,
        device: str = "cpu",
        random_state: int | None = 0,
        verbose: bool | None = False,
    ) -> None:
        self.module = module
        self.objective = objective
        self.w0 = w0
        self.dual_domain = dual_domain
        self.outputs = outputs
        self.method = method
        self.lr = lr
        self.rounds = rounds
        self.q = q
        self.batch_size = batch_size
        self.hidden = hidden
        self.standardize = standardize
        self.exchange = exchange
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, *, groups: Any = None) -> Self:
        """Train on sites: a list of (X, y), a dict of them by name, or one (X, y) with `groups`."""
        if not callable(self.objective):
            raise DataError("FederatedMinimax needs objective=f, where f(model, w, (x, y, site)) is the mean loss.")
        if self.w0 is None:
            raise DataError("FederatedMinimax needs w0, the starting point of the maximising player.")
        sites = gather(X, y, groups)
        seed = self._seed()
        own = not isinstance(self.module, torch.nn.Module)
        self.scale_: InputEncoding = common_encoding(sites, scaled=self.standardize, mark_gaps=own)
        x = torch.cat([inputs(self.scale_, site.x, site.schema, site.where) for site in sites])
        labels = torch.from_numpy(np.concatenate([site.y for site in sites]))
        number = torch.repeat_interleave(torch.arange(len(sites)), torch.tensor([len(site) for site in sites]))
        parts = np.split(np.arange(len(x)), np.cumsum([len(site) for site in sites])[:-1])
        self.n_features_in_ = len(sites[0].schema) or sites[0].x.shape[1]
        self.shape_ = tuple(x.shape[1:])
        self.site_names_ = [site.name for site in sites]
        model = self._model(self.shape_, self.outputs, seed)
        w0 = torch.as_tensor(self.w0, dtype=torch.float32).reshape(-1)
        problem = Minimax(self.objective, model, w0, dual_domain=self.dual_domain)
        clients = Examples((x, labels, number), parts, batch=self.batch_size, names=self.site_names_)
        result = self._run(problem, clients, seed, None, "loss")
        self.module_ = result.model.cpu()
        self.w_ = result.shared["w"].cpu().numpy()
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the model's outputs."""
        check_is_fitted(self)
        return models.score(self.module_, inputs(self.scale_, *as_table(X))).numpy()

    def _fitted(self) -> dict[str, Any]:
        return {
            "scale": self.scale_.to_json(),
            "shape": list(self.shape_),
            "features": self.n_features_in_,
            "w": self.w_.tolist(),
            "sites": self.site_names_,
        }

    def _restore(self, fitted: Mapping[str, Any]) -> None:
        self.scale_ = encoding_from_json(fitted["scale"])
        self.shape_, self.n_features_in_ = tuple(fitted["shape"]), fitted["features"]
        self.w_, self.site_names_ = np.array(fitted["w"], np.float32), list(fitted["sites"])
        self.module_ = self._model(self.shape_, self.outputs, 0)
