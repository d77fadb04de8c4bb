"""fedselect reproduce: runs what is missing, once, whoever asks and however often it is interrupted."""

import csv
import json
import re
import shutil
import signal

import pytest
from children import FEDSELECT, PATIENCE, Children, until

from fedselect.core.files import read_json

SMALL = ("--columns", "digits", "--scale", "0.2", "--device", "cpu")
TINY = ("reproduce", "table1", *SMALL, "--rounds", "2", "--seeds", "0,1", "--methods", "fedselect,local")
LONG = ("reproduce", "table1", *SMALL, "--rounds", "30", "--seeds", "0,1", "--methods", "fedselect", "--rates", "paper")
SHARED = ("reproduce", "table1", *SMALL, "--rounds", "10", "--methods", "local,fedavg,fedper", "--rates", "paper")


MAIN = "from fedselect.cli import main; main()"


@pytest.fixture
def start(fork):
    """The command line in a process of its own."""
    return lambda *args: fork(MAIN, *args)


def made_at(out, *args):
    """A command that comes to its end; what it printed."""
    with Children() as children:
        process = children.fork(MAIN, *args, "--out", out)
        said, err = process.communicate()
    assert process.returncode == 0, err
    return said


def rounds_run(out):
    """How far the run is that is farthest."""
    return max((p.read_bytes().count(b"\n") for p in out.glob("cells/*/metrics.jsonl")), default=0)


def outcome(out):
    """All that must not depend on interruptions, run by run."""
    found = {}
    for run in sorted((out / "cells").iterdir()):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        metrics = [{k: v for k, v in line.items() if k not in ("seconds", "crc32")} for line in lines]
        found[run.name] = metrics, (run / "masks.jsonl").read_bytes()
    return found


def configs(out):
    return [{**json.loads(p.read_text()), "place": p.parent} for p in out.glob("cells/*/config.json")]


def times(out):
    """When each file of each run was written last; locks are touched by looking."""
    return {p: p.stat().st_mtime_ns for p in (out / "cells").rglob("*") if p.is_file() and p.name != ".lock"}


# ---- what it does


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small table with tuned rates, and what was printed."""
    out = tmp_path_factory.mktemp("reproduce") / "r"
    return out, made_at(out, *TINY)


def test_it_prints_our_numbers_and_writes_the_same(made):
    out, said = made
    assert "16/16 runs" in said  # nine and three trials, and two methods with two seeds
    assert "scaled to 0.2, 2 rounds, not comparable" in re.sub(r"\s+", " ", said)
    assert "Wilcoxon signed-rank" in said
    rows = list(csv.DictReader((out / "table1-scaled-0.2-rounds-2.csv").read_text().splitlines()))
    assert [r["row"] for r in rows] == ["Local Only", "FedSelect"]
    detail = json.loads((out / "table1-scaled-0.2-rounds-2.json").read_text())
    for row, told in zip(rows, detail["columns"][0]["rows"], strict=True):
        summaries = [json.loads((out / "cells" / run / "summary.json").read_text()) for run in told["runs"]]
        assert [s["seed"] for s in summaries] == [0, 1]
        assert {s["score"] for s in summaries} == {"test"}
        assert told["tail"] == [pytest.approx(100 * s["accuracy_tail"], abs=1e-3) for s in summaries]
        assert told["curve"][0][-1] == pytest.approx(100 * summaries[0]["accuracy"], abs=1e-2)
        assert detail["environments"] == [summaries[0]["environment"]]
        assert detail["date"] >= summaries[0]["date"]
        assert float(row["mean"]) == pytest.approx(50 * sum(s["accuracy"] for s in summaries), abs=1e-3)
        assert f"{float(row['mean']):.2f}" in said
    assert r"\bottomrule" in (out / "table1-scaled-0.2-rounds-2.tex").read_text()


def test_rates_are_those_that_did_best_on_validation_data_and_are_saved(made):
    out, _ = made
    tuned = read_json(out / "tuned.json", "")
    detail = json.loads((out / "table1-scaled-0.2-rounds-2.json").read_text())["columns"][0]["rows"]
    for (name, entry), row in zip(sorted(tuned.items()), sorted(detail, key=lambda r: r["row"]), strict=True):
        assert "not comparable" in name
        runs = [out / "cells" / run for t in entry["trials"] for run in t["runs"]]
        summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
        assert {(s["score"], s["seed"]) for s in summaries} == {("val", 100)}
        assert [t["accuracy"] for t in entry["trials"]] == [pytest.approx(s["accuracy_tail"], abs=1e-6) for s in summaries]
        best = max(entry["trials"], key=lambda t: t["accuracy"])["options"]
        for run in row["runs"]:
            config = json.loads((out / "cells" / run / "config.json").read_text())
            assert {k: config["method"][k] for k in best} == entry["chosen"] == best


def test_a_second_call_trains_nothing(made, cli):
    out, _ = made
    before = times(out)
    said = cli(*TINY, "--out", out)
    assert said.code == 0
    assert "table1, digits" in said.out
    assert times(out) == before


def test_more_seeds_run_only_what_is_new(made, cli):
    out, _ = made
    before = times(out)
    listed = cli(*TINY, "--seeds", "0,1,2", "--out", out, "--dry-run").out
    assert re.search(r"total +18 runs, 16 complete, 4 rounds to run", listed)
    assert times(out) == before  # it only said so
    said = cli(*TINY, "--seeds", "0,1,2", "--out", out)
    assert "2/2 runs" in said.out
    assert before.items() <= times(out).items()


def test_rows_that_are_there_show_before_all_are(cli, tmp_path):
    args = (*SMALL, "--rounds", 2, "--seeds", "0,1", "--rates", "paper", "--out", tmp_path)
    assert "table1: no row is complete yet" in cli("reproduce", "table1", *args, "--there").out
    assert not list(tmp_path.glob("table1*"))
    assert cli("reproduce", "table1", *args, "--methods", "local,fedselect", "-q").code == 0
    (gone,) = [c for c in configs(tmp_path) if (c["method"]["name"], c["seed"]) == ("local", 1)]
    shutil.rmtree(gone["place"])
    before = times(tmp_path)
    tuned = [a for a in args if a not in ("--rates", "paper")]
    assert "table1: no row is complete yet" in cli("reproduce", "table1", *tuned, "--there").out  # nothing was tuned
    said = cli("reproduce", "table1", *args, "--there").out
    assert times(tmp_path) == before
    assert "FedSelect" in said
    assert "Local Only" not in said  # of one seed alone
    assert (
        json.loads((tmp_path / "table1-paper-rates-scaled-0.2-rounds-2.json").read_text())["columns"][0]["rows"][0]["rank"] == 1
    )
    sizes = ("reproduce", "fig-data-size", *args, "--methods", "fedavg,fedselect")
    assert cli(*sizes, "-q").code == 0
    shutil.rmtree(next(c["place"] for c in configs(tmp_path) if c["method"]["name"] == "fedavg"))
    assert cli(*sizes, "--there").code == 0


def test_a_figure_takes_the_runs_of_its_table(cli, tmp_path):
    args = (*SMALL, "--rounds", 2, "--seeds", 0, "--rates", "paper", "--out", tmp_path, "-q")
    assert cli("reproduce", "table2", *args).code == 0
    before = times(tmp_path)
    said = cli("reproduce", "fig-iou", *args)
    assert said.code == 0
    assert times(tmp_path) == before
    name = "fig-iou-digits-paper-rates-scaled-0.2-rounds-2"
    assert {p.suffix for p in tmp_path.glob(f"{name}.*")} == {".pdf", ".png"}
    told = json.loads((tmp_path / "fig-iou-paper-rates-scaled-0.2-rounds-2.json").read_text())["overlap"]
    assert [o["row"][-7:-1] for o in told] == ["α=0.05", "α=0.30", "α=0.50", "α=0.80"]
    for o in told:
        assert len(o["iou"]) == len(o["iou"][0]) == len(o["clients"])
        assert o["layer"].endswith(".weight")
    for target, name in (("fig-convergence", "fig-convergence-digits"), ("fig-data-size", "fig-data-size-digits")):
        assert cli("reproduce", target, *args, "--methods", "fedselect,fedavg").code == 0
        assert len(list(tmp_path.glob(f"{name}-*.p*"))) == 2
    for target, part in (("fig-iou", "masks"), ("fig-convergence", "metrics")):  # as outcomes from elsewhere are
        for file in tmp_path.glob(f"cells/*/{part}.jsonl"):
            file.unlink()
        said = cli("reproduce", target, *args, "--methods", "fedselect")
        assert said.code == 2
        assert f"has a summary but no {part}; remove that folder to run it again" in said.err


def test_a_target_of_ours_is_scored_on_held_out_data_with_seeds_of_its_own(cli, tmp_path):
    said = cli("reproduce", "readings", *SMALL, "--rounds", 1, "--out", tmp_path)
    assert said.code == 0
    assert "rates set by each row" in re.sub(r"\s+", " ", said.out)
    told = json.loads((tmp_path / "readings-scaled-0.2-rounds-1.json").read_text())
    assert {tuple(r["seeds"]) for r in told["columns"][0]["rows"]} == {(100, 101, 102)}
    assert {json.loads(p.read_text())["score"] for p in tmp_path.glob("cells/*/summary.json")} == {"val"}
    assert not (tmp_path / "tuned.json").exists()


# ---- shared and interrupted


def test_two_processes_never_run_a_cell_twice(start, tmp_path):
    both = [start(*SHARED, "--out", tmp_path) for _ in range(2)]
    said = [p.communicate() for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    own = [[line.split()[7] for line in out.splitlines() if " runs  " in line and "another" not in line] for out, _ in said]
    assert sorted(own[0] + own[1]) == sorted(p.name[:6] for p in (tmp_path / "cells").iterdir())
    assert len(own[0] + own[1]) == 9
    tables = [out[out.index("table1, digits") :] for out, _ in said]
    assert tables[0] == tables[1]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    made_at(out, *LONG)
    return outcome(out)


def test_another_process_goes_on_with_what_a_killed_one_had_taken(start, spawn, tmp_path, unbroken):
    first = start(*LONG, "--out", tmp_path)
    until(lambda: rounds_run(tmp_path) >= 8, first, pause=0.002)
    first.send_signal(signal.SIGSTOP)  # it holds what it has taken, and gets no further
    second = spawn(*FEDSELECT, *LONG, "--out", tmp_path)
    while "waiting for" not in (line := second.stdout.readline()):
        assert line, second.communicate()
    first.kill()
    first.communicate()
    said = second.communicate(timeout=PATIENCE)
    assert (first.returncode, second.returncode) == (-signal.SIGKILL, 0), said
    assert outcome(tmp_path) == unbroken


def test_ctrl_c_stops_after_the_round_and_the_same_command_goes_on(cli, start, tmp_path, unbroken):
    process = start(*LONG, "--out", tmp_path)
    until(lambda: rounds_run(tmp_path) >= 4, process, pause=0.002)
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    assert process.returncode == 130
    assert "Traceback" not in err
    assert re.search(r"stopped after round \d+ of 30; run the same command again to continue\.\n$", err)
    assert outcome(tmp_path) != unbroken
    assert cli(*LONG, "--out", tmp_path, "-q").code == 0
    assert outcome(tmp_path) == unbroken


# ---- what it says to bad input


@pytest.mark.parametrize(("args", "said"), [
    (("tabel1",), "did you mean 'table1'"),
    (("table1", "--columns", "cifar11"), "there is no column 'cifar11'"),
    (("alpha", "--columns", "miniimagenet"), "there is no column miniimagenet; choose one of cifar10, cifar10c"),
    (("plain", "--columns", "digits"), "plain: there is no column digits; choose one of cifar10, cifar10c."),
    (("stem", "--columns", "digits"), "stem: there is no column digits; choose one of cifar10."),
    (("table1", "--methods", "lotteryfl", "--columns", "digits"), "there is no row of method 'lotteryfl'"),
    (("table1", "--scale", "2"), "must be greater than 0 and at most 1"),
    (("table1", "--seeds", "a"), "seeds must be whole numbers"),
    (("table1", "--rates", "best"), "rates must be paper or tuned"),
    (("table1", "--seeds", "100"), "seed 100 is reserved for tuning"),
    (("table1", "--rounds", "0"), "rounds must be at least 1"),
    (("table1", "--columns", ""), "--columns names no data set"),
    (("table1", "--out", __file__), "is a file; choose a folder as --out"),
    (("table1", "--columns", "cifar10"), "the data is missing"),
    (("fig-iou",), "there is no data for fig-iou"),
    (("table1", "--columns", "digits", "--device", "tpu"), "device must be auto, cpu, cuda or one GPU"),
])  # fmt: skip
def test_a_wrong_input_is_one_sentence(cli, tmp_path, monkeypatch, args, said):
    monkeypatch.setenv("FEDSELECT_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = cli("reproduce", "--out", tmp_path / "r", *args)
    assert said in done.sentence()
    assert not list((tmp_path / "r").rglob("summary.json"))


@pytest.mark.parametrize("file", ["config.json", "compare.json"])
def test_nothing_is_written_into_a_run(cli, tmp_path, file):
    (tmp_path / file).write_text("{}")
    said = cli("reproduce", "table1", "--columns", "digits", "--out", tmp_path, "--scale", 0.1).sentence()
    assert f"{tmp_path} is already a run or a comparison" in said
    assert [p.name for p in tmp_path.iterdir()] == [file]
