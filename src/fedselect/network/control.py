"""Control of runs from the server's machine: start, resume and watch them, as in a simulation."""

import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any

from fedselect.core import doing
from fedselect.core.errors import InputError, RunError, Stopped
from fedselect.core.files import in_use, read_json
from fedselect.network import site
from fedselect.network.drive import config_of, over, prepare, say
from fedselect.network.engine import Engine
from fedselect.network.plan import check_name, plan
from fedselect.network.rounds import Limits, check_enough
from fedselect.network.site import Site
from fedselect.private.settings import as_private
from fedselect.runs.config import Config
from fedselect.runs.loop import Watch
from fedselect.runs.rundir import finished, read_records
from fedselect.simulate.records import Record

POLL, ALIVE = 0.3, 5.0  # seconds between checks of the run directory, and of the server
START = 120.0  # seconds for the engine to start the run


def server_part(root: Path) -> Path:
    """The server's folder of a site, given that folder or the whole site."""
    part = root / "server" if (root / "server" / "federation.json").is_file() else root
    site.check_kind(part, "server")
    return part


def start(engine: Engine, part: Path, config: Config, limits: Limits, name: str | None) -> Path:
    """Create a run in the server's folder and submit it."""
    known = Site.read(part)
    limits = replace(limits, fraction=config.fraction, eval_every=config.eval_every)
    check_enough(limits, known.clients, as_private(config.private))
    name = name or f"{config.method['name']}-seed{config.seed}-{secrets.token_hex(3)}".replace("+", "-")
    place = part / "runs" / check_name(name)
    made = plan(config, known.federation, name, known.clients, known.shape, limits)
    _need_server(engine, part)
    if promise := made.promise():
        print(promise, file=sys.stderr)
    prepare(place, made, known.names)
    submit(engine, part, place)
    return place


def submit(engine: Engine, part: Path, place: Path, goes_back: bool = False) -> None:
    """Submit a prepared run, new or resumed. `goes_back`: reset clients that are ahead of the server."""
    _need_server(engine, part)
    say(place, "submitted", goes_back=goes_back)
    engine.submit(part, place)


def _need_server(engine: Engine, part: Path) -> None:
    if not engine.healthy(part):
        raise RunError(f"the server does not answer; start it with: fedselect deploy server {quote(str(part))}")


def runs(part: Path) -> list[Path]:
    """The site's runs, oldest first."""
    folder = part / "runs"
    found = [p for p in folder.iterdir() if (p / "plan.json").exists()] if folder.is_dir() else []
    return sorted(found, key=lambda p: (p / "plan.json").stat().st_mtime_ns)


def state(out: Path) -> str:
    """A run's status as the server noted it, or "interrupted" if its process died, or "not started" if none began."""
    noted = _noted(out)
    if noted == "running" and not _going(out):
        noted = _noted(out)  # it may just have ended
        return "interrupted" if noted == "running" else noted
    late = time.time() > (out / "status.json").stat().st_mtime + START
    return "not started" if noted == "submitted" and late else noted


def reason(out: Path) -> str:
    """Why a run failed or was stopped, and what to do; empty for any other run."""
    return str(_note(out).get("error", ""))


def unrecorded(engine: Engine, part: Path) -> str:
    """Why a run ended without saying so."""
    if engine.healthy(part):
        return f"the run ended and could not record why: is the disk full? See {part / 'log.txt'}"
    return "the server's process died"


def _going(out: Path) -> bool:
    """Whether both the run's process and its server are running; after a server is killed, the run's process ends later."""
    return in_use(out) and in_use(out.parents[1])


def _noted(out: Path) -> str:
    return str(_note(out)["status"])


def _note(out: Path) -> Any:
    return read_json(out / "status.json", "it should hold the status of the run.")


def unfinished(part: Path, name: str | None) -> Path:
    """The run to resume: the one of this name, or the newest that is unfinished, or else not closed.

    A run that is over can be named, too: its clients then write their final models again.
    """
    there = [p for p in runs(part) if (not over(p) if name is None else p.name == name)]
    there.sort(key=lambda p: not finished(p))
    if not there:
        raise InputError(f"there is no {f'run {name}' if name else 'unfinished run'} in {part / 'runs'}.")
    if _going(there[-1]):
        raise InputError(f"{there[-1].name} is still running; watch it with: fedselect deploy status {quote(str(part))}")
    return there[-1]


def follow(engine: Engine, part: Path, out: Path, watch: Watch | None) -> None:
    """Show a run's progress until it ends; Ctrl-C stops the run, which can be resumed."""
    config, seen, idle = config_of(out), len(_records(out)), 0
    again = f"resume it with: fedselect deploy run {quote(str(part))} --resume --name {quote(out.name)}"
    began = checked = time.monotonic()
    last: list[Any] = ["", None]
    with _interrupts() as asked:
        while True:
            busy, status = in_use(out), read_json(out / "status.json", "the server should have written it.")
            idle = 0 if busy or status["status"] != "running" else idle + 1  # seen once, it may just have started or ended
            if (now := status.get("doing", ["", None])) != last:
                last = now
                doing.tell(*now)
            for record in _records(out)[seen:]:
                seen += 1
                if watch:
                    watch(config, record)
            if status["status"] == "finished":
                return
            if status["status"] in ("failed", "stopped"):
                raise RunError(status["error"])
            if asked():
                engine.stop(part, out)
                if _noted(out) == "submitted":  # it has not started, and will not
                    say(out, "stopped", f"it was stopped before it started; {again}")
                raise Stopped(f"stopped after round {seen} of {config.rounds}; {again}")
            if idle == 3:
                raise RunError(f"{unrecorded(engine, part)} (after round {seen}); {again}")
            if status["status"] == "submitted" and time.monotonic() > began + START:
                raise RunError(f"the server did not start the run; see {part / 'log.txt'}, then {again}")
            if time.monotonic() > checked + ALIVE:
                checked = time.monotonic()
                if not engine.healthy(part):
                    raise RunError(f"the server no longer answers; start it, then {again}")
            time.sleep(POLL)


def _records(out: Path) -> list[Record]:
    """The rounds whose records are complete."""
    return read_records(out / "metrics.jsonl", growing=True)


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
