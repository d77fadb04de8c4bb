"""The report while a run trains: read-only, on this machine alone, gone with the run."""

import json
import re
import signal
import socket
import sys
import urllib.error
import urllib.request

import pytest
from browser import Browser, Chromium
from children import PATIENCE, until

TINY = ("--model", "mlp", "--clients", "3", "--train", "20", "--test", "10", "-q")


@pytest.fixture
def watched(tmp_path, spawn):
    """A long run that is being watched: its process, its address and its directory."""
    args = ("run", *TINY, "--rounds", "100000", "--watch", "--out", tmp_path / "a")
    process = spawn(sys.executable, "-u", "-m", "fedselect", *args)
    said = process.stdout.readline()
    found = re.fullmatch(r"watch it at (http://127\.0\.0\.1:(\d+)/)\n", said)
    assert found, said
    return process, found[1], tmp_path / "a"


def fetch(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=PATIENCE) as answer:
        return answer.status, answer.headers, answer.read()


def news(address):
    """What the page would be told, once there is a round to tell of."""

    def told():
        status, headers, body = fetch(address + "data.json")
        return (headers, json.loads(body)) if status == 200 else None

    return until(told)


def status_of(address, **headers):
    try:
        return fetch(address, **headers)[0]
    except urllib.error.HTTPError as e:
        return e.code


def test_the_page_follows_the_run_and_ends_with_it(watched):
    process, address, out = watched
    _, first = news(address)

    def further():
        _, later = news(address)
        return later if later["runs"][0]["round"][-1] > first["runs"][0]["round"][-1] else None

    later = until(further, process)
    assert not later["runs"][0]["finished"]
    status, _, page = fetch(address)
    assert (status, b'<body class="live">' in page) == (200, True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert err.rstrip().endswith(f"fedselect resume {out}")
    with pytest.raises(urllib.error.URLError):
        fetch(address)


def test_it_is_read_only_and_this_machines_alone(watched):
    _, address, _ = watched
    news(address)
    port = int(re.search(r":(\d+)/", address)[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)  # another address of this very machine
    assert status_of(address, Host="evil.example") == 403  # a name that was made to point here
    assert status_of(address, Host=f"localhost:{port}") == 200
    assert status_of(address + "../../etc/passwd") == 404
    assert status_of(address + "config.json") == 404
    for method in ("POST", "PUT", "DELETE"):
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(urllib.request.Request(address, method=method, data=b""), timeout=PATIENCE)


def test_nothing_is_sent_twice(tmp_path, monkeypatch):
    from fedselect.report.live import live
    from fedselect.runs.config import Config
    from fedselect.runs.runner import start

    monkeypatch.setattr("fedselect.report.live.PATIENCE", 0.1)  # no page stays open to see the end
    small = {"data": {"name": "digits", "clients": 2, "train": 10, "test": 10, "val": 0}, "model": {"name": "mlp"}, "rounds": 1}
    with live(tmp_path / "a", 0) as address:
        assert b"The first round is running" in fetch(address)[2]
        assert fetch(address + "data.json")[0] == 204
        start(Config.from_dict(small, "test"), tmp_path / "a")
        headers, data = news(address)
        assert data["runs"][0]["finished"]
        assert status_of(address + "data.json", **{"If-None-Match": headers["ETag"]}) == 304


def test_a_port_that_is_taken_is_said_before_anything_is_trained(cli, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = cli("run", *TINY, "--watch", "--port", port, "--out", tmp_path / "a").sentence()
    assert f"port {port} cannot be used" in said
    assert not (tmp_path / "a").exists()


def test_a_port_without_a_page_is_refused(cli, tmp_path):
    assert "--port needs --watch" in cli("run", *TINY, "--port", 8000, "--out", tmp_path / "a").sentence()
    assert not (tmp_path / "a").exists()


def test_the_browser_draws_it_again_and_says_when_it_is_over(watched, tmp_path):
    process, address, _ = watched
    chromium = Chromium(tmp_path / "profile")
    try:
        browser = Browser(chromium, offline=False)
        browser.open(address, "document.querySelector('#convergence .main-svg')")
        rounds = "document.querySelector('#convergence .chart').data.find(t => t.name === 'fedselect').x.at(-1)"
        seen = browser.ask(rounds)
        browser.wait(f"{rounds} > {seen}")
        assert browser.ask("document.querySelector('#live').textContent").startswith("live · fedselect seed 0: round ")
        assert browser.problems == []
        process.send_signal(signal.SIGINT)
        browser.wait("document.querySelector('#live').textContent.startsWith('the run has ended')")
    finally:
        chromium.close()
