"""What the conformance suite runs: every method of the table, plus the readings of FedSelect, on awkward clients."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from local import QUICK, Room, assignment

import fedselect as fs
from fedselect.core.options import call, options
from fedselect.core.tree import State, nested
from fedselect.methods import METHODS
from fedselect.methods.method import Up
from fedselect.network.client import MODEL
from fedselect.network.server import Server
from fedselect.network.vault import Vault
from fedselect.simulate import Simulation
from fedselect.simulate.jobs import Job
from fedselect.training.settings import Training

READINGS = {
    "fedselect-tensor": {"scope": "tensor", "weights_only": True, "strict": False},
    "fedselect-authors": {"scope": "tensor", "weights_only": True, "strict": False, "since": "update", "every": 2, "first": 1},
    "fedselect-least": {"by": "least", "share": "all"},
    "fedselect-joint": {"order": "joint", "start_with": "head", "relative": "tensor"},
    "fedselect-live": {"counts": "live", "start_with": "head+norms", "relative": "weights", "first": 1},
    "fedselect-frozen": {"freeze": "head", "finetune": 1, "view": "merged"},
    "fedselect-tuned": {
        "start_with": "head",
        "finetune": 1,
        "finetune_lr": 0.02,
        "server_average": 0.6,
        "answers": "own",
        "view": "merged",
    },
    "fedselect-samples": {"weight": "samples", "norm_stats": "shared", "view": "merged"},
}
BOTH = {"fedselect", "fedalike", "fedpersist", "ditto", "fedpac", "lotteryfl"}
"""What has code of its own: with both models, and trains two epochs a round. Aliases train one."""
CASES = {
    **{name: lambda f=f, e=1 + (name in BOTH): _quick(f, epochs=e) for name, f in METHODS.items()},
    **{name: lambda o=o: _quick(fs.FedSelect, **o) for name, o in READINGS.items()},
    "fedselect-random": lambda: _quick(fs.FedSelect, by="random"),
    "lg-fedavg-authors": lambda: _quick(fs.LGFedAvg, shared="convolutions", warmup=1),
    "fedselect-adamw-cosine": lambda: _quick(fs.FedSelect, epochs=2, lr=0.01, personal_lr=0.02),
    "fedbabu-adam": lambda: _quick(fs.FedBABU, lr=0.01),
    "fedrep-nesterov": lambda: _quick(fs.FedRep),
    "ditto-tuned": lambda: _quick(fs.Ditto, finetune=1),
    "fedpac-tuned": lambda: _quick(fs.FedPAC, finetune=1, finetune_lr=0.02, view="merged"),
    "fedselect-ranks": lambda: _quick(fs.FedSelect, unit="rank", epochs=2),
    "fedpersist-ranks": lambda: _quick(fs.FedPersist, unit="rank", threshold=0.0),
    "layers-b": lambda: _quick(fs.PersonalLayers, layers="*.lora_b,fc"),
}
MODELS = {
    "mlp": lambda data: fs.models.mlp(data, hidden=8),
    "cnn-batchnorm": lambda data: fs.models.small_cnn(data, width=2, norm="batch"),
    "cnn-lora": lambda data: fs.lora(fs.models.small_cnn(data, width=2, norm="batch"), 2),
}
ADAPTERS = {"fedselect-ranks", "fedpersist-ranks", "layers-b"}
"""What makes sense with low-rank adapters alone."""
ADAPTED = ADAPTERS | {"fedavg", "ditto"}
"""What runs with them."""
NORMS = {"fedselect-adamw-cosine", "fedbn", "fedavg", "fedavg+ft", "lg-fedavg", "fedselect-live", "fedselect-samples"}
"""Of the others, those to which norm layers or their statistics matter: with these. The rest: with the smaller model."""
COVERING = {
    (case, model) for case in CASES for model in ("mlp", "cnn-batchnorm") if case in BOTH or (model == "mlp") != (case in NORMS)
} | {(case, "cnn-lora") for case in ADAPTED}
FEW = {(case, "mlp") for case in BOTH | {"fedavg", "local"}}

PAIRS = [
    (case, model) for case in CASES for model in MODELS if (case in ADAPTED if model == "cnn-lora" else case not in ADAPTERS)
]


def _pairs(covering: set[tuple[str, str]]) -> pytest.MarkDecorator:
    """A test for every case with every model; those beside the covering ones in `make test-all` alone."""
    pairs = [
        pytest.param(case, model, id=f"{case}-{model}", marks=[] if (case, model) in covering else pytest.mark.full)
        for case, model in PAIRS
    ]
    return pytest.mark.parametrize(("case", "model"), pairs)


EVERY_METHOD = _pairs(COVERING)
A_FEW_METHODS = _pairs(FEW)
"""For what another test of every method implies, unless two things go wrong at once."""
AGGREGATES = {
    "momentum": ("fedavg", "cnn-batchnorm", fs.Mean(server_momentum=0.5)),
    "momentum, masks": ("fedselect", "mlp", fs.Mean(server_momentum=0.5)),
    "adam, masks": ("fedselect", "mlp", fs.FedAdam(server_lr=0.02)),
    "clip": ("fedavg", "cnn-batchnorm", fs.ClippedMean(clip_factor=1.0)),
    "clip, masks, momentum": ("fedselect", "mlp", fs.ClippedMean(0.5, clip_factor=1.05)),
    "trimmed, masks, least": ("fedselect", "mlp", fs.TrimmedMean(trim=0.3, least_senders=4)),
    "product": ("fedavg", "cnn-lora", fs.Products()),
    "median": ("fedavg", "cnn-batchnorm", fs.Median()),
    "median, masks": ("fedselect", "mlp", fs.Median()),
    "median, nothing sent": ("local", "mlp", fs.Median()),
}
"""(method, model, aggregator): what folds uploads in another way than the plain mean."""
ROUNDS = 3
TRAINING = Training(batch_size=8, momentum=0.9, weight_decay=1e-3, clip=1.0)
TRAININGS = {
    "fedselect-joint": replace(TRAINING, schedule="step", decay=0.9),
    "fedselect-adamw-cosine": Training(
        batch_size=8, optimizer="adamw", weight_decay=0.1, clip=1.0, schedule="cosine", warmup=1
    ),
    "fedbabu-adam": Training(batch_size=8, optimizer="adam", beta2=0.99),
    "fedrep-nesterov": replace(TRAINING, nesterov=True, schedule="step", decay=0.5, warmup=2),
}
"""Cases that train in another way than the others."""
TOTAL = 6  # rounds that a schedule expects
SIZES = (20, 5, 13, 20, 9, 8)  # several batches, less than one, one exactly
AWAY = {"fraction": 0.5, "late": (2, 3), "eval_every": 2}
"""Half of those present take part, two more come in the third round; clients are measured every other round."""


def _quick(factory, **given):
    """A method with rates that move things within a few rounds."""
    wish = {"epochs": 1, "lr": 0.05, "personal_lr": 0.1, "rate": 0.2, "limit": 0.45, "layers": "*1.weight", "window": 2}
    return call(factory, **{k: v for k, v in {**wish, **given}.items() if k in options(factory)})


def federation() -> fs.Federation:
    """Real digits, cut to awkward sizes; some held out for methods that validate."""
    full = fs.load("digits", clients=len(SIZES), classes_per_client=3, train=25, test=12, val=5, seed=5)
    return fs.Federation(
        [fs.ClientData((c.train[0][:n], c.train[1][:n]), c.test, c.val) for c, n in zip(full.clients, SIZES, strict=True)], 10
    )


def simulation(case: str, model: str, data: fs.Federation | None = None, **how) -> Simulation:
    data = data or federation()
    training = TRAININGS.get(case, TRAINING)
    return Simulation(CASES[case](), MODELS[model](data), data, seed=11, training=training, rounds=TOTAL, **how)


def a_round(sim: Simulation, ids: torch.Tensor) -> tuple[State, Up]:
    """What these clients would make of the round that comes next."""
    state, down = sim._open(ids)
    job = Job("client", ids, sim.round, state, down)
    return sim.method.client(sim._work(ids, sim.round), state, job.heard())


def rounds(sim: Simulation, count: int = ROUNDS) -> list[dict]:
    return [{k: v for k, v in sim.step().items() if k != "seconds"} for _ in range(count)]


def everything(sim: Simulation) -> dict[str, torch.Tensor]:
    """All a simulation knows, flat: the server's state, every client's state, both models of every client."""
    everybody = range(sim.clients)
    found = {f"server/{k}/{n}": v for k, t in sim.server.items() for n, v in t.items()}
    found |= {f"aggregate/{k}/{n}": v for k, t in sim.memory.items() for n, v in t.items()}
    found |= {f"rows/{k}/{n}": v for k, t in sim.store.rows.items() for n, v in t.items()}
    return found | {f"{view}/{n}": v for view in ("local", "merged") for n, v in sim.models(everybody, view).items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tol: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name, v in a.items():
        if v.is_floating_point():
            torch.testing.assert_close(v, b[name], rtol=tol, atol=tol, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
        else:
            assert torch.equal(v, b[name]), name


def deployed(case: str, model: str, folder: Path, aggregator: fs.Aggregator | None = None) -> tuple[Server, Room]:
    """The same by letters: a node for each client with its own data and vault, and a server that sees replies alone."""
    data = federation()
    made = assignment(CASES[case](), MODELS[model], data, seed=11, training=TRAININGS.get(case, TRAINING), rounds=TOTAL)
    return Server(made, QUICK, folder / "masks", aggregator=aggregator), Room(made, data, folder)


def kept(room: Room, view: str) -> dict[str, torch.Tensor]:
    """The models that clients kept when their run ended, stacked."""
    found = [Vault(room.node(i).vault.folder / MODEL).load(ROUNDS).tensors for i in range(len(SIZES))]
    models = [nested("model", tensors)[view] for tensors in found]
    return {n: torch.stack([m[n] for m in models]) for n in models[0]}


def models_of(sim: Simulation, view: str) -> dict[str, torch.Tensor]:
    """The same of a simulation, as state_dicts of the plain module."""
    models = sim.models(range(sim.clients), view)
    found = [sim.model.state_dict({n: v[i] for n, v in models.items()}) for i in range(sim.clients)]
    return {n: torch.stack([m[n] for m in found]) for n in found[0]}
