"""Watching a deployed run from its run directory, as a simulated one is watched."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedselect.deploy.flower.drive import config_of
from fedselect.errors import RunError
from fedselect.experiments.runner import Stopped, Watch, read_records
from fedselect.files import in_use, read_json

POLL = 0.3
START = 120.0  # seconds for Flower to start the server's process


def follow(out: Path, watch: Watch | None, alive: Callable[[], bool], stop: Callable[[], None]) -> None:
    """Until the run is over: a line a round; Ctrl-C stops the run, which can be resumed."""
    config, seen = config_of(out), len(read_records(out / "metrics.jsonl"))
    began = time.monotonic()
    with _interrupts() as asked:
        while True:
            status = read_json(out / "status.json", "the server should have written it.")
            records = read_records(out / "metrics.jsonl")
            for record in records[seen:]:
                if watch:
                    watch(config, record)
            seen = len(records)
            if status["status"] == "finished":
                return
            if status["status"] == "failed":
                raise RunError(status["error"])
            if asked():
                stop()
                raise Stopped(f"stopped after round {seen} of {config.rounds}; go on with: --resume {out.name}")
            if status["status"] == "running" and not in_use(out):
                raise RunError(f"the server's process died after round {seen}; go on with: --resume {out.name}")
            if not alive() or (status["status"] == "submitted" and time.monotonic() > began + START):
                raise RunError(f"the server does not answer; start it, then go on with: --resume {out.name}")
            time.sleep(POLL)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    asked = False

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
