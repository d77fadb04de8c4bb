"""Every method over real Flower messages, and over gRPC with TLS, in one process: the numbers of the simulation, to the bit."""

import io
import json
import shutil
import sys

import calls
import numpy as np
import pytest
import torch
from flwr.app import Array, RecordDict
from grid import RUN, LocalGrid, run_server
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from fedselect.core.errors import DataError, FedselectError, InputError, RunError
from fedselect.core.files import read_json
from fedselect.core.tree import nested
from fedselect.methods import METHODS
from fedselect.network.drive import over, prepare
from fedselect.network.export import export_model
from fedselect.network.flower.apps import from_record, to_record
from fedselect.network.home import Home
from fedselect.network.letters import Letter
from fedselect.network.plan import Shape, plan
from fedselect.network.rounds import Limits
from fedselect.network.vault import Vault
from fedselect.report.runs import gather
from fedselect.runs.config import Config
from fedselect.runs.rundir import read_records, reopen

CLIENTS, ROUNDS = 3, 2
LIMITS = Limits(wait=1.0, timeout=60.0)


def config(method, model, **given):
    return Config.from_dict(
        {
            "method": {"name": method, **({"layers": "*.weight"} if method == "layers" else {})},
            "data": {"name": "digits", "clients": CLIENTS, "train": 20, "test": 10, "val": 4},
            "model": {"name": model},
            "rounds": ROUNDS,
            "seed": 3,
            **given,
        },
        "test",
    )


def deployed(made, folder, monkeypatch, nodes=None, grid=LocalGrid, **changed):
    """Run it over Flower's messages; returns the run directory."""
    monkeypatch.chdir(folder)
    agreed = plan(made, "site", "", CLIENTS, Shape.of(made.make_data()), LIMITS)
    homes = {100 + i: {"partition-id": i, "vault": str(folder / f"vault-{i}"), "device": "cpu"} for i in range(CLIENTS)}
    run_server(grid(homes if nodes is None else nodes, {**agreed.to_flat(), **changed}))
    return folder / "fedselect-runs" / f"flower-{RUN}"


def called(made, folder, monkeypatch):
    """Run it over gRPC; returns the run directory."""
    out = folder / "runs" / "r"
    agreed = plan(made, "site", "r", CLIENTS, Shape.of(made.make_data()), LIMITS)
    prepare(out, agreed)
    root = calls.make_site(folder / "site", CLIENTS)
    calls.run_server(root, [Home(i, folder / f"vault-{i}", device="cpu") for i in range(CLIENTS)], agreed.to_flat(), out)
    return out


ENGINES = {"flower": deployed, "grpc": called}


def history(out):
    drop = ("seconds", "missed", "rejected", "set_back", "absent")
    return [{k: v for k, v in record.items() if k not in drop} for record in read_records(out / "metrics.jsonl")]


NORMS = {"fedselect", "fedbn", "fedavg", "fedpac"}
"""Methods that differ in what they do with norm layers: with a model that has some; the others so in `make test-all`."""


def quick(engine, method, model):
    """Every method on each engine with a small model; the larger one, where norm layers matter, on one engine."""
    return model == "mlp" or (engine == "flower" and method in NORMS)


@pytest.mark.parametrize(
    ("engine", "method", "model"),
    [
        pytest.param(engine, method, model, marks=[] if quick(engine, method, model) else pytest.mark.full)
        for engine in ENGINES
        for method in METHODS
        for model in ("mlp", "small_cnn")
    ],
)
def test_deployed_is_simulated(engine, method, model, tmp_path, monkeypatch):
    made = config(method, model)
    simulation = made.simulation()
    records = [{k: v for k, v in simulation.step().items() if k != "seconds"} for _ in range(ROUNDS)]
    out = ENGINES[engine](made, tmp_path, monkeypatch)
    assert history(out) == records  # accuracies, losses, shares, and bytes up and down of every client
    state = nested("server", Vault(out / "checkpoint").load(ROUNDS).tensors)
    for k, tree in simulation.server.items():
        for n, v in tree.items():
            assert torch.equal(state[k][n], v), (k, n)
    for i in range(CLIENTS):
        for view in ("local", "merged"):
            export_model(tmp_path / f"vault-{i}", tmp_path / f"{i}.safetensors", None, view)
            tree = simulation.models([i], view)
            found = load_file(tmp_path / f"{i}.safetensors")
            assert all(torch.equal(found[n], v[0]) for n, v in tree.items())


def test_a_server_writes_down_who_shares_a_head(tmp_path, monkeypatch):
    """As a simulation does; a server that is resumed writes it again."""
    made = config("fedalike", "mlp")
    simulation = made.simulation()
    for _ in range(ROUNDS):
        simulation.step()
    out = deployed(made, tmp_path, monkeypatch)
    assert read_json(out / "groups.json", "") == {"groups": simulation.groups()}
    assert gather([out])["runs"][0]["heads"]["groups"] == simulation.groups()
    for file in ("summary.json", "groups.json"):
        (out / file).unlink()
    deployed(made, tmp_path, monkeypatch)
    assert read_json(out / "groups.json", "") == {"groups": simulation.groups()}


def test_an_exported_model_takes_pictures_as_the_client_has_them(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for kind, tone in (("cat", 60), ("dog", 180)):
        (tmp_path / "zoo" / kind).mkdir(parents=True)
        for i in range(40):
            pixels = draw.integers(tone - 50, tone + 50, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "zoo" / kind / f"{i}.png")
    zoo = {"name": "folder", "path": str(tmp_path / "zoo"), "size": 8, "clients": 1, "split": "iid"}
    made = config("fedselect", "small_cnn", data=zoo)
    own = {f"data.{k}": v for k, v in zoo.items()}
    homes = {
        100 + i: {"partition-id": i, "vault": str(tmp_path / f"vault-{i}"), "device": "cpu", **own} for i in range(CLIENTS)
    }
    out = deployed(made, tmp_path, monkeypatch, nodes=homes)
    with pytest.raises(RunError, match="was deployed, so each personalized model is on its client"):
        reopen(out)
    exported = export_model(tmp_path / "vault-1", tmp_path / "model.safetensors", None, None)
    x, y = made.make_data().clients[0].test  # everybody's here
    known = {"x": x}
    exec(exported.snippet, known)
    accuracy = float((known["logits"].argmax(1) == y).double().mean())
    assert x.dtype == torch.uint8
    assert accuracy == pytest.approx(read_json(out / "summary.json", "")["clients"][1], abs=1e-6)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["cat", "dog"]
    assert not torch.allclose(known["net"](x.float()), known["logits"])  # bytes as they are would be something else


def test_an_exported_model_is_replaced_by_its_own_run_and_client_alone(cli, tmp_path, monkeypatch):
    deployed(config("fedselect", "mlp"), tmp_path, monkeypatch)
    run, out = f"flower-{RUN}", tmp_path / "model.safetensors"
    for i in (0, 1):
        shutil.copytree(tmp_path / f"vault-{i}" / run, tmp_path / f"vault-{i}" / "another")

    def export(client, run, *more):
        return cli("deploy", "export", tmp_path, "--vault", tmp_path / f"vault-{client}", "--run", run, "--out", out, *more)

    assert export(0, run).code == export(0, run, "--view", "merged").code == 0
    before = out.read_bytes()
    held = f"{out} holds the model of run {run}, client 0, federation site; choose another --out, or remove it first."
    assert held in export(0, "another").sentence()
    assert held in export(1, run).sentence()
    assert out.read_bytes() == before
    out.write_text("my notes")
    assert f"{out} holds something else; choose another --out" in export(0, run).sentence()
    assert out.read_text() == "my notes"
    out.unlink()
    assert export(1, "another").code == 0


@pytest.mark.parametrize(
    ("engine", "every"), [("flower", 1), ("flower", 2), ("grpc", 2), pytest.param("grpc", 1, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("method", ["fedselect", "fedpac", "fedavg+ft"])
def test_some_clients_at_a_time_as_in_simulation(engine, method, every, tmp_path, monkeypatch):
    """Clients that sit a round out are measured as well."""
    made = config(method, "mlp", fraction=0.6, rounds=4, eval_every=every)
    simulation = made.simulation()
    records = [{k: v for k, v in simulation.step().items() if k != "seconds"} for _ in range(4)]
    assert any(None in r["clients"]["bytes_up"] for r in records)
    assert history(ENGINES[engine](made, tmp_path, monkeypatch)) == records


def test_measured_every_other_round_and_at_the_end(tmp_path, monkeypatch):
    made = config("fedavg", "mlp", rounds=5, eval_every=2)
    simulation = made.simulation()
    accuracy = [simulation.step(evaluate=True if r == 4 else None)["accuracy"] for r in range(5)]
    assert [r["accuracy"] for r in history(deployed(made, tmp_path, monkeypatch))] == accuracy
    assert accuracy.count(None) == 2


def test_a_node_that_cannot_answer_is_named_with_its_reason(tmp_path, monkeypatch):
    homes = {100: {"partition-id": 0, "vault": str(tmp_path / "v"), "device": "cpu"}, 101: {"partition-id": 1}}
    out = deployed(config("fedavg", "mlp"), tmp_path, monkeypatch, homes)
    record = read_records(out / "metrics.jsonl")[-1]
    assert record["missed"] == {"1": "not connected", "2": "not connected"}
    assert record["rejected"] == {"node 101": "the node configuration must name partition-id and vault."}
    (run,) = gather([out])["runs"]
    assert run["missed"]["2"] == [1, 2]
    assert run["rejected"][0]["round"] == 1
    assert run["rejected"][0]["who"] == "node 101"


def test_a_rounds_line_says_how_many_took_part_where_somebody_was_away(tmp_path, monkeypatch, capsys):
    homes = {100 + i: {"partition-id": i, "vault": str(tmp_path / f"vault-{i}"), "device": "cpu"} for i in (0, 1)}
    deployed(config("fedavg", "mlp"), tmp_path, monkeypatch, homes)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert len(lines) == ROUNDS
    assert all(line.endswith("  2 of 3 clients trained") for line in lines)
    (tmp_path / "all").mkdir()
    deployed(config("fedavg", "mlp"), tmp_path / "all", monkeypatch)
    assert "clients" not in capsys.readouterr().out


class Leaving(LocalGrid):
    """Two of three clients go away when the last round is over."""

    def push_messages(self, messages):
        (message,) = messages
        gone = message.metadata.dst_node_id != 100 and from_record(message.content).head["kind"] == "close"
        return [] if gone else super().push_messages(messages)


def test_who_missed_the_end_is_named_and_gets_its_model_when_the_run_is_closed_again(tmp_path, monkeypatch):
    made = config("fedselect", "mlp")
    simulation = made.simulation()
    records = [{k: v for k, v in simulation.step().items() if k != "seconds"} for _ in range(ROUNDS)]
    out = deployed(made, tmp_path, monkeypatch, grid=Leaving)
    away = {"1": "could not be reached", "2": "could not be reached"}
    assert read_records(out / "metrics.jsonl")[-1]["absent"] == away
    assert read_json(out / "summary.json", "")["absent"] == away
    assert read_json(out / "status.json", "") == {"status": "finished", "error": "", "absent": away}
    assert not over(out)
    with pytest.raises(RunError, match="holds no finished model yet"):
        export_model(tmp_path / "vault-1", tmp_path / "model.safetensors", None, None)
    with pytest.raises(RunError, match="only 0 of at least 1 clients connected"):
        deployed(made, tmp_path, monkeypatch, nodes={})
    assert len(history(out)) == ROUNDS  # what there was is there still
    homes = {100 + i: {"partition-id": i, "vault": str(tmp_path / f"vault-{i}"), "device": "cpu"} for i in (1, 2)}
    deployed(made, tmp_path, monkeypatch, nodes=homes)  # and of client 0 it is known how it did
    assert over(out)
    assert read_json(out / "status.json", "") == {"status": "finished", "error": "", "absent": {}}
    assert history(out) == records
    assert read_json(out / "summary.json", "")["clients"] == records[-1]["clients"]["accuracy"]
    export_model(tmp_path / "vault-1", tmp_path / "model.safetensors", None, None)


def npz():
    file = io.BytesIO()
    np.savez(file, np.zeros(3, np.uint8))
    return file.getvalue()


@pytest.mark.parametrize(
    "sent", [b"", b"no array", npz(), npz()[:-9], Array(np.zeros(3)).data, Array(np.zeros((3, 1), "u1")).data]
)
def test_a_message_that_holds_no_letter_is_refused(sent):
    content = to_record(Letter({"kind": "hello"}))
    content.array_records["body"]["bytes"].data = sent
    with pytest.raises(DataError, match=r"a Flower message (cannot be read|has no fedselect content)"):
        from_record(content)


def test_a_message_without_its_parts_is_refused():
    with pytest.raises(DataError, match=r"a Flower message (cannot be read|has no fedselect content)"):
        from_record(RecordDict())


def test_a_client_that_starts_from_other_values_is_refused(tmp_path, monkeypatch):
    with pytest.raises(FedselectError, match="starts from different values here than on the server"):
        deployed(config("fedavg", "mlp"), tmp_path, monkeypatch, initial="0" * 64)


def test_clients_refuse_a_run_that_is_not_the_one_its_server_prepared(tmp_path, monkeypatch):
    """Somebody starts a prepared run again with a configuration of their own: clients get letters of another plan."""
    made = config("fedavg", "mlp")
    agreed = plan(made, "site", "r", CLIENTS, Shape.of(made.make_data()), LIMITS)
    prepare(tmp_path / "runs" / "r", agreed)
    (tmp_path / "nodes.json").write_text("{}")
    monkeypatch.setenv("FEDSELECT_SERVER", str(tmp_path))
    with pytest.raises(FedselectError, match="got a message for plan"):
        deployed(made, tmp_path, monkeypatch, **{"run": "r", "method.lr": 9.0})


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("checkpoint/000002/manifest.json", '"server/params/', '"server/parans/'),
        ("checkpoint/000002/manifest.json", '"accepted"', '"accepteb"'),
        ("metrics.jsonl", '"accuracy_merged"', '"accuracy_mergee"'),  # of the first round
    ],
)
def test_a_server_whose_last_state_is_damaged_goes_on_from_the_one_before(tmp_path, monkeypatch, file, old, new):
    made = config("fedselect", "mlp")
    out = deployed(made, tmp_path, monkeypatch)
    whole = history(out)
    (out / "summary.json").unlink()
    text = (out / file).read_text()
    assert old in text
    (out / file).write_text(text.replace(old, new, 1))
    deployed(made, tmp_path, monkeypatch)
    assert history(out) == whole
    assert over(out)


def test_a_run_cannot_be_named_as_a_path(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"cannot be named '\.\./x'"):
        deployed(config("fedavg", "mlp"), tmp_path, monkeypatch, run="../x")


def test_a_site_runs_only_what_was_prepared_there(tmp_path, monkeypatch):
    (tmp_path / "nodes.json").write_text("{}")
    monkeypatch.setenv("FEDSELECT_SERVER", str(tmp_path))
    with pytest.raises(FedselectError, match=r"plan\.json"):
        deployed(config("fedavg", "mlp"), tmp_path, monkeypatch, run="intruder")


def test_a_node_that_the_site_does_not_know_is_turned_away(tmp_path, monkeypatch):
    """Node 102 says it is client 2, but no key of the site's is its."""
    made = config("fedavg", "mlp")
    site = tmp_path / "server"
    agreed = plan(made, "site", "r", CLIENTS, Shape.of(made.make_data()), LIMITS)
    prepare(site / "runs" / "r", agreed)
    (site / "nodes.json").write_text('{"100": 0, "101": 1}')
    monkeypatch.setenv("FEDSELECT_SERVER", str(site))
    homes = {100 + i: {"partition-id": i, "vault": str(tmp_path / f"v{i}"), "device": "cpu"} for i in range(CLIENTS)}
    run_server(LocalGrid(homes, agreed.to_flat()))
    records = read_records(site / "runs" / "r" / "metrics.jsonl")
    assert records[0]["rejected"] == {"node 102": "it says it is client 2, but its key is unknown"}
    assert [r["clients"]["bytes_up"][2] for r in records] == [None, None]


def prepared(site, monkeypatch, **changed):
    """A site with a run that its server will find in its folder."""
    made = config("fedavg", "mlp")
    agreed = plan(made, "site", "r", CLIENTS, Shape.of(made.make_data()), LIMITS)
    prepare(site / "runs" / "r", agreed)
    (site / "runs" / "r" / "plan.json").write_text(json.dumps({**agreed.to_flat(), **changed}))
    (site / "nodes.json").write_text('{"100": 0, "101": 1, "102": 2}')
    monkeypatch.setenv("FEDSELECT_SERVER", str(site))
    return agreed.to_flat()


def test_a_server_without_the_plugin_of_a_run_says_so_at_once(tmp_path, monkeypatch):
    flat = prepared(tmp_path, monkeypatch, plugins="own")
    said = "this run needs the plugin 'own', which is not loaded here; install it, or start the server with --plugin own."
    with pytest.raises(InputError, match=said):
        run_server(LocalGrid({}, flat))
    assert read_json(tmp_path / "runs" / "r" / "status.json", "") == {"status": "failed", "error": said}


def test_clients_without_the_plugin_of_a_run_refuse_it_by_name(tmp_path, monkeypatch):
    flat = prepared(tmp_path, monkeypatch)
    homes = {100 + i: {"partition-id": i, "vault": str(tmp_path / f"v{i}"), "device": "cpu"} for i in range(CLIENTS)}
    with pytest.raises(RunError, match=r"client 1: this run needs the plugin 'own', .* start the client with --plugin own"):
        run_server(LocalGrid(homes, {**flat, "plugins": "own"}))
    assert "own" not in sys.modules
