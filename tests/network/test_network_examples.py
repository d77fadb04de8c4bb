"""Every example over a network, by the commands of its page, with Flower's messages in one process in place of its processes.

Each client names its own file or folder and sees nothing else, and the numbers are those of the simulation, to the bit.
"""

import json

import pytest

pytest.importorskip("flwr")
from example import KINDS, Example, Page, options, with_option, without

CLIENTS = 4
DEPLOYED = """
import os, sys
from pathlib import Path
from grid import LocalGrid, run_server
from fedselect.cli import main
from fedselect.core.files import read_json, write_json
from fedselect.network.flower import launch
from fedselect.network.flower.apps import SERVER

site, own, args = Path(sys.argv[1]), sys.argv[2].splitlines(), sys.argv[3:]
nodes = {}

def works(part, home, *rest):
    nodes[100 + home.client] = home.to_flat()

def submitted(part, place):
    os.environ[SERVER] = str(part.resolve())
    run_server(LocalGrid(nodes, read_json(place / "plan.json", "")))

launch.work, launch.submit, launch.healthy = works, submitted, lambda part: True
for line in own:
    sys.argv[1:] = line.split("\\t")
    try:
        main()
    except SystemExit as e:
        assert not e.code, line
write_json(site / "server" / "nodes.json", {str(node): node - 100 for node in nodes})
sys.argv[1:] = args
main()
"""


@pytest.fixture(params=KINDS)
def example(request, tmp_path, fork):
    return Example(request.param, tmp_path, fork)


def names(example):
    """What clients are called: the files or folders of the data, without their endings."""
    if example.kind == "multilabel":
        return ["for everybody", "for men", "for the old", "for women"]
    (place,) = (p for p in example.folder.iterdir() if p.is_dir() and p.name not in ("runs", "__pycache__"))
    return [p.stem for p in sorted(place.iterdir())]


def for_client(args, i, who):
    """The page's command for the first client, as the others type it."""
    return [arg.replace("client-0", f"client-{i}").replace(who[0], who[i]) for arg in args]


def test_over_a_network_it_is_the_simulation(example):
    who = names(example)
    if example.kind in ("tabular", "regression"):
        for i in range(CLIENTS):
            example.run(*for_client(example.command("data", "schema"), i, who))
        example.run(*example.command("data", "merge"))
    example.run(*example.command("deploy", "init"), "--insecure")
    clients = [for_client(example.command("deploy", "client"), i, who) for i in range(CLIENTS)]
    own = "\n".join("\t".join(args) for args in clients)
    said = example.python(DEPLOYED, "runs/site", own, *example.command("deploy", "run"), "--name", "first", "-q")
    assert "missed" not in said
    run = example.folder / "runs" / "site" / "server" / "runs" / "first"
    assert [c["name"] for c in json.loads((run / "federation.json").read_text())["clients"]] == who
    example.run("report", run)
    assert who[1] in (run / "report.html").read_text(encoding="utf-8")

    one = ["run", *without(example.command("compare")[1:], "--methods", "--seeds", "--eval-every")]
    one = [arg for arg in one if arg != "--report"]
    example.run(*with_option(with_option(one, "--rounds", 2), "--out", "runs/one"), "--method", "fedavg+ft", "-q")
    there, here = (
        [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        for place in (run, example.folder / "runs" / "one")
    )
    for deployed, simulated in zip(there, here, strict=True):
        for column, values in simulated["clients"].items():
            if column not in ("bytes_up", "bytes_down"):
                assert deployed["clients"][column] == pytest.approx(values, abs=1e-6), column


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_says_the_same_of_the_demo_and_of_the_run(kind):
    """`deploy demo` is started by hand; here its options are held to those of the commands that are tested."""
    page = Page(kind)
    demo, run, simulated = (options(page.command(*words)) for words in (("deploy", "demo"), ("deploy", "run"), ("compare",)))
    assert run.items() <= demo.items()
    own = {"--clients", "--method", "--rounds", "--out", "--overwrite"}
    assert {k: v for k, v in demo.items() if k not in own}.items() <= simulated.items()
