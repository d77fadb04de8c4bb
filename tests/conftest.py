"""What every test shares: one thread, repeatable hypothesis, a small federation, and the command line in process."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from children import Children
from hypothesis import settings

import fedselect as fs

torch.set_num_threads(1)
settings.register_profile("fedselect", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("full", deadline=None, max_examples=500)
settings.load_profile("fedselect")


ONE_PROCESS = ("test_deploy", "test_reproduce", "test_report", "test_resume", "test_keep", "test_export", "test_tune")
"""Files whose tests share what is costly to make."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests go to processes one by one, but those that share something costly together, so that it is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path, _, test = nodeid.partition("::")
            case = re.search(r"\[(.+)\]$", test)
            if Path(path).stem in ONE_PROCESS:
                return path
            return f"conformance {case[1]}" if "/conformance/" in path and case else nodeid

    return Together(config, log)


@pytest.fixture(scope="session")
def digits() -> fs.Federation:
    """Three clients with three classes each: small enough to train in milliseconds."""
    return fs.load("digits", clients=3, classes_per_client=3, train=20, test=10, val=0, seed=0)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Nothing is read from or written to the user's own cache, which may not be writable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch):
    """A command with --plugin names it in the environment for child processes; the next test's children must not load it."""
    monkeypatch.setenv("FEDSELECT_PLUGINS", "")


@pytest.fixture
def spawn():
    """Start a process; what is left of it when the test is over, however that ends, is ended."""
    with Children() as children:
        yield children.start


@pytest.fixture
def fork():
    """Run Python code in a process that starts at once; what is left of it when the test is over is ended."""
    with Children() as children:
        yield children.fork


@dataclass(frozen=True)
class Said:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    def sentence(self) -> str:
        """The one line of an error: code 2, on stderr, no traceback."""
        assert self.code == 2, self
        assert "Traceback" not in self.err
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1, self.err
        return self.err


@pytest.fixture
def cli(monkeypatch, capsys):
    """fedselect's main() with these arguments, in this process; an exception it lets through fails the test."""
    from fedselect.cli import main

    def call(*args: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedselect", *map(str, args)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as e:
            code = e.code or 0
        return Said(code, *capsys.readouterr())

    return call
