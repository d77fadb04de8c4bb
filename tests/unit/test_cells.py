"""What a target needs, by which name, and what is made of the outcome."""

import dataclasses
import fcntl
import gzip
import json
import threading
from pathlib import Path

import pytest
import torch
from scipy.stats import wilcoxon

import fedselect as fs
from fedselect.core.errors import BusyError, DataError, InputError
from fedselect.core.files import locked
from fedselect.paper import plan, shared, tune
from fedselect.paper.outcome import Entry, Seed, blocks, compare, ranks
from fedselect.paper.plan import How, cells, name_of, scaled, trials
from fedselect.paper.protocol import choose, read_column, read_tuning, targets
from fedselect.paper.write import as_csv, as_json, as_latex, lean
from fedselect.runs import environment, loop, runner
from fedselect.runs.config import Config
from fedselect.runs.rundir import core, identity, write_measures
from fedselect.runs.summary import summarise
from fedselect.simulate import checkpoint

ROOT = Path(__file__).parents[2]
SMALL_RUN = Config.from_dict({"method": {"name": "local"}, "data": {"name": "digits"}, "model": {"name": "mlp"}}, "here")
SMALL = How(seeds=(0, 1), scale=0.2, rounds=2, rates="paper")


def on_digits(name, *methods):
    return choose(targets(name), ["digits"], methods or None)[0]


# ---- which runs


def test_runs_of_a_kind_are_cut_evenly_and_stay_in_order(monkeypatch):
    monkeypatch.setattr("fedselect.simulate.trial.fits", lambda run: 3 * run.clients)
    configs = {str(s): dataclasses.replace(SMALL_RUN, seed=s) for s in range(7)}
    assert list(runner.groups(configs)) == [["0", "1"], ["2", "3"], ["4", "5", "6"]]
    assert list(runner.groups(configs, {"0", "1", "3"}.__contains__)) == [["2"], ["4", "5", "6"]]  # as they began
    assert list(runner.groups(configs, configs.__contains__)) == []


def test_a_target_is_rows_times_data_times_settings_times_seeds():
    own = list(cells(on_digits("p-alpha"), SMALL, {}))
    assert len(own) == 4 * 4 * 2
    assert {(c.config.method["rate"], c.config.method["limit"]) for c in own} == {
        (p, a) for p in (0.01, 0.05, 0.20, 0.50) for a in (0.05, 0.30, 0.50, 0.80)
    }
    assert len({name_of(c.config) for c in own}) == len(own)


def test_targets_share_runs():
    names = {t: {name_of(c.config) for c in cells(on_digits(t), SMALL, {})} for t in ("table1", "table2", "alpha", "fig-iou")}
    assert names["fig-iou"] == names["table2"] < names["alpha"]
    assert len(names["table1"] & names["table2"]) == 2  # the limit of 0.30, with both seeds


def test_a_target_of_ours_has_its_own_seeds_rates_and_data():
    (target,) = targets("readings")
    own = list(cells(target, How(), {("cifar10", "fedselect"): {"lr": 0.5}}))
    assert {c.seed for c in own} == set(target.seeds)
    assert {c.seed for c in cells(target, How(seeds=(7,)), {})} == {7}
    assert tune.needed([target], How()) == []
    for c in own:
        assert {k: c.config.method[k] for k in c.row.options} == c.row.options
        assert c.config.score == "val"
        assert c.config.data["train"] - c.config.data["val"] == 100  # what reported runs train on


def test_a_target_may_be_a_table_with_rows_above_its_own():
    (target,), (table,) = targets("beyond"), targets("table1")
    assert target.rows[1:] == table.rows
    assert (target.rows[0].name, len(target.on)) == (target.against, 4)


def test_a_target_may_be_a_table_run_in_another_way():
    (target,), (table,) = targets("plain"), targets("table1")
    assert (target.rows, target.against, target.table) == (table.rows, table.against, "table1")
    own = [c for c in cells(target, How(), {("cifar10", "fedselect"): {"lr": 0.5}}) if c.column == "cifar10"]
    assert tune.needed([target], How()) == []
    assert {c.config.data["augment"] for c in own} == {"none"}
    assert {c.config.method["lr"] for c in own if c.row.method == "fedbabu"} == {0.01}
    assert {(c.config.method["lr"], c.config.method["personal_lr"]) for c in own if c.row.method == "fedselect"} == {
        (0.001, 0.1)
    }


def test_rows_and_settings_reach_every_part_of_a_run():
    (target,) = targets("stem")
    assert {c.config.model["stem"] for c in cells(target, SMALL, {})} == {"small"}
    row = dataclasses.replace(target.rows[0], training={"momentum": 0.9}, data={"augment": "crop-flip"}, model_options={})
    (one, *_) = cells(dataclasses.replace(target, rows=(row,)), SMALL, {})
    assert (one.config.training["momentum"], one.config.data["augment"]) == (0.9, "crop-flip")


def test_a_run_is_the_same_wherever_its_files_lie(tmp_path):
    names = []
    for folder, content in (("a", b"12"), ("b", b"12"), ("c", b"123")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "weights.safetensors"
        file.write_bytes(content)
        model = {"name": "resnet18", "weights": str(file)}
        names.append(name_of(Config.from_dict({"data": {"name": "digits"}, "model": model}, "test")))
    assert names[0] == names[1] != names[2]


def test_layers_of_a_resnet_are_left_out_on_another_model():
    assert {c.row.method for c in cells(on_digits("table3"), SMALL, {})} == {"fedselect"}


def test_tuned_rates_replace_the_papers_and_a_row_may_take_anothers():
    how = dataclasses.replace(SMALL, rates="tuned")
    (target,) = choose(targets("table3"), ["cifar10"], None)
    rates = {("cifar10", "fedselect"): {"lr": 0.01, "personal_lr": 0.001}}
    for cell in cells(target, how, rates):
        assert (cell.config.method["lr"], cell.config.method["personal_lr"]) == (0.01, 0.001)


def test_a_run_is_named_by_all_that_its_numbers_depend_on():
    own = next(cells(on_digits("table1"), SMALL, {})).config
    assert name_of(dataclasses.replace(own, device="cpu", chunk=1)) == name_of(own)
    changes = {"seed": 7, "rounds": 9, "precision": "float32", "score": "val", "training": {**own.training, "momentum": 0.9}}
    changed = {name_of(dataclasses.replace(own, **{k: v})) for k, v in changes.items()}
    assert len(changed | {name_of(own)}) == 1 + len(changes)


@pytest.mark.parametrize(("column", "scale", "expected"), [
    ("cifar10", 1.0, {"clients": 10, "train": 100, "test": 200}),
    ("cifar10", 0.1, {"clients": 2, "train": 10, "test": 20}),
    ("cifar10", 0.001, {"clients": 2, "train": 2, "test": 2}),  # an image of each class
    ("miniimagenet", 0.25, {"clients": 5, "train": 125, "test": 125}),
    ("officehome", 0.1, {"train": 190, "test": 26}),  # one client a domain, whatever the scale
])  # fmt: skip
def test_scale_shrinks_clients_and_images(column, scale, expected):
    own = read_column(column)
    made = scaled(own, own.data, scale)
    assert {k: v for k, v in made.items() if k in ("clients", "train", "test")} == expected


def test_scale_shrinks_rounds_and_everything_says_so():
    how = How(scale=0.1)
    assert next(cells(on_digits("table1"), how, {})).config.rounds == 5
    assert "not comparable" in how.mark
    assert How().mark == ""
    assert "not comparable" in How(rounds=3).mark


# ---- tuning


def test_a_trial_is_scored_on_images_held_out_of_training_with_seeds_of_its_own():
    how = dataclasses.replace(SMALL, rates="tuned")
    made = trials("digits", "fedselect", how)
    assert len(made) == 9
    assert len(trials("digits", "local", how)) == 3
    for options, seed, config in made:
        assert {k: config.method[k] for k in options} == options
        assert (config.score, config.seed) == ("val", seed)
        assert seed not in how.seeds
        assert config.eval_every == 1  # a fifth of the column's 5
        assert 0 < config.data["val"] < config.data["train"]
        data = config.make_data()
        assert all(torch.equal(c.test[0], c.val[0]) for c in data.clients)


@pytest.mark.parametrize(("how", "rounds", "train", "val"), [
    (How(), 50, 200, 100),  # a hundred left, as in reported runs
    (How(scale=0.1), 5, 20, 10),
    (How(rounds=3), 3, 200, 100),
    (How(rounds=300), 50, 200, 100),
])  # fmt: skip
def test_a_trial_is_short_and_trains_on_as_much_as_a_reported_run(how, rounds, train, val):
    config = trials("cifar10", "local", how)[0][2]
    assert (config.rounds, config.data["train"], config.data["val"]) == (rounds, train, val)
    asked = plan.in_tuning(
        "cifar10", how
    )  # tuned.json speaks of rounds where trials have fewer than their own, not of a table's
    assert ("rounds" in asked.mark) == (rounds == 3)


def test_a_federation_scored_on_validation_data_holds_no_test_sample():
    data = fs.load("digits", clients=3, classes_per_client=3, train=20, test=10, val=5, seed=0)
    own = data.on_validation()
    for before, after in zip(data.clients, own.clients, strict=True):
        assert torch.equal(after.test[0], before.val[0])
        assert torch.equal(after.train[0], before.train[0])
    with pytest.raises(DataError, match="client 0 has no validation data"):
        fs.load("digits", clients=3, classes_per_client=3, train=20, test=10, val=0, seed=0).on_validation()


def write(place, accuracy, score="val", clients=(), **more):
    place.mkdir(parents=True)
    said = {
        "accuracy": accuracy, "accuracy_tail": accuracy - 0.01, "score": score, "clients": list(clients), "rounds": 2,
        "curve": [[2, accuracy]], "share": 0.25,
        "bytes_up": 200, "bytes_down": 100, "seconds": 1.5, "date": "2026-01-02", "environment": {"torch": "3"},
    }  # fmt: skip
    (place / "summary.json").write_text(json.dumps({**said, **more}))


@pytest.fixture
def two_seeds(monkeypatch):
    """Tuning over two seeds: what it does with several."""
    both = dataclasses.replace(read_tuning(), seeds=(100, 101))
    for module in (plan, tune):
        monkeypatch.setattr(module, "read_tuning", lambda: both)


@pytest.mark.usefixtures("two_seeds")
def test_the_best_on_validation_data_is_chosen_and_of_equal_ones_the_first(tmp_path):
    how = dataclasses.replace(SMALL, rates="tuned")
    made = trials("digits", "local", how)
    for (_, _, config), accuracy in zip(made, (0.5, 0.6, 0.7, 0.8, 0.6, 0.9), strict=True):  # two seeds each
        assert tune.judged([("digits", "local")], how, tmp_path) == {}  # until the last is there
        write(tmp_path / name_of(config), accuracy)
    found = tune.judged([("digits", "local")], how, tmp_path)["digits", "local"]
    assert found["chosen"] == made[2][0]
    assert [t["accuracy"] for t in found["trials"]] == [0.54, 0.74, 0.74]  # tails are 0.01 below the last round


def test_rates_are_never_chosen_on_test_data(tmp_path):
    how = dataclasses.replace(SMALL, rates="tuned")
    for _, _, config in trials("digits", "local", how):
        write(tmp_path / name_of(config), 0.5, score="test")
    with pytest.raises(fs.RunError, match="scored on test images"):
        tune.judged([("digits", "local")], how, tmp_path)


def test_only_accuracies_are_reproduced(tmp_path):
    how = dataclasses.replace(SMALL, rates="tuned")
    for place in (*(tmp_path / name_of(c.config) for c in cells(on_digits("table1", "local"), SMALL, {})),
                  *(tmp_path / name_of(config) for _, _, config in trials("digits", "local", how))):  # fmt: skip
        write(place, 0.5)
        write_measures(place, fs.Classification().measured("test_loss"))
    said = "has the headline test_loss, but reproduce compares accuracy; remove it to run it again"
    with pytest.raises(fs.RunError, match=said):
        tune.judged([("digits", "local")], how, tmp_path)
    with pytest.raises(fs.RunError, match=said):
        blocks(on_digits("table1", "local"), SMALL, {}, tmp_path)


@pytest.mark.usefixtures("two_seeds")
def test_a_trial_that_diverged_is_never_chosen(tmp_path):
    how = dataclasses.replace(SMALL, rates="tuned")
    for (_, _, config), accuracy in zip(trials("digits", "local", how), (None, 0.5, 0.02, 0.02, 0.5, None), strict=True):
        if accuracy is None:
            (tmp_path / name_of(config)).mkdir()
            (tmp_path / name_of(config) / "failed.json").write_text('{"why": "x"}')
        else:
            write(tmp_path / name_of(config), accuracy)
    found = tune.judged([("digits", "local")], how, tmp_path)["digits", "local"]
    assert found["chosen"] == trials("digits", "local", how)[2][0]
    assert [t["accuracy"] for t in found["trials"]] == [None, 0.01, None]


# ---- running


class Silent:
    def __init__(self):
        self.rounds, self.finished = [], []

    def round(self, config, record):
        self.rounds.append((config.method["name"], record["round"]))

    def done(self, config):
        self.finished.append(config.method["name"])

    def waiting(self, runs):
        raise AssertionError("nobody else is here")


def tiny(**method):
    return Config.from_dict(
        {
            "method": {"name": "local", "lr": 0.1, **method},
            "data": {"name": "digits", "clients": 2, "classes_per_client": 2, "train": 10, "test": 4, "val": 0},
            "model": {"name": "mlp", "hidden": 4},
            "rounds": 2,
        },
        "test",
    )


def test_a_run_whose_numbers_stop_being_finite_is_not_tried_again(tmp_path):
    runs = {tmp_path / "bad": tiny(lr=1e38), tmp_path / "good": tiny()}
    told = Silent()
    shared.finish(runs, lambda: False, told)
    assert "client" in json.loads((tmp_path / "bad" / "failed.json").read_text())["why"]
    assert (tmp_path / "good" / "summary.json").exists()
    assert sorted(told.finished) == ["local", "local"]
    again = Silent()
    shared.finish(runs, lambda: False, again)
    assert again.rounds == []


def test_a_finished_run_keeps_no_models_and_a_short_one_never_wrote_any(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(loop.checkpoints, "save", lambda place, *rest: saved.append(place))
    shared.finish({tmp_path / "a": tiny()}, lambda: False, Silent())
    assert not (tmp_path / "a" / "checkpoint").exists()
    assert saved == []
    monkeypatch.setattr(loop, "SHORT", 0.0)  # from then on as any run, but for the last round
    shared.finish({tmp_path / "b": tiny()}, lambda: False, Silent())
    assert len(saved) == 1
    monkeypatch.setattr(loop, "DISK", 1.0)  # one would take longer than the whole run
    shared.finish({tmp_path / "c": tiny()}, lambda: False, Silent())
    assert len(saved) == 1


def test_runs_of_one_stack_share_data_that_is_the_same():
    dealt = {}
    one, same, other = (c.simulation(dealt=dealt) for c in (tiny(), tiny(lr=0.05), dataclasses.replace(tiny(), seed=1)))
    assert one.data is same.data
    assert other.data is not one.data
    assert len(dealt) == 2


def test_a_run_of_another_configuration_begins_anew_where_nothing_was_kept_of_it(tmp_path):
    old, new = tiny(), tiny(lr=0.05)
    (tmp_path / "a").mkdir()
    runner.prepare(tmp_path / "a", old)
    (tmp_path / "a" / "metrics.jsonl").write_text("{}")
    runner.prepare(tmp_path / "a", old)
    assert (tmp_path / "a" / "metrics.jsonl").exists()
    runner.prepare(tmp_path / "a", new)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    assert json.loads((tmp_path / "a" / "config.json").read_text())["method"]["lr"] == 0.05


def halted(place, config):
    """Stop a run after its first round; returns what it kept."""
    with pytest.raises(loop.Stopped):
        shared.finish({place: config}, iter([False, True]).__next__, Silent())  # before the run no, after a round yes
    return {p: p.read_bytes() for p in place.glob("checkpoint/*/*.safetensors")}


def rounds_left(place, config):
    shared.finish({place: config}, lambda: False, told := Silent())
    return [r for _, r in told.rounds]


def test_what_was_trained_with_another_configuration_is_refused_and_stays(tmp_path):
    place = tmp_path / "a"
    assert (kept := halted(place, tiny()))
    with pytest.raises(fs.RunError) as said:
        rounds_left(place, tiny(lr=0.05))
    assert f"(lr was 0.1, is 0.05); choose another --out, or remove {place} to start this run over." in str(said.value)
    assert {p: p.read_bytes() for p in kept} == kept
    assert rounds_left(place, tiny()) == [2]


def test_a_run_goes_on_on_another_device(tmp_path):
    halted(tmp_path / "a", tiny())
    assert rounds_left(tmp_path / "a", dataclasses.replace(tiny(), device="cpu")) == [2]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["device"] == "cpu"


def test_a_run_goes_on_where_its_files_lie_elsewhere_now(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for i in range(40):
        (tmp_path / "here/set" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        image.new("RGB", (4, 4), (i, i, i)).save(tmp_path / "here/set" / "ab"[i % 2] / f"{i}.png")

    def at(folder):
        data = {"name": "folder", "path": str(tmp_path / folder / "set"), "size": 4, "clients": 2, "classes_per_client": 1}
        return Config.from_dict({**tiny().to_json(), "data": {**data, "train": 8, "test": 2, "val": 0}}, "test")

    here = at("here")
    place = tmp_path / name_of(here)
    halted(place, here)
    (tmp_path / "here").rename(tmp_path / "there")
    assert name_of(at("there")) == place.name
    assert rounds_left(place, at("there")) == [2]
    assert json.loads((place / "config.json").read_text())["data"]["path"] == str(tmp_path / "there/set")


def test_a_lock_can_be_waited_for_or_refused(tmp_path):
    with locked(tmp_path), pytest.raises(BusyError, match="in use by another process"), locked(tmp_path):
        pass
    with locked(tmp_path, wait=True):
        assert shared.in_use(tmp_path)


def test_who_only_looks_whether_a_place_is_in_use_is_in_nobodys_way(tmp_path):
    """A look takes the lock for an instant; here for longer than any."""
    look = (tmp_path / ".lock").open("w")
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.05, look.close).start()
    with locked(tmp_path):
        assert look.closed


def test_the_tail_is_the_last_quarter_of_the_evaluated_rounds():
    clients = {"accuracy": [0.5], "test_loss": [1.0]}
    more = {
        "accuracy_local": 0,
        "accuracy_merged": 0,
        "test_loss": 1,
        "share": 0,
        "bytes_up": 1,
        "bytes_down": 1,
        "seconds": 0.1,
    }
    values = {20: 0.1, 150: 0.2, 155: 0.4, 160: None, 200: 0.6}  # 151 to 200 count
    history = [{"round": r, "accuracy": a, "clients": clients, **more} for r, a in values.items()]
    assert summarise(tiny(), history, [10])["accuracy_tail"] == 0.5


def test_a_copy_without_git_says_its_commit(tmp_path, monkeypatch):
    assert environment.environment("cpu")["precision"] == "float32"
    monkeypatch.delenv("FEDSELECT_COMMIT", raising=False)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    assert environment.commit() is None
    monkeypatch.setenv("FEDSELECT_COMMIT", "abc")
    assert environment.commit() == "abc"


# ---- the outcome


def entry(row, *seeds):
    return Entry(row, tuple(Seed(i, sum(s) / len(s), 0.0, tuple(s)) for i, s in enumerate(seeds)))


def test_equal_means_share_a_rank():
    assert ranks({"a": 3.0, "b": 5.0, "c": 3.0, "d": 1.0}) == {"a": 2, "b": 1, "c": 2, "d": 4}
    assert ranks({"a": 0.1 + 0.2, "b": 0.3}) == {"a": 1, "b": 1}


def test_pairs_are_clients_and_seeds():
    ours, other = entry("a", [50.0, 62.0], [71.0, 80.0, 91.0]), entry("b", [49.0, 60.0], [68.0, 76.0, 86.0])
    found = compare(ours, other)
    assert found.pairs == 5
    assert found.gain == pytest.approx(3.0)  # of 1, 2, 3, 4, 5
    assert found.p == pytest.approx(2 / 2**5)  # all signs alike: one of 32 patterns at each end
    assert found.p == wilcoxon([1, 2, 3, 4, 5]).pvalue
    back = compare(other, ours)
    assert (back.gain, back.p) == (pytest.approx(-3.0), found.p)


def test_differences_that_are_equal_but_for_rounding_are_tied():
    ours, other = [50.1, 60.3, 70.2, 44.0, 51.0], [50.0, 60.2, 70.1, 44.1, 50.6]  # three of 0.1, one of -0.1, one of 0.4
    assert len({a - b for a, b in zip(ours, other, strict=True)}) > 3
    assert compare(entry("a", ours), entry("b", other)).p == wilcoxon([1, 1, 1, -1, 4]).pvalue


def test_so_are_those_of_accuracies_that_were_rounded_before():
    """Accuracies of 167 test images are kept to six digits: 1/167 apart is then 0.5988 or 0.5989 points."""
    right = [(100, 99), (101, 100), (105, 104), (147, 146), (98, 99), (150, 146)]
    ours, other = ([round(100 * round(pair[i] / 167, 6), 6) for pair in right] for i in range(2))
    off = [round(a - b, 6) for a, b in zip(ours, other, strict=True)]
    assert len({abs(d) for d in off}) == 3
    assert compare(entry("a", ours), entry("b", other)).p == wilcoxon([1, 1, 1, 1, -1, 4]).pvalue


def test_equal_rows_differ_by_chance_alone():
    assert compare(entry("a", [50.0, 60.0]), entry("b", [50.0, 60.0])).p == 1.0


def test_only_seeds_of_both_and_clients_with_a_number_are_paired():
    ours = entry("a", [50.0, 62.0])
    other = Entry("b", (Seed(0, 1.0, 1.0, (None, 60.0)), Seed(1, 1.0, 1.0, (1.0, 1.0))))
    assert compare(ours, other).pairs == 1
    assert compare(ours, Entry("b", ())) is None


@pytest.fixture
def cifar(tmp_path):
    """Made-up outcomes of two rows of table 1 on CIFAR-10."""
    how = How(seeds=(0, 1), rates="paper")
    (target,) = choose(targets("table1"), ["cifar10"], ["fedselect", "fedavg"])
    for cell in cells(target, how, {}):
        accuracy = {"fedselect": 0.80, "fedavg": 0.30}[cell.row.method] + 0.02 * cell.seed
        write(tmp_path / name_of(cell.config), accuracy, "test", [accuracy] * 10)
    return target, how, blocks(target, how, {}, tmp_path)


def test_a_cell_has_mean_spread_the_papers_value_difference_and_ranks(cifar):
    _, _, (block,) = cifar
    fedavg, ours = block.entries
    assert (ours.mean, ours.std, ours.error) == (pytest.approx(81.0), pytest.approx(2**0.5), pytest.approx(1.0))
    assert ours.tail == pytest.approx(80.0)
    assert (ours.paper, ours.difference) == (82.25, pytest.approx(-1.25))
    assert (ours.rank, ours.paper_rank, fedavg.rank, fedavg.paper_rank) == (1, 1, 2, 2)
    assert ours.compared is None
    assert (fedavg.compared.pairs, fedavg.compared.gain) == (20, pytest.approx(50.0))


def test_files_hold_the_same_numbers(cifar):
    target, how, found = cifar
    lines = as_csv(target, found, how).splitlines()
    assert lines[2].startswith("table1,cifar10,,FedSelect,2,81,1.41421,1,80,82.25,-1.25,1,1,")
    assert r"FedSelect & \boldmath$81.00 \pm 1.00$ (82.25) \\" in as_latex(target, found, how)
    said = as_json(target, found, how, {})
    assert said["comparable"]
    assert (said["date"], said["environments"]) == ("2026-01-02", [{"torch": "3"}])
    row = said["columns"][0]["rows"][1]
    assert row["difference"] == pytest.approx(-1.25)
    assert (row["method"], row["options"]["limit"], row["seeds"]) == ("fedselect", 0.3, [0, 1])
    assert (row["tail"], row["rounds"], row["curve"]) == ([79.0, 81.0], [2], [[80.0], [82.0]])
    assert (row["share"], row["share_live"], row["bytes_up"], row["bytes_down"]) == (
        [0.25] * 2,
        [None] * 2,
        [100] * 2,
        [50] * 2,
    )


def test_a_share_of_live_parameters_is_taken_where_it_is_recorded(tmp_path):
    how = How(seeds=(0,), rates="paper")
    (target,) = choose(targets("table1"), ["cifar10"], ["fedselect"])
    (cell,) = cells(target, how, {})
    write(tmp_path / name_of(cell.config), 0.8, "test", [0.8], share_live=0.75)
    assert blocks(target, how, {}, tmp_path)[0].entries[0].seeds[0].share_live == 0.75


def all_failed(target, how, folder):
    for cell in cells(target, how, {}):
        place = folder / name_of(cell.config)
        place.mkdir(parents=True)
        (place / "failed.json").write_text('{"why": "it had to"}')
    return folder


def test_files_name_files_not_places(tmp_path, monkeypatch):
    (tmp_path / "resnet18.safetensors").write_bytes(b"x")
    (tmp_path / "PACS").mkdir()
    monkeypatch.setenv("FEDSELECT_DATA", str(tmp_path))
    target = dataclasses.replace(targets("table1")[0], on=("pacs",))
    how = How(seeds=(0,), rates="paper")
    found = blocks(target, how, {}, all_failed(target, how, tmp_path / "cells"))
    text = lean(as_json(target, found, how, {}))
    assert str(tmp_path) not in text
    assert found[0].weights == "resnet18.safetensors"
    assert json.loads(text)["columns"][0]["common"]["data"]["path"] == "PACS"


def test_a_whole_table_is_a_small_file(cifar):
    target, how, (block,) = cifar
    seed = dataclasses.replace(
        block.entries[0].seeds[0], clients=(71.23,) * 10, rounds=tuple(range(5, 205, 5)), curve=(71.23456,) * 40
    )
    entries = tuple(dataclasses.replace(e, seeds=(seed,) * 5, runs=("0123456789abcdef",) * 5) for e in block.entries[:1] * 10)
    text = lean(as_json(target, [dataclasses.replace(block, entries=entries)] * 4, how, {}))
    assert json.loads(text)["columns"][3]["rows"][9]["curve"][4][-1] == 71.23
    assert len(text) < 200_000


def test_a_target_of_ours_has_no_published_numbers(tmp_path):
    how = How(scale=0.5)
    (target,) = choose(targets("readings"), ["digits"], None)
    assert blocks(target, how, {}, tmp_path) == []
    found = blocks(target, how, {}, all_failed(target, how, tmp_path))
    assert all(e.paper is None for e in found[0].entries)
    said = as_json(target, found, how, {})
    assert (said["paper"], said["score"], said["how"]["rates"]) == (None, "val", "own")
    assert "held out of the client's training data" in as_latex(target, found, how)
    assert as_csv(target, found, how).count("own,") == len(target.rows)


def test_files_of_other_sizes_say_so_and_show_no_difference(cifar):
    target, _, found = cifar
    how = How(seeds=(0, 1), scale=0.5, rates="paper")
    assert all(line.endswith('scaled to 0.5, not comparable"') for line in as_csv(target, found, how).splitlines()[1:])
    assert "not comparable} \\\\" in as_latex(target, found, how)
    said = as_json(target, found, how, {})
    assert not said["comparable"]
    assert said["columns"][0]["rows"][1]["difference"] is None


# ---- what cannot be used


@pytest.mark.parametrize(("given", "said"), [
    ({"scale": 0.0}, "must be greater than 0"),
    ({"scale": 1.5}, "must be greater than 0"),
    ({"rounds": 0}, "at least 1"),
    ({"rates": "best"}, "paper or tuned"),
    ({"seeds": ()}, "at least one seed"),
])  # fmt: skip
def test_a_wrong_choice_is_one_sentence(given, said):
    with pytest.raises(InputError, match=said):
        How(**given)


def test_seeds_kept_for_tuning_are_not_reported_on_test_data():
    how = How(seeds=(0, 100))
    with pytest.raises(InputError, match="seed 100 is reserved for tuning"):
        how.on(targets("table1")[0])
    assert how.on(targets("readings")[0]).seeds == (0, 100)


def test_stored_runs_still_have_their_names():
    """What is added to a configuration later must not give the runs in results/ other names: they would all run again."""
    lines = gzip.decompress((ROOT / "results" / "runs.jsonl.gz").read_bytes()).decode().splitlines()
    stored = [json.loads(line) for line in lines]
    plain = [s for s in stored if not s["config"]["model"].get("weights") and not s["config"]["data"].get("data_dir")]
    same = [identity(Config.from_dict(s["config"], s["cell"]))[:16] == s["cell"] for s in plain]
    assert len(same) > 500
    assert all(same)


def test_the_aggregator_shows_in_the_identity_of_a_run_unless_it_is_the_first_one():
    plain = Config.from_dict({"method": {"name": "fedselect"}}, "test")
    older = plain.to_json()
    del older["aggregate"]
    older["method"] = {**older["method"], "server_momentum": 0.0}
    assert identity(Config.from_dict(older, "older")) == identity(plain)
    chosen = [{"name": "mean", "server_momentum": 0.5}, {"name": "mean", "server_momentum": 0.9}, {"name": "median"}]
    others = [identity(Config.from_dict({**plain.to_json(), "aggregate": a}, "test")) for a in chosen]
    assert len({identity(plain), *others}) == 4


@pytest.mark.parametrize("name", ["ditto", "fedpac"])
def test_fine_tuning_shows_in_the_identity_of_a_run_where_there_is_some(name):
    plain = Config.from_dict({"method": {"name": name, "epochs": 1}}, "test")
    assert core(plain.to_json())["method"].keys() & {"finetune", "finetune_lr"} == set()
    more = {"view": "merged"} if name == "fedpac" else {}
    rates = [{"finetune": 1}, {"finetune": 2}, {"finetune": 2, "finetune_lr": 0.02}]
    others = [identity(Config.from_dict({"method": {"name": name, "epochs": 1, **more, **r}}, "test")) for r in rates]
    assert len({identity(plain), *others}) == 4


@pytest.mark.parametrize("method", [fs.Ditto, fs.FedPAC])
def test_so_it_does_in_that_of_a_simulation(method, digits):
    said = checkpoint.owner(fs.Simulation(method(), fs.models.mlp(digits), digits)).config["method"]
    assert said.keys() & {"finetune", "finetune_lr"} == set()
    tuned = method(finetune=2, **({"view": "merged"} if method is fs.FedPAC else {}))
    assert checkpoint.owner(fs.Simulation(tuned, fs.models.mlp(digits), digits)).config["method"]["finetune"] == 2


def test_identity_leaves_out_what_came_later_and_keeps_what_is_gone(monkeypatch):
    monkeypatch.setattr(checkpoint, "LATER", {"colour": "red", "training": {"speed": 1}})
    monkeypatch.setattr(checkpoint, "GONE", {"fedselect": {"old": 0.0}})
    first = {"method": {"name": "fedselect", "old": 0.0}, "training": {"batch_size": 32}}
    now = {"method": {"name": "fedselect"}, "training": {"batch_size": 32, "speed": 1}, "colour": "red"}
    assert checkpoint.as_first_written(now) == checkpoint.as_first_written(first) == first
    assert checkpoint.as_first_written({**now, "colour": "blue"}) == {**first, "colour": "blue"}
    faster = checkpoint.as_first_written({**now, "training": {"batch_size": 32, "speed": 2}})
    assert faster == {**first, "training": {"batch_size": 32, "speed": 2}}
