"""The gRPC engine for the deploy commands. grpc itself is imported when a server or a client starts."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from fedselect.core.errors import FedselectError, InputError, RunError
from fedselect.core.files import held, in_use, read_json
from fedselect.network.desk import Desk
from fedselect.network.drive import serve as serve_run
from fedselect.network.grpc import requests
from fedselect.network.home import Home
from fedselect.network.identity import node_identity
from fedselect.network.letters import Letter
from fedselect.network.plan import check_name
from fedselect.network.processes import started
from fedselect.network.reach import check_server
from fedselect.network.site import Site, check_part, check_port, listens_at
from fedselect.network.vault import private
from fedselect.runs.config import Config
from fedselect.runs.progress import describe
from fedselect.simulate.records import Record

if TYPE_CHECKING:
    from fedselect.network.grpc.hub import Hub

SECURE_SERVER = ("ca.crt", "server.crt", "server.key")
SECURE_CLIENT = ("ca.crt", "node.crt", "node.key")
LOOK = 0.1  # seconds between checks for a requested run
PATIENCE = 120.0  # seconds for a process to start; a busy machine takes half a minute


def need() -> None:
    if find_spec("grpc") is None or find_spec("cryptography") is None:
        raise InputError("a deployment on gRPC needs its packages; install them with: pip install 'fedselect[grpc]'")


class _Stop(KeyboardInterrupt):
    """The run must stop; the server continues."""


def serve(part: Path, say: Callable[[str], None], shipped_code: bool = False) -> None:
    """Run the site's server: clients call its port; runs are requested by files in its folder, one at a time."""
    _no_code(shipped_code)
    from fedselect.network.grpc import hub

    part, site = part.resolve(), Site.read(part)
    if not site.insecure:
        check_part(part, SECURE_SERVER)
    check_port(listens_at(site), site.port)
    tell = _logged(part / "log.txt", say)
    with held(part / ".lock", wait=False, advice="stop the other server first."), _until_stopped():
        requests.clear(part)
        with hub.opened(part, site, tell) as switch:
            tell(f"the server is up at {site.address}; its log is {part / 'log.txt'}; Ctrl-C stops it")
            while True:
                if run := requests.taken(part):
                    _run(part, run, switch, tell)
                time.sleep(LOOK)


def _run(part: Path, name: str, switch: "Hub", say: Callable[[str], None]) -> None:
    """Run one run to its end; if it fails, its status says why, and the server waits for the next."""
    from fedselect.network.grpc.hub import HubNodes

    def go_on() -> None:
        if requests.stopped(part, name):
            raise _Stop

    def watch(config: Config, record: Record) -> None:
        say(f"{name}: round {record['round']}  {describe(record, config.measured()[0])}")

    keys = None if switch.keys is None else {i: i for i in range(switch.site.clients)}
    try:
        out = part / "runs" / check_name(name)
        plan = Letter({"plan": read_json(out / "plan.json", "it should hold the plan of a deployed run.")})
        serve_run(out, HubNodes(switch, plan, go_on), keys, watch)
        say(f"{name} is finished")
    except _Stop:
        say(f"{name} was stopped")
    except FedselectError as e:
        say(f"{name} failed: {e}")
    except Exception:
        say(f"{name} failed: {traceback.format_exc()}")


def work(part: Path, home: Home, say: Callable[[str], None], shipped_code: bool = False) -> None:
    """Run a client: one process, which trains in its main thread. A second copy with the same vault is refused here."""
    _no_code(shipped_code)
    from fedselect.network.grpc.line import Caller

    part, site = part.resolve(), Site.read(part)
    private(home.vault)
    with held(home.vault / ".client", wait=False, advice="stop the other copy of this client first."), _until_stopped():
        if not site.insecure:
            check_part(part, SECURE_CLIENT)
            check_server(part, site, b"".join(node_identity(part)), home.vault)
        log = (part if os.access(part, os.W_OK) else home.vault) / "log.txt"
        tell = _logged(log, say)
        tell(f"client {home.client} calls the server at {site.address}; its log is {log}; Ctrl-C stops it")
        Caller(part, site, Desk(home), tell).work()


def main(what: str, part: str, home: str = "{}") -> None:
    """Run a server or a client in a separate process, for `server` and `client` below."""
    if what == "server":
        serve(Path(part), _printed)
    else:
        work(Path(part), Home.from_flat(json.loads(home)), _printed)


def _printed(text: str) -> None:
    print(text, flush=True)


def _ours(*args: str) -> list[str]:
    """A command that runs `main`, without modules from the current folder."""
    return [
        sys.executable,
        "-P",
        "-c",
        "import sys; from fedselect.network.grpc import launch; launch.main(*sys.argv[1:])",
        *args,
    ]


@contextmanager
def server(part: Path, log: Path) -> Iterator[Popen[bytes]]:
    with started(_ours("server", str(part.resolve())), part, dict(os.environ), log) as process:
        until = time.monotonic() + PATIENCE
        while not healthy(part):
            if process.poll() is not None or time.monotonic() > until:
                raise RunError(f"the server did not start; see {log}.")
            time.sleep(LOOK)
        yield process


@contextmanager
def client(part: Path, home: Home, log: Path) -> Iterator[Popen[bytes]]:
    command = _ours("client", str(part.resolve()), json.dumps(home.to_flat()))
    with started(command, part, dict(os.environ), log) as process:
        yield process


def healthy(part: Path) -> bool:
    """Whether a server holds this folder and is up."""
    return in_use(part) and (part / requests.CONNECTED).exists()


def connected(part: Path) -> dict[int, str]:
    if not healthy(part):
        return {}
    here = read_json(part / requests.CONNECTED, "start the server again.")["clients"]
    return {i: "online" if i in here else "offline" for i in range(Site.read(part).clients)}


def submit(part: Path, place: Path) -> None:
    requests.start(part, place.name)


def stop(part: Path, place: Path) -> None:
    requests.stop(part, place.name)


def _no_code(shipped_code: bool) -> None:
    if shipped_code:
        raise InputError("--allow-shipped-code is for apps of Flower; leave it out, on gRPC no code can be sent.")


@contextmanager
def _until_stopped() -> Iterator[None]:
    """Ctrl-C and a termination signal end the block without an error."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        yield


def _logged(log: Path, say: Callable[[str], None]) -> Callable[[str], None]:
    """Also write what is said to the log, with the time; a log that cannot be written, as on a full disk, ends nothing."""

    def tell(text: str) -> None:
        say(text)
        with suppress(OSError), log.open("a") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n")

    return tell
