"""Engine: what the deploy commands need from a transport; `flower.launch` and `grpc.launch` implement it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from fedselect.network.home import Home


class Engine(Protocol):
    """`part` is the server's or a client's folder of a site, `place` the directory of a run in it."""

    def need(self) -> None:
        """Raise an error that says what to install if a package is missing."""

    def serve(self, part: Path, say: Callable[[str], None], shipped_code: bool) -> None:
        """Run the site's server until Ctrl-C or a termination signal."""

    def work(self, part: Path, home: Home, say: Callable[[str], None], shipped_code: bool) -> None:
        """Run a client until Ctrl-C or a termination signal; raises if the server refuses it."""

    def server(self, part: Path, log: Path) -> AbstractContextManager[object]:
        """The server in a separate process, up when the block begins and stopped when it ends."""

    def client(self, part: Path, home: Home, log: Path) -> AbstractContextManager[object]:
        """A client in a separate process, stopped when the block ends."""

    def healthy(self, part: Path) -> bool:
        """Whether the server on this machine is up."""

    def connected(self, part: Path) -> dict[int, str]:
        """The status of each client that the server knows: online, or what else the engine says."""

    def submit(self, part: Path, place: Path) -> None:
        """Submit a prepared run to the server, new or resumed."""

    def stop(self, part: Path, place: Path) -> None:
        """Stop a running run."""
