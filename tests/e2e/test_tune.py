"""The command tune: what it writes and says, that it can be killed at any moment, and what it refuses."""

import json
import signal

import pytest
from children import until

from fedselect.tuning import trials

TINY = ("--data", "digits", "--model", "mlp", "--clients", 3, "--train", 25, "--val", 10, "--test", 10, "--rounds", 8)
SPACE = ("--methods", "fedavg+ft,local,fedselect", "--lr", "0.01,0.1", "--fedavg+ft.finetune", 1, "--seeds", "0,1")
COMMAND = ("tune", *TINY, *SPACE, "--test-seeds", "5,6", "-q")
MAIN = "from fedselect.cli import main; main()"


def timeless(found):
    """An outcome without what the clock says."""
    if isinstance(found, dict):
        return {k: timeless(v) for k, v in found.items() if k not in ("seconds", "crc32")}
    return [timeless(v) for v in found] if isinstance(found, list) else found


def outcome(out):
    return timeless(json.loads((out / "outcome.json").read_text()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    from typer.testing import CliRunner

    from fedselect.cli.program import app

    out = tmp_path_factory.mktemp("tune") / "whole"
    said = CliRunner().invoke(app, [str(a) for a in (*COMMAND, "--out", out)], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return out, said.output


def test_it_ends_with_a_ranking_a_choice_and_one_look_at_test_data(whole):
    out, said = whole
    found = outcome(out)
    assert [s[1] for s in found["schedule"]] == [3, 8]
    assert len(found["ranking"]) == found["schedule"][0][0] == 14  # 2 x 2, 2, and 2 x 2 x 2
    assert found["ranking"][0]["name"] == found["chosen"]
    assert found["test"]["seeds"] == [5, 6]
    assert f"chosen: {found['chosen']}" in said
    assert "on test data, fresh seeds 5, 6" in said
    assert "--rungs 14x3,4x8" in said
    dropped = [row["name"] for row in found["ranking"] if row["rounds"] == 3]
    assert len(dropped) == 10
    assert not any((out / trials.run(name, 0) / "checkpoint").exists() for name in dropped)
    assert all(json.loads((p / "config.json").read_text())["score"] == "val" for p in out.glob("*-seed?"))


def test_the_chosen_file_runs_as_the_look_at_test_data_did(whole, cli, tmp_path):
    out, _ = whole
    assert cli("run", "--config", out / "chosen.json", "--out", tmp_path / "again", "-q").code == 0
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert (again["score"], again["seed"]) == ("test", 5)
    assert again["accuracy"] == outcome(out)["test"]["values"][0]


def test_the_page_has_the_picture_and_the_finalists(whole):
    out, _ = whole
    text = (out / "report.html").read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    tuned = data["tuning"]
    assert len(data["groups"]) == 4
    assert (tuned["ends"][0]["of"], tuned["ends"][0]["kept"], tuned["ends"][0]["x"]) == (14, 4, 14 * 2 * 3)
    assert tuned["ends"][1]["x"] == 14 * 2 * 3 + 4 * 2 * 5
    ends = {s["name"]: s["points"][-1] for s in tuned["settings"]}
    assert ends[tuned["chosen"]][0] == tuned["ends"][1]["x"]
    assert ends[tuned["settings"][-1]["name"]][0] == tuned["ends"][0]["x"]


def test_killed_again_and_again_it_comes_to_the_same_end(whole, cli, fork, tmp_path):
    out, args = tmp_path / "broken", (*COMMAND, "--out", tmp_path / "broken")
    first = "local-lr=0.1-seed0/metrics.jsonl"
    for file, lines in (("tune.json", 1), (first, 2), (first, 6), ("test/*/metrics.jsonl", 2)):
        process = fork(MAIN, *args)

        def far(file=file, lines=lines, process=process):
            return any(p.read_bytes().count(b"\n") >= lines for p in out.glob(file)) or process.poll() is not None

        until(far, pause=0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        args = ("resume", out, "-q")
    assert cli("resume", out, "-q").code == 0
    assert outcome(out) == outcome(whole[0])
    assert (out / "chosen.json").read_bytes() == (whole[0] / "chosen.json").read_bytes()


def test_ctrl_c_gives_the_best_so_far_and_it_can_go_on(whole, cli, fork, tmp_path):
    out = tmp_path / "stopped"
    process = fork(MAIN, *COMMAND, "--rounds", 100, "--out", out)
    until(lambda: any(len(p.read_bytes().splitlines()) > 10 for p in out.glob("*-seed0/metrics.jsonl")), process, pause=0.002)
    process.send_signal(signal.SIGINT)
    said, err = process.communicate()
    assert process.returncode == 130, err
    assert "the best so far is" in err
    assert f"Resume with: fedselect resume {out}" in err
    assert "validation data" in said
    assert json.loads((out / "chosen.json").read_text())["method"]["name"] in SPACE[1]
    assert outcome(out)["test"] is None


def test_a_finished_search_is_left_as_it_is(whole, cli):
    out, _ = whole
    before = (out / "outcome.json").read_text()
    assert f"chosen: {outcome(out)['chosen']}" in cli("resume", out, "-q").out
    assert timeless(json.loads(before)) == outcome(out)
    assert cli("tune", *TINY, *SPACE, "--out", out).code == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--budget", "10"), "the budget leaves 0 rounds for trials, but two settings on 2 seeds need"),
        (("--budget", "tomorrow"), "budget must be a time"),
        (("--for", "best"), "--for must be mean or worst, not 'best'"),
        (("--test-seeds", "1,2"), "seed 1 is in both --seeds and --test-seeds"),
        (("--rungs", "99x3,2x8"), "has 99 settings, but there are"),
        (("--rungs", "4x3,2x8", "--budget", "1m"), "pass only one of them"),
        (("--val", "0"), "no validation data; hold some out with val"),
        (("--shift", "labels,groups"), "all settings must train on the same data; give --shift one value, not 2"),
        (("--methods", "fedsel"), "did you mean"),
        (("--limit", "2.0"), "limit"),
        (("--nonsense", "3"), "there is no option 'nonsense'"),
    ],
)
def test_wrong_input_is_answered_in_a_sentence_and_leaves_nothing(cli, tmp_path, given, said):
    found = cli("tune", *TINY, *SPACE, *given, "-q", "--out", tmp_path / "t")
    assert (found.code, found.err.count("\n")) == (2, 1), found
    assert said in found.err
    assert not (tmp_path / "t" / "tune.json").exists()
