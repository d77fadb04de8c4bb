"""Kept rounds over a network: the same rounds and models as in the simulation, chosen by clients on data that stays theirs."""

import json

import pytest
import torch
from local import QUICK, Room
from safetensors.torch import load_file

import fedselect as fs
from fedselect.network import drive
from fedselect.network.export import export_model
from fedselect.network.letters import Letter
from fedselect.network.plan import Plan, Shape, plan
from fedselect.network.vault import Vault
from fedselect.runs.config import Config
from fedselect.simulate.keeping import final, stalled

CONFIG = {
    "data": {"name": "digits", "clients": 3, "train": 30, "val": 10, "test": 10}, "model": {"name": "mlp"},
    "method": {"name": "fedavg+ft", "lr": 2.0, "finetune": 1}, "rounds": 8,
}  # fmt: skip


def deploy(given, out, spoil=None):
    """A run whose letters pass in this process: its records and its room."""
    config = Config.from_dict({**CONFIG, **given}, "here")
    data = config.make_data()
    made = plan(config, "f", "r", 3, Shape.of(data), QUICK)
    assert Plan.from_flat(made.to_flat(), "r").digest() == made.digest()
    drive.prepare(out / "r", made)
    room = Room(made.assignment("cpu"), data, out)
    if spoil:
        spoil(room)
    drive.serve(out / "r", room, None, lambda config, record: None)
    return config, [json.loads(line) for line in (out / "r" / "metrics.jsonl").read_text().splitlines()], room


def simulated(config, rounds):
    simulation = config.simulation()
    return simulation, [simulation.step(evaluate=True) for _ in range(rounds)]


def exported(out, i):
    export_model(out / f"vault-{i}", out / f"{i}.safetensors", None, None)
    return load_file(out / f"{i}.safetensors")


@pytest.mark.parametrize("keep", ["best", "own"])
def test_clients_keep_the_rounds_and_models_of_the_simulation(keep, tmp_path):
    config, records, _ = deploy({"keep": keep}, tmp_path)
    simulation, history = simulated(config, 8)
    assert [r["kept"] for r in records] == [r["kept"] for r in history]
    kept = records[-1]["kept"]
    assert (len(set(kept)) > 1) if keep == "own" else kept < 8  # or nothing is tested
    for name in ("accuracy", "val_accuracy", "val_loss"):
        assert [r["clients"][name] for r in records] == [r["clients"][name] for r in history]
    for i in range(3):
        own = simulation.personal(i)
        found = exported(tmp_path, i)
        assert all(torch.equal(found[n], v) for n, v in own.items())
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["kept"] == kept


def flip(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("keep", ["best", "own"])
def test_a_damaged_best_round_is_reported_and_no_other_is_called_the_best(keep, tmp_path):
    """Of client 1, just before it is asked to end the run."""
    _, history = simulated(Config.from_dict({**CONFIG, "keep": keep}, "here"), 8)
    kept = [r["kept"] if keep == "best" else r["kept"][1] for r in history]
    assert kept[-1] < 8
    left = [tmp_path / "vault-1" / "r" / "best" / f"{kept[-1]:06d}" / "state.safetensors"]

    def spoil(room):
        def damage(i, letter):
            if i == 0 and letter.head["kind"] == "measured" and left:
                flip(left.pop())  # client 0 is asked before client 1
            return letter

        room.spoil = damage

    _, records, _ = deploy({"keep": keep}, tmp_path, spoil)
    assert f"its models of round {kept[-1]}, its best so far, are damaged" in records[-1]["set_back"]["client 1"]
    places = [Vault(tmp_path / f"vault-{i}" / "r" / "model") for i in range(3)]
    assert ["kept" in v.notes(v.rounds()[-1]) for v in places] == [True, False, True]
    assert places[1].rounds() == [8]


def test_a_damaged_final_model_is_named_and_written_again(tmp_path):
    _, _, room = deploy({"rounds": 2}, tmp_path)
    want = exported(tmp_path, 0)
    flip(tmp_path / "vault-0" / "r" / "model" / "000002" / "state.safetensors")
    for run in (None, "r"):
        with pytest.raises(fs.RunError, match=r"000002 is damaged; .* deploy run SITE --resume --name r"):
            export_model(tmp_path / "vault-0", tmp_path / "again.safetensors", run, None)
    drive.serve(tmp_path / "r", room, None, lambda config, record: None)
    assert all(torch.equal(v, want[n]) for n, v in exported(tmp_path, 0).items())
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 2


def test_where_the_last_round_is_the_best_it_is_kept(tmp_path):
    slow = {"name": "fedavg+ft", "lr": 0.05, "finetune": 1}
    config, records, _ = deploy({"keep": "best", "headline": "test_loss", "method": slow, "rounds": 2}, tmp_path)
    assert records[-1]["kept"] == 2
    simulation, _ = simulated(config, 2)
    assert all(torch.equal(exported(tmp_path, 1)[n], v) for n, v in simulation.personal(1).items())


def test_patience_ends_a_deployed_run_with_the_round_that_is_under_way(tmp_path):
    config, records, _ = deploy({"patience": 2, "rounds": 30}, tmp_path)
    _, history = simulated(config, 30)
    best = next(r for r in history if stalled(history[: r["round"]], 2))
    assert len(records) == best["round"] + 1  # that it is past is known once the next round has been trained
    assert records[-1]["stopped"]
    assert records[-1]["kept"] == best["kept"]


def test_without_it_letters_and_plans_are_as_they_were(tmp_path):
    config, records, room = deploy({"rounds": 2}, tmp_path)
    assert "kept" not in records[-1]
    assert not any("val_" in name for name in records[-1]["clients"])
    assert not any("best" in letter.head for _, letter in room.asked)
    made = plan(config, "f", "r", 3, Shape.of(room.data), QUICK)
    assert not {"keep", "patience"} & made.to_flat().keys()
    assert not (tmp_path / "vault-0" / "r" / "best").exists()


def test_a_client_that_lies_about_its_validation_is_turned_away(tmp_path):
    def spoil(room):
        def lie(node, letter):
            if node == 1 and letter.head.get("measured"):
                letter.head["measured"]["val_accuracy"] = 7.0
            return letter

        room.spoil = lie

    _, records, _ = deploy({"keep": "own", "rounds": 3}, tmp_path, spoil)
    assert "val_accuracy" in str(records[1]["rejected"]) or "accuracy 7.0" in str(records[1]["rejected"])
    assert records[-1]["kept"][1] is None


def test_where_nobody_has_validation_data_a_sentence_says_so(tmp_path):
    data = {**CONFIG["data"], "val": 0}
    with pytest.raises(fs.RunError, match="no client has any; start clients whose data has some"):
        deploy({"keep": "own", "data": data}, tmp_path)


@pytest.mark.parametrize("keep", ["last", "own"])
def test_clients_choose_their_model_as_in_the_simulation(keep, tmp_path):
    config, records, _ = deploy({"view": "best", "keep": keep}, tmp_path)
    simulation, history = simulated(config, 8)
    for name in ("chosen", "accuracy", "accuracy_merged", "val_accuracy"):
        assert [r["clients"][name] for r in records] == [r["clients"][name] for r in history]
    assert len({c for r in records for c in r["clients"]["chosen"]}) > 1  # or nothing is tested
    for i in range(3):
        assert all(torch.equal(exported(tmp_path, i)[n], v) for n, v in simulation.personal(i).items())
    chosen = json.loads((tmp_path / "r" / "summary.json").read_text())["chosen"]
    assert [c["model"] for c in chosen] == final(history, "accuracy")["clients"]["chosen"]


def test_a_choice_without_validation_data_anywhere_ends_the_run(tmp_path):
    with pytest.raises(fs.RunError, match="view=best chooses on validation data, and no client has any"):
        deploy({"view": "best", "data": {**CONFIG["data"], "val": 0}}, tmp_path)


@pytest.mark.parametrize("said", [1.5, None, 6.0])
def test_a_choice_that_is_no_number_of_a_model_is_turned_away(said, tmp_path):
    def spoil(room):
        ask = room.ask

        def spoiled(letters, timeout):
            for node, reply in ask(letters, timeout):
                if isinstance(reply, Letter) and reply.head.get("measured"):
                    reply.head["measured"]["chosen"] = said
                yield node, reply

        room.ask = spoiled

    with pytest.raises(fs.RunError, match="chose"):
        deploy({"view": "best", "rounds": 1}, tmp_path, spoil)
