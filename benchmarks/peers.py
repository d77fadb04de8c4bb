"""How long a round takes here and in other frameworks: the same data, model, batches, epochs and learning rate.

A peer takes part where its folder is given, as its authors publish it; nothing of theirs is copied. What it imports only for
data sets, and is not installed, is replaced by a stub. Everybody trains and aggregates; nobody evaluates. Contestants take
turns in one process, and the best turn of each counts: wall time, and CPU time of the process, which says more where a machine
is busy. In steady state a turn is ten rounds, one after the other. First rounds are those of new runs, after everybody has
run a round of each model with two clients, so that nobody pays for torch's own start. Flower's simulation starts processes of
its own and runs alone (`peers_flower.py`).

    python benchmarks/peers.py --pfllib ~/PFLlib --fluke ~/fluke --pfl-research ~/pfl-research --fl-bench ~/FL-bench --flower
        [--threads 1] [--clients 3 10 100] [--models mlp small_cnn]
"""

import argparse
import contextlib
import gc
import io
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from contestants import BATCH, EPOCHS, LR, METHODS, PEERS, SAMPLES, Contestant, Maker, Stubs, ours, pictures

import fedselect as fs
from fedselect.training.recorded import RECORD_AFTER

Makers = dict[str, Maker]


def timed(run: Callable[[], object], rounds: int = 1) -> tuple[float, float]:
    gc.collect()  # nobody pays for what others have left
    wall, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(rounds):
            run()
    return (time.perf_counter() - wall) / rounds, (time.process_time() - cpu) / rounds


def turns(contest: dict[str, Contestant], count: int, at: int = 0, rounds: int = 1) -> dict[str, tuple[float, float]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contest}
    for turn in range(at, at + count):  # another one begins each time
        order = list(contest)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for name in order:
            found[name].append(timed(contest[name].run, rounds))
    return {name: (min(w for w, _ in v), min(c for _, c in v)) for name, v in found.items()}


def start(makers: Makers, method: str, name: str, clients: int, batch: int = BATCH) -> dict[str, Contestant]:
    data = pictures(clients)
    model = getattr(fs.models, name)(data)
    with contextlib.redirect_stdout(io.StringIO()):
        made = {who: make(method, model, data, batch) for who, make in makers.items()}
    return {who: contestant for who, contestant in made.items() if contestant is not None}


def same(makers: Makers, method: str, name: str) -> dict[str, float]:
    """How far the shared models are from ours after a round in which an epoch is one batch, so that no shuffle matters."""
    contest = start(makers, method, name, 4, SAMPLES)
    turns(contest, 1)
    ends = {who: torch.cat([v.detach().flatten() for v in c.shared()]) for who, c in contest.items()}
    begin = torch.cat([v.flatten() for v in getattr(fs.models, name)(pictures(4)).init(0).values()])
    moved = (ends["fedselect"] - begin).norm()
    return {who: float((end - ends["fedselect"]).norm() / moved) for who, end in ends.items()}


def compete(method: str, name: str, clients: int, makers: Makers, count: int) -> list[dict]:
    first: dict[str, tuple[float, float]] = {}
    for turn in range(count):
        contest = start(makers, method, name, clients)
        for who, found in turns(contest, 1, turn).items():
            first[who] = tuple(map(min, first.get(who, found), found))
    steps = EPOCHS * SAMPLES // BATCH
    for _ in range(RECORD_AFTER["cpu"] // steps + 1):  # as in a run of some length: the step is traced
        contest["fedselect"].run()
    steady = turns(contest, count, rounds=10)
    rows = []
    for who in contest:
        row = {"method": method, "model": name, "clients": clients, "framework": who}
        for stage, found in (("first", first), ("steady", steady)):
            row[stage] = {"wall_ms": round(1e3 * found[who][0], 2), "cpu_ms": round(1e3 * found[who][1], 2)}
        rows.append(row)
        say(row)
    return rows


def say(row: dict) -> None:
    taken = "  ".join(f"{stage} {row[stage]['wall_ms']:>8} ms (CPU {row[stage]['cpu_ms']})" for stage in ("first", "steady"))
    print(f"{row['method']:<9} {row['model']:<9} {row['clients']:>3} clients  {row['framework']:<12}  {taken}", flush=True)


def flower(name: str, clients: int) -> dict:
    program = Path(__file__).with_name("peers_flower.py")
    done = subprocess.run([sys.executable, program, name, str(clients)], capture_output=True, text=True, check=True)
    row = {
        "method": "fedavg",
        "model": name,
        "clients": clients,
        "framework": "flower",
        **json.loads(done.stdout.splitlines()[-1]),
    }
    say(row)
    return row


def commit(folder: Path) -> str | None:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}", type=Path, help=f"the folder of {peer}'s repository")
        parser.add_argument(f"--{peer}-commit", help="which commit that is, where git does not know")
    parser.add_argument("--flower", action="store_true", help="also Flower's simulation, if flwr[simulation] is installed")
    parser.add_argument("--clients", type=int, nargs="*", default=[3, 10, 100])
    parser.add_argument("--models", nargs="*", default=["mlp", "small_cnn"])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=6)
    how = parser.parse_args()
    torch.set_num_threads(how.threads)
    chosen, versions = dict[str, Maker](), {}
    sys.meta_path.append(Stubs())
    for peer, (inside, make) in PEERS.items():
        folder = getattr(how, peer.replace("-", "_"))
        if folder is not None:
            sys.path.append(str(folder / inside))
            chosen[peer], versions[peer] = make, getattr(how, f"{peer}_commit".replace("-", "_")) or commit(folder)
    makers = {"fedselect": ours, **chosen}
    for n in how.models:
        for m in how.methods:
            turns(start(makers, m, n, 2), 1)
    alike = {n: same(makers, "fedavg", n) for n in how.models}
    print("distance to our model after a round, as a share of how far it moved:", alike, flush=True)
    rows: list[dict] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for m in how.methods:
            for n in how.models:
                for c in how.clients:
                    rows += compete(m, n, c, makers, how.turns)
                    if how.flower and m == "fedavg":
                        rows.append(flower(n, c))
    except KeyboardInterrupt:
        print("stopped early; here is what was measured", flush=True)
    print(json.dumps({
        "benchmark": "peers", "date": str(date.today()), "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "threads": how.threads, "commits": {"fedselect": commit(Path(__file__).parent), **versions},
        "batch": BATCH, "epochs": EPOCHS, "lr": LR, "samples": SAMPLES, "turns": how.turns, "distance": alike, "rounds": rows,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
