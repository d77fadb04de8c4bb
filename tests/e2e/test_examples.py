"""Every example in simulation, by the commands of its page: from files to a report, and what the page says of the outcome."""

import json
import re

import pytest
from example import EXAMPLES, KINDS, Example, with_option

BETTER_THAN = {  # the headline of FedAvg + FT must be above this: chance, or what knows the targets' mean alone, and a margin
    "audio": 0.2 + 0.3,  # five vowels
    "multilabel": 0.5 + 0.05,  # yes or no
    "pictures": 0.1 + 0.4,  # ten digits
    "regression": 0.0 + 0.2,  # the mean explains nothing of the variance
    "sensor": 0.25 + 0.2,  # four states
    "tabular": 0.5 + 0.3,  # ill or not
    "text": 0.2 + 0.1,  # a space, the most frequent character, is about a sixth
}


@pytest.fixture(params=KINDS)
def example(request, tmp_path, fork):
    return Example(request.param, tmp_path, fork)


def test_from_data_to_report(example):
    shown = example.run(*example.command("data", "show"))
    assert "4 clients" in shown
    args = with_option(example.command("compare"), "--seeds", 0)
    if example.kind == "text":  # the slowest by far
        args = with_option(args, "--rounds", 5)
    said = example.run(*args, "-q")
    out = example.folder / args[args.index("--out") + 1]
    assert f"wrote {args[args.index('--out') + 1]}/report.html" in said
    assert "fedavg+ft" in (out / "report.html").read_text(encoding="utf-8")
    names = {client["name"] for client in json.loads((out / "local-seed0" / "federation.json").read_text())["clients"]}
    assert len(names) == 4
    assert not names & {"0", "1", "2", "3"}, "clients have names"
    ends = {run.name.removesuffix("-seed0"): json.loads((run / "summary.json").read_text()) for run in out.glob("*-seed0")}
    assert set(ends) == {"local", "fedavg+ft", "fedalike"}
    headline = json.loads((out / "local-seed0" / "task.json").read_text())["metrics"][0]["name"]
    means = {method: end["over_clients"][headline]["mean"] for method, end in ends.items()}
    assert means["fedavg+ft"] > BETTER_THAN[example.kind], means
    if example.kind != "text":  # whose page says that a point is no proof
        assert max(means["fedavg+ft"], means["fedalike"]) > means["local"], means


def test_every_example_is_in_the_table():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[[\w -]+\]\((\w+)/\)", page, re.M)) == sorted(KINDS)
    assert sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir() and folder.name != "notebooks") == sorted(
        KINDS
    )


@pytest.mark.parametrize("page", sorted(EXAMPLES.rglob("README.md")), ids=lambda page: page.parent.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link
