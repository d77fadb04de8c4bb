"""The command line: what it does, what it leaves behind, and what it says to bad input."""

import functools
import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
from children import FEDSELECT, Children, call
from PIL import Image

import fedselect as fs
from fedselect.aggregate import AGGREGATORS
from fedselect.core import snapshots, sums
from fedselect.core.errors import InputError
from fedselect.core.files import read_json
from fedselect.data import DATA
from fedselect.methods import METHODS
from fedselect.models import MODELS
from fedselect.report import gather
from fedselect.runs import loop, progress, rundir, runner, tables
from fedselect.runs.config import Config
from fedselect.simulate import checkpoint
from fedselect.tasks import TASKS
from fedselect.training.optim import OPTIMIZERS, SCHEDULES

TINY = ("--model", "mlp", "--hidden", 8, "--clients", 3, "--classes-per-client", 3, "--train", 20, "--test", 10, "-q")


def metrics(run):
    """The lines of metrics.jsonl, the times aside."""
    lines = [sums.from_line(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    out = tmp_path_factory.mktemp("done") / "a"
    with Children() as children:
        process = children.fork("from fedselect.cli import main; main()", "run", *TINY, "--rounds", 2, "--out", out)
        said = process.communicate()
    assert process.returncode == 0, said
    return out


@pytest.fixture
def done(made_once, tmp_path):
    """A finished run."""
    return shutil.copytree(made_once, tmp_path / "a")


@pytest.fixture
def halfway(done):
    """The same run as a kill after its second of three rounds leaves it."""
    raw = read_json(done / "config.json", "")
    (done / "summary.json").unlink()
    config = runner.Config.from_dict({**raw, "rounds": 3}, "test")
    (done / "config.json").write_text(json.dumps(config.to_json()))
    for place in snapshots.places(done / "checkpoint"):
        reseal(place, run=rundir.identity(config), config=rundir.core(config.to_json()))
    return done


# ---- what it does


def test_a_run_leaves_its_directory(done):
    assert {p.name for p in done.iterdir()} == {
        "config.json", "task.json", "federation.json", "metrics.jsonl", "masks.jsonl", "summary.json", "checkpoint", ".lock",
    }  # fmt: skip
    assert sorted(p.name for p in (done / "checkpoint").iterdir()) == ["000001", "000002"]
    first, last = metrics(done)
    assert (first["round"], last["round"]) == (1, 2)
    assert set(last["clients"]) == {
        "accuracy", "accuracy_local", "accuracy_merged", "test_loss", "train_loss", "share", "bytes_up", "bytes_down",
    }  # fmt: skip
    assert all(len(values) == 3 for values in last["clients"].values())
    assert last["bytes_up"] == sum(last["clients"]["bytes_up"])
    summary = read_json(done / "summary.json", "")
    assert (summary["accuracy"], summary["method"], summary["seed"]) == (last["accuracy"], "fedselect", 0)


def test_the_configuration_is_complete_and_replays(cli, done, tmp_path):
    config = read_json(done / "config.json", "")
    assert config["method"]["limit"] == 0.3  # a default, written out
    assert config["model"] == {"name": "mlp", "hidden": 8}
    assert cli("run", "--config", done / "config.json", "-q", "--out", tmp_path / "b").code == 0
    assert metrics(tmp_path / "b") == metrics(done)
    assert read_json(tmp_path / "b" / "config.json", "") == config


def test_flags_override_a_file(cli, done, tmp_path):
    cli("run", "--config", done / "config.json", "-q", "--rounds", 1, "--limit", 0.1, "--out", tmp_path / "b")
    config = read_json(tmp_path / "b" / "config.json", "")
    assert (config["rounds"], config["method"]["limit"], config["data"]["clients"]) == (1, 0.1, 3)


def test_a_run_can_be_scored_on_held_out_training_data(cli, tmp_path):
    (tmp_path / "c.toml").write_text('score = "val"\n')
    args = ("--config", tmp_path / "c.toml", *TINY, "--val", 5, "--rounds", 1)
    assert "each on its own validation data" in cli("run", *args, "--out", tmp_path / "a").out
    assert "each client's validation data" in cli("compare", *args, "--methods", "fedselect", "--out", tmp_path / "b").out
    summary = read_json(tmp_path / "a" / "summary.json", "")
    assert summary["score"] == "val"
    assert all((5 * accuracy) % 1 == pytest.approx(0) for accuracy in summary["clients"])  # five images each, not ten
    assert "no validation data" in cli("run", *args, "--val", 0, "--out", tmp_path / "c").sentence()


def test_a_sweep_can_be_scored_so_too(cli, tmp_path):
    out = tmp_path / "s"
    assert cli("sweep", *TINY, "--val", 5, "--score", "val", "--limit", "0.1,0.3", "--rounds", 1, "--out", out).code == 0
    said = [read_json(p, "")["score"] for p in out.glob("*/summary.json")]
    assert said == ["val", "val"]
    wrong = cli("run", *TINY, "--score", "training", "--out", tmp_path / "w")
    assert wrong.code == 2
    assert "score is test or val, not 'training'" in wrong.err


def test_another_method_than_the_files_does_not_inherit_its_options(cli, done, tmp_path):
    assert cli("run", "--config", done / "config.json", "-q", "--method", "local", "--out", tmp_path / "b").code == 0
    assert read_json(tmp_path / "b" / "config.json", "")["method"] == {"name": "local", "epochs": 3, "lr": 0.1}


def aggregate(run):
    return read_json(run / "config.json", "")["aggregate"]


def test_an_aggregator_is_chosen_by_name_and_its_options_are_flags(cli, done, tmp_path):
    assert aggregate(done) == {"name": "mean", "server_momentum": 0.0}
    args = ("run", "--config", done / "config.json", "-q", "--out")
    assert cli(*args, tmp_path / "median", "--aggregate", "median").code == 0
    assert aggregate(tmp_path / "median") == {"name": "median", "least_senders": 1}
    assert cli(*args, tmp_path / "ahead", "--server-momentum", "0.5").code == 0
    assert aggregate(tmp_path / "ahead") == {"name": "mean", "server_momentum": 0.5}
    assert metrics(tmp_path / "median") != metrics(done)
    kept = read_json(tmp_path / "ahead" / "checkpoint" / "000002" / "manifest.json", "")["tensors"]
    assert any(name.startswith("aggregate/velocity/") for name in kept)
    assert "there is no aggregator 'medium'" in cli(*args, tmp_path / "c", "--aggregate", "medium").sentence()
    none = cli(*args, tmp_path / "c", "--aggregate", "median", "--server-momentum", "0.5").sentence()
    assert "there is no option 'server_momentum' in this run; aggregate mean or clip has it: add --aggregate mean." in none


def test_a_sweep_does_not_divide_a_list_of_names(cli, tmp_path):
    """Of three target columns, one alone would be learned from the others."""
    rows = ["site,a,b,c,d"] + [f"{i % 2},{i / 7},{i % 3 % 2},{i % 5 % 2},{(i + 1) % 2}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    table = ("--data", f"table:{tmp_path / 't.csv'}", "--client", "site", "--target", "b,c,d", "--test-share", 0.3)
    cli("sweep", *table, "--method", "fedavg", "--lr", "0.1,0.01", "--rounds", 1, "--out", tmp_path / "s", "-q")
    assert sorted(p.parent.name for p in (tmp_path / "s").glob("*/config.json")) == [
        "fedavg-lr=0.01-seed0",
        "fedavg-lr=0.1-seed0",
    ]
    both = ("--adapt", "lora", "--rank", 2, "--targets", "1;1,3", "--beside", "nothing")
    cli(
        "sweep",
        "--train",
        20,
        "--test",
        10,
        "--model",
        "mlp",
        "--method",
        "fedavg",
        *both,
        "--rounds",
        1,
        "--out",
        tmp_path / "l",
        "-q",
    )
    made = [json.loads(p.read_text())["adapt"]["targets"] for p in sorted((tmp_path / "l").glob("*/config.json"))]
    assert sorted(made) == ["1", "1,3"]


def test_names_of_layers_are_not_taken_for_kinds_of_targets(cli, tmp_path):
    """--targets is an option of texts, too."""
    (tmp_path / "t.csv").write_text("site,a,b\n" + "".join(f"{i % 2},{i / 7},{i % 3 % 2}\n" for i in range(40)))
    table = ("--data", f"table:{tmp_path / 't.csv'}", "--client", "site", "--target", "b")
    said = cli("run", *table, "--adapt", "lora", "--targets", "*.query", "--out", tmp_path / "r").sentence()
    assert "targets is an option of data and of adapt" in said


def test_a_sweep_over_an_aggregators_options_names_its_runs_by_them(cli, tmp_path):
    out = tmp_path / "s"
    said = cli("sweep", *TINY, "--server-momentum", "0,0.5,0.9", "--method", "fedavg", "--rounds", 2, "--out", out)
    assert said.code == 0
    assert [aggregate(p)["server_momentum"] for p in sorted(out.glob("fedavg*"))] == [0.0, 0.5, 0.9]
    assert "server_momentum=0.5" in said.out
    assert "server_momentum=0.9" in said.out


def test_an_option_that_moved_to_the_aggregator_is_said_to_be_there(cli, tmp_path):
    (tmp_path / "c.toml").write_text('[method]\nname = "fedselect"\nserver_momentum = 0.5\n')
    said = cli("run", "--config", tmp_path / "c.toml", *TINY, "--out", tmp_path / "a").sentence()
    assert "server_momentum is no longer an option of a method; it is an option of the aggregator" in said
    assert "write it under [aggregate], or pass --server-momentum" in said
    (tmp_path / "c.toml").write_text('[method]\nname = "fedselect"\nserver_momentum = 0.0\n')  # as older runs have it
    assert cli("run", "--config", tmp_path / "c.toml", *TINY, "--rounds", 1, "--out", tmp_path / "a").code == 0


@pytest.mark.parametrize(("pause", "told"), [(10.0, ["round 3/3"]), (0.0, ["round 1/3", "round 2/3", "round 3/3"])])
def test_in_a_pipe_a_run_prints_its_end_and_a_line_after_every_pause(cli, tmp_path, monkeypatch, pause, told):
    moments = iter(range(100))  # a second a look at the clock
    monkeypatch.setattr(progress, "PAUSE", pause)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    said = cli("run", *TINY[:-1], "--rounds", 3, "--out", tmp_path / "a").out.splitlines()
    assert [line.split("  ")[1] for line in said[1:-1]] == told
    assert said[-1].startswith("accuracy ")


def test_quiet_prints_the_result_alone(cli, tmp_path):
    (said,) = cli("run", *TINY, "--rounds", 2, "--out", tmp_path / "b").out.splitlines()
    assert said.startswith("accuracy ")


def test_lines_of_a_sweep_name_what_is_swept(cli, tmp_path):
    args = ("--limit", "0.1,0.3", "--seeds", "0,1", "--rounds", 1)
    said = cli("sweep", *TINY[:-1], *args, "--out", tmp_path / "s").out.splitlines()
    named = {f"fedselect limit={limit} seed {seed}" for limit in (0.1, 0.3) for seed in (0, 1)}
    assert {line.split("  ")[0] for line in said[1:5]} == named
    for summary in (tmp_path / "s").glob("*/summary.json"):
        summary.unlink()
    shutil.rmtree(tmp_path / "s" / "fedselect-limit=0.1-seed0" / "checkpoint")
    assert "fedselect limit=0.1 seed 0  round 1/1" in cli("resume", tmp_path / "s").out


def test_a_run_without_out_goes_to_a_new_directory_under_runs(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert cli("run", *TINY, "--rounds", 1, "--method", "local").code == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["local-digits-seed0", "local-digits-seed0-2"]


def test_compare_runs_every_method_with_every_seed(cli, tmp_path):
    said = cli("compare", *TINY, "--methods", "fedselect,local", "--seeds", "0,1", "--rounds", 1, "--out", tmp_path / "c")
    assert {p.name for p in (tmp_path / "c").iterdir()} == {
        ".lock", "compare.json", "fedselect-seed0", "fedselect-seed1", "local-seed0", "local-seed1",
    }  # fmt: skip
    assert "2 seeds, ± standard deviation" in " ".join(said.out.split())
    rows = [line for line in said.out.splitlines() if "±" in line][1:]
    assert sorted(name for row in rows for name in ("fedselect", "local") if name in row) == ["fedselect", "local"]


def test_compare_reads_methods_from_toml_and_a_flag_can_single_one_out(cli, tmp_path):
    (tmp_path / "e.toml").write_text(
        'rounds = 1\nseeds = [3]\n[data]\nname = "digits"\nclients = 3\ntrain = 20\ntest = 10\n[model]\nname = "mlp"\n'
        "[training]\nbatch_size = 10\n[methods.fedselect]\nlimit = 0.2\n[methods.fedrep]\nhead_epochs = 1\n[methods.fedavg]\n"
    )
    said = cli("compare", "--config", tmp_path / "e.toml", "-q", "--fedrep.lr", 0.5, "--momentum", 0, "--out", tmp_path / "c")
    assert said.code == 0
    configs = read_json(tmp_path / "c" / "compare.json", "")
    assert list(configs) == ["fedselect-seed3", "fedrep-seed3", "fedavg-seed3"]
    assert configs["fedselect-seed3"]["method"]["limit"] == 0.2
    assert [c["method"]["lr"] for c in configs.values()] == [0.1, 0.5, 0.1]  # what suits digits, but for what a flag said
    assert all(c["training"]["momentum"] == 0.0 for c in configs.values())


def test_a_value_or_a_seed_that_is_said_twice_counts_once(cli, tmp_path):
    said = cli("sweep", *TINY, "--limit", "0.1,0.3,0.1,0.10", "--seeds", "0,0", "--rounds", 1, "--out", tmp_path / "s")
    assert "data, 1 seed " in said.out
    assert list(read_json(tmp_path / "s" / "compare.json", "")) == [
        "fedselect-limit=0.1-seed0",
        "fedselect-limit=0.3-seed0",
    ]
    (tmp_path / "e.toml").write_text('seeds = [0, "0"]\n[methods.local]\n')
    assert cli("compare", *TINY, "--config", tmp_path / "e.toml", "--rounds", 1, "--out", tmp_path / "c").code == 0
    assert list(read_json(tmp_path / "c" / "compare.json", "")) == ["local-seed0"]


def test_resume_leaves_a_finished_run_as_it_is(cli, done):
    before = {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}
    assert "fedselect" in cli("resume", done, "-q").out
    assert {p: p.read_bytes() for p in done.rglob("*") if p.is_file()} == before


def test_resume_finishes_a_run(cli, halfway, tmp_path):
    assert cli("resume", halfway, "-q").code == 0
    cli("run", "--config", halfway / "config.json", "-q", "--out", tmp_path / "whole")
    assert metrics(halfway) == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["methods"], METHODS),
        (["data", "list"], DATA),
        (["models"], MODELS),
        (["tasks"], TASKS),
        (["optimizers"], [*OPTIMIZERS, "schedule", *SCHEDULES]),
        (["aggregators"], AGGREGATORS),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_lists_name_everything_there_is(cli, args, names):
    said = cli(*args)
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines() if line[:1].isalpha()][1 : len(names) + 1] == list(names)


def test_optimizers_are_listed_with_the_defaults_that_runs_have(cli):
    said = cli("optimizers").out
    assert "weight_decay=0.0" in said
    assert "weight_decay=0.01" not in said  # AdamW's own, in Python


def test_a_tables_options_can_be_named(cli, tmp_path):
    args = ("run", *TINY, "--rounds", 1, "--aggregate.server-momentum", 0.5, "--training.momentum", 0.1, "--data.test", 5)
    assert cli(*args, "--out", tmp_path / "a").code == 0
    found = read_json(tmp_path / "a" / "config.json", "")
    assert (found["aggregate"]["server_momentum"], found["training"]["momentum"], found["data"]["test"]) == (0.5, 0.1, 5)


def test_one_methods_options(cli):
    said = cli("methods", "fedrep").out
    assert "--head-epochs" in said
    assert "--batch-size" in said
    assert "--limit" not in said


def test_a_late_client_joins_in_the_round_that_was_said(cli, tmp_path):
    assert cli("run", *TINY, "--late", "1@2", "--rounds", 3, "--out", tmp_path / "a").code == 0
    assert [r["clients"]["bytes_up"][2] is not None for r in metrics(tmp_path / "a")] == [False, True, True]


def test_a_directory_is_named_as_it_is(cli, tmp_path):
    out = tmp_path / "[bold]draft"
    assert f"in {out}" in cli("run", *TINY, "--rounds", 1, "--out", out).out


def test_the_module_runs_as_a_program_and_says_its_version():
    said = call(*FEDSELECT, "version")
    assert (said.returncode, said.stdout.strip()) == (0, "0.1.0")


def test_the_version_is_an_option_too(cli):
    assert (cli("--version").code, cli("--version").out) == (0, cli("version").out)
    assert "Personalized federated learning" in cli("--help").out


def test_an_error_of_the_program_is_one_sentence():
    said = call(*FEDSELECT, "methods", "fedvg")
    assert said.returncode == 2
    assert said.stderr.startswith("error: there is no method 'fedvg'; did you mean 'fedavg'")
    assert said.stderr.count("\n") == 1


# ---- bad input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "fedslect"], "there is no method 'fedslect'; did you mean 'fedselect'"),
        (["--data", "digit"], "there is no data 'digit'; did you mean 'digits'"),
        (["--model", "mpl"], "there is no model 'mpl'; did you mean 'mlp'"),
        (["--limt", "0.5"], "there is no option 'limt'; did you mean 'limit'"),
        (["--round", "3"], "there is no option 'round'; did you mean 'rounds'"),
        (["--method", "local", "--limit", "0.5"], "there is no option 'limit' in this run; method fedselect has it"),
        (["--model", "small_cnn", "--hidden", "5"], "there is no option 'hidden' in this run; model mlp has it"),
        (["--limit", "1.5"], "limit is a share and must be in [0, 1], not 1.5"),
        (["--rate", "-0.1"], "rate is a share and must be in [0, 1], not -0.1"),
        (["--rate", "nan"], "rate is a share and must be in [0, 1], not nan"),
        (["--limit", "much"], "limit must be a number, not 'much'"),
        (["--limit"], "--limit needs a value"),
        (["stray"], "'stray' does not belong to a flag"),
        (["--clients", "0"], "at least one client, not 0"),
        (["--classes-per-client", "11"], "classes_per_client must lie in 1 to 10 (the classes there are), not 11"),
        (["--train", "5000"], "lower train, test or clients"),
        (["--val", "20"], "val is held out of train and must lie in 0 to 19, not 20"),
        (["--rounds", "0"], "rounds must be at least 1, not 0"),
        (["--epochs", "-1"], "epochs"),
        (["--batch-size", "0"], "batch_size must be at least 1, not 0"),
        (["--fraction", "0"], "fraction is the share of clients in a round and must be above 0 and at most 1, not 0.0"),
        (["--chunk", "0"], "chunk must be at least 1 or auto, not 0"),
        (["--chunk", "some"], "chunk must be at least 1 or auto, not 'some'"),
        (["--eval-every", "0"], "eval_every must be at least 1, not 0"),
        (["--late", "3@1"], "late: 3 of 3 clients cannot join late"),
        (["--late", "1@50"], "late: a client that joins in round 50 of 30 never takes part"),
        (["--late", "soon"], "--late must be COUNT@ROUND, such as 2@10, not 'soon'"),
        (["--rows", "personal", "--cross"], "not their local models; use view='merged' or rows=all"),
        (["--device", "tpu"], "device must be auto, cpu, cuda or one GPU such as cuda:0, not 'tpu'"),
        (["--device", "cuda:"], "device must be auto, cpu, cuda or one GPU such as cuda:0, not 'cuda:'"),
        (["--seed", "0,1"], "a run has one seed; for several: fedselect compare --methods NAME --seeds 0,1"),
        (["--seeds", "0,1"], "for several: fedselect compare --methods NAME --seeds 0,1"),
        (["--seed", "one"], "seed must be a whole number, not 'one'"),
        (["--methods", "fedavg,local"], "fedselect compare --methods fedavg,local"),
        (["--alpha", "0.5"], "for a Dirichlet partition type --split dirichlet --concentration 0.5, for FedSelect --limit 0.5"),
        (["--learning-rate", "0.1"], "there is no option 'learning-rate'; type --lr 0.1"),
        (["--metric", "loss"], "type --headline loss"),
        (["--gpu"], "type --device cuda"),
        (["--batch", "8"], "did you mean 'batch-size'"),
        (["fedavg"], "'fedavg' does not belong to a flag; type --method fedavg"),
        (["--seed", "-1"], "seed must"),
        (["--seed", str(2**70)], "seed must"),
        (["--hidden", "0"], "hidden must be at least 1, not 0"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_bad_input_gets_one_sentence(cli, tmp_path, args, said):
    assert said in cli("run", *TINY, *args, "--out", tmp_path / "a").sentence()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "./pictures",
            "./pictures is a folder; type --data folder:./pictures (one folder of images per class)",
        ),
        ("pictures", "domains:pictures (one folder per client, with class folders in it) or table:pictures"),
        ("rows.csv", "rows.csv is a table; type --data table:rows.csv --client COLUMN"),
        ("./no.csv", "there is no table ./no.csv; check the path, then type --data table:./no.csv"),
        ("./no", "there is no folder ./no; check the path"),
    ],
)
def test_a_path_in_place_of_a_name_says_what_to_type(cli, tmp_path, monkeypatch, place, said):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)
    assert said in cli("run", "--data", place).sentence()


def test_names_may_be_written_as_papers_write_them(cli, tmp_path):
    assert cli("run", *TINY, "--method", "FedAvg", "--data", "Digits", "--optimizer", "Adam", "--out", tmp_path / "a").code == 0
    saved = read_json(tmp_path / "a" / "config.json", "")
    assert (saved["method"]["name"], saved["data"]["name"], saved["training"]["optimizer"]) == ("fedavg", "digits", "adam")
    assert "--mu" in cli("methods", "FedProx").out
    assert "there is no option 'seed'; this command takes several seeds: --seeds 3" in cli("compare", "--seed", 3).sentence()


def test_each_option_of_a_method_is_explained_where_it_is_listed(cli):
    said = cli("methods", "fedalike").out
    assert re.search(r"--heads +find +find: the server finds the groups", said)
    assert re.search(r"--batch-size +32 +samples per step", said)


@pytest.mark.parametrize(
    "args", [["--limit", 2], ["--clients", 0], ["--hidden", 0], ["--device", "tpu"], ["--chunk", 0]], ids=str
)
def test_bad_input_leaves_no_directory_in_the_way_of_the_next_try(cli, tmp_path, args):
    cli("run", *TINY, *args, "--out", tmp_path / "a").sentence()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--methods", "fedselect,fedvg"], "there is no method 'fedvg'; did you mean 'fedavg'"),
        (["--methods", ","], "name at least one method"),
        (["--seeds", "0,x"], "seeds must be whole numbers separated by commas, not '0,x'"),
        (["--methods", "local", "--fedrep.lr", "1"], "there is no method or table in this command 'fedrep'"),
        (["--methods", "local", "--local.lt", "1"], "there is no option of method local: 'lt'; did you mean 'lr'"),
        (["--methods", "local,fedavg", "--limit", "1"], "there is no option 'limit'"),
        (["--methods", "local", "--seed", "1"], "there is no option 'seed'; this command takes several seeds: --seeds 1"),
        (["--method", "local"], "there is no option 'method'; this command takes several methods: --methods local"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_compare_likewise(cli, tmp_path, args, said):
    assert said in cli("compare", *TINY, *args, "--out", tmp_path / "c").sentence()
    assert not (tmp_path / "c").exists()


FILES = {
    "no.toml": (None, "cannot be read: No such file"),
    "broken.toml": (b"rounds = ", "is not valid TOML"),
    "broken.json": (b'{"rounds": 3', "is not valid JSON"),
    "list.json": (b"[1]", "must contain a table of fields"),
    "bytes.toml": (b"\xff\xfe\x00", "bytes.toml"),
    "field.toml": (b"round = 3", "there is no field 'round'; did you mean 'rounds'"),
    "flat.toml": (b"limit = 0.5", "'limit' is an option of method fedselect and belongs under [method]"),
    "comparison.toml": (
        b"seeds = [0, 1]",
        "'seeds' is a field of a comparison; use this file with: fedselect compare --config",
    ),
    "name.toml": (b'method = "fedavg"', "method must be a table"),
    "option.toml": (b'[method]\nname = "fedselect"\nlimt = 1', "there is no option of method fedselect: 'limt'"),
    "value.toml": (b'rounds = "many"', "rounds must be a whole number, not 'many'"),
    "training.toml": (b"[training]\nmomentun = 1", "there is no training option 'momentun'; did you mean 'momentum'"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_configuration_file_is_named(cli, tmp_path, name):
    content, said = FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    sentence = cli("run", "--config", tmp_path / name, "--out", tmp_path / "a").sentence()
    assert said in sentence
    assert name in sentence
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "text", ["methods = 3", "seeds = 3", "[methods]\nlocal = 3", "[methods.loco]", 'seeds = ["x"]', "seeds = []"]
)
def test_a_wrong_comparison_file_is_refused(cli, tmp_path, text):
    (tmp_path / "e.toml").write_text(text)
    cli("compare", *TINY, "--config", tmp_path / "e.toml", "--rounds", 1, "--out", tmp_path / "c").sentence()
    assert not (tmp_path / "c").exists()


# ---- directories and checkpoints


def test_an_existing_directory_is_refused_and_stays(cli, done):
    before = metrics(done)
    said = cli("run", *TINY, "--rounds", 1, "--out", done).sentence()
    assert f"{done} already exists" in said
    assert "pass --overwrite to replace everything in it" in said
    assert metrics(done) == before


def test_overwrite_replaces_a_run_and_mixes_nothing(cli, done):
    assert cli("export", done, "--client", 0).code == 0
    assert cli("run", *TINY, "--rounds", 1, "--method", "local", "--out", done, "--overwrite").code == 0
    assert len(metrics(done)) == 1
    assert read_json(done / "config.json", "")["method"]["name"] == "local"
    assert [p.name for p in (done / "checkpoint").iterdir()] == ["000001"]
    assert not (done / "client-0.safetensors").exists()  # a model of the run that is gone
    assert "including models and figures exported to it" in " ".join(cli("run", "--help").out.replace("│", " ").split())


@pytest.mark.parametrize("command", [("run",), ("compare", "--methods", "local,fedavg")])
def test_a_run_that_came_and_went_meanwhile_stays(cli, done, tmp_path, monkeypatch, command):
    """Two commands that choose the same directory: each finds it free, and the other is faster."""
    from fedselect.runs.config import Config

    real = Config.simulation

    def slowly(self, *args, **more):
        if not (tmp_path / "new").exists():
            shutil.copytree(done, tmp_path / "new")
        return real(self, *args, **more)

    monkeypatch.setattr(Config, "simulation", slowly)
    assert "already exists" in cli(*command, *TINY, "--rounds", 1, "--out", tmp_path / "new").sentence()
    assert metrics(tmp_path / "new") == metrics(done)


def test_masks_of_rounds_that_are_not_recorded_are_not_left_to_stand_for_them(cli, tmp_path):
    out = tmp_path / "a"
    assert cli("run", *TINY, "--rounds", 2, "--rows", "personal", "--chunk", 1, "--out", out).code == 0
    (out / "masks.jsonl").write_text('{"round": 1, "share": ""}\n')
    (out / "summary.json").unlink()
    assert cli("resume", out, "-q").code == 0
    assert not (out / "masks.jsonl").exists()
    assert len(read_json(out / "federation.json", "")["clients"]) == 3  # whose names the report has


def test_a_sweep_over_paths_stays_in_its_directory(cli, tmp_path):
    for name in ("a", "b"):
        for kind in ("cat", "dog"):
            (tmp_path / "pictures" / name / kind).mkdir(parents=True)
            for i in range(6):
                Image.new("RGB", (8, 8), (40 * i, 0, 0)).save(tmp_path / "pictures" / name / kind / f"{i}.png")
    where = ",".join(f"{tmp_path}/pictures/{name}" for name in ("a", "b"))
    data = ("--data", "folder", "--path", where, "--size", 8, "--clients", 2, "--train", 4, "--test", 2)
    assert cli("sweep", *data, "--model", "mlp", "--rounds", 1, "-q", "--out", tmp_path / "s").code == 0
    assert {p.parent.parent for p in tmp_path.rglob("summary.json")} == {tmp_path / "s"}
    assert len(list(tmp_path.rglob("summary.json"))) == 2


def test_overwrite_with_bad_input_keeps_the_old_run(cli, done):
    before = metrics(done)
    cli("run", *TINY, "--clients", 0, "--out", done, "--overwrite").sentence()
    assert metrics(done) == before


@pytest.mark.parametrize(
    "content", [{"thesis.tex": "years of work"}, {"config.json": '{"app": 1}', "thesis.tex": "years of work"}]
)
def test_overwrite_refuses_a_directory_that_is_not_a_run(cli, tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    assert "contains files that are not part of a run" in cli("run", *TINY, "--out", tmp_path, "--overwrite").sentence()
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_overwrite_refuses_a_file(cli, tmp_path):
    (tmp_path / "notes").write_text("mine")
    cli("run", *TINY, "--rounds", 1, "--out", tmp_path / "notes", "--overwrite").sentence()
    assert (tmp_path / "notes").read_text() == "mine"


def test_resume_of_something_else_says_so(cli, tmp_path, made_once):
    for command in ("resume", "report"):
        assert "is not a run directory" in cli(command, tmp_path).sentence()
        assert f"there is no run directory {tmp_path / 'no'}; check the path" in cli(command, tmp_path / "no").sentence()
        inside = f"{made_once.parent} is not a run directory, but contains 1; give one, such as {made_once}"
        assert inside in cli(command, made_once.parent).sentence()
    (tmp_path / "file").write_text("x")
    assert "is a file, not a run directory" in cli("report", tmp_path / "file").sentence()


def test_resume_of_a_finished_run_says_that_nothing_was_trained(cli, made_once):
    before = (made_once / "metrics.jsonl").read_bytes()
    assert f"{made_once} was already finished; nothing was trained" in " ".join(cli("resume", made_once).out.split())
    assert (made_once / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("method", ["fedalike", "fedpac", "scaffold"])
def test_what_cannot_be_private_is_refused_without_a_promise(cli, tmp_path, method):
    flags = ("--clients", 3, "--rounds", 2, "--model", "mlp", "--private", "epsilon=8", "-q", "--out", tmp_path / "a")
    said = cli("run", "--method", method, *flags)
    assert "which noise on updates does not protect" in said.sentence()  # the only line on stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("command", ["run", "compare", "tune"])
def test_without_a_terminal_the_first_line_says_what_is_trained(cli, tmp_path, monkeypatch, command):
    """Before anything is read or trained, and not with --quiet."""

    def stop(*args, **more):
        raise InputError("far enough")

    for name in ("fedselect.runs.runner.start", "fedselect.runs.runner.start_comparison", "fedselect.tuning.trials.start"):
        monkeypatch.setattr(name, stop)
    own = {"run": ("--method", "fedavg"), "compare": ("--methods", "fedavg,local"), "tune": ("--methods", "fedavg", "--val", 5)}
    flags = (command, *own[command], "--clients", 3, "--rounds", 4, "--device", "cpu", "--out", tmp_path / "a")
    begins = {
        "run": "training fedavg",
        "compare": "training 2 runs of fedavg, local",
        "tune": "tuning 3 settings (3 seeds) of fedavg",
    }
    said = cli(*flags)
    assert said.out == f"{begins[command]} on digits: small_cnn, 3 clients, 4 rounds, on cpu, in {tmp_path / 'a'}\n"
    assert "far enough" in said.sentence()
    assert cli(*flags, "-q").out == ""


@pytest.mark.parametrize("turns", [False, True], ids=["as it is", "into another error"])
def test_ctrl_c_gets_one_sentence(cli, monkeypatch, turns):
    """A library whose import is interrupted may turn the interruption into any error."""

    def work(args):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if turns:
                raise AttributeError("partially imported") from None
            raise

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("fedselect.cli.program.app", work)
    said = cli("run")
    assert (said.code, said.err) == (130, "stopped by Ctrl-C\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_without_ctrl_c_is_not_hidden(cli, monkeypatch):
    def work(args):
        raise AttributeError("a mistake of ours")

    monkeypatch.setattr("fedselect.cli.program.app", work)
    with pytest.raises(AttributeError, match="a mistake of ours"):
        cli("run")


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def edit(path, **fields):
    path.write_text(json.dumps({**read_json(path, ""), **fields}))


def reseal(place, without="", **fields):
    """A snapshot that says something else of itself, as its writer would have written it."""
    said = {**snapshots.manifest(place, ""), **fields}
    snapshots.write_manifest(place, {k: v for k, v in said.items() if k != without})


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def unsealed(run, old, new):
    """A manifest as they were at first, without a checksum, in which something has changed."""
    said = read_json(manifest(run), "")
    said.pop("manifest_sha256")
    manifest(run).write_text(json.dumps(said))
    replace(manifest(run), old, new)


def cut_newline(run):
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().rstrip("\n"))


def manifest(run):
    return run / "checkpoint/000002/manifest.json"


def flip_line(run, old, new, checksum=False):
    """Change the last line of the metrics, by default without its checksum, as lines were at first."""
    first, last = (run / "metrics.jsonl").read_text().splitlines()
    assert old in last
    last = last if checksum else json.dumps(sums.from_line(last.encode()))
    (run / "metrics.jsonl").write_text(f"{first}\n{last.replace(old, new, 1)}\n")


CHECKPOINT_DAMAGE = {
    "a flipped byte": (lambda r: flip(r / "checkpoint/000002/state.safetensors"), "state.safetensors is damaged"),
    "no state": (lambda r: (r / "checkpoint/000002/state.safetensors").unlink(), "state.safetensors is missing"),
    "no manifest": (lambda r: manifest(r).unlink(), "manifest.json is missing"),
    "half a manifest": (lambda r: manifest(r).write_text('{"format'), "manifest.json cannot be read"),
    "a list for a manifest": (lambda r: manifest(r).write_text("[]"), "manifest.json"),
    "another round": (lambda r: reseal(manifest(r).parent, round=1), "000002 contains round 1"),
    "another tensor": (lambda r: replace(manifest(r), "server/params/1.w", "server/params/1.v"), "manifest.json is damaged"),
    "another format, flipped": (lambda r: replace(manifest(r), '"format": 1', '"format": 3'), "manifest.json is damaged"),
    "another tensor, no checksum": (lambda r: unsealed(r, "server/params/1.w", "server/params/1.v"), "lists other tensors"),
    "no list of tensors": (lambda r: unsealed(r, '"tensors"', '"tensorz"'), "manifest.json is damaged"),
    "no chunk": (lambda r: unsealed(r, '"chunk"', '"chunj"'), "manifest.json is damaged"),
    "a metrics line lost": (
        lambda r: (r / "metrics.jsonl").write_text((r / "metrics.jsonl").read_text().splitlines()[0] + "\n"),
        "metrics.jsonl ends with round 1",
    ),
    "half a metrics line": (
        lambda r: (r / "metrics.jsonl").write_text((r / "metrics.jsonl").read_text()[:-40]),
        "metrics.jsonl is damaged in line 2",
    ),
    "another name in metrics": (lambda r: flip_line(r, '"accuracy_local"', '"accuracy_locbl"'), "it lacks 'accuracy_local'"),
    "another round in metrics": (lambda r: flip_line(r, '"round": 2', '"round": 3'), "it should be of round 2"),
    "another number in metrics": (lambda r: flip_line(r, "1", "2", checksum=True), "it does not match its checksum"),
}  # fmt: skip
DAMAGE = {
    "another format": (lambda r: reseal(manifest(r).parent, format=9), "has format 9, but this version reads 1"),
    "half a configuration": (lambda r: (r / "config.json").write_text('{"rounds'), "config.json cannot be read"),
    "a list for a configuration": (lambda r: (r / "config.json").write_text("[]"), "config.json"),
    "no metrics": (lambda r: (r / "metrics.jsonl").unlink(), "no checkpoint is intact"),
    "no text in metrics": (lambda r: flip(r / "metrics.jsonl", 5), "metrics.jsonl is damaged in line 1"),
}  # fmt: skip


@pytest.mark.filterwarnings("default:.*using the checkpoint before it")
@pytest.mark.parametrize("damage", CHECKPOINT_DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(cli, halfway, tmp_path, damage):
    hurt, said = CHECKPOINT_DAMAGE[damage]
    assert cli("run", "--config", halfway / "config.json", "-q", "--out", tmp_path / "whole").code == 0
    hurt(halfway)
    resumed = cli("resume", halfway, "-q")
    assert resumed.code == 0
    assert said in resumed.err
    assert resumed.err.endswith("; using the checkpoint before it, of round 1.\n")
    assert metrics(halfway) == metrics(tmp_path / "whole")
    last = "checkpoint/000003/state.safetensors"
    assert (halfway / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_where_no_checkpoint_is_whole_the_run_can_begin_anew(cli, halfway):
    for place in (halfway / "checkpoint").iterdir():
        flip(place / "state.safetensors")
    said = cli("resume", halfway, "-q").sentence()
    assert "no checkpoint is intact" in said
    assert f"delete {halfway / 'checkpoint'}, and resume starts from the first round" in said
    shutil.rmtree(halfway / "checkpoint")
    assert cli("resume", halfway, "-q").code == 0
    assert [r["round"] for r in metrics(halfway)] == [1, 2, 3]


@pytest.mark.filterwarnings("default:.*using the checkpoint before it")
def test_a_damaged_checkpoint_is_not_kept_in_place_of_a_whole_one(cli, halfway, monkeypatch):
    def stop(self, **kw):
        raise fs.RunError("stopped before its first round.")

    flip(halfway / "checkpoint/000002/state.safetensors")
    monkeypatch.setattr(loop.Stack, "step", stop)
    assert cli("resume", halfway, "-q").code == 2
    assert [p.name for p in (halfway / "checkpoint").iterdir()] == ["000001"]


@pytest.mark.filterwarnings("default:.*using the checkpoint before it")
def test_a_damaged_checkpoint_of_one_run_does_not_stop_a_comparison(cli, tmp_path):
    out = tmp_path / "c"
    assert cli("compare", *TINY, "--methods", "local,fedavg", "--rounds", 2, "--out", out).code == 0
    before = metrics(out / "local-seed0")
    (out / "local-seed0" / "summary.json").unlink()
    manifest(out / "local-seed0").unlink()
    manifest(out / "fedavg-seed0").unlink()  # of a finished run it does no harm
    assert cli("resume", out, "-q").code == 0
    assert metrics(out / "local-seed0") == before
    assert cli("report", out).code == 0


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_refused_with_the_files_name(cli, halfway, damage):
    hurt, said = DAMAGE[damage]
    hurt(halfway)
    assert said in cli("resume", halfway, "-q").sentence()
    assert not (halfway / "summary.json").exists()


def test_a_configuration_that_was_changed_is_to_be_put_back_and_nothing_deleted(cli, halfway):
    method = read_json(halfway / "config.json", "")["method"]
    edit(halfway / "config.json", seed=5, method={**method, "limit": 0.7})
    said = cli("resume", halfway, "-q").sentence()
    assert (
        f"000002 has another configuration (limit was 0.3, is 0.7, seed was 0, is 5); restore {halfway / 'config.json'}" in said
    )
    assert "delete" not in said
    reseal(manifest(halfway).parent, without="config")  # as checkpoints were at first
    assert "(config.json was changed since); restore " in cli("resume", halfway, "-q").sentence()
    edit(halfway / "config.json", seed=0, method=method)
    assert cli("resume", halfway, "-q").code == 0


def as_of_a_version_without(option, run):
    """The run as one that did not know an option of its method yet would have left it."""

    def without(config):
        return {**config, "method": {k: v for k, v in config["method"].items() if k != option}}

    for place in snapshots.places(run / "checkpoint"):
        config = without(snapshots.manifest(place, "")["config"])
        reseal(place, config=config, run=checkpoint.identity(config))
    config = read_json(run / "config.json", "")
    (run / "config.json").write_text(json.dumps(without(config)))


def test_a_run_that_an_earlier_version_began_goes_on(cli, halfway, tmp_path):
    assert cli("run", "--config", halfway / "config.json", "-q", "--out", tmp_path / "whole").code == 0
    as_of_a_version_without("server_average", halfway)
    assert cli("resume", halfway, "-q").code == 0
    assert metrics(halfway) == metrics(tmp_path / "whole")
    assert cli("report", halfway).code == 0  # its last checkpoint knows the option, its config.json does not
    as_of_a_version_without("server_average", halfway)
    assert cli("export", halfway, "--client", 0).code == 0


def test_an_option_that_came_later_must_be_as_it_was_without_it(cli, halfway):
    as_of_a_version_without("first", halfway)
    method = read_json(halfway / "config.json", "")["method"]
    edit(halfway / "config.json", method={**method, "first": 5})
    assert "000002 has another configuration (first was 0, is 5); restore " in cli("resume", halfway, "-q").sentence()


def test_a_run_with_another_optimizer_and_a_schedule_is_read_back(cli, tmp_path):
    flags = ("--optimizer", "adamw", "--weight-decay", 0.01, "--schedule", "cosine", "--warmup", 1, "--rounds", 2, "--lr", 0.01)
    assert cli("run", *TINY, "--method", "fedavg", *flags, "-q", "--out", tmp_path / "a").code == 0
    training = read_json(tmp_path / "a" / "config.json", "")["training"]
    assert (training["optimizer"], training["schedule"], training["warmup"]) == ("adamw", "cosine", 1)
    whole = metrics(tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    assert cli("resume", tmp_path / "a", "-q").code == 0
    assert metrics(tmp_path / "a") == whole


def test_a_falling_rate_says_which_schedule_it_means(cli):
    said = cli("run", *TINY, "--decay", 0.98).sentence()
    assert "does not use decay" in said
    assert "(--schedule step --decay 0.98)" in said


@pytest.mark.parametrize("command", ["resume", "report"])
def test_a_configuration_that_was_changed_after_the_run_is_refused(cli, done, command):
    edit(done / "config.json", rounds=3, device="cpu")
    assert "000002 has another configuration (rounds was 2, is 3); restore " in cli(command, done).sentence()
    edit(done / "config.json", rounds=2)  # where it ran does not matter
    assert cli(command, done).code == 0


def test_a_comparison_says_so_before_it_goes_on(cli, tmp_path):
    assert cli("compare", *TINY, "--methods", "local,fedavg", "--rounds", 1, "--out", tmp_path / "c").code == 0
    edit(tmp_path / "c" / "local-seed0" / "config.json", rounds=3)
    (tmp_path / "c" / "fedavg-seed0" / "summary.json").unlink()
    assert "(rounds was 1, is 3)" in cli("resume", tmp_path / "c", "-q").sentence()
    assert not (tmp_path / "c" / "fedavg-seed0" / "summary.json").exists()


def test_a_comparison_never_throws_away_what_was_trained_with_another_configuration(cli, tmp_path):
    out = tmp_path / "c"
    assert cli("compare", *TINY, "--methods", "local,fedavg", "--rounds", 2, "--out", out).code == 0
    (out / "local-seed0" / "summary.json").unlink()
    shutil.rmtree(out / "fedavg-seed0")  # it would run first
    asked = read_json(out / "compare.json", "")
    edit(out / "compare.json", **{name: {**config, "rounds": 3, "device": "cpu"} for name, config in asked.items()})
    kept = {p: p.read_bytes() for p in (out / "local-seed0").rglob("*") if p.is_file()}
    said = cli("resume", out, "-q").sentence()
    assert f"(rounds was 2, is 3); restore the original {out / 'compare.json'}, or remove {out / 'local-seed0'} to" in said
    assert {p: p.read_bytes() for p in kept} == kept
    assert not (out / "fedavg-seed0").exists()
    edit(out / "compare.json", **{name: {**config, "device": "cpu"} for name, config in asked.items()})  # where it runs is free
    assert cli("resume", out, "-q").code == 0
    assert (out / "local-seed0" / "metrics.jsonl").read_bytes() == kept[out / "local-seed0" / "metrics.jsonl"]


@pytest.mark.parametrize("command", ["resume", "report"])
@pytest.mark.parametrize("text", ['{"method', "{}"], ids=["half of it", "nothing in it"])
def test_a_damaged_summary_says_how_to_mend_it(cli, done, command, text):
    whole = read_json(done / "summary.json", "")
    (done / "summary.json").write_text(text)
    assert cli(command, done).sentence().endswith(f"delete it, then: fedselect resume {done}\n")
    (done / "summary.json").unlink()
    assert cli("resume", done, "-q").code == 0
    assert {**read_json(done / "summary.json", ""), "date": whole["date"]} == whole


def test_a_damaged_list_of_clients_is_written_anew_or_can_be_spared(cli, halfway):
    place = halfway / "federation.json"
    whole = place.read_bytes()
    place.write_bytes(whole[:40])
    assert cli("resume", halfway, "-q").code == 0
    assert place.read_bytes() == whole
    place.write_bytes(whole[:40])
    assert cli("report", halfway).sentence().endswith("delete it; clients are then listed by number.\n")
    place.unlink()
    assert cli("report", halfway).code == 0


def test_a_lost_newline_does_not_glue_two_rounds_together(cli, halfway):
    cut_newline(halfway)
    assert cli("resume", halfway, "-q").code == 0
    assert [r["round"] for r in metrics(halfway)] == [1, 2, 3]


def test_report_of_damaged_metrics_names_the_file(cli, done):
    (done / "metrics.jsonl").write_text((done / "metrics.jsonl").read_text()[:-40])
    assert "metrics.jsonl" in cli("report", done).sentence()


def test_numbers_that_explode_stop_the_run_at_its_last_checkpoint(cli, tmp_path):
    # decay 1 at rate 1e6 multiplies every weight by about -1e6 a step, one step a round: past float32's 3e38 in seven
    args = ("--method", "fedavg", "--lr", "1e6", "--weight-decay", 1, "--momentum", 0, "--epochs", 1)
    said = cli("run", *TINY, *args, "--rounds", 20, "--out", tmp_path / "a").sentence()
    found = re.match(r"error: client \d, round (\d): 1\.weight is no longer finite; lower the learning rate", said)
    assert found, said
    kept = max(p.name for p in (tmp_path / "a" / "checkpoint").iterdir())  # how many there are is a matter of time
    assert 1 <= int(kept) < int(found[1]) <= 7
    assert cli("resume", tmp_path / "a", "-q").sentence() == said  # the same client, round and tensor
    why = said.removeprefix("error: ")
    assert cli("report", tmp_path / "a").sentence() == f"error: every run diverged; fedavg, seed 0: {why}"
    assert (
        cli("export", tmp_path / "a", "--client", 0).sentence()
        == f"error: {tmp_path / 'a'} diverged, so it has no model: {why}"
    )
    assert not (tmp_path / "a" / "client-0.safetensors").exists()


@pytest.mark.parametrize("seeds", ["0", "0,1"])
def test_a_run_that_diverges_does_not_stop_the_others(cli, tmp_path, seeds):
    args = ("--methods", "fedavg,local", "--fedavg.lr", 1e38, "--seeds", seeds, "--rounds", 1)
    said = cli("compare", *TINY, *args, "--out", tmp_path / "c")
    assert said.code == 0
    assert "fedavg, seed 0 diverged: client 0, round 1: 1.weight is no longer finite" in said.out
    assert (
        f"to retry a diverged run: fedselect resume {tmp_path / 'c' / 'fedavg-seed0'} (on a CPU it will diverge again)\n"
        in said.out
    )
    assert re.search(r"^ *fedavg +diverged *$", said.out, re.MULTILINE)
    assert said.err == f"note: {len(seeds.split(','))} of {2 * len(seeds.split(','))} runs diverged.\n"
    assert cli("resume", tmp_path / "c", "-q") == said


def test_a_run_that_failed_is_tried_again_by_its_own_name(cli, tmp_path, monkeypatch):
    step = loop.Stack.step
    with monkeypatch.context() as once:  # a GPU that rounds otherwise the next time
        bad = fs.TrainingError("client 0, round 1: 1.weight is no longer finite.")
        once.setattr(loop.Stack, "step", lambda self, **kw: [bad, *step(self, **kw)[1:]])
        assert cli("sweep", *TINY, "--lr", "0.1,0.2", "--rounds", 1, "--out", tmp_path / "s").code == 0
    failed = tmp_path / "s" / "fedselect-lr=0.1-seed0"
    assert cli("resume", failed, "-q").code == 0
    assert not (failed / "failed.json").exists()
    said = cli("resume", tmp_path / "s", "-q").out
    assert "fedselect lr=0.1 " in said
    assert "diverged" not in said


def test_a_setting_that_is_left_of_a_sweep_keeps_its_name(cli, tmp_path):
    said = cli("sweep", *TINY, "--lr", "0.1,1e38", "--rounds", 1, "--out", tmp_path / "s").out
    assert "fedselect lr=0.1 " in said
    assert "fedselect lr=1e+38, seed 0 diverged: client 0, round 1" in said


def test_of_seeds_those_that_came_to_their_end_make_the_row(cli, tmp_path):
    out = tmp_path / "c"
    assert cli("compare", *TINY, "--methods", "local,fedavg", "--seeds", "0,1", "--rounds", 1, "--out", out).code == 0
    (out / "local-seed1" / "summary.json").unlink()
    (out / "local-seed1" / "failed.json").write_text('{"why": "it had to"}')
    said = cli("resume", out, "-q")
    assert "2 seeds" in said.out
    assert "local, seed 1 diverged: it had to" in said.out
    assert not re.search(r"local +diverged", said.out)
    assert re.search(r"local, 1 of 2 seeds +\d", said.out)
    assert re.search(r"fedavg +\d", said.out)
    assert said.err == "note: 1 of 4 runs diverged.\n"
    rows = {r.method: r for r in tables.rows([out / f"{m}-seed{s}" for m in ("local", "fedavg") for s in (0, 1)])}
    assert [rows[m].asked - len(rows[m].seeds) for m in ("local", "fedavg")] == [1, 0]
    assert "\nlocal,1,2," in tables.as_csv([*rows.values()], ["lost"])
    assert tables.as_csv([*rows.values()], ["lost"]).endswith("\nlost,0,,,,,,,,,\n")
    assert "local, 1 of 2 seeds & " in tables.as_latex([*rows.values()], ["lost"])
    assert "\nlost & diverged & " in tables.as_latex([*rows.values()], ["lost"])
    assert {g["label"]: g["lost"] for g in gather([out])["groups"]} == {"local": 1, "fedavg": 0}


def test_a_table_says_what_its_bytes_are_of(cli, done):
    assert "MB up: uploads of all clients in the whole run" in " ".join(cli("resume", done, "-q").out.split())


def test_where_all_diverge_there_is_nothing_to_show(cli, tmp_path):
    said = cli("sweep", *TINY, "--lr", "1e37,1e38", "--method", "fedavg", "--rounds", 1, "--out", tmp_path / "s").sentence()
    assert "every run diverged; fedavg-lr=1e37-seed0: client 0, round 1" in said
    assert cli("resume", tmp_path / "s", "-q").sentence() == said


def test_an_error_in_the_api_is_the_same_error(digits):
    with pytest.raises(fs.TrainingError, match=r"client 0, round 1: 1\.weight is no longer finite"):
        fs.run(fs.FedAvg(lr=1e30), model=fs.models.mlp(digits), data=digits, rounds=1, training=fs.Training(weight_decay=1e30))


# ---- a run's file for another command


def test_the_file_of_a_run_keeps_its_method_and_seed_in_a_comparison_and_a_sweep(cli, tmp_path):
    assert cli("run", *TINY, "--rounds", 1, "--limit", 0.7, "--seed", 5, "--out", tmp_path / "a").code == 0
    file = ("--config", tmp_path / "a" / "config.json")
    assert cli("compare", *file, "--out", tmp_path / "b", "-q").code == 0
    assert cli("compare", *file, "--methods", "fedselect,local", "--out", tmp_path / "c", "-q").code == 0
    assert cli("sweep", *file, "--lr", "0.1,0.2", "--out", tmp_path / "d", "-q").code == 0
    made = {p.parent.name: read_json(p, "") for part in "bcd" for p in (tmp_path / part).glob("*/config.json")}
    assert set(made) == {"fedselect-seed5", "local-seed5", "fedselect-lr=0.1-seed5", "fedselect-lr=0.2-seed5"}
    assert {c["method"]["limit"] for c in made.values() if c["method"]["name"] == "fedselect"} == {0.7}
    assert {c["seed"] for c in made.values()} == {5}


def test_a_run_on_held_out_data_is_not_called_one_on_test_data(cli, tmp_path):
    assert cli("run", *TINY, "--rounds", 1, "--val", 5, "--score", "val", "--out", tmp_path / "a").code == 0
    said = cli("export", tmp_path / "a", "--client", 0)
    assert said.code == 0
    assert "on the validation data of client 0" in said.out


def test_tables_in_a_pipe_are_whole(tmp_path):
    command = [
        *FEDSELECT,
        "sweep",
        *TINY,
        "--rounds",
        "1",
        "--lr",
        "0.1,0.2",
        "--rate",
        "0.1,0.2",
    ]
    plain = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    said = call(*command, "--out", tmp_path / "a", env=plain)
    assert said.returncode == 0, said.stderr
    assert "…" not in said.stdout


def test_on_the_way_to_a_run_a_configuration_is_parsed_once_and_a_method_built_once(cli, tmp_path, monkeypatch):
    done = []

    def counted(what, function):
        return functools.wraps(function)(lambda *given, **named: done.append(what) or function(*given, **named))

    monkeypatch.setattr(Config, "complete", counted("parsed", Config.complete))
    monkeypatch.setitem(METHODS, "fedavg", counted("built", METHODS["fedavg"]))
    assert cli("run", "--method", "fedavg", "--rounds", 1, "--out", tmp_path / "run").code == 0
    assert sorted(done) == ["built", "parsed"]
