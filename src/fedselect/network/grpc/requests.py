"""What `deploy run` asks of the server, as files in its folder: whoever may write there may start and stop runs."""

from pathlib import Path

from fedselect.core.errors import RunError
from fedselect.core.files import in_use, read_json, write_json

CONNECTED = "connected.json"
START, STOP = "start.json", "stop.json"


def start(part: Path, run: str) -> None:
    """Request a run; a server runs one at a time."""
    going = [p.name for p in (part / "runs").iterdir() if in_use(p)]
    if going:
        raise RunError(f"{going[0]} is still running; wait for its end, or stop it with Ctrl-C where it was started.")
    (part / STOP).unlink(missing_ok=True)
    write_json(part / START, {"run": run})


def stop(part: Path, run: str) -> None:
    if _named(part / START) == run:  # not started yet
        (part / START).unlink(missing_ok=True)
    write_json(part / STOP, {"run": run})


def clear(part: Path) -> None:
    """Drop the requests to an earlier server, and its list of connected clients."""
    for name in (START, STOP, CONNECTED):
        (part / name).unlink(missing_ok=True)


def taken(part: Path) -> str | None:
    """The requested run, if there is one; the request is removed."""
    run = _named(part / START)
    if run is not None:
        (part / START).unlink(missing_ok=True)
    return run


def stopped(part: Path, run: str) -> bool:
    return _named(part / STOP) == run


def _named(path: Path) -> str | None:
    return str(read_json(path, "delete it.").get("run")) if path.exists() else None
