"""The report: what the page says, in a real browser; its figures and tables as files."""

import csv
import dataclasses
import json
import re
import shutil
import statistics
import sys
from itertools import pairwise

import pytest
from browser import Browser, Chromium

from fedselect.core.errors import RunError
from fedselect.core.files import read_json
from fedselect.report import gather, page, write_report
from fedselect.report.figures import _dots
from fedselect.report.runs import distinct
from fedselect.runs import rundir, runner, tables
from fedselect.runs.config import Config
from fedselect.runs.labels import looks
from fedselect.runs.masks import unpack

METHODS = {"fedselect": {"limit": 0.4, "rate": 0.2}, "local": {}, "fedavg": {}}
FIGURES = ["convergence", "gains", "sides", "bytes", "shares", "overlap", "cross"]


def config(method, seed, **options):
    return Config.from_dict(
        {
            "method": {"name": method, **(options or METHODS[method])},
            "data": {"name": "digits", "clients": 4, "classes_per_client": 3, "train": 20, "test": 10, "val": 0},
            "model": {"name": "mlp", "hidden": 8},
            "rounds": 4,
            "seed": seed,
            "cross": True,
        },
        "test",
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Three methods with two seeds each."""
    out = tmp_path_factory.mktemp("report") / "c"
    runs = {f"{m}-seed{s}": config(m, s) for m in METHODS for s in (0, 1)}
    runner.start_comparison(runner.Comparison(runs), out)
    return out


def summaries(out, method):
    return [read_json(out / f"{method}-seed{s}" / "summary.json", "") for s in (0, 1)]


# ---- without a browser


def test_the_page_holds_all_it_needs(compared):
    text = write_report([compared]).read_text()
    own = re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", text, count=1, flags=re.S)
    assert len(own) < len(text) / 5  # plotly is in the page
    assert not re.search(r"""(src|href)=["']?(http|//)|@import|url\(|<script src""", own)  # and nothing is fetched


def test_text_from_a_run_cannot_become_part_of_the_page(compared):
    data = gather([compared])
    data["title"] = data["groups"][0]["label"] = "</script><script>alert(1)</script>"
    assert "<script>alert(1)" not in page(data)


def test_it_gathers_what_the_runs_recorded(compared):
    data = gather([compared])
    assert [g["label"] for g in data["groups"]] == list(METHODS)
    assert len(data["runs"]) == 6
    for run in data["runs"]:
        method = data["groups"][run["group"]]["label"]
        said = read_json(compared / f"{method}-seed{run['seed']}" / "summary.json", "")
        assert run["last"]["value"] == said["clients"]
        assert (run["up"][-1], run["down"], run["cross"]) == (said["bytes_up"], said["bytes_down"], said["cross"])
        assert sum(run["clients"]["up"][-1]) == said["bytes_up"]
        assert bool(run["iou"]) == (method == "fedselect")
    assert data["environments"] == [said["environment"]]


def test_several_directories_make_one_page_and_settings_are_told_apart(compared, cli, tmp_path, monkeypatch):
    runner.start(config("fedselect", 0, limit=0.1), tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert cli("report", compared, "other").out == "wrote report.html\n"
    assert [g["label"] for g in gather([compared, tmp_path / "other"])["groups"]] == [
        "fedselect rate=0.2, limit=0.4", "local", "fedavg", "fedselect rate=0.05, limit=0.1",
    ]  # fmt: skip
    assert (tmp_path / "report.html").stat().st_size > 1e6


@pytest.mark.filterwarnings("default")
def test_the_same_configuration_and_seed_counts_once(compared, cli, tmp_path):
    runner.start(dataclasses.replace(config("fedselect", 0), cross=False), tmp_path / "again")
    said = cli("report", compared, tmp_path / "again", "--figures", "--out", tmp_path / "r.html")
    kept = compared / "fedselect-seed0"
    assert said.err == f"note: {tmp_path / 'again'} is skipped, because {kept} has the same configuration and seed.\n"
    assert [r["seed"] for r in gather([tmp_path / "again", compared])["runs"] if r["group"] == 0] == [0, 1]
    with (tmp_path / "figures" / "table.csv").open() as f:
        assert {r["method"]: r["seeds"] for r in csv.DictReader(f)} == dict.fromkeys(METHODS, "2")


def test_of_equal_runs_the_finished_one_is_shown(compared, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_bytes((compared / "local-seed0" / "config.json").read_bytes())
    with pytest.warns(UserWarning, match="begun is skipped"):
        assert distinct([tmp_path / "begun", compared / "local-seed0"]) == [compared / "local-seed0"]


def test_runs_scored_on_different_data_do_not_share_a_page(compared, cli, tmp_path):
    held = config("local", 0)
    runner.start(dataclasses.replace(held, data={**held.data, "val": 5}, score="val"), tmp_path / "v")
    said = cli("report", compared, tmp_path / "v", "--out", tmp_path / "r.html").sentence()
    assert (
        f"fedavg-seed1 is scored on test data, but {tmp_path / 'v'} on validation data; write a separate report for each"
        in said
    )
    assert gather([tmp_path / "v"])["scored"] == "validation"


def test_a_run_under_way_is_shown_as_far_as_it_is(compared, tmp_path):
    run = tmp_path / "a"
    run.mkdir()
    for name in ("config.json", "federation.json"):
        (run / name).write_bytes((compared / "fedselect-seed0" / name).read_bytes())
    for name in ("metrics.jsonl", "masks.jsonl"):  # two rounds, and half of the third
        lines = (compared / "fedselect-seed0" / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:2]) + lines[2][:30])
    (shown,) = gather([run])["runs"]
    assert (shown["round"], shown["rounds"], shown["finished"]) == ([1, 2], 4, False)
    assert [r for r, _ in shown["shares"]] == [1, 2]


def test_the_view_that_counts_is_not_guessed_from_equal_numbers(compared, tmp_path):
    """FedAvg reports the merged model, also where both views score alike; of older runs the numbers tell."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_bytes((compared / "fedavg-seed0" / "config.json").read_bytes())
    (line,) = rundir.read_records(compared / "fedavg-seed0" / "metrics.jsonl")[-1:]
    line |= {"round": 1, "accuracy_local": line["accuracy"]}
    line["clients"]["accuracy_local"] = line["clients"]["accuracy"]
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    summary = {**summaries(compared, "fedavg")[0], "accuracy_local": line["accuracy"]}
    older = {k: v for k, v in summary.items() if k != "view"}
    for said, view in ((summary, "merged"), (older, "local")):
        (run / "summary.json").write_text(json.dumps(said))
        assert gather([run])["runs"][0]["view"] == tables.rows([run])[0].reports == view


def test_a_run_without_records_of_masks_still_has_a_report(compared, tmp_path):
    run = tmp_path / "old"
    run.mkdir()
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        (run / name).write_bytes((compared / "fedselect-seed0" / name).read_bytes())
    data = gather([run])
    assert (data["runs"][0]["shares"], data["federations"][0]["layers"]) == ([], {})
    assert [c["name"] for c in data["federations"][0]["clients"]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("name", ["x.pdf", "x"])
def test_the_page_is_html_and_figures_make_pdfs(cli, compared, tmp_path, name):
    said = cli("report", compared, "--out", tmp_path / name).sentence()
    assert f"the report is an .html page, not '{name}'; to also write figures as PDF and PNG, pass --figures" in said
    assert not (tmp_path / name).exists()


def test_bad_input_gets_one_sentence(cli, compared, tmp_path):
    assert "there is no run directory" in cli("report", tmp_path / "no").sentence()
    assert "cannot be written" in cli("report", compared, "--out", tmp_path / "no" / "r.html").sentence()
    (tmp_path / "mine.html").mkdir()
    (tmp_path / "mine.html" / "thesis.tex").write_text("years of work")
    assert "cannot be written (Is a directory)" in cli("report", compared, "--out", tmp_path / "mine.html").sentence()
    assert (tmp_path / "mine.html" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_bytes((compared / "local-seed0" / "config.json").read_bytes())
    finish = f"continue with: fedselect resume {tmp_path / 'begun'}\n"
    assert cli("report", tmp_path / "begun").sentence().endswith(f"nothing was evaluated yet; {finish}")
    (tmp_path / "begun" / "summary.json").write_bytes((compared / "local-seed0" / "summary.json").read_bytes())
    again = f" again with: fedselect run --config {tmp_path / 'begun' / 'config.json'}"
    assert again in cli("report", tmp_path / "begun").sentence()  # a run of a table that came from another machine
    assert again in cli("export", tmp_path / "begun", "--client", 0, "--out", tmp_path / "m.safetensors").sentence()


def test_a_missing_package_is_named(cli, compared, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "a report needs plotly; install it with" in cli("report", compared, "--out", tmp_path / "r.html").sentence()
    assert "a report needs plotly" in cli("run", "--watch", "--out", tmp_path / "a").sentence()
    assert not (tmp_path / "a").exists()


def test_figures_and_tables_are_files_too(cli, compared):
    assert cli("report", compared, "--figures").code == 0
    folder = compared / "figures"
    drawn = ["bytes", "clients", "convergence", "cross-fedavg", "cross-fedselect", "cross-local", "overlap-fedselect"]
    assert sorted(p.name for p in folder.glob("*.pdf")) == [f"{n}.pdf" for n in [*drawn, "shares-fedselect"]]
    for path in folder.glob("*.pdf"):
        assert path.read_bytes()[:5] == b"%PDF-"
        assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    with (folder / "table.csv").open() as f:
        rows = {r["method"]: r for r in csv.DictReader(f)}
    wanted = statistics.fmean(s["accuracy"] for s in summaries(compared, "fedselect"))
    assert float(rows["fedselect"]["accuracy"]) == pytest.approx(wanted, abs=1e-6)
    assert (folder / "table.tex").read_text().count(r" \\") == 1 + len(METHODS)
    with (folder / "clients.csv").open() as f:
        assert len(list(csv.DictReader(f))) == len(METHODS) * 2 * 4
    assert rundir.is_run(compared)  # so that --overwrite may replace it


@pytest.fixture
def start(tmp_path):
    """Run a configuration into a directory of its own."""

    def begin(method, seed=0, options=None, **fields):
        made = config(method, seed, **(options or {}))
        fields = {k: {**getattr(made, k), **v} if isinstance(v, dict) else v for k, v in fields.items()}
        out = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        runner.start(dataclasses.replace(made, **fields), out)
        return out

    return begin


def partners(data):
    """Of each run: method, seed, and the label of what it is compared with."""
    labels = [data["groups"][r["group"]]["label"] for r in data["runs"]]
    return [(labels[i], r["seed"], None if r["alone"] is None else labels[r["alone"]]) for i, r in enumerate(data["runs"])]


OTHERS = {
    "rounds": {"rounds": 2},
    "data.train": {"data": {"train": 10}},
    "data.clients": {"data": {"clients": 3}},
    "model.hidden": {"model": {"hidden": 4}},
    "training.momentum": {"training": {"momentum": 0.3}},
    "fraction": {"fraction": 0.5},
}


@pytest.mark.parametrize("key", OTHERS)
def test_local_of_another_configuration_is_not_training_alone(start, key):
    data = gather([start("local", **OTHERS[key]), start("fedavg")])
    assert [r["alone"] for r in data["runs"]] == [g["alone"] for g in data["groups"]] == [None, None]
    assert data["groups"][1]["why"].endswith(
        f"is not compared with training alone, because the runs of local have other values of {key}."
    )


def test_the_right_local_run_is_taken_whatever_comes_first_and_however_it_was_executed(start):
    other, right = start("local", rounds=2), start("local", chunk=2, device="cpu", eval_every=2)
    data = gather([other, right, start("fedavg"), start("fedselect")])
    assert [r["alone"] for r in data["runs"]] == [None, None, 1, 1]
    assert [(g["alone"], g["why"]) for g in data["groups"]] == [(None, ""), (None, ""), (1, ""), (1, "")]


def test_training_alone_is_so_whatever_the_aggregator(start):
    """Also of a run from before there were any."""
    alone = start("local")
    saved = read_json(alone / "config.json", "")
    del saved["aggregate"]
    (alone / "config.json").write_text(json.dumps(saved))
    data = gather([alone, start("fedavg"), start("fedavg", aggregate={"server_momentum": 0.5})])
    assert partners(data) == [("local", 0, None), ("fedavg", 0, "local"), ("fedavg server_momentum=0.5", 0, "local")]


def test_of_several_settings_of_local_the_best_is_training_alone(start):
    places = [start("local", s, {"lr": lr}) for lr in (0.0001, 0.1, 0.001) for s in (0, 1)]
    data = gather([*places, start("fedavg", 0), start("fedavg", 1)])
    best = max(range(3), key=lambda g: statistics.fmean(r["value"][-1] for r in data["runs"] if r["group"] == g))
    assert best == 1  # neither the first nor the last
    assert data["groups"][3]["alone"] == 1
    assert partners(data)[-2:] == [("fedavg", 0, "local lr=0.1"), ("fedavg", 1, "local lr=0.1")]
    assert _dots(data).axes[0].get_xlabel() == "client accuracy against training alone (local lr=0.1), points (bar: mean)"


def test_a_seed_without_a_partner_is_left_out_of_page_and_figure(start):
    data = gather([start("fedavg", 0), start("fedavg", 1), start("local", 1), start("local", 2), start("fedselect", 0)])
    assert [r["alone"] for r in data["runs"]] == [None, 2, None, None, None]
    assert (
        data["groups"][0]["why"]
        == "fedavg is not compared with training alone on seed 0, because local has no run that reached the same round."
    )
    (axes,) = _dots(data).axes
    dots, _ = axes.collections
    own, alone = (data["runs"][i]["last"]["value"] for i in (1, 2))
    assert dots.get_offsets()[:, 0].tolist() == pytest.approx([100 * (a - b) for a, b in zip(own, alone, strict=True)])
    assert [t.get_text() for t in axes.get_yticklabels()] == ["fedavg"]


def test_figures_of_runs_with_different_numbers_of_clients(start, cli, tmp_path):
    few, many = start("local", data={"clients": 3}), start("fedavg")
    assert cli("report", few, many, "--figures", "--out", tmp_path / "r.html").code == 0
    (axes,) = _dots(gather([few, many])).axes
    assert axes.get_xlabel() == "client accuracy, % (bar: mean)"  # nothing to compare with
    assert [len(c.get_offsets()) for c in axes.collections] == [3, 1, 4, 1]


def test_a_file_of_somebody_elses_in_the_figures_is_not_ours_to_replace(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "thesis.tex").write_text("years of work")
    assert not rundir.is_run(tmp_path)


# ---- in Chromium


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    started = Chromium(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def browser(chromium, request):
    made = Browser(chromium, **getattr(request, "param", {}))
    yield made
    made.close()


def show(browser, compared):
    browser.open(write_report([compared]).as_uri(), "document.querySelectorAll('.chart .main-svg').length >= 6")
    return browser


def cell(browser, method, column):
    """A cell of the table of results, by its heading."""
    return browser.ask(f"""(() => {{
        const t = document.querySelector('#table table');
        const at = [...t.tHead.rows[0].cells].findIndex(c => c.textContent === {json.dumps(column)});
        const row = [...t.tBodies[0].rows].find(r => r.cells[0].textContent === {json.dumps(method)});
        return row.cells[at].textContent; }})()""")


VIEWS = {
    "desktop": {"width": 1200}, "phone": {"width": 390}, "dark": {"width": 1200, "dark": True},
    "dark phone": {"width": 390, "dark": True},
}  # fmt: skip


@pytest.mark.parametrize("browser", VIEWS.values(), ids=VIEWS, indirect=True)
def test_every_figure_is_drawn_without_a_complaint_and_nothing_is_wider_than_the_screen(browser, compared):
    show(browser, compared)
    drawn = browser.ask("[...document.querySelectorAll('section')].filter(s => s.querySelector('.main-svg')).map(s => s.id)")
    assert drawn == FIGURES
    assert browser.ask("document.documentElement.scrollWidth <= window.innerWidth")
    paper = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(16, 19, 23)" if browser.dark else "rgb(253, 253, 252)")
    assert browser.problems == []


def test_where_clients_keep_disagreeing_is_shown_for_runs_that_measure_it_alone(browser, compared, tmp_path):
    runner.start(config("fedpersist", 0, window=2), tmp_path / "p")
    drawn = "!document.querySelector('#persistence').hidden"
    show(browser, compared)
    assert not browser.ask(drawn)
    browser.open(write_report([tmp_path / "p"]).as_uri(), "document.querySelectorAll('.chart .main-svg').length >= 2")
    assert browser.ask(drawn)
    z = browser.ask("document.querySelector('#persistence .chart').data[0].z")
    assert z == list(read_json(tmp_path / "p" / "persistence.json", "")["persistence"].values())
    said = browser.ask("document.querySelector('#persistence figcaption').textContent")
    assert said == " ".join(gather([tmp_path / "p"])["runs"][0]["persistence"]["sentences"])
    browser.click("#persistence summary")
    browser.wait("document.querySelector('#persistence details table')")
    assert browser.problems == []


def test_who_shares_a_head_is_shown_for_runs_that_have_groups_alone(browser, compared, tmp_path):
    runner.start(config("fedalike", 0, epochs=1), tmp_path / "p")
    drawn = "!document.querySelector('#heads').hidden"
    show(browser, compared)
    assert not browser.ask(drawn)
    browser.open(write_report([tmp_path / "p"]).as_uri(), "document.querySelectorAll('.chart .main-svg').length >= 2")
    assert browser.ask(drawn)
    found = read_json(tmp_path / "p" / "groups.json", "")["groups"]
    z = browser.ask("document.querySelector('#heads .chart').data[0].z")
    assert z == [[int(own == group) for own in found] for group in dict.fromkeys(found)]
    said = browser.ask("document.querySelector('#heads figcaption').textContent")
    assert said == " ".join(gather([tmp_path / "p"])["runs"][0]["heads"]["sentences"])
    browser.click("#heads summary")
    browser.wait("document.querySelector('#heads details table')")
    assert browser.problems == []


ODD = {
    "one client, one round, nothing sent": {"method": {"name": "local"}, "clients": 1, "rounds": 1},
    "late and absent clients": {"rounds": 6, "late": "2@5", "fraction": 0.5, "eval_every": 2, "cross": True},
    "more clients than are paired": {"clients": 7, "rounds": 2},
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_runs_are_drawn_too(browser, cli, tmp_path, monkeypatch, odd):
    monkeypatch.setattr("fedselect.runs.masks.PAIRED", 6)
    fields = dict(ODD[odd])
    data = {"name": "digits", "clients": fields.pop("clients", 5), "train": 20, "test": 10, "val": 0}
    runner.start(Config.from_dict({"data": data, "model": {"name": "mlp"}, **fields}, "test"), tmp_path / "a")
    assert cli("report", tmp_path / "a", "--figures").code == 0
    browser.open((tmp_path / "a" / "report.html").as_uri(), "document.querySelector('#gains .main-svg')")
    browser.click("button[data-client='0']")
    browser.wait("location.hash === '#client=0'")
    assert browser.ask("[...document.querySelectorAll('section')].every(s => !/NaN|undefined|null/.test(s.innerText))")
    assert browser.problems == []


def test_the_page_says_what_the_runs_say(browser, compared):
    show(browser, compared)
    for method in METHODS:
        mean = statistics.fmean(s["accuracy"] for s in summaries(compared, method))
        off = statistics.stdev(s["accuracy"] for s in summaries(compared, method))
        assert cell(browser, method, "accuracy %") == f"{100 * mean:.2f}± {100 * off:.2f}"
    measured = [row.split("\t") for row in browser.ask("document.querySelector('#metrics table').innerText").splitlines()]
    found = {(method, metric): rest for method, metric, *rest in measured[1:]}
    over = [s["over_clients"]["accuracy"] for s in summaries(compared, "fedselect")]
    assert found["fedselect", "accuracy %"][1:] == [
        *(f"{100 * statistics.fmean(o[k] for o in over):.2f}" for k in ("worst_tenth", "weighted")), "4 of 4",
    ]  # fmt: skip
    assert browser.ask("document.querySelector('#config').textContent.includes('data.classes_per_client')")
    assert browser.ask("document.querySelector('#environment').textContent.includes('torch')")
    assert browser.ask("document.querySelector('#environment').textContent.includes('commit')")


@pytest.fixture
def deployed(tmp_path):
    """A run whose summary says, as that of a deployment does, who was away."""
    runner.start(config("fedselect", 0), tmp_path / "d")
    path = tmp_path / "d" / "summary.json"
    turned = {"round": 3, "who": "client 2", "why": "its values are <b>not finite</b>"}
    back = {"round": 2, "who": "client 2", "why": "its vault lost round 1"}
    away = {"missed": {"2": [1, 3]}, "rejected": [turned], "set_back": [back], "absent": {"2": "not connected"}}
    path.write_text(json.dumps({**read_json(path, ""), **away}))
    return tmp_path / "d"


def test_who_missed_a_round_is_gathered_from_deployed_runs_alone(compared, deployed):
    assert [(r["missed"], r["rejected"]) for r in gather([compared])["runs"]] == [(None, [])] * 6
    (run,) = gather([deployed])["runs"]
    assert run["missed"] == {"2": [1, 3]}
    assert run["rejected"][0]["who"] == run["set_back"][0]["who"] == "client 2"


@pytest.fixture
def networked(deployed):
    """The same as it lies in a server's folder: with a plan, without masks and without cross-client accuracy."""
    (deployed / "plan.json").write_text("{}")
    (deployed / "masks.jsonl").unlink()
    path = deployed / "summary.json"
    path.write_text(json.dumps({k: v for k, v in read_json(path, "").items() if k != "cross"}))
    return deployed


def test_of_a_deployed_run_the_configuration_is_what_its_clients_share(compared, networked):
    found = gather([networked])
    assert [r["deployed"] for r in found["runs"]] == [True]
    assert set(found["groups"][0]["config"]) == {
        "method", "model", "training", "aggregate", "rounds", "fraction", "data",
    }  # fmt: skip
    assert found["groups"][0]["config"]["data"] == {"name": "digits"}
    simulated = gather([compared])
    assert not any(r["deployed"] for r in simulated["runs"])
    assert all(g["config"]["data"]["classes_per_client"] == 3 for g in simulated["groups"])


def test_a_deployed_run_stands_beside_the_same_one_simulated(compared, networked):
    simulated = compared / "fedselect-seed0"
    found = gather([networked, simulated])
    assert [(g["label"], r["deployed"]) for g, r in zip(found["groups"], found["runs"], strict=True)] == [
        ("fedselect deployed=yes", True), ("fedselect", False),
    ]  # fmt: skip
    assert {r.method for r in tables.rows([networked, simulated])} == {"fedselect deployed=yes", "fedselect"}


def test_the_page_says_of_a_deployed_run_what_is_true_of_a_deployment(browser, networked):
    browser.open(write_report([networked]).as_uri(), "document.querySelectorAll('.chart .main-svg').length >= 2")
    said = {part: browser.ask(f"document.querySelector('#{part} .say').textContent") for part in ("config", *FIGURES[4:])}
    assert said == {
        "config": "For deployed runs: the settings that all clients share, including defaults.",
        "shares": "Deployed runs do not record masks by round; each client keeps its mask in its vault.",
        "overlap": "Deployed runs do not record masks by round, so there is no overlap to show.",
        "cross": "In a deployment, no model is evaluated on another client's data, because the data never leaves its client.",
    }
    assert not browser.ask("document.querySelector('#config').textContent.includes('data.classes_per_client')")
    assert browser.problems == []


def test_the_page_says_who_missed_which_round(browser, compared, deployed):
    show(browser, deployed)
    rows = "[...document.querySelectorAll('#missed tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    assert browser.ask(rows) == [
        ["fedselect, seed 0", "2", "1, 3"],
        ["fedselect, seed 0", "3", "client 2", "its values are <b>not finite</b>"],
        ["fedselect, seed 0", "2", "client 2", "its vault lost round 1"],
        ["fedselect, seed 0", "2", "not connected"],
    ]
    browser.click("button[data-client='1']")
    browser.wait("location.hash === '#client=1'")
    assert browser.ask(rows) == []
    assert "Client 1 never missed a round." in browser.ask("document.querySelector('#missed').innerText")
    assert browser.problems == []
    show(browser, compared)
    assert browser.ask("document.querySelector('#missed').hidden")


@pytest.fixture
def diverged(tmp_path):
    """A sweep of two rates, one of them far too high."""
    runs = {f"lr={lr}": config("local", 0, lr=lr) for lr in (0.1, 1e38)}
    runner.start_comparison(runner.Comparison(runs), tmp_path / "s")
    return tmp_path / "s"


def test_a_run_that_diverged_is_listed_and_the_others_keep_their_names(diverged):
    data = gather([diverged])
    assert [g["label"] for g in data["groups"]] == ["local lr=0.1"]
    ((run, why),) = data["failed"]
    assert (run, why.partition(";")[0]) == ("local lr=1e+38, seed 0", "client 0, round 1: 1.weight is no longer finite")
    with pytest.raises(RunError, match="every run diverged; local, seed 0: client 0"):
        gather([diverged / "lr=1e+38"])


def test_the_page_says_what_diverged(browser, compared, diverged):
    browser.open(write_report([diverged]).as_uri(), "document.querySelector('#gains .main-svg')")
    said = browser.ask("document.querySelector('#table').innerText")
    assert "local lr=1e+38, seed 0 diverged: client 0, round 1" in said
    assert browser.problems == []
    show(browser, compared)
    assert browser.ask("document.querySelector('#table .failed').hidden")


def test_a_run_under_way_is_not_compared_with_one_that_is_further(browser, compared, tmp_path):
    shutil.copytree(compared, tmp_path / "c")
    for run in (tmp_path / "c").glob("local-seed*"):
        (run / "summary.json").unlink()
        (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:-1]))
    write_report([tmp_path / "c"], tmp_path / "r.html")
    browser.open((tmp_path / "r.html").as_uri(), "document.querySelector('#gains .main-svg')")
    assert "against local" not in browser.ask("document.querySelector('#table thead').textContent")
    said = browser.ask("document.querySelector('#lede').textContent")
    assert said.startswith("So far:")
    assert "training alone" not in said


def test_the_page_shows_no_gain_over_another_configuration_and_says_why(browser, start, tmp_path):
    write_report([start("local", rounds=2), start("fedavg")], tmp_path / "r.html")
    browser.open((tmp_path / "r.html").as_uri(), "document.querySelector('#gains .main-svg')")
    assert "against local" not in browser.ask("document.querySelector('#table thead').textContent")
    assert "training alone" not in browser.ask("document.querySelector('#lede').textContent")
    assert "passed" not in browser.ask("document.querySelector('#bytes figcaption').textContent")
    choose = "(s => { s.value = 1; s.dispatchEvent(new Event('input')); })(document.querySelector('#gains [data-pick=group]'))"
    browser.ask(choose)
    for part in ("#table", "#gains"):
        said = browser.ask(f"document.querySelector('{part} .say').textContent")
        assert "is not compared with training alone, because the runs of local have other values of rounds." in said
    assert browser.problems == []


def test_the_page_has_the_figures_gain_and_names_what_it_is_over(browser, start, tmp_path):
    places = [start("local", s, {"lr": lr}) for lr in (0.0001, 0.1) for s in (1, 2)]
    places += [start("fedavg", s) for s in (0, 1)]
    write_report(places, tmp_path / "r.html")
    browser.open((tmp_path / "r.html").as_uri(), "document.querySelector('#gains .main-svg')")
    mean = _dots(gather(places)).axes[0].collections[1].get_offsets()[0, 0]
    assert abs(mean) > 0.1
    shown = cell(browser, "fedavg", "against local").replace("\N{MINUS SIGN}", "-")
    assert float(shown) == pytest.approx(mean, abs=0.051)
    said = browser.ask("document.querySelector('#table .say').textContent")
    assert (
        "Training alone is local lr=0.1. fedavg is not compared with training alone on seed 0, because local lr=0.1 has no"
        in said
    )
    browser.ask(
        "(s => { s.value = 2; s.dispatchEvent(new Event('input')); })(document.querySelector('#gains [data-pick=group]'))"
    )
    assert "(local lr=0.1, hollow)" in browser.ask("document.querySelector('#gains .say').textContent")
    rows = browser.ask("document.querySelector('#gains .chart').layout.annotations.map(a => a.text)")
    gains = [float(text.replace("\N{MINUS SIGN}", "-").replace("±", "")) for text in rows]
    assert statistics.fmean(gains) == pytest.approx(mean, abs=0.06)  # of the seed that is compared
    assert browser.problems == []


def test_every_figure_has_words_and_numbers_for_those_who_cannot_see_it(browser, compared):
    show(browser, compared)
    for figure in FIGURES:
        said = browser.ask(f"document.querySelector('#{figure} [role=img]').getAttribute('aria-label')")
        assert re.search(r"\d", said), (figure, said)
        browser.click(f"#{figure} summary")
        browser.wait(f"document.querySelector('#{figure} details table')")
        assert browser.ask(f"document.querySelectorAll('#{figure} details td').length") >= 4
    assert browser.problems == []


@pytest.fixture
def many(compared):
    """The page of the same runs as if thirty settings had ended within a point of each other."""
    data = gather([compared])
    runs, groups = data["runs"], data["groups"]
    for k in range(len(groups), 30):
        groups.append({**groups[1], "label": f"local lr=0.{k}, momentum=0.{k}"})
        runs.append({**runs[2], "group": k, "value": [v + k / 3000 for v in runs[2]["value"]]})
    for group, (colour, symbol) in zip(groups, looks([g["method"] for g in groups]), strict=True):
        group["colour"], group["symbol"] = colour, symbol
    return page(data)


def test_labels_of_thirty_curves_never_overprint(browser, many, tmp_path):
    (tmp_path / "many.html").write_text(many)
    browser.open((tmp_path / "many.html").as_uri(), "document.querySelectorAll('#convergence .annotation').length >= 30")
    boxes = browser.ask("""[...document.querySelectorAll('#convergence .annotation-text-g')].map(a => {
        const b = a.querySelector('text').getBoundingClientRect(); return [b.top, b.bottom, b.left, b.right]; })""")
    boxes.sort()
    assert len(boxes) == 30
    assert min(below[0] - above[1] for above, below in pairwise(boxes)) > -2.5  # lines of text are as high as their boxes
    plot = browser.ask("(l => l.xaxis._offset + l.xaxis._length)(document.querySelector('#convergence .chart')._fullLayout)")
    chart = browser.ask("(b => [b.left, b.right])(document.querySelector('#convergence .chart').getBoundingClientRect())")
    assert min(b[2] for b in boxes) > chart[0] + plot  # beside the curves, not on them
    assert max(b[3] for b in boxes) <= chart[1]
    looked = browser.ask("data.groups.map(g => g.colour[0] + g.symbol)")
    assert len(set(looked)) == 30


@pytest.mark.parametrize("browser", [{"width": 390}], indirect=True)
def test_on_a_phone_the_bar_is_slim_and_a_wide_table_says_that_it_scrolls(browser, compared):
    show(browser, compared)
    assert browser.ask("document.querySelector('.filter').offsetHeight") < 48
    hint = "getComputedStyle(document.querySelector('#table .hint')).display"
    browser.wait(f"{hint} === 'block'")
    browser.ask("document.querySelector('#table .wide').scrollLeft = 40")
    browser.wait(f"{hint} === 'none'")
    listed = browser.ask("[...document.querySelectorAll('#convergence .key li')].map(li => li.textContent)")
    assert [re.sub(r"[\d.]+%$", "", text) for text in listed] == browser.ask("ranked().map(r => label(r.g))")
    browser.click(".filter summary")
    browser.click("button[data-method='fedavg']")
    assert browser.ask("document.querySelector('#filtered').textContent") == "All clients · 2 of 3 methods"
    assert browser.problems == []


def test_two_methods_stand_side_by_side(browser, compared):
    show(browser, compared)
    for key, at in (("left", 1), ("right", 2)):  # local and fedavg
        browser.ask(
            f"(s => {{ s.value = {at}; s.dispatchEvent(new Event('input')); }})(document.querySelector('[data-pick={key}]'))"
        )
    first = browser.ask("[...document.querySelectorAll('#sides .beside tbody tr')[0].cells].map(c => c.textContent)")
    alone, shared = (statistics.fmean(s["accuracy"] for s in summaries(compared, m)) for m in ("local", "fedavg"))
    assert first[1:3] == [f"{100 * alone:.2f}", f"{100 * shared:.2f}"]
    assert float(first[3].replace("\N{MINUS SIGN}", "-").replace("±", "")) == pytest.approx(100 * (shared - alone), abs=0.051)
    drawn = browser.ask("document.querySelector('#sides .chart').data.at(-1)")
    means = [100 * statistics.fmean(s["clients"][i] for s in summaries(compared, "fedavg")) for i in drawn["customdata"]]
    assert drawn["x"] == pytest.approx(means)
    assert browser.problems == []


@pytest.mark.parametrize("browser", [{"width": 1200, "dark": True}], indirect=True)
def test_paper_is_light_and_its_charts_fit(browser, compared):
    show(browser, compared)
    browser.ask("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(253, 253, 252)"
    widths = browser.ask("[...document.querySelectorAll('.chart .main-svg')].map(s => s.getBoundingClientRect().width)")
    assert max(widths) <= 43 * 16
    browser.ask("window.dispatchEvent(new Event('afterprint'))")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 23)"
    assert browser.problems == []


def test_a_click_on_a_client_filters_the_page_to_it(browser, compared):
    show(browser, compared)
    browser.click("button[data-client='2']")
    browser.wait("location.hash === '#client=2'")
    accuracies = [s["clients"][2] for s in summaries(compared, "fedselect")]
    assert cell(browser, "fedselect", "accuracy %").startswith(f"{100 * statistics.fmean(accuracies):.2f}")
    measured = browser.ask("document.querySelector('#metrics').innerText")
    assert f"fedselect\taccuracy %\t{100 * statistics.fmean(accuracies):.2f}" in measured
    drawn = browser.ask("document.querySelector('#convergence .chart').data.find(t => t.name === 'fedavg').y.at(-1)")
    assert drawn == pytest.approx(100 * statistics.fmean(s["clients"][2] for s in summaries(compared, "fedavg")), abs=0.01)
    kept = browser.ask("document.querySelector('#cross .chart').data[0].z.flat().filter(v => v !== null).length")
    assert kept == 7  # of 16 cells, its row and its column
    browser.click("button[data-client='all']")
    browser.wait("location.hash === ''")
    assert browser.ask("document.querySelector('#cross .chart').data[0].z.flat().filter(v => v !== null).length") == 16
    assert browser.problems == []


def test_a_click_in_a_chart_filters_too(browser, compared):
    show(browser, compared)
    browser.ask("document.querySelector('#cross .chart').scrollIntoView({block: 'center', behavior: 'instant'})")
    browser.click_at(
        *browser.ask("""(() => {
        const chart = document.querySelector('#cross .chart'), box = chart.getBoundingClientRect(), l = chart._fullLayout;
        return [box.x + l.xaxis._offset + l.xaxis.d2p(0), box.y + l.yaxis._offset + l.yaxis.d2p(3)]; })()""")
    )
    browser.wait("location.hash === '#client=3'")
    assert browser.ask("document.querySelector('button[data-client=\"3\"]').getAttribute('aria-pressed')") == "true"


def test_choices_change_a_figure_and_methods_can_be_hidden(browser, compared):
    show(browser, compared)
    before = browser.ask("document.querySelector('#overlap .chart').data[0].z")
    browser.ask(
        """(s => { s.value = 1; s.dispatchEvent(new Event('input')); })(document.querySelector('#overlap [data-pick=layer]'))"""
    )
    assert browser.ask("document.querySelector('#overlap .chart').data[0].z") != before
    chance = float(re.search(r"about ([\d.]+)%", browser.ask("document.querySelector('#overlap figcaption').textContent"))[1])
    share = unpack(gather([compared])["runs"][0]["shares"][-1][1])[:4]  # of the first layer
    pairs = [(a, b) for i, a in enumerate(share) for b in share[:i]]
    assert chance == pytest.approx(100 * statistics.fmean(a * b / (a + b - a * b) for a, b in pairs), abs=0.06)
    browser.click("button[data-method='fedavg']")
    assert browser.ask("document.querySelectorAll('#table tbody tr').length") == 2
    assert not browser.ask("document.querySelector('#convergence .chart').data.some(t => t.name === 'fedavg')")
    assert browser.problems == []
