"""What the conformance suite runs: every method of the table, plus the readings of FedSelect, on awkward clients."""

import torch

import fedselect as fs
from fedselect.deploy import wire
from fedselect.method import Received
from fedselect.methods import METHODS
from fedselect.options import options
from fedselect.program import Programs
from fedselect.simulate import Simulation
from fedselect.step import Training
from fedselect.tree import MaskedSum, expand
from fedselect.work import Work

READINGS = {
    "fedselect-tensor": {"scope": "tensor", "weights_only": True, "strict": False},
    "fedselect-authors": {"scope": "tensor", "weights_only": True, "strict": False, "since": "update", "every": 2, "first": 1},
    "fedselect-least": {"by": "least", "share": "all"},
    "fedselect-samples": {"weight": "samples", "norm_stats": "shared", "view": "merged"},
}
CASES = {
    **{name: lambda f=f: _quick(f) for name, f in METHODS.items()},
    **{name: lambda o=o: _quick(fs.FedSelect, **o) for name, o in READINGS.items()},
    "fedselect-random": lambda: _quick(fs.FedSelect, by="random"),
    "lg-fedavg-authors": lambda: _quick(fs.LGFedAvg, shared="convolutions", warmup=1),
}
MODELS = {
    "mlp": lambda data: fs.models.mlp(data, hidden=8),
    "cnn-batchnorm": lambda data: fs.models.small_cnn(data, width=2, norm="batch"),
}
ROUNDS = 3
TRAINING = Training(batch_size=8, momentum=0.9, weight_decay=1e-3, clip=1.0)
SIZES = (20, 5, 13, 20, 9, 8)  # several batches, less than one, one exactly


def _quick(factory, **given):
    """A method with rates that move things within a few rounds."""
    wish = {"epochs": 2, "lr": 0.05, "personal_lr": 0.1, "rate": 0.2, "limit": 0.45, "layers": "*1.weight"}
    return factory(**{k: v for k, v in {**wish, **given}.items() if k in options(factory)})


def federation() -> fs.Federation:
    """Real digits, cut to awkward sizes; some held out for methods that validate."""
    full = fs.load("digits", clients=len(SIZES), classes_per_client=3, train=25, test=12, val=5, seed=5)
    return fs.Federation(
        [fs.ClientData((c.train[0][:n], c.train[1][:n]), c.test, c.val) for c, n in zip(full.clients, SIZES, strict=True)], 10
    )


def simulation(case: str, model: str, data: fs.Federation | None = None, **how) -> Simulation:
    data = data or federation()
    return Simulation(CASES[case](), MODELS[model](data), data, seed=11, training=TRAINING, **how)


def rounds(sim: Simulation, count: int = ROUNDS) -> list[dict]:
    return [{k: v for k, v in sim.step().items() if k != "seconds"} for _ in range(count)]


def everything(sim: Simulation) -> dict[str, torch.Tensor]:
    """All a simulation knows, flat: the server's state, every client's state, both models of every client."""
    everybody = range(sim.clients)
    found = {f"server/{k}/{n}": v for k, t in sim.server.items() for n, v in t.items()}
    found |= {f"rows/{k}/{n}": v for k, t in sim.store.rows.items() for n, v in t.items()}
    return found | {f"{view}/{n}": v for view in ("local", "merged") for n, v in sim.models(everybody, view).items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tol: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name, v in a.items():
        if v.is_floating_point():
            torch.testing.assert_close(v, b[name], rtol=tol, atol=tol, msg=lambda m, name=name: f"{name}: {m}")
        else:
            assert torch.equal(v, b[name]), name


class Network:
    """The same method by messages: a client holds its own state and data, and only packets pass between it and the server.

    Whatever a packet does not carry is NaN on the other side, so that reading it would show.
    """

    def __init__(self, case: str, model: str) -> None:
        self.data = federation()
        self.method, self.model = CASES[case](), MODELS[model](self.data)
        self.initial = self.model.init(11)
        self.programs = Programs(self.model, TRAINING)
        self.model.check(self.data.clients[0].train[0][:2], self.data.classes)
        self.server = self.method.init(self.initial, len(SIZES), self.model)
        self.states = [None] * len(SIZES)
        self.round = 0
        self.bytes_up: list[int] = []

    def work(self, i: int, round_: int) -> Work:
        alone = fs.Federation([self.data.clients[i]], self.data.classes)
        train, val = (alone.split(p, torch.float32) for p in ("train", "val"))
        return Work(
            self.programs, train, val, ids=torch.tensor([i]), round=round_, seed=11, initial=lambda: expand(self.initial, 1)
        )

    def receive(self, i: int) -> dict:
        """What client i has of the server's state: the entries it wants, and rows of its own."""
        down = self.method.down(self.server, torch.tensor([i]))
        wants = {
            n: m[0] if isinstance(m, torch.Tensor) else m for n, m in self.method.wants(self.model, self.states[i]).items()
        }
        values, sent = wire.unpack(wire.pack(down.shared["params"], wants), self.initial)
        nan = {n: torch.where(torch.as_tensor(sent[n]), v, torch.nan) for n, v in values.items()}
        shared = {k: expand(t, 1) for k, t in {**down.shared, "params": nan}.items()}
        return {**shared, **down.rows}

    def step(self) -> None:
        folded, extras, sizes = MaskedSum(), [], []
        for i in range(len(SIZES)):
            work = self.work(i, self.round)
            if self.states[i] is None:
                self.states[i] = self.method.join(work, expand(self.initial, 1))
            self.states[i], up = self.method.client(work, self.states[i], self.receive(i))
            sent = {n: m[0] if isinstance(m, torch.Tensor) else m for n, m in up.sent.items()}
            packet = wire.pack({n: v[0] for n, v in up.values.items()}, sent)
            values, marks = wire.unpack(packet, self.initial)
            rows = {n: m.unsqueeze(0) if isinstance(m, torch.Tensor) else m for n, m in marks.items()}
            folded.add(expand(values, 1), rows, up.weight)
            extras.append(up.extra)
            sizes.append(packet.nbytes + sum(v.nbytes for t in up.extra.values() for v in t.values()))
        mean, heard = folded.mean()
        extra = {k: {n: torch.cat([e[k][n] for e in extras]) for n in t} for k, t in extras[0].items()}
        self.server = self.method.server(self.server, Received(torch.arange(len(SIZES)), mean, heard, extra))
        self.round += 1
        self.bytes_up = sizes

    def models(self, view: str) -> dict[str, torch.Tensor]:
        rows = []
        for i in range(len(SIZES)):
            state = self.states[i]
            work = self.work(i, self.round - 1)
            rows.append(self.method.local(state) if view == "local" else self.method.personal(work, state, self.receive(i)))
        return {n: torch.cat([r[n] for r in rows]) for n in rows[0]}
