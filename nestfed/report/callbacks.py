"""Ready callbacks for `simulate`: TensorBoard, MLflow and Weights & Biases.

Each needs its package: `pip install 'nestfed[tensorboard]'`, `'nestfed[mlflow]'` or `'nestfed[wandb]'`.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError
from nestfed.engine.callbacks import Callback, Started
from nestfed.engine.round import Record
from nestfed.report.events import scalars


def _require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise NestfedError(f"This callback needs the package {module}: pip install 'nestfed[{extra}]'.")


def _finite(record: Record) -> dict[str, float]:
    return {name: value for name, value in scalars(record) if math.isfinite(value)}


class TensorBoard(Callback):
    """Writes event files while a run trains; `tensorboard --logdir FOLDER` shows them.

    folder: where; None = "tensorboard" in the run's directory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        _require("tensorboard", "tensorboard")
        self.folder = folder
        self._writer: Any = None

    def start(self, run: Started) -> None:
        """Open the event file; rounds after the resumed one are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        if self.folder is None and run.directory is None:
            raise NestfedError("TensorBoard needs a folder, or a run with a directory.")
        folder = Path(self.folder) if self.folder is not None else Path(run.directory or "") / "tensorboard"
        resumed = run.history[-1]["round"] + 1 if run.history else None
        self._writer = SummaryWriter(str(folder), purge_step=resumed)
        if not run.history:
            self._writer.add_text("settings", "\n".join(f"- {k}: {v}" for k, v in run.settings.items()))

    def record(self, record: Record) -> None:
        """Write the numbers of a round."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["round"])

    def end(self, error: BaseException | None) -> None:
        """Close the file."""
        self._writer.close()


class MLflow(Callback):
    """Logs a run to MLflow, under the tracking URI and experiment that you set there (needs mlflow-skinny or mlflow).

    name: of the MLflow run; None = the method's name.
    """

    def __init__(self, name: str | None = None) -> None:
        _require("mlflow", "mlflow")
        self.name = name

    def start(self, run: Started) -> None:
        """Start an MLflow run and log the settings."""
        import mlflow

        self._run = mlflow.start_run(run_name=self.name or run.method, nested=mlflow.active_run() is not None)
        mlflow.log_params({"method": run.method, **run.settings}, run_id=self._run.info.run_id)

    def record(self, record: Record) -> None:
        """Log the numbers of a round."""
        import mlflow

        mlflow.log_metrics(_finite(record), step=record["round"], run_id=self._run.info.run_id)

    def end(self, error: BaseException | None) -> None:
        """End the MLflow run."""
        import mlflow

        mlflow.end_run("FINISHED" if error is None else "FAILED")


class WandB(Callback):
    """Logs a run to Weights & Biases. All arguments are those of `wandb.init`, such as project and mode="offline"."""

    def __init__(self, **init: Any) -> None:
        _require("wandb", "wandb")
        self.init = init

    def start(self, run: Started) -> None:
        """Start a run there, with the settings."""
        import wandb

        config = {"method": run.method, **run.settings, **self.init.get("config", {})}
        self._run = wandb.init(**{"name": run.method, **self.init, "config": config})

    def record(self, record: Record) -> None:
        """Log the numbers of a round."""
        self._run.log(_finite(record), step=record["round"])

    def end(self, error: BaseException | None) -> None:
        """Finish the run there."""
        self._run.finish(exit_code=0 if error is None else 1)
