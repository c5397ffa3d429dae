"""Compare the default `nestfed train` with pooled logistic regression, on the same columns and test rows.

python papers/measurements/studies/measure.py FOLDER TARGET [SPLITS]     FOLDER has one CSV per site

Pooled: scikit-learn's LogisticRegressionCV (five folds, log-loss, 15 penalties) on the training and validation rows of all
sites together, with the study's model inputs. Differences are paired: same test rows.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import roc_auc_score

from nestfed.study.at_hand import AtHand
from nestfed.study.outcome import ALONE
from nestfed.study.start import from_files, train


def main() -> None:
    folder, target = Path(sys.argv[1]), sys.argv[2]
    splits = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    files = sorted(folder.glob("*.csv"))
    gaps, own = [], []
    for split in range(splits):
        started = from_files(files, target, data={"split": split})
        with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, model, _ = train(started, Path(out) / "study")
            sites = AtHand(started.study, started.tables, directory=Path(out)).sites
            rows = [site.by_part(True) for site in sites]
            x, y = (np.concatenate([getattr(r["training"], k) for r in rows]) for k in "xy")
            held = [r["test"] for r in rows if "test" in r]
            labels = np.concatenate([r.y for r in held])
            inputs = np.concatenate([r.x for r in held])
            pooled = LogisticRegressionCV(Cs=np.logspace(-5, 2, 15), cv=5, scoring="neg_log_loss", max_iter=5000).fit(
                x, y
            )
        theirs = roc_auc_score(labels, pooled.decision_function(inputs))
        ours = roc_auc_score(labels, model.scores(torch.from_numpy(inputs)))
        alone = found.test.entry(ALONE, "auroc").value.value
        gaps.append(ours - theirs)
        own.append(alone - theirs)
        print(
            f"{folder.name} {split}: {found.released.name} {ours:.4f}, pooled {theirs:.4f}, alone {alone:.4f}",
            flush=True,
        )
    for name, values in (("nestfed train", gaps), ("every site alone", own)):
        error = np.std(values, ddof=1) / np.sqrt(len(values))
        print(f"{folder.name}: {name} − pooled {np.mean(values):+.4f} ± {error:.4f} (standard error, {splits} splits)")


if __name__ == "__main__":
    main()
