"""Starts Flower's processes: a SuperLink, SuperNodes, and runs on them; whatever was started is also stopped."""

import json
import math
import os
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import held, read_json, write_json
from fedselect.core.version import package_version
from fedselect.network.flower import clock, guard, reasons
from fedselect.network.home import Home
from fedselect.network.processes import started as _process
from fedselect.network.reach import LATE, back, check_server, lost, silent, waiting
from fedselect.network.reach import unreachable as _unreachable
from fedselect.network.site import Site, check_part, check_port, free_port, listens_at, write_app
from fedselect.network.vault import private

NAME = "fedselect"  # of the SuperLink in Flower's own configuration
PATIENCE = 300.0  # seconds for one of Flower's commands; a busy machine takes a minute
RETRY, PAUSE = 120.0, 5.0  # seconds to retry after a refusal, and between tries; Flower forgets a dead client after 60
LOOK = 0.5  # seconds between checks of the log
SECURE_SERVER = ("ca.crt", "server.crt", "server.key")
SECURE_CLIENT = ("ca.crt", "node.key")


def need() -> None:
    if find_spec("flwr") is None:
        raise InputError("a deployment on Flower needs its package; install it with: pip install 'fedselect[flower]'")


def environment(part: Path, guarded: bool) -> dict[str, str]:
    """Environment of Flower's processes: a separate home, no telemetry, no update checks, and the guard before its commands."""
    home = part / ".flwr"
    home.mkdir(parents=True, exist_ok=True)
    own = Path(sys.executable).parent
    first = [str(guard.commands(home / "bin"))] if guarded else []
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([*first, str(own), os.environ.get("PATH", "")]),
    }


@contextmanager
def server(part: Path, log: Path, shipped_code: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A SuperLink that knows this site's clients."""
    part = part.resolve()
    site = Site.read(part)
    if not site.insecure:
        check_part(part, SECURE_SERVER)
    host = listens_at(site)
    check_port(host, site.port)
    control = free_port()
    env = {**environment(part, not shipped_code), "FEDSELECT_SERVER": str(part)}
    if not (part / "superlink.db").exists():  # where Flower stores the keys it knows
        write_json(part / "nodes.json", {})
    tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
    secure = ["--insecure"] if site.insecure else [*tls, "--enable-supernode-auth"]
    command = [
        sys.executable, "-P", "-m", "fedselect.network.flower.superlink", "--public", f"{host}:{site.port}", *secure,
        "--host", "127.0.0.1", "--port", str(control), "--database", "superlink.db",
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    _write_connection(part, site, control)
    with held(part / ".lock", wait=False, advice="stop the other server first."), _process(command, part, env, log) as process:
        _until_healthy(part, process, log)
        if not site.insecure:
            _register(part, site)
        yield process


def serve(part: Path, say: Callable[[str], None], shipped_code: bool = False) -> None:
    """Run a SuperLink until Ctrl-C or a termination signal."""
    log = part / "log.txt"
    with server(part, log, shipped_code) as process, suppress(KeyboardInterrupt):
        say(f"the server is up at {Site.read(part).address}; its log is {log}; Ctrl-C stops it")
        raise RunError(f"the server ended with code {process.wait()}; see {log}.")


@contextmanager
def client(part: Path, home: Home, log: Path, shipped_code: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A SuperNode with its own data and vault."""
    part = part.resolve()
    site = Site.read(part)
    if not site.insecure:
        check_part(part, SECURE_CLIENT)
        check_server(part, site)
        if why := clock.wrong(part, site):
            raise InputError(why)
    secure = ["--insecure"] if site.insecure else ["--root-certificates", "ca.crt", "--auth-supernode-private-key", "node.key"]
    command = [
        _tool("flower-supernode"), *secure, "--superlink", site.address, "--host", "127.0.0.1", "--port", str(free_port()),
        "--node-config", _node_config(home),
    ]  # fmt: skip
    with _process(command, part, environment(part, not shipped_code), log) as process:
        yield process


def work(part: Path, home: Home, say: Callable[[str], None], shipped_code: bool = False) -> None:
    """Run a SuperNode until Ctrl-C or a termination signal; if it ends before, that is an error.

    Flower refuses an unknown key and a client that it counts as connected with the same words, so both are retried. A second
    copy with the same vault is refused here.
    """
    log = part / "log.txt"
    said = f"client {home.client} calls the server at {Site.read(part).address}; its log is {log}; Ctrl-C stops it"
    until = None
    private(home.vault)
    with (
        held(home.vault / ".client", wait=False, advice="stop the other copy of this client first."),
        suppress(KeyboardInterrupt),
    ):
        while True:
            begun = log.stat().st_size if log.exists() else 0
            with client(part, home, log, shipped_code) as process:
                if until is None:
                    say(said)
                if _let_in(process, log, begun, Site.read(part), say):
                    say(f"client {home.client} is connected to the server")
                code = _wait(process, part, say)
            if not reasons.turned_away(log) or (until is not None and time.monotonic() > until):
                raise RunError(f"the client ended: {reasons.of_log(log, code)}")
            if until is None:
                until = time.monotonic() + RETRY
                say(
                    "the server still counts this client as connected, or does not know its node.key; "
                    "trying for two minutes (is another copy running?)"
                )
            time.sleep(PAUSE)


def _let_in(process: subprocess.Popen[bytes], log: Path, begun: int, site: Site, say: Callable[[str], None]) -> bool:
    """Whether the server accepts a SuperNode, once known; reports a server that does not answer at once, and later why.

    A SuperNode, whose log begins at `begun`, logs its number when it is accepted.
    """
    late, looked = time.monotonic() + LATE, False
    while "SuperNode ID:" not in _since(log, begun):
        if process.poll() is not None:
            return False
        if not looked and _unreachable(site):
            say(waiting(site))
        looked = True
        if time.monotonic() > late:
            late += LATE
            if why := _unreachable(site):
                late = math.inf
                say(silent(site, why))
        time.sleep(LOOK)
    return True


def _wait(process: subprocess.Popen[bytes], part: Path, say: Callable[[str], None]) -> int:
    """Wait until a SuperNode ends; report a lost server, its return, and a wrong clock."""
    site, away, off = Site.read(part), False, False
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LATE)
        why = _unreachable(site)
        if why and not away:
            say(lost(site, why))
        if away and not why:
            say(back(site))
        away = why is not None
        wrong = None if away else clock.wrong(part, site)
        if wrong and not off:
            say(wrong)
        off = wrong is not None


def _since(log: Path, begun: int) -> str:
    with log.open("rb") as file:
        file.seek(begun)
        return file.read().decode(errors="replace")


def submit(part: Path, place: Path) -> None:
    """Start a run on this machine's SuperLink, and store Flower's number for it."""
    plan = read_json(place / "plan.json", "it should hold the plan of a deployed run.")
    app = write_app(place / "app", plan, package_version())
    said = _flwr(part, "run", str(app.resolve()), NAME, "--format", "json")
    write_json(place / "flower.json", {"run": str(json.loads(said[said.index("{") :])["run-id"])})


def stop(part: Path, place: Path) -> None:
    _flwr(part, "stop", str(read_json(place / "flower.json", "it should name the run.")["run"]), NAME)


def connected(part: Path) -> dict[int, str]:
    """The registered clients, with the state of their nodes."""
    nodes = read_json(part / "nodes.json", "start the server first.") if (part / "nodes.json").exists() else {}
    states = {}
    if healthy(part):
        said = _flwr(part, "supernode", "list", NAME, "--format", "json")
        states = {int(n["node-id"]): str(n["status"]) for n in json.loads(said[said.index("{") :])["nodes"]}
    return {int(client): states.get(int(node), "unknown") for node, client in nodes.items()}


def _flwr(part: Path, *args: str) -> str:
    part = part.resolve()
    command, env = [_tool("flwr"), *args], environment(part, guarded=False)
    try:
        done = subprocess.run(command, cwd=part, env=env, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise RunError(f"flwr {args[0]} did not answer within {PATIENCE:.0f} seconds; see {part / 'log.txt'}.") from None
    if done.returncode != 0 or '"success": false' in done.stdout:
        raise RunError(f"flwr {args[0]} failed: {reasons.of_command(done.stdout + done.stderr)}")
    return done.stdout


def _register(part: Path, site: Site) -> None:
    """Register the clients' keys, and record which node is which client."""
    known = read_json(part / "nodes.json", "delete it and superlink.db.")
    for i in range(site.clients):
        key = part / "keys" / f"client-{i}.pub"
        if not key.is_file():
            raise InputError(f"{key} is missing; copy it from the site, or make the site again with: fedselect deploy init.")
        if i not in known.values():
            said = _flwr(part, "supernode", "register", str(key), NAME, "--format", "json")
            known[str(json.loads(said[said.index("{") :])["node-id"])] = i
            write_json(part / "nodes.json", known)


def _write_connection(part: Path, site: Site, port: int) -> None:
    """Tell Flower's own command where this SuperLink is; it takes orders from this machine only."""
    security = "insecure = true" if site.insecure else f'root-certificates = "{part / "ca.crt"}"'
    home = part / ".flwr"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "127.0.0.1:{port}"\n{security}\n'
    )


def healthy(part: Path) -> bool:
    """Whether this machine's SuperLink answers."""
    site = Site.read(part)
    scheme = "http" if site.insecure else "https"
    context = None if site.insecure else ssl.create_default_context(cafile=str(part / "ca.crt"))
    try:
        with urllib.request.urlopen(f"{scheme}://127.0.0.1:{site.port}/health", timeout=5, context=context):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _until_healthy(part: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        if healthy(part):
            return
        time.sleep(0.2)
    raise RunError(f"the SuperLink did not start: {reasons.of_log(log, process.poll())}")


def _node_config(home: Home) -> str:
    parts = []
    for key, value in home.to_flat().items():
        if isinstance(value, str) and any(c in value for c in "'\"\n\\"):
            raise InputError(f"{value} has a character that Flower's node configuration does not allow; rename it.")
        parts.append(f"{key}={json.dumps(value)}")
    return " ".join(parts)


def _tool(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise InputError(f"{name} was not found; install Flower with: pip install 'fedselect[flower]'")
    return found
