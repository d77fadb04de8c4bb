"""The commands with wrong input: one sentence that says what to do, and exit code 2; nothing is started for it."""

import itertools
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from cryptography import x509
from PIL import Image

from fedselect.cli import deploy
from fedselect.core import sums
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import held, in_use, locked, read_json, write_json
from fedselect.network import control, drive, site
from fedselect.network.control import follow
from fedselect.network.drive import prepare, say
from fedselect.network.flower import launch
from fedselect.network.grpc import launch as grpc
from fedselect.network.plan import Shape, plan
from fedselect.network.rounds import Limits, Outcome, check_enough
from fedselect.private import Private
from fedselect.runs.config import Config
from fedselect.runs.rundir import again
from fedselect.simulate.records import columns
from fedselect.tasks import Classification

FEW = ("--train", 20, "--test", 10)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A site that tests copy and spoil."""
    root = tmp_path_factory.mktemp("made") / "site"
    data = Config().complete().data
    site.make(root, 2, f"127.0.0.1:{site.free_port()}", data, Shape((1, 8, 8), tuple("0123456789")), insecure=False, days=30)
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "site")


def pictures(folder, classes, size=8):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (size, size), (20 * i, 10, 10)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture
def started(monkeypatch):
    """What would have been started: Flower's processes are not."""
    commands = []

    def refuse(command, cwd, env, log):
        commands.append((command, env))
        raise RunError("nothing is started in this test.")

    monkeypatch.setattr(launch, "_process", refuse)
    return commands


# ---- init


def test_a_site_has_a_part_for_everybody_and_keys_are_private(cli, tmp_path):
    said = cli("deploy", "init", tmp_path / "s", "--clients", 2, "--address", "fl.example.org:8000", *FEW)
    assert said.code == 0, said
    names = sorted(str(p.relative_to(tmp_path / "s")) for p in (tmp_path / "s").rglob("*") if p.is_file())
    assert names == sorted([
        "README.md", "federation.json", "app/LICENSE", "app/pyproject.toml", "ca/ca.crt", "ca/ca.key",
        "server/federation.json", "server/ca.crt", "server/server.crt", "server/server.key",
        "server/keys/client-0.pub", "server/keys/client-1.pub",
        *(f"client-{i}/{n}" for i in (0, 1) for n in ("federation.json", "client.json", "ca.crt", "node.key", "roster.json")),
    ])  # fmt: skip
    for key in (tmp_path / "s").rglob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    shown = x509.load_pem_x509_certificate((tmp_path / "s" / "server" / "server.crt").read_bytes())
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]


def test_a_site_for_data_that_only_clients_have(cli, tmp_path):
    assert cli("deploy", "init", tmp_path / "s", "--classes", "cat, dog", "--shape", "3,32,32").code == 0
    known = site.Site.read(tmp_path / "s")
    assert known.shape == Shape((3, 32, 32), ("cat", "dog"))
    assert known.data == {"name": "folder", "size": 32}


def test_a_site_knows_its_clients_by_name(cli, tmp_path):
    for office in ("east", "west"):
        pictures(tmp_path / "offices" / office, ["cat", "dog"])
    at_hand = ("--clients", 2, "--data", f"domains:{tmp_path / 'offices'}", "--size", 8)
    assert cli("deploy", "init", tmp_path / "s", *at_hand).code == 0
    known = site.Site.read(tmp_path / "s" / "server")
    assert known.names == ("east", "west")
    text = (tmp_path / "s" / "README.md").read_text()
    assert "`client-1/` to client 1 (west)" in text
    assert "--data folder:/where/its/images/are" in text
    assert cli("deploy", "init", tmp_path / "t", *at_hand, "--names", "here, there").code == 0
    assert site.Site.read(tmp_path / "t").names == ("here", "there")
    said = cli("deploy", "init", tmp_path / "u", *at_hand, "--names", "here").sentence()
    assert "2 clients need as many different names, not here" in said
    assert not (tmp_path / "u").exists()


def test_an_insecure_site_warns_and_has_no_keys(cli, tmp_path):
    said = cli("deploy", "init", tmp_path / "s", "--insecure", *FEW)
    assert said.code == 0
    assert "warning: no TLS and no keys" in said.err
    assert not [*(tmp_path / "s").rglob("*.key"), *(tmp_path / "s").rglob("*.crt")]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--clients", 0), "at least one client, not 0"),
        (("--address", "8000"), "an address is HOST:PORT"),
        (("--address", "host:99999"), "an address is HOST:PORT"),
        (("--classes", "cat,dog"), "pass both --classes and --shape"),
        (("--classes", "cat,cat", "--shape", "3,8,8"), "two different names"),
        (("--classes", "cat,dog", "--shape", "3,x"), "whole numbers"),
        (("--data", "digit"), "did you mean 'digits'"),
        (("--trian", 5), "no option 'trian'"),
    ],
)
def test_init_says_what_is_wrong(cli, tmp_path, args, text):
    assert text in cli("deploy", "init", tmp_path / "s", *args).sentence()
    assert not (tmp_path / "s").exists()


def test_init_does_not_touch_what_is_there(cli, root):
    assert "exists already" in cli("deploy", "init", root).sentence()


# ---- server


def test_a_port_in_use(cli, root, started):
    with socket.socket() as other:
        other.bind(("127.0.0.1", site.Site.read(root).port))
        other.listen()
        assert "cannot be used (Address already in use)" in cli("deploy", "server", root / "server").sentence()
    assert not started


@pytest.mark.parametrize("part", ["server", "client"])
def test_an_expired_certificate(cli, root, started, part):
    site.renew(root, days=-3)
    if part == "client":
        shutil.copy(root / "server" / "server.crt", root / "client-0" / "ca.crt")
    place = root / ("server" if part == "server" else "client-0")
    said = cli("deploy", part, place).sentence()
    assert "expired on" in said
    assert "fedselect deploy renew" in said
    assert not started


def test_a_renewed_certificate_is_accepted(cli, root, started):
    site.renew(root, days=-3)
    assert cli("deploy", "renew", root).code == 0
    assert "nothing is started in this test" in cli("deploy", "server", root / "server").sentence()
    assert "--days must be at least 1" in cli("deploy", "renew", root, "--days", 0).sentence()


def test_renewing_needs_the_authority(cli, root):
    shutil.rmtree(root / "ca")
    assert "renew where the site was made" in cli("deploy", "renew", root).sentence()


@pytest.mark.parametrize(
    ("part", "name"), [("server", "server.key"), ("server", "ca.crt"), ("client-0", "node.key"), ("client-0", "ca.crt")]
)
def test_a_missing_file_is_named(cli, root, started, part, name):
    (root / part / name).unlink()
    assert f"{name} is missing" in cli("deploy", part.partition("-")[0], root / part).sentence()
    assert not started


def test_something_that_is_no_certificate(cli, root, started):
    (root / "server" / "server.crt").write_text("hello")
    assert "is not a certificate" in cli("deploy", "server", root / "server").sentence()


@pytest.mark.parametrize("command", ["server", "client", "run", "status", "renew"])
def test_a_folder_that_is_no_site(cli, tmp_path, command):
    assert "give a folder made by: fedselect deploy init SITE" in cli("deploy", command, tmp_path).sentence()


@pytest.mark.parametrize(
    ("command", "part", "text"),
    [
        ("status", "client-0", "is a client's part of a site; give the server's part, {}/server."),
        ("run", "client-0", "is a client's part of a site; give the server's part, {}/server."),
        ("server", "client-0", "is a client's part of a site; give the server's part, {}/server."),
        ("server", "", "is a whole site; give the server's part, {}/server."),
        ("client", "", "is a whole site; give a client's part, such as {}/client-0."),
        ("client", "server", "is the server's part of a site; give a client's part, such as {}/client-0."),
        ("export", "server", "is the server's part of a site; give a client's part, such as {}/client-0."),
    ],
)
def test_another_folder_of_the_site(cli, root, started, command, part, text):
    assert f"{root / part} {text.format(root)}" in cli("deploy", command, root / part).sentence()
    assert not started


def test_a_damaged_site(cli, root):
    (root / "server" / "federation.json").write_text("{}")
    assert "federation.json lacks" in cli("deploy", "status", root).sentence()


def test_flowers_own_noise_is_off_and_its_commands_are_guarded(cli, root, started):
    cli("deploy", "server", root / "server")
    cli("deploy", "client", root / "client-1")
    for command, env in started:
        assert env["FLWR_TELEMETRY_ENABLED"] == "0"
        assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert env["PATH"].split(":")[0].endswith(".flwr/bin")
        assert "--insecure" not in command
    (superlink, _), (supernode, _) = started
    assert {"--enable-supernode-auth", "--ssl-certfile", "--disable-runtime-dependency-installation"} <= set(superlink)
    assert {"--root-certificates", "--auth-supernode-private-key"} <= set(supernode)
    assert "--allow-runtime-dependency-installation" not in supernode


def test_shipped_code_runs_only_where_it_was_asked_for(cli, root, started):
    cli("deploy", "client", root / "client-1", "--allow-shipped-code")
    assert not started[0][1]["PATH"].split(":")[0].endswith(".flwr/bin")


def test_an_earlier_demo_is_replaced_only_when_asked(cli, root, started):
    said = cli("deploy", "demo", "--out", root)
    assert said.code == 2
    assert f"{root} contains an earlier demo; choose another --out, or pass --overwrite to replace it" in said.err
    assert not started
    assert (root / "federation.json").exists()


# ---- client


@pytest.fixture
def zoo(tmp_path):
    """A site of pictures with three classes."""
    known = Shape((3, 8, 8), ("cat", "dog", "owl"))
    site.make(
        tmp_path / "zoo", 2, f"127.0.0.1:{site.free_port()}", {"name": "folder", "size": 8}, known, insecure=True, days=30
    )
    return tmp_path / "zoo"


def test_a_client_without_data_does_not_start(cli, zoo, started):
    said = cli("deploy", "client", zoo / "client-0")
    assert said.code == 2
    assert "start the client with: --data folder:PATH" in said.err
    assert not started


def test_a_client_whose_data_has_another_class(cli, zoo, tmp_path, started):
    folder = pictures(tmp_path / "mine", ["cat", "zebra"])
    said = cli("deploy", "client", zoo / "client-0", "--data", f"folder:{folder}")
    assert "client 0 has the class 'zebra'; this federation agreed on cat, dog, owl" in said.err
    assert said.code == 2
    assert not started


def test_a_client_whose_data_has_another_shape(cli, zoo, tmp_path, started):
    folder = pictures(tmp_path / "mine", ["cat"])
    said = cli("deploy", "client", zoo / "client-0", "--data", f"folder:{folder}", "--size", 16)
    assert "inputs of shape (3, 16, 16); this federation agreed on (3, 8, 8)" in said.err
    assert not started


def test_a_client_with_data_of_its_own_tells_only_itself(cli, zoo, tmp_path, started):
    folder = pictures(tmp_path / "mine", ["dog", "owl"])
    said = cli("deploy", "client", zoo / "client-1", "--data", f"folder:{folder}", "--val", 2)
    assert "nothing is started in this test" in said.err
    config = started[0][0][started[0][0].index("--node-config") + 1]
    assert 'partition-id=1 vault="' in config
    assert f'data.path="{folder}"' in config
    assert "data.val=2" in config


def test_a_client_of_a_site_of_folders_brings_its_own(cli, tmp_path, started):
    """Pictures get the size that was agreed; a class or a size that was not is refused."""
    for office in ("east", "west"):
        pictures(tmp_path / "offices" / office, ["cat", "dog"])
    cli(
        "deploy", "init", tmp_path / "s", "--clients", 2, "--data", f"domains:{tmp_path / 'offices'}", "--size", 8, "--insecure"
    )
    part = tmp_path / "s" / "client-1"
    assert "start the client with: --data folder:PATH" in cli("deploy", "client", part).err
    own = f"folder:{tmp_path / 'offices' / 'west'}"
    assert "agreed on (3, 8, 8)" in cli("deploy", "client", part, "--data", own, "--size", 16).err
    assert not started
    assert "nothing is started in this test" in cli("deploy", "client", part, "--data", own).err
    pictures(tmp_path / "offices" / "west", ["owl"])
    assert (
        "client 1 has the class 'owl'; this federation agreed on cat, dog" in cli("deploy", "client", part, "--data", own).err
    )


@pytest.mark.parametrize("name", ['my "data"', "it's"])
def test_a_path_that_flower_cannot_carry(cli, zoo, tmp_path, started, name):
    folder = pictures(tmp_path / name, ["dog", "owl"])
    said = cli("deploy", "client", zoo / "client-1", "--data", f"folder:{folder}")
    assert "has a character that Flower's node configuration does not allow" in said.err


def test_data_that_is_not_there(cli, zoo, started):
    assert "cannot be read as a folder" in cli("deploy", "client", zoo / "client-0", "--data", "folder:/nowhere").err


REFUSED = "Starting Flower SuperNode\nExit Code: 300\n[code: 2004] Failed to activate SuperNode.\n"


@pytest.fixture
def supernodes(monkeypatch):
    """Call it with what the SuperNodes that are started say, one after the other; each ends at once with code 1."""
    monkeypatch.setattr(launch, "PAUSE", 0.01)

    def say_(words):
        words = iter(words)

        @contextmanager
        def pretend(command, cwd, env, log):
            with log.open("a") as out:
                out.write(next(words))
            yield SimpleNamespace(wait=lambda timeout: 1, poll=lambda: 1)

        monkeypatch.setattr(launch, "_process", pretend)

    return say_


def test_a_client_that_the_server_still_counts_as_connected_tries_again(cli, root, supernodes):
    supernodes([REFUSED, REFUSED, "Starting Flower SuperNode\nSuperNode ID: 7\nExit Code: 1\nit fell over\n"])
    said = cli("deploy", "client", root / "client-0")
    assert said.code == 2
    assert said.out.count("client 0 calls the server at") == 1
    assert said.out.count("client 0 is connected to the server") == 1
    assert said.out.count("the server still counts this client as connected") == 1
    assert "trying for two minutes (is another copy running?)" in said.out
    assert "it fell over" in said.err


def test_a_client_says_that_it_is_connected_only_where_it_is(cli, root, supernodes, monkeypatch):
    monkeypatch.setattr(launch, "RETRY", 0.0)
    (root / "client-0" / "log.txt").write_text("Starting Flower SuperNode\nSuperNode ID: 7\n")  # the day before
    supernodes(itertools.repeat(REFUSED))
    said = cli("deploy", "client", root / "client-0")
    assert "calls the server" in said.out
    assert "is connected" not in said.out


def test_a_client_whose_server_does_not_answer_says_so_once_and_goes_on_trying(cli, root, monkeypatch):
    monkeypatch.setattr(launch, "LATE", 0.0)
    monkeypatch.setattr(launch, "LOOK", 0.01)

    @contextmanager
    def pretend(command, cwd, env, log):
        looks = itertools.count()

        def poll():
            log.write_text("SuperNode ID: 7\n" if next(looks) > 4 else "Connection attempt failed\n")

        log.write_text("Starting Flower SuperNode\n")
        yield SimpleNamespace(wait=lambda timeout: 1, poll=poll)

    monkeypatch.setattr(launch, "_process", pretend)
    said = cli("deploy", "client", root / "client-0").out
    late = f"the server at {site.Site.read(root).address} does not answer (Connection refused); this client keeps trying"
    assert said.count(f"waiting for the server at {site.Site.read(root).address}") == 1
    assert said.count(late) == 1
    assert said.index(late) < said.index("client 0 is connected to the server")


def test_a_client_says_when_its_server_is_gone_and_when_it_is_back(cli, root, monkeypatch):
    gone = iter([None, "Connection refused", "Connection refused", None, None, "no route", None])
    monkeypatch.setattr(launch, "_unreachable", lambda site: next(gone))
    waits = iter([True] * 7 + [False])

    @contextmanager
    def pretend(command, cwd, env, log):
        def wait(timeout):
            if next(waits):
                raise subprocess.TimeoutExpired(command, timeout)
            return 1

        log.write_text("Starting Flower SuperNode\nSuperNode ID: 7\n")
        yield SimpleNamespace(wait=wait, poll=lambda: None)

    monkeypatch.setattr(launch, "_process", pretend)
    said = cli("deploy", "client", root / "client-0").out
    found = re.findall(r"no longer answers \((.+)\)|(answers again)", said)
    assert found == [("Connection refused", ""), ("", "answers again"), ("no route", ""), ("", "answers again")]


def test_a_folder_that_is_no_clients_has_nothing_to_export(cli, root):
    said = cli("deploy", "export", root / "client-9").sentence()
    assert f"{root / 'client-9'} is not a client's part of a site" in said


def test_a_client_that_is_turned_away_for_long_says_why_that_may_be(cli, root, supernodes, monkeypatch):
    monkeypatch.setattr(launch, "RETRY", 0.1)
    supernodes(itertools.repeat(REFUSED))
    said = cli("deploy", "client", root / "client-0")
    assert said.code == 2
    assert "the server does not know this client's node.key (use the client folder of the same site)" in said.err
    assert "or another copy of this client is connected" in said.err


def test_a_second_copy_of_a_client_does_not_start(cli, root, started):
    vault = root / "client-0" / "vault"
    vault.mkdir()
    with held(vault / ".client"):
        said = cli("deploy", "client", root / "client-0").sentence()
        assert f"{vault} is in use by another process; stop the other copy of this client first." in said
        assert not started
        assert "nothing is started in this test" in cli("deploy", "client", root / "client-1").sentence()
    assert "nothing is started in this test" in cli("deploy", "client", root / "client-0").sentence()


# ---- run, export


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--method", "fedselct"), "did you mean 'fedselect'"),
        (("--min-clients", 3), "min_clients is 3, but this federation has 2 clients"),
        (("--min-clients", 0), "min_clients must be at least 1"),
        (("--timeout", 0), "timeout must be positive"),
        (("--fraction", 2), "fraction is the share of clients"),
        (("--rounds", 0), "rounds must be at least 1"),
        (("--limit", 3), "limit is a share"),
        (("--model", "mlp", "--widht", 3), "no option 'widht'"),
        (("--clients", 5), "this federation has 2 clients; remove --clients"),
        (("--name", "../x"), "a run cannot be named '../x'"),
        (("--resume",), "there is no unfinished run"),
        (("--resume", "--rounds", 9), "a resumed run keeps its configuration"),
        (("--resume", "--limit", 0.2), "a resumed run keeps its configuration"),
        (("--resume", "--name", "x"), "there is no run x"),
    ],
)
def test_run_says_what_is_wrong(cli, root, args, text):
    assert text in cli("deploy", "run", root, *args).sentence()
    assert not (root / "server" / "runs").exists()


def test_a_run_without_a_server_says_how_to_start_it(cli, root):
    assert f"fedselect deploy server {root / 'server'}" in cli("deploy", "run", root, "--model", "mlp").sentence()
    assert not (root / "server" / "runs").exists()


@pytest.mark.parametrize("part", ["", "server"])
def test_status_while_nothing_runs(cli, root, part):
    said = cli("deploy", "status", root / part)
    assert said.code == 0
    assert "is down" in said.out


def test_export_without_a_model(cli, root):
    assert "holds no finished model yet" in cli("deploy", "export", root / "client-0").sentence()
    assert "holds no run 'x'; it holds none" in cli("deploy", "export", root / "client-0", "--run", "x").sentence()


def test_without_flower_it_says_how_to_get_it(cli, root, monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    for command in (("server", root / "server"), ("client", root / "client-0"), ("run", root), ("demo",), ("init", root)):
        assert "pip install 'fedselect[flower]'" in cli("deploy", *command).sentence()


# ---- on gRPC


def test_a_site_for_grpc_gives_clients_certificates_and_needs_no_app(cli, tmp_path):
    assert cli("deploy", "init", tmp_path / "s", "--clients", 1, "--engine", "grpc", *FEW).code == 0
    names = {str(p.relative_to(tmp_path / "s")) for p in (tmp_path / "s").rglob("*") if p.is_file()}
    assert {"client-0/node.crt", "client-0/node.key", "server/keys/client-0.pub"} <= names
    assert not (tmp_path / "s" / "app").exists()
    assert site.Site.read(tmp_path / "s" / "client-0").engine == "grpc"
    shown = x509.load_pem_x509_certificate((tmp_path / "s" / "client-0" / "node.crt").read_bytes())
    assert shown.subject.rfc4514_string() == "CN=client 0"
    uses = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    assert (
        "there is no engine 'grcp'; did you mean 'grpc'?"
        in cli("deploy", "init", tmp_path / "t", "--engine", "grcp").sentence()
    )


@pytest.fixture(scope="module")
def made_for_grpc(tmp_path_factory):
    root, data = tmp_path_factory.mktemp("made") / "site", Config().complete().data
    agreed = Shape((1, 8, 8), tuple("0123456789"))
    address = f"127.0.0.1:{site.free_port()}"
    site.make(root, 2, address, data, agreed, insecure=False, days=30, engine="grpc")
    return root


@pytest.fixture
def called(made_for_grpc, tmp_path):
    return shutil.copytree(made_for_grpc, tmp_path / "called")


def test_without_grpc_it_says_how_to_get_it(cli, called, monkeypatch):
    monkeypatch.setattr(grpc, "find_spec", lambda name: None)
    for command in (
        ("server", called / "server"), ("client", called / "client-0"), ("run", called), ("status", called),
        ("demo", "--engine", "grpc"), ("init", called, "--engine", "grpc"),
    ):  # fmt: skip
        assert "pip install 'fedselect[grpc]'" in cli("deploy", *command).sentence()


@pytest.mark.parametrize("name", ["node.crt", "node.key", "ca.crt"])
def test_a_missing_file_of_a_grpc_client_is_named(cli, called, name):
    (called / "client-0" / name).unlink()
    assert f"{name} is missing" in cli("deploy", "client", called / "client-0").sentence()


def test_what_a_grpc_server_and_client_refuse(cli, called):
    part, client = called / "server", called / "client-0"
    assert "on gRPC no code can be sent" in cli("deploy", "server", part, "--allow-shipped-code").sentence()
    assert "on gRPC no code can be sent" in cli("deploy", "client", client, "--allow-shipped-code").sentence()
    assert f"fedselect deploy server {part}" in cli("deploy", "run", called, "--model", "mlp").sentence()
    assert "is down" in cli("deploy", "status", called).out
    with locked(part):
        assert "stop the other server first." in cli("deploy", "server", part).sentence()
        assert "is down" in cli("deploy", "status", called).out  # it is starting
        (part / "connected.json").write_text('{"clients": [1]}')
        said = cli("deploy", "status", called).out
        assert "client 0: offline\n  client 1: online\n" in said
    (client / "vault").mkdir()
    with held(client / "vault" / ".client"):
        assert "stop the other copy of this client first." in cli("deploy", "client", client).sentence()
    with socket.socket() as other:
        other.bind(("127.0.0.1", site.Site.read(part).port))
        other.listen()
        assert "cannot be used (Address already in use)" in cli("deploy", "server", part).sentence()


COLUMNS = columns(Classification().measured())


def measured(round, *accuracies):
    """The record of a round in which clients had these accuracies and nothing else is known."""
    there = [a for a in accuracies if a is not None]
    mean = sum(there) / len(there) if there else None
    clients = {**{name: [None] * len(accuracies) for name in COLUMNS}, "accuracy": list(accuracies)}
    return {"round": round, **dict.fromkeys(("seconds", *COLUMNS)), "accuracy": mean, "clients": clients}


@pytest.fixture
def ended(root):
    """A run that is over, one that is not finished, and one whose end client 1 missed, in this order."""
    part = root / "server"
    for name, absent in (("whole", {}), ("broken", None), ("left", {"1": "not connected"})):
        config = Config(data=site.Site.read(part).data).complete()
        prepare(part / "runs" / name, plan(config, "f", name, 2, Shape((1, 8, 8), tuple("0123456789")), Limits()))
        if absent is not None:
            record = {**measured(1, 0.5, None), "absent": absent}
            (part / "runs" / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            (part / "runs" / name / "summary.json").write_text(json.dumps({"absent": absent}))
    return part


def test_a_run_that_needs_a_plugin_is_resumed_with_it_alone_and_its_status_needs_none(cli, ended, monkeypatch):
    run, asked = ended / "runs" / "broken", []
    config = read_json(run / "config.json", "")
    (run / "config.json").write_text(json.dumps({**config, "plugins": ["own"]}))
    monkeypatch.setattr(control, "submit", lambda *run: asked.append(run))
    said = cli("deploy", "run", ended, "--resume", "--name", "broken").sentence()
    assert "this run needs the plugin 'own', which is not loaded here; install it, or add --plugin own." in said
    assert asked == []
    assert "broken: prepared, round 0 of 30" in cli("deploy", "status", ended).out


def test_status_says_who_missed_the_end_and_what_to_do(cli, ended):
    said = cli("deploy", "status", ended).out
    assert said.count("missed the end") == 1
    assert "client 1 missed the end (not connected) and has no model: start it, then resume with --resume --name left" in said


def test_status_says_whose_accuracy_it_shows_and_of_which_round(cli, ended):
    records = [measured(1, 0.25, 0.25), measured(2, None, None)]
    (ended / "runs" / "broken" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    said = cli("deploy", "status", ended).out
    assert re.search(r"whole: prepared, round 1 of \d+, accuracy 50\.00% of 1 client\n", said)
    assert re.search(r"broken: prepared, round 2 of \d+, accuracy 25\.00% after round 1\n", said)


@pytest.mark.parametrize("how", ["failed", "stopped"])
def test_status_says_why_a_run_ended_early(cli, ended, how):
    say(ended / "runs" / "broken", how, "round 1: nobody came; go on with --resume.")
    said = cli("deploy", "status", ended).out
    assert f"broken: {how}, round 0 of" in said
    assert said.count("round 1: nobody came; go on with --resume.") == 1


def test_status_tells_a_client_that_lost_its_vault_from_one_that_was_turned_away(cli, ended):
    record = {
        **measured(1, None, None),
        "rejected": {"node 7": "no key"},
        "set_back": {"client 1": "its vault lost round 3"},
    }
    (ended / "runs" / "broken" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    said = cli("deploy", "status", ended).out
    assert "round 1, node 7 rejected: no key" in said
    assert "round 1, client 1 reset to an older state: its vault lost round 3" in said
    assert said.count("rejected") == said.count("reset to an older state") == 1


def test_status_tells_a_run_that_goes_on_from_one_whose_server_was_killed(cli, ended):
    say(ended / "runs" / "broken", "running")
    (ended / "runs" / "broken" / "metrics.jsonl").write_text('{"rou')  # killed while it wrote
    said = cli("deploy", "status", ended).out
    assert "broken: interrupted, round 0 of" in said
    again = f"fedselect deploy run {ended} --resume --name broken"
    assert f"the server's process died; start the server, then resume with: {again}" in said
    with locked(ended / "runs" / "broken"):
        assert (
            "broken: interrupted, round 0 of" in cli("deploy", "status", ended).out
        )  # the run's process outlives the server's
        assert control.unfinished(ended, "broken").name == "broken"
        with locked(ended):
            said = cli("deploy", "status", ended).out
            assert "broken is still running" in cli("deploy", "run", ended, "--resume", "--name", "broken").sentence()
    assert "broken: running, round 0 of" in said
    assert "died" not in said


def test_a_server_holds_its_part_while_it_is_up(cli, root, monkeypatch):
    @contextmanager
    def pretend(command, cwd, env, log):
        assert in_use(root / "server")
        yield SimpleNamespace(wait=lambda: 1, poll=lambda: 1)

    monkeypatch.setattr(launch, "_process", pretend)
    monkeypatch.setattr(launch, "healthy", lambda part: True)
    monkeypatch.setattr(launch, "_flwr", lambda *args: '{"node-id": 1}')
    monkeypatch.setattr(launch, "_until_healthy", lambda *args: None)
    assert "the server ended with code 1" in cli("deploy", "server", root / "server").err
    assert not in_use(root / "server")
    with locked(root / "server"):
        assert "stop the other server first." in cli("deploy", "server", root / "server").sentence()


def test_status_tells_a_run_that_never_started_from_one_that_may_still(cli, ended):
    out = ended / "runs" / "broken"
    say(out, "submitted")
    assert "broken: submitted, round 0 of" in cli("deploy", "status", ended).out
    long_ago = time.time() - control.START - 1
    os.utime(out / "status.json", (long_ago, long_ago))
    said = cli("deploy", "status", ended).out
    assert "broken: not started, round 0 of" in said
    log, again = ended / "log.txt", f"fedselect deploy run {ended} --resume --name broken"
    assert f"the server did not start it (see {log}); resume with: {again}" in said


def test_a_run_that_ends_while_status_looks_was_not_interrupted(ended, monkeypatch):
    out = ended / "runs" / "broken"
    say(out, "running")
    monkeypatch.setattr(control, "in_use", lambda out: say(out, "finished"))
    assert control.state(out) == "finished"


def test_a_run_whose_end_a_client_missed_can_be_resumed_after_those_that_are_not_finished(ended):
    assert control.unfinished(ended, None).name == "broken"
    assert control.unfinished(ended, "left").name == "left"
    (ended / "runs" / "broken" / "summary.json").write_text("{}")
    assert control.unfinished(ended, None).name == "left"
    assert control.unfinished(ended, "whole").name == "whole"  # its clients write their models again
    with pytest.raises(InputError, match="there is no run nowhere"):
        control.unfinished(ended, "nowhere")


def test_a_deployed_run_is_not_simulated_on_the_server(cli, ended):
    run = ended / "runs" / "broken"
    before = sorted(run.iterdir())
    again = f"fedselect deploy run {ended} --resume --name broken"
    assert f"{run} is a deployed run; resume it with: {again}" in cli("resume", run).sentence()
    assert sorted(run.iterdir()) == before
    assert f"nothing was evaluated yet; continue with: {again}" in cli("report", run).sentence()
    assert "there with: fedselect deploy export" in cli("export", run, "--client", 0).sentence()


# ---- watching a run


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"status": "failed", "error": "round 1: nobody came."}, "round 1: nobody came."),
        ({"status": "stopped", "error": "the run was stopped; continue"}, "the run was stopped; continue"),
        ({"status": "running"}, r"the server's process died \(after round 0\); resume it with: fedselect deploy run"),
        ({"status": "submitted"}, "the server did not start the run"),
    ],
)
def test_a_run_that_ends_badly_says_so(root, tmp_path, monkeypatch, status, text):
    monkeypatch.setattr(control, "START", 0.5)
    (tmp_path / "config.json").write_text(json.dumps(Config().complete().to_json()))
    say(tmp_path, **status)
    with pytest.raises(RunError, match=text):
        follow(launch, root / "server", tmp_path, None)


def test_a_run_whose_end_was_not_recorded_while_its_server_is_up_did_not_die(root, tmp_path, monkeypatch):
    """A server whose disk is full cannot write why."""
    (tmp_path / "config.json").write_text(json.dumps(Config().complete().to_json()))
    say(tmp_path, "running")
    monkeypatch.setattr(launch, "healthy", lambda part: True)
    with pytest.raises(RunError, match=r"could not record why: is the disk full\? See .*log.txt \(after round 0\)"):
        follow(launch, root / "server", tmp_path, None)


def test_the_error_that_ends_a_run_is_not_replaced_by_one_of_its_record(tmp_path, monkeypatch):
    write_json(tmp_path / "plan.json", {})
    say(tmp_path, "submitted")

    def full(out, status, error="", **more):
        if status != "running":
            raise RunError("the disk is full")

    monkeypatch.setattr(drive, "say", full)
    monkeypatch.setattr(drive, "load_plugins", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive.serve(tmp_path, None, None, None)


@pytest.mark.parametrize(
    ("min_clients", "fraction", "private", "said"),
    [
        (4, 0.75, None, "a round asks 3 of 4 clients; lower --min-clients, or raise --fraction"),
        (5, 1.0, None, "this federation has 4 clients"),
        (3, 0.75, None, ""),
        (4, 0.75, Private(8.0), ""),
        (4, 0.75, Private(8.0, unit="sample"), "a round asks 3 of 4 clients"),
    ],
)
def test_a_round_is_not_made_to_wait_for_more_clients_than_it_asks(min_clients, fraction, private, said):
    limits = Limits(min_clients, fraction=fraction)
    if not said:
        check_enough(limits, 4, private)
    else:
        with pytest.raises(InputError, match=said):
            check_enough(limits, 4, private)


def test_a_command_to_copy_is_quoted(tmp_path):
    place = tmp_path / "a site" / "server" / "runs" / "r"
    place.mkdir(parents=True)
    write_json(place / "plan.json", {})
    assert shlex.split(again(place)) == [
        "fedselect", "deploy", "run", str(place.parents[1]), "--resume", "--name", "r"
    ]  # fmt: skip
    assert shlex.split(again(tmp_path / "b c")) == ["fedselect", "resume", str(tmp_path / "b c")]


def test_a_run_that_is_stopped_before_it_began_is_not_said_to_have_failed(root, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(Config().complete().to_json()))
    say(tmp_path, "submitted")
    stopped = []
    monkeypatch.setattr(launch, "stop", lambda part, place: stopped.append(place))

    @contextmanager
    def at_once():
        yield lambda: True

    monkeypatch.setattr(control, "_interrupts", at_once)
    with pytest.raises(control.Stopped, match="stopped after round 0"):
        follow(launch, root / "server", tmp_path, None)
    assert stopped == [tmp_path]
    assert control.state(tmp_path) == "stopped"
    assert "it was stopped before it started; resume it with: fedselect deploy run" in control.reason(tmp_path)


def test_a_server_that_is_gone_is_noticed(root, tmp_path, monkeypatch):
    monkeypatch.setattr(control, "ALIVE", 0.1)
    (tmp_path / "config.json").write_text(json.dumps(Config().complete().to_json()))
    say(tmp_path, "submitted")
    with pytest.raises(RunError, match="the server no longer answers"):
        follow(launch, root / "server", tmp_path, None)


def test_rounds_are_shown_once_they_are_written_to_their_end(root, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(Config().complete().to_json()))
    say(tmp_path, "running")
    seen = []
    asked = SimpleNamespace(metrics=Classification().measured(), validates=False, view=None)
    first, second = (sums.to_line(drive._record(Outcome(i), 1, asked)) for i in (1, 2))
    turns = iter([first + second[:9], first + second])

    def look(out):
        (out / "metrics.jsonl").write_text(text := next(turns))
        if text.endswith("\n"):
            say(out, "finished")
        return True

    monkeypatch.setattr(control, "in_use", look)
    follow(launch, root / "server", tmp_path, lambda config, record: seen.append(record["round"]))
    assert seen == [1, 2]


def test_certificates_pass_the_strictest_check(root):
    """As Python 3.13 checks them by default: a handshake in memory, RFC 5280 to the letter."""
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cafile=str(root / "client-0" / "ca.crt")),
    )
    server.load_cert_chain(root / "server" / "server.crt", root / "server" / "server.key")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(down, up, server_hostname="127.0.0.1"),
        server.wrap_bio(up, down, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert ends[0].version() == "TLSv1.3"


@pytest.mark.parametrize(("cores", "clients", "threads"), [(8, 3, "2"), (2, 3, "1"), (None, 2, "1")])
def test_clients_of_a_demo_share_the_cores(cores, clients, threads, monkeypatch):
    monkeypatch.delenv(deploy.THREADS, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    with deploy._cores_shared(clients):
        assert os.environ[deploy.THREADS] == threads
    assert deploy.THREADS not in os.environ
    monkeypatch.setenv(deploy.THREADS, "5")
    with deploy._cores_shared(clients):
        assert os.environ[deploy.THREADS] == "5"
    assert os.environ[deploy.THREADS] == "5"
