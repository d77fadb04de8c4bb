"""The same job in other frameworks: a round of theirs, by their own functions, as `peers.py` times it.

Each function makes one contestant of a method, a model, data and a batch size, or None if the framework does not have the
method. The frameworks are as their authors publish them; nothing of theirs is copied.
"""

import copy
import importlib.abc
import importlib.machinery
import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedselect as fs
from fedselect.simulate import Simulation
from fedselect.simulate.stack import Stack

BATCH, EPOCHS, LR, SAMPLES = 16, 3, 0.05, 48
ABSENT = (
    "torchvision", "h5py", "matplotlib", "seaborn", "wandb", "clearml", "tensorboard", "datasets", "ray", "pynvml", "hydra",
)  # fmt: skip
ROUNDS = 200  # as in an ordinary run; ours traces its step at once where many more are to come
METHODS = {"fedavg": fs.FedAvg, "fedper": fs.FedPer, "fedselect": fs.FedSelect}


class Contestant(NamedTuple):
    """What runs a round, and what gives the server's model: the values of the parameters that all clients share, in order."""

    run: Callable[[], object]
    shared: Callable[[], list[Tensor]]


Maker = Callable[[str, fs.Model, fs.Federation, int], Contestant | None]


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not installed and that a peer needs for nothing this benchmark does."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)
        return module

    def exec_module(self, module):
        pass


def pictures(clients: int) -> fs.Federation:
    """Noise of 8x8 pixels, for what is measured is time."""
    g = torch.Generator().manual_seed(0)
    dealt = [
        (torch.randn(SAMPLES, 1, 8, 8, generator=g), torch.randint(0, 10, (SAMPLES,), generator=g)) for _ in range(clients)
    ]
    return fs.Federation([fs.ClientData(part, part) for part in dealt], 10)


def ours(method: str, model: fs.Model, data: fs.Federation, batch: int) -> Contestant:
    training = fs.Training(batch_size=batch, momentum=0.0)
    made = METHODS[method](lr=LR, **({"epochs": EPOCHS} if method == "fedavg" else {}))
    simulation = Simulation(made, model, data, training=training, device="cpu", rounds=ROUNDS)
    stack = Stack([simulation])  # as fs.run does
    return Contestant(lambda: stack.step(evaluate=False), lambda: list(simulation.server["params"].values()))


class Split(nn.Module):
    """A network in two parts, as peers ask for it: all up to the last Linear, and that; it starts from our values."""

    def __init__(self, model: fs.Model) -> None:
        super().__init__()
        self.base, self.head = model.build(), nn.Identity()
        self.base.load_state_dict(model.init(0))
        parent, _, name = (model.head or "").rpartition(".")
        home = self.base.get_submodule(parent)
        self.head = getattr(home, name)
        setattr(home, name, nn.Identity())

    def forward(self, x):
        return self.head(self.base(x))


def pfllib(method: str, model: fs.Model, data: fs.Federation, batch: int) -> Contestant | None:
    from flcore.clients import clientbase
    from flcore.servers import serverbase
    from flcore.servers.serveravg import FedAvg
    from flcore.servers.serverper import FedPer

    makers = {"fedavg": FedAvg, "fedper": FedPer}
    if method not in makers:
        return None
    parts = [list(zip(*c.train, strict=True)) for c in data.clients]
    clientbase.read_client_data = serverbase.read_client_data = lambda name, i, is_train=True, few_shot=0: parts[i]
    args = SimpleNamespace(
        device="cpu", dataset="noise", num_classes=10, global_rounds=1, local_epochs=EPOCHS, batch_size=batch,
        local_learning_rate=LR, model=Split(model), num_clients=len(parts), join_ratio=1.0, random_join_ratio=False, few_shot=0,
        algorithm=method, time_select=False, goal="test", time_threthold=1e9, save_folder_name="", top_cnt=1, auto_break=False,
        eval_gap=1, client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0, dlg_eval=False, dlg_gap=1,
        batch_num_per_client=1, num_new_clients=0, fine_tuning_epoch_new=0, learning_rate_decay=False,
        learning_rate_decay_gamma=1.0,
    )  # fmt: skip
    server = makers[method](args, 0)
    if method == "fedper":
        server.global_model = copy.deepcopy(args.model.base)

    def run() -> None:
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()

    return Contestant(run, lambda: list(server.global_model.parameters()))


def fluke(method: str, model: fs.Model, data: fs.Federation, batch: int) -> Contestant | None:
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.algorithms.fedper import FedPer
    from fluke.data import FastDataLoader
    from fluke.nets import EncoderHeadNet

    makers = {"fedavg": FedAVG, "fedper": FedPer}
    if method not in makers:
        return None
    FlukeENV().set_eval_cfg(server=False)

    def loader(client: fs.ClientData) -> FastDataLoader:
        return FastDataLoader(*client.train, num_labels=10, batch_size=batch, shuffle=True)

    dealt = SimpleNamespace(assign=lambda n, size: (([loader(c) for c in data.clients], [None] * n), None))
    split = Split(model)
    whole = EncoderHeadNet(split.base, split.head)
    own = {"model": whole} if method == "fedper" else {}
    asked = DDict(
        client=DDict(batch_size=batch, local_epochs=EPOCHS, loss=nn.CrossEntropyLoss, optimizer=DDict(name="SGD", lr=LR),
                     scheduler=DDict(name="StepLR", step_size=1, gamma=1), **own),
        server=DDict(weighted=True), model=split.base if own else whole,
    )  # fmt: skip
    algorithm = makers[method](len(data.clients), dealt, asked)
    server = algorithm.server

    def run() -> None:
        server.broadcast_model(algorithm.clients)
        for client in algorithm.clients:
            client.local_update(1)
        server.aggregate(algorithm.clients, server.receive_client_models(algorithm.clients, state_dict=False))

    return Contestant(run, lambda: list(server.model.parameters()))


def pfl_research(method: str, model: fs.Model, data: fs.Federation, batch: int) -> Contestant | None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.algorithm_utils import run_train_eval
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    if method != "fedavg":
        return None
    module = Split(model)
    module.loss = lambda x, y: F.cross_entropy(module(x), y)
    module.metrics = lambda x, y: {}
    parts = [PyTorchTensorDataset(c.train, user_id=str(i)) for i, c in enumerate(data.clients)]
    users = FederatedDataset(lambda i: parts[i], get_user_sampler("minimize_reuse", list(range(len(parts)))))
    backend = SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()])
    theirs = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    algorithm = FederatedAveraging()
    never = 10**9  # iteration 0 would evaluate
    asked = NNAlgorithmParams(never, evaluation_frequency=never, train_cohort_size=len(parts), val_cohort_size=None)
    how = NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=batch)
    iterations = itertools.count(1)

    def run() -> None:
        contexts, _, metrics = algorithm.get_next_central_contexts(theirs, next(iterations), asked, how)
        found = run_train_eval(algorithm, backend, theirs, contexts)
        pairs = tuple((context, statistics) for context, (statistics, _) in zip(contexts, found, strict=True))
        algorithm.process_aggregated_statistics_from_all_contexts(pairs, metrics, theirs)

    return Contestant(run, lambda: list(module.parameters()))


def fl_bench(method: str, model: fs.Model, data: fs.Federation, batch: int) -> Contestant | None:
    from data.utils.datasets import BaseDataset
    from omegaconf import OmegaConf
    from src.server.fedavg import FedAvgServer
    from src.server.fedper import FedPerServer
    from src.utils.constants import FLBENCH_ROOT
    from src.utils.models import DecoupledModel

    makers = {"fedavg": FedAvgServer, "fedper": FedPerServer}
    if method not in makers:
        return None
    args = OmegaConf.load(FLBENCH_ROOT / "config" / "defaults.yaml")
    args.optimizer.lr = LR
    args.common.update({"local_epoch": EPOCHS, "batch_size": batch, "client_side_evaluation": False, "use_cuda": False})
    clients = range(len(data.clients))
    x, y = (torch.cat(part) for part in zip(*(c.train for c in data.clients), strict=True))
    dataset = BaseDataset(x.clone(), y, list(range(10)))
    dataset.data = x  # it has taken noise above 1 for bytes, and scaled it
    server = makers[method].__new__(makers[method])  # its own start reads a data set from its folder
    vars(server).update(
        args=args, device=torch.device("cpu"), client_num=len(clients), selected_clients=list(clients), current_epoch=0,
        verbose=False, client_local_epoches=[EPOCHS for _ in clients], client_metrics={i: {} for i in clients},
        client_optimizer_states={i: {} for i in clients}, client_lr_scheduler_states={i: {} for i in clients},
        client_data_indices=[{"train": list(range(i * SAMPLES, (i + 1) * SAMPLES)), "val": [], "test": []} for i in clients],
        dataset=dataset,
    )  # fmt: skip
    split, whole = Split(model), DecoupledModel()
    whole.base, whole.classifier = split.base, split.head
    server.init_model(whole)
    server.init_trainer()
    return Contestant(server.train_one_round, lambda: list(server.public_model_params.values()))


PEERS: dict[str, tuple[str, Maker]] = {
    "pfllib": ("system", pfllib), "fluke": (".", fluke), "pfl-research": (".", pfl_research), "fl-bench": (".", fl_bench),
}  # fmt: skip
"""The folder in each repository from which it is imported, and what makes a contestant."""
