"""What differential privacy costs: accuracy over epsilon for 10, 100 and 1,000 clients, and for samples of few large clients.

Spoken digits (AudioMNIST as 8x8 pictures) are dealt evenly to clients, so that only the number of clients differs; beside them
the four hospitals of the heart disease data. With --secret clients add the noise themselves, in shares. Learning rate and clip
of every cell are chosen on validation data with seeds from 100 on; test data is looked at once. `python scripts/private.py`
makes docs/private.md of what this writes.
"""

import argparse
import datetime
import itertools
import json
import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedselect as fs
from fedselect.data.audiomnist import MEAN, STD, read

BUDGETS: tuple[float | None, ...] = (None, 16.0, 8.0, 4.0, 2.0, 1.0)  # None: not private
ROUNDS, SEEDS, TUNED = 30, (0, 1, 2), (100,)
RATES = (0.1, 0.3, 1.0)
CLIPS = {"client": ("clip=0.1", "clip=0.3", "quantile=0.5"), "sample": ("clip=0.3", "clip=1")}
SHARED: tuple[float | None, ...] = (8.0, 4.0, 2.0)
FIXED = ("clip=0.1", "clip=0.3", "clip=1")  # where nobody sees how long updates are
BATCH = {"client": 32, "sample": 128}
EPOCHS = {"client": 3, "sample": 1}


def spoken(data_dir: Path | None) -> tuple[Tensor, Tensor]:
    """All spoken digits as 8x8 pictures."""
    found = read(data_dir)
    x = nn.functional.avg_pool2d(torch.tensor(found.x).float() / 255, 4)
    return (x - MEAN[0]) / STD[0], torch.tensor(found.y)


def dealt(x: Tensor, y: Tensor, clients: int, seed: int) -> fs.Federation:
    """12,000 samples to train on, 1,000 to choose by and 2,000 to test on, in equal parts to all clients."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = torch.split(order[:15_000], [12_000, 1_000, 2_000])
    own = [[(x[p[i::clients]], y[p[i::clients]]) for p in parts] for i in range(clients)]
    return fs.Federation([fs.ClientData(train, test, val) for train, val, test in own], 10)


def network(inputs: int, hidden: int, outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def train(
    data: fs.Federation, unit: str, seed: int, epsilon: float | None, lr: float, clip: str, model: Any, secret: bool
) -> dict[str, Any]:
    """One run, its noise from the seed: to be repeated, so not private."""
    private = None if epsilon is None else f"epsilon={epsilon:g},unit={unit},seeded=yes,{clip}"
    simulation = fs.Simulation(
        fs.FedAvg(lr=lr, epochs=EPOCHS[unit]), model, data, seed=seed, training=fs.Training(batch_size=BATCH[unit]),
        rounds=ROUNDS, eval_every=ROUNDS, val=True, device="cpu", private=private, secret=secret,
    )  # fmt: skip
    record: dict[str, Any] = {}
    try:
        for _ in range(ROUNDS):
            record = simulation.step()
    except fs.TrainingError:
        return {"accuracy": 0.0, "val_accuracy": 0.0}
    kept = {"accuracy": round(100 * record["accuracy"], 2), "val_accuracy": round(100 * record["val_accuracy"], 2)}
    if simulation.budget is None:
        return kept
    promised = simulation.budget.guarantee
    return kept | {
        "spent": round(record["epsilon"], 3), "delta": promised.delta, "ratio": round(promised.ratio, 3),
        "noise": round(max(lot.noise for lot in promised.lots), 3), "entries": promised.size,
    }  # fmt: skip


def cell(
    make: Callable[[int], fs.Federation], unit: str, epsilon: float | None, model: Any, tuned: tuple[int, ...], secret: bool
) -> list[Any]:
    """The rows of one cell of the table: what was best on validation data, with every seed on test data."""
    clips = ("",) if epsilon is None else FIXED if secret else CLIPS[unit]
    scores = {
        (lr, clip): statistics.fmean(train(make(s), unit, s, epsilon, lr, clip, model, secret)["val_accuracy"] for s in tuned)
        for lr, clip in itertools.product(RATES, clips)
    }
    lr, clip = max(scores, key=lambda k: scores[k])
    chosen = {"lr": lr, "clip": clip}
    return [
        {"epsilon": epsilon, "seed": s, **chosen, **train(make(s), unit, s, epsilon, lr, clip, model, secret)} for s in SEEDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: results/private.json, with --secret results/private_secret.json")
    parser.add_argument("--secret", action="store_true", help="clients add the noise, in shares: epsilon 8, 4 and 2 alone")
    parser.add_argument("--data-dir", type=Path, help="where audiomnist.npz and heart.npz lie")
    args = parser.parse_args()
    out = args.out or Path("results/private_secret.json" if args.secret else "results/private.json")
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    x, y = spoken(args.data_dir)
    cases: list[tuple[dict[str, Any], Callable[[int], fs.Federation], str, Any, tuple[int, ...]]] = []
    for clients, unit in ((10, "client"), (100, "client"), (1000, "client"), (10, "sample")):
        about = {"data": "spoken digits", "clients": clients, "unit": unit, "samples": 12_000 // clients}
        cases.append((about, lambda s, n=clients: dealt(x, y, n, s), unit, network(64, 16, 10), TUNED))  # type: ignore[misc]
    if args.secret:
        cases = cases[:3]
    hospitals = {"data": "heart disease", "clients": 4, "unit": "sample", "samples": None}
    heart = lambda s: fs.load("heart", val=20, data_dir=args.data_dir and str(args.data_dir), seed=s)  # noqa: E731
    if not args.secret:
        cases.append((hospitals, heart, "sample", network(31, 8, 2), (100, 101, 102)))
    rows = []
    for (about, make, unit, model, tuned), epsilon in itertools.product(cases, SHARED if args.secret else BUDGETS):
        found = cell(make, unit, epsilon, model, tuned, args.secret)
        rows += [{**about, **r} for r in found]
        print(about, epsilon, [r["accuracy"] for r in found], found[0], flush=True)
    made = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(), "commit": commit,
        "machine": f"{platform.machine()}, 1 CPU thread, torch {torch.__version__}",
        "rounds": ROUNDS, "seeds": SEEDS, "rates": RATES, "clips": {"client": FIXED} if args.secret else CLIPS,
        "batch": BATCH, "epochs": EPOCHS,
    }  # fmt: skip
    head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in made.items())
    body = ",\n  ".join(map(json.dumps, rows))
    out.write_text(f'{{\n {head},\n "rows": [\n  {body}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
