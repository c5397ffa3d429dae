"""Writes reference.json: what statsmodels and scikit-survival find on two small tables.

Run in an environment of its own: pip install scikit-survival statsmodels; python tests/queries/make_reference.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import sksurv
import statsmodels
import statsmodels.api as sm
from sksurv.linear_model import CoxPHSurvivalAnalysis
from sksurv.metrics import brier_score, concordance_index_censored, concordance_index_ipcw
from sksurv.nonparametric import kaplan_meier_estimator

RNG = np.random.default_rng(2024)
SITE = np.repeat(np.arange(6), [3, 12, 20, 25, 30, 30])
N = len(SITE)


def regressions(x: np.ndarray) -> dict[str, Any]:
    eta = x @ [0.8, -0.5, 0.3] + 0.2
    y, number = (RNG.random(N) < 1 / (1 + np.exp(-eta))).astype(int), eta + RNG.normal(size=N)
    three = np.minimum((RNG.random(N) * 2.2 + 0.5 * y).astype(int), 2)
    ones, found = sm.add_constant(x), {"y": y.tolist(), "number": number.tolist(), "three": three.tolist()}
    for name, model in (("logistic", sm.Logit(y, ones)), ("linear", sm.OLS(number, ones))):
        options = {"disp": 0, "tol": 1e-14, "maxiter": 100} if name == "logistic" else {}
        fit = model.fit(**options)
        robust = model.fit(cov_type="HC0", **options)
        site = model.fit(cov_type="cluster", cov_kwds={"groups": SITE, "use_correction": False}, **options)
        found[name] = {"coef": fit.params.tolist(), "llf": fit.llf, "p": fit.pvalues.tolist()}
        found[name] |= {"interval": fit.conf_int().tolist(), "model": fit.bse.tolist()}
        found[name] |= {"robust": robust.bse.tolist(), "site": site.bse.tolist()}
    several = sm.MNLogit(three, ones).fit(disp=0, tol=1e-14, maxiter=100, method="newton")
    found["several"] = {"coef": several.params.T.tolist(), "model": several.bse.T.tolist(), "llf": several.llf}
    return found


def survival(x: np.ndarray, ties: bool) -> dict[str, Any]:
    time, censored = RNG.exponential(np.exp(-x @ [0.7, -0.4, 0.2])), RNG.exponential(2, N)
    event, time = time < censored, np.minimum(time, censored)
    time = np.ceil(8 * time) if ties else time
    event[SITE == 0] = [True, False, False]
    event[SITE == 1] = np.arange(12) < 2
    event[SITE == 2] = False
    y = np.array(list(zip(event, time)), dtype=[("event", bool), ("time", float)])
    found: dict[str, Any] = {"time": time.tolist(), "event": event.tolist()}
    for way in ("efron", "breslow"):
        fit = sm.PHReg(time, x, status=event, ties=way).fit(disp=0)
        own = sm.PHReg(time, x, status=event, ties=way, strata=SITE).fit(disp=0)
        found[way] = {"coef": CoxPHSurvivalAnalysis(ties=way, tol=1e-15).fit(x, y).coef_.tolist()}
        found[way] |= {"model": fit.bse.tolist(), "llf": fit.llf}
        found[way] |= {"stratified": own.params.tolist(), "stratified_model": own.bse.tolist()}
    for name, groups in (("robust", np.arange(N)), ("site", SITE)):
        found["breslow"][name] = sm.PHReg(time, x, status=event, ties="breslow").fit(groups=groups, disp=0).bse.tolist()
    if not ties:
        found |= measures(x, y)
    return found


def measures(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    fit = CoxPHSurvivalAnalysis(ties="breslow", tol=1e-15).fit(x, y)
    times, survival, limits = kaplan_meier_estimator(y["event"], y["time"], conf_type="log-log")
    risk, horizons = x @ fit.coef_, [0.2, 0.5, 1.0]
    curves = [[float(f(t)) for t in horizons] for f in fit.predict_survival_function(x)]
    found: dict[str, Any] = {"horizons": horizons, "km": [times.tolist(), survival.tolist(), limits.tolist()]}
    found["baseline"] = [fit.cum_baseline_hazard_.x.tolist(), fit.cum_baseline_hazard_.y.tolist()]
    found["c"] = concordance_index_censored(y["event"], y["time"], risk)[0]
    found["uno"] = concordance_index_ipcw(y, y, risk, tau=1.0)[0]
    found["brier"] = brier_score(y, y, curves, horizons)[1].tolist()
    return found


def main() -> None:
    x = RNG.normal(size=(N, 3))
    x[:, 1] = RNG.random(N) < 0.4
    x[SITE == 3, 1] = 1.0  # constant within a site
    x[:, 2] = np.where(SITE % 2, 1.0, 0.0) + (SITE == 5) * RNG.normal(size=N)  # constant within all sites but one
    made = {
        "statsmodels": statsmodels.__version__,
        "scikit-survival": sksurv.__version__,
        "x": x.tolist(),
        "site": SITE.tolist(),
    }
    made |= {"regression": regressions(x), "ties": survival(x, True), "plain": survival(x, False)}
    Path(__file__).with_name("reference.json").write_text(json.dumps(made) + "\n", encoding="utf-8")


main()
