"""What a deployed round costs beside training: the codec, the vault, and each engine. The last line is one JSON object.

python benchmarks/deploy.py                    # ResNet18, three nodes as real processes with TLS on this machine
python benchmarks/deploy.py --model mlp        # a small model: what a round costs at least
python benchmarks/deploy.py --engine grpc      # one engine alone
python benchmarks/deploy.py --in-process       # without processes: codec and vault alone

`overhead` is a round's time at the server less what its slowest client spent training and measuring, by that client's clock.
To compare with another commit: PYTHONPATH=OTHER/src python benchmarks/deploy.py --engine grpc
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch

from fedselect.aggregate import codec
from fedselect.cli.engines import ENGINES, find_engine
from fedselect.core.plugins import VARIABLE
from fedselect.network import site
from fedselect.network.client import Node
from fedselect.network.control import follow, start
from fedselect.network.desk import Desk
from fedselect.network.examiner import Examiner
from fedselect.network.home import Home
from fedselect.network.letters import Letter, unseal
from fedselect.network.plan import Plan, Shape, plan
from fedselect.network.rounds import Limits
from fedselect.network.server import Server
from fedselect.network.site import Site
from fedselect.network.vault import Vault
from fedselect.runs.config import Config
from fedselect.runs.environment import environment
from fedselect.runs.rundir import read_records

CLIENTS = 3


class Local:
    """All nodes in this process; every letter is sealed and unsealed on its way."""

    def __init__(self, agreed: Plan, folder: Path) -> None:
        assigned = agreed.assignment("cpu")
        self.nodes = [Node(assigned, i, Home(i, folder / str(i)).load(agreed), folder / str(i)) for i in range(CLIENTS)]

    def present(self) -> list[int]:
        return list(range(CLIENTS))

    def ask(self, letters, timeout) -> Iterator[tuple[int, Letter]]:
        for i, letter in letters:
            yield i, unseal(*self.nodes[i].answer(unseal(*letter.seal())).seal())


@contextmanager
def timed(spent: dict[str, float], owner: object, name: str, what: str) -> Iterator[None]:
    """Add up the time that calls of one function take."""
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        began = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            spent[what] += time.perf_counter() - began

    setattr(owner, name, wrapped)
    yield
    setattr(owner, name, real)


def in_process(agreed: Plan, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds a client and round: training; packing and unpacking; the vault; the server's checks."""
    room = Local(agreed, folder)
    server = Server(agreed.assignment("cpu"), agreed.limits, folder / "masks")
    spent: dict[str, float] = defaultdict(float)
    method = type(room.nodes[0].method)
    server.step(room)  # the first round warms up and says hello
    watched = [
        (method, "client", "training"), (codec, "pack", "codec"), (codec, "unpack", "codec"), (Letter, "seal", "codec"),
        (Vault, "save", "vault"), (Vault, "rounds", "vault"), (Vault, "find", "vault"), (Examiner, "update", "checks"),
    ]  # fmt: skip
    began = time.perf_counter()
    with ExitStack() as stack:
        for owner, name, what in watched:
            stack.enter_context(timed(spent, owner, name, what))
        for _ in range(rounds):
            server.step(room)
    spent["all"] = time.perf_counter() - began
    return {what: round(seconds / rounds / CLIENTS, 4) for what, seconds in spent.items()}


WATCH = """
import json, time
from pathlib import Path
from fedselect.network.client import Node
from fedselect.training.work import Work

PLACE, spent = Path(__file__).parent, [0.0]

def counted(owner, name):
    real = getattr(owner, name)
    def call(*args, **how):
        began, before = time.perf_counter(), spent[0]
        try:
            return real(*args, **how)
        finally:
            spent[0] = before + time.perf_counter() - began
    setattr(owner, name, call)

def train(node, letter, real=Node._train):
    spent[0] = 0.0
    reply = real(node, letter)
    with (PLACE / f"times-{node.client}.jsonl").open("a") as file:
        file.write(json.dumps([letter.head["round"], spent[0]]) + "\\n")
    return reply

counted(Work, "train")
counted(Node, "_measure")
Node._train = train
"""
"""A plugin for clients: notes for each round how long they trained and measured."""


def slowest(folder: Path) -> dict[int, float]:
    """By round, the seconds that the slowest client trained and measured."""
    found: dict[int, float] = {}
    for path in folder.glob("times-*.jsonl"):
        for at, seconds in map(json.loads, path.read_text().splitlines()):
            found[at] = max(found.get(at, 0.0), seconds)
    return found


def real(engine: str, config: Config, shape: Shape, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of each round with real processes, TLS and keys on this machine; and those of them that are overhead."""
    root, carrier = folder / engine, find_engine(engine)
    watch = folder / f"watch_{engine}" / f"watch_{engine}.py"
    watch.parent.mkdir()
    watch.write_text(WATCH)
    os.environ[VARIABLE] = str(watch)
    site.make(root, CLIENTS, f"127.0.0.1:{site.free_port()}", config.data, shape, insecure=False, days=2, engine=engine)
    with ExitStack() as stack:
        stack.enter_context(carrier.server(root / "server", root / "server" / "log.txt"))
        for i in range(CLIENTS):
            part = root / f"client-{i}"
            stack.enter_context(carrier.client(part, Home(i, part / "vault", device="cpu"), part / "log.txt"))
        place = start(carrier, root / "server", config, Limits(min_clients=CLIENTS), None)
        follow(carrier, root / "server", place, None)
        rounds = {r["round"]: r["seconds"] for r in read_records(place / "metrics.jsonl")}
    training = slowest(watch.parent)
    return list(rounds.values()), [round(seconds - training[at], 3) for at, seconds in rounds.items() if at in training]


class Echo(Desk):
    """A client that sends back what it gets."""

    def answer(self, letter: Letter) -> Letter:
        return letter


def echo(part: Path, i: int) -> None:
    from fedselect.network.grpc.line import Caller

    Caller(part, Site.read(part), Echo(Home(i, part / "vault")), lambda text: None).work()


def there_and_back(size: int, shape: Shape, folder: Path) -> float:
    """Seconds for letters of so many bytes to three gRPC clients, processes of their own, and back; the median of five."""
    from fedselect.network.grpc import hub

    root, spent = folder / "echo", []
    site.make(root, CLIENTS, f"127.0.0.1:{site.free_port()}", {"name": "digits"}, shape, insecure=False, days=2, engine="grpc")
    with hub.opened(root / "server", Site.read(root), lambda text: None) as switch:
        start = get_context("spawn").Process
        clients = [start(target=echo, args=(root / f"client-{i}", i), daemon=True) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        nodes = hub.HubNodes(switch, Letter({"plan": {}}), lambda: None)
        while len(nodes.present()) < CLIENTS:
            time.sleep(0.1)
        letter = Letter({"plan": "p"}, {"x": torch.zeros(size, dtype=torch.uint8)})
        for _ in range(5):
            began = time.perf_counter()
            assert all(isinstance(reply, Letter) for _, reply in nodes.ask([(i, letter) for i in range(CLIENTS)], 60))
            spent.append(time.perf_counter() - began)
        for client in clients:
            client.terminate()
            client.join()
    return round(statistics.median(spent), 4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, nargs="*", default=list(ENGINES))
    parser.add_argument("--in-process", action="store_true")
    args = parser.parse_args()
    model = {"name": args.model, **({"stem": "small"} if args.model == "resnet18" else {})}
    data = {"name": "digits", "clients": CLIENTS, "train": 16, "test": 10, "val": 0}
    config = Config.from_dict({"data": data, "model": model, "rounds": args.rounds}, "benchmark")
    shape = Shape.of(config.make_data())
    agreed = plan(config, "benchmark", "r", CLIENTS, shape, Limits(min_clients=CLIENTS))
    megabytes = sum(v.nbytes for v in agreed.assignment("cpu").initial.values()) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        result = {"model": args.model, "megabytes": round(megabytes, 1), "clients": CLIENTS, "threads": torch.get_num_threads()}
        result["seconds_a_client_and_round"] = in_process(agreed, args.rounds - 1, Path(folder))
        for engine in [] if args.in_process else args.engine:
            rounds, overhead = real(engine, config, shape, Path(folder))
            result[engine] = {"round_seconds": rounds, "median_after_first": round(statistics.median(rounds[1:]), 3)}
            if len(overhead) == len(rounds):
                result[engine] |= {"overhead": overhead, "overhead_after_first": round(statistics.median(overhead[1:]), 3)}
        if not args.in_process and "grpc" in args.engine:
            result["grpc"]["letters_alone"] = there_and_back(int(megabytes * 1e6), shape, Path(folder))
    result["environment"] = environment("cpu")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
