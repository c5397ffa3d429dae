"""pfl-research: FedAvg, one process and one thread per core (`torchrun`)."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from net import FashionNet, data, given, parts
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F

FOLDER, CLIENTS, PART, ROUNDS = given()
torch.set_num_threads(1)


class Model(FashionNet):
    def loss(self, x, y, eval=False):
        return F.cross_entropy(self(x), y)

    def metrics(self, x, y, eval=False):
        return {"loss": Weighted(float(self.loss(x, y)), len(x))}


class Clock(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if os.environ.get("RANK", "0") == "0":
            print("round", time.perf_counter(), flush=True)
        return False, type(aggregate_metrics)()


def main() -> None:
    x, y = data(FOLDER)
    held = parts(FOLDER, CLIENTS)

    def user(n):
        # A round takes ten batches: draw as many examples, as the others do.
        rows = held[n][np.random.randint(len(held[n]), size=500)]
        return Dataset([torch.from_numpy(x[rows]), torch.from_numpy(y[rows])], user_id=str(n))

    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    training = FederatedDataset(user, sampler)
    net = Model()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    params = NNAlgorithmParams(
        central_num_iterations=ROUNDS, evaluation_frequency=10**6, train_cohort_size=PART, val_cohort_size=None
    )
    train = NNTrainHyperParams(local_num_epochs=None, local_num_steps=10, local_learning_rate=0.05, local_batch_size=50)
    FederatedAveraging().run(
        params, SimulatedBackend(training, training), model, model_train_params=train,
        model_eval_params=NNEvalHyperParams(local_batch_size=None), callbacks=[Clock()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
