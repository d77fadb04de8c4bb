"""A real federation on loopback: server and clients as processes, TLS, keys, vaults; started once an engine."""

import http.client
import shutil
import signal
import ssl
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from children import PATIENCE, Children, until
from safetensors.torch import load_file

from fedselect.core.files import read_json
from fedselect.network.site import Site, free_port
from fedselect.runs.config import Config
from fedselect.runs.rundir import read_records

ROUNDS = 2
PLUGIN = """
from torch import nn
import fedselect as fs

def mine(lr: float = 0.1) -> fs.Method:
    return fs.FedAvg(epochs=1, lr=lr)

def tiny(data: fs.Federation) -> fs.Model:
    return fs.Model.wrap(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, data.classes)))

fs.METHODS["mine"], fs.MODELS["tiny"] = mine, tiny
"""


CLIENTS = 2
MAIN = "from fedselect.cli import main; main()"
LOGGED = "import os, sys; log = os.open(sys.argv.pop(), os.O_CREAT | os.O_WRONLY); os.dup2(log, 1); os.dup2(log, 2); "


def start(fork, *args, log, **how):
    """A command that runs until it is stopped."""
    log.touch()
    return fork(LOGGED + MAIN, "deploy", *args, log, **how)


def deploy(*args, **how):
    """A command that comes to its end."""
    with Children() as children:
        process = children.fork(MAIN, "deploy", *args, **how)
        out, err = process.communicate()
    return Ended(process.returncode, out, err)


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str


@dataclass
class Federation:
    engine: str
    root: Path
    run: Ended


@pytest.fixture(scope="module", params=["flower", "grpc"])
def federation(request, tmp_path_factory):
    """Two clients train two rounds with FedSelect; everything is stopped in the end."""
    base = tmp_path_factory.mktemp("federation")
    root, port = base / "site", free_port()
    engine = ("--engine", request.param)
    made = deploy("init", root, "--clients", CLIENTS, "--address", f"127.0.0.1:{port}", "--train", 20, "--test", 10, *engine)
    assert made.returncode == 0, made.stderr
    with Children() as children:
        processes = [start(children.fork, "server", root / "server", log=base / "server.txt")]
        wait_for(base / "server.txt", "the server is up", processes[0])
        for i in range(CLIENTS):
            log = base / f"client-{i}.txt"
            processes.append(start(children.fork, "client", root / f"client-{i}", "--device", "cpu", log=log))
        for i in range(CLIENTS):
            wait_for(base / f"client-{i}.txt", f"client {i} is connected to the server", processes[i + 1])
        run = deploy("run", root, "--model", "mlp", "--rounds", ROUNDS, "--name", "first")
        yield Federation(request.param, root, run)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE) for process in processes]
        assert codes == [0] * (1 + CLIENTS)
        assert not alive(str(root)), "something was left running"


def wait_for(path, text, process):
    """Until a log says this; a process that ends before shows what it said."""
    until(lambda: text in path.read_text() or process.poll() is not None, pause=0.1)
    assert text in path.read_text(), path.read_text()


def alive(mark):
    """The processes whose command line names this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in place.read_bytes().decode(errors="replace"):
                found.append(place.parent.name)
        except OSError:
            continue
    return found


def test_it_runs_to_the_end_and_shows_its_progress(federation):
    assert federation.run.returncode == 0, federation.run.stderr
    assert f"round {ROUNDS}/{ROUNDS}  accuracy" in federation.run.stdout
    assert "missed" not in federation.run.stdout


def test_deployed_is_simulated_to_the_bit(federation):
    out = federation.root / "server" / "runs" / "first"
    config = Config.from_dict(read_json(out / "config.json", ""), "run")
    simulation = config.simulation()
    records = [simulation.step() for _ in range(ROUNDS)]
    for ours, theirs in zip(read_records(out / "metrics.jsonl"), records, strict=True):
        assert ours.pop("missed") == ours.pop("rejected") == ours.pop("set_back") == ours.pop("absent", {}) == {}
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    server = load_file(max((out / "checkpoint").glob("[0-9]*")) / "state.safetensors")
    assert all(torch.equal(server[f"server/params/{n}"], v) for n, v in simulation.server["params"].items())
    for i in range(CLIENTS):
        done = deploy("export", federation.root / f"client-{i}")
        assert done.returncode == 0, done.stderr
        model = load_file(federation.root / f"client-{i}" / "model.safetensors")
        assert all(torch.equal(model[n], v[0]) for n, v in simulation.models([i]).items())


def test_personal_values_are_nowhere_but_at_their_client(federation):
    """No file of the server's holds the entries that client 0 keeps to itself."""
    out = federation.root / "server" / "runs" / "first"
    state = load_file(federation.root / "client-0" / "vault" / "first" / f"{ROUNDS:06d}" / "state.safetensors")
    name = "state/params/1.weight"
    personal = state[name][0][state["state/kept/1.weight"][0]]
    assert len(personal) > 10
    kept = {float(v) for v in personal}
    for path in [*out.rglob("*.safetensors")]:
        for found in load_file(path).values():
            if found.dtype == torch.float32:
                assert not kept & {float(v) for v in found.flatten()}, path


def test_files_are_private(federation):
    for part in ("client-0/vault", "client-0/node.key", "server/server.key", "ca/ca.key"):
        for path in [federation.root / part, *(federation.root / part).rglob("*")]:
            assert path.stat().st_mode & 0o077 == 0, path


def test_who_is_connected_and_how_it_went(federation):
    said = deploy("status", federation.root).stdout
    assert said.count(": online") == CLIENTS, said
    assert f"first: finished, round {ROUNDS} of {ROUNDS}" in said


def test_nobody_controls_the_server_through_the_port_of_its_nodes(federation):
    """There only nodes are let in; who controls it has another port, which is bound to loopback."""
    if federation.engine == "grpc":
        pytest.skip("on gRPC no port is for control")
    part = federation.root / "server"
    control = tomllib.loads((part / ".flwr" / "config.toml").read_text())["superlink"]["fedselect"]["address"]
    public = Site.read(part).address
    assert control.startswith("127.0.0.1:")
    assert control != public

    def ask(address, path):
        context = ssl.create_default_context(cafile=str(part / "ca.crt"))
        there = http.client.HTTPSConnection(address, timeout=PATIENCE, context=context)
        there.request("POST", path, b"", {"Content-Type": "application/protobuf"})
        status = there.getresponse().status
        there.close()
        return status

    for path in ("/v1/control/list-runs", "/v1/control/stop-run", "/v1/control/register-node", "/v1/runtime/acquire-task"):
        assert ask(public, path) == 403
    assert ask(control, "/v1/control/list-runs") == 200
    assert ask(public, "/v1/fleet/pull-messages") == 401  # without a node's signature
    listening = Path("/proc/net/tcp").read_text().split()
    assert f"0100007F:{int(control.partition(':')[2]):04X}" in listening
    assert f"00000000:{int(control.partition(':')[2]):04X}" not in listening


@pytest.mark.parametrize("key", ["unknown", "connected"])
def test_a_client_with_an_unknown_key_or_a_second_copy_is_turned_away(federation, fork, tmp_path, key):
    if federation.engine == "grpc":
        pytest.skip("in one process: tests/network/test_grpc.py")
    stranger = tmp_path / "stranger"
    shutil.copytree(federation.root / "client-0", stranger, ignore=shutil.ignore_patterns("vault", ".flwr", "log.txt"))
    if key == "unknown":
        assert deploy("init", tmp_path / "other", "--clients", 1).returncode == 0
        shutil.copy(tmp_path / "other" / "client-0" / "node.key", stranger / "node.key")
    process = start(fork, "client", stranger, log=tmp_path / "said.txt")
    wait_for(tmp_path / "said.txt", "still counts this client as connected, or does not know its node.key", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


def test_a_client_of_another_authority_does_not_connect(federation, tmp_path):
    address = read_json(federation.root / "federation.json", "")["address"]
    other = ("--clients", 1, "--address", address, "--engine", federation.engine)
    assert deploy("init", tmp_path / "other", *other).returncode == 0
    done = deploy("client", tmp_path / "other" / "client-0")
    assert done.returncode == 2
    assert "shows a certificate that" in done.stderr


def test_a_second_server_on_the_same_port_is_refused(federation):
    done = deploy("server", federation.root / "server")
    assert done.returncode == 2
    assert "cannot be used (Address already in use)" in done.stderr


def test_a_finished_run_cannot_be_resumed(federation):
    done = deploy("run", federation.root, "--resume")
    assert done.returncode == 2
    assert "there is no unfinished run" in done.stderr


def test_on_grpc_a_run_outlives_its_server_its_clients_and_ctrl_c(fork, tmp_path):
    """Killed clients are named and come back; a killed server's run and one that was stopped go on to the simulation's bits."""
    root, rounds = tmp_path / "site", 40
    where = ("--address", f"127.0.0.1:{free_port()}", "--engine", "grpc")
    assert deploy("init", root, "--clients", CLIENTS, *where, "--train", 20, "--test", 10).returncode == 0

    def up(part, turn, *more):
        process = start(fork, part.partition("-")[0], root / part, *more, log=tmp_path / f"{part}-{turn}.txt")
        wait_for(tmp_path / f"{part}-{turn}.txt", "the server is up" if part == "server" else "is connected", process)
        return process

    def lines(run):
        path = root / "server" / "runs" / run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    server = up("server", 0)
    clients = [up(f"client-{i}", 0, "--device", "cpu") for i in range(CLIENTS)]
    quick = ("--model", "mlp", "--rounds", rounds, "--wait", 60, "--epochs", 1)
    whole = start(fork, "run", root, *quick, "--min-clients", CLIENTS, "--name", "whole", log=tmp_path / "whole.txt")
    until(lambda: lines("whole") > 2, whole)
    whole.send_signal(signal.SIGINT)
    assert whole.wait(PATIENCE) == 130
    until(lambda: "whole: stopped" in deploy("status", root).stdout)
    whole = start(fork, "run", root, "--resume", log=tmp_path / "again.txt")
    seen = lines("whole")
    until(lambda: lines("whole") > seen + 2, whole)
    server.kill()
    assert whole.wait(PATIENCE) == 2
    assert "resume it with: fedselect deploy run" in (tmp_path / "again.txt").read_text()
    assert lines("whole") < rounds
    server = up("server", 1)
    done = deploy("run", root, "--resume")  # clients call the new server by themselves
    assert done.returncode == 0, done.stderr
    out = root / "server" / "runs" / "whole"
    simulation = Config.from_dict(read_json(out / "config.json", ""), "run").simulation()
    records = [simulation.step() for _ in range(rounds)]
    found = read_records(out / "metrics.jsonl")
    assert [r["clients"]["accuracy"] for r in found] == [r["clients"]["accuracy"] for r in records]
    state = load_file(max((out / "checkpoint").glob("[0-9]*")) / "state.safetensors")
    assert all(torch.equal(state[f"server/params/{n}"], v) for n, v in simulation.server["params"].items())

    gone = start(fork, "run", root, *quick, "--name", "gone", log=tmp_path / "gone.txt")
    until(lambda: lines("gone") > 2, gone)
    clients[1].kill()
    until(lambda: "1 of 2 clients trained" in (tmp_path / "gone.txt").read_text(), gone)
    up("client-1", 1, "--device", "cpu")
    assert gone.wait(PATIENCE) == 0
    missed = [r["missed"].get("1") for r in read_records(root / "server" / "runs" / "gone" / "metrics.jsonl")]
    assert missed[0] is None
    assert set(missed) <= {None, "is disconnected", "could not be reached", "not connected"}
    assert any(missed)


@pytest.mark.full  # it waits for replies that do not come; tests/network has the refusals in one process
def test_a_plugin_works_where_it_was_named_and_a_client_without_it_says_so(fork, tmp_path):
    """Everybody is started in the plugin's folder, and Flower's processes run in others."""
    root, code, own = tmp_path / "site", tmp_path / "code", ("--plugin", "own")
    code.mkdir()
    (code / "own.py").write_text(PLUGIN)
    assert deploy("init", root, "--clients", 2, "--address", f"127.0.0.1:{free_port()}", "--train", 20).returncode == 0
    server = start(fork, "server", root / "server", *own, cwd=code, log=tmp_path / "server.txt")
    wait_for(tmp_path / "server.txt", "the server is up", server)
    for i, named in enumerate((own, ())):
        log = tmp_path / f"client-{i}.txt"
        client = start(fork, "client", root / f"client-{i}", "--device", "cpu", *named, cwd=code, log=log)
        wait_for(log, f"client {i} is connected to the server", client)
    run = deploy(
        "run", root, *own, "--method", "mine", "--model", "tiny", "--rounds", 1, "--wait", 60, "--name", "one", cwd=code
    )
    assert run.returncode == 0, run.stderr
    assert "round 1/1  accuracy" in run.stdout
    remedy = "install it, or start the client with --plugin own."
    said = f"client 1 missed round 1: this run needs the plugin 'own', which is not loaded here; {remedy}"
    assert said in " ".join(run.stdout.split())
    done = deploy("status", root)  # which needs no plugin, and neither does the export
    assert "one: finished, round 1 of 1" in done.stdout, done.stderr
    assert deploy("export", root / "client-0").returncode == 0
