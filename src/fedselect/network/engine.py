"""Engine: what the commands of a deployment ask of whatever carries its letters; `flower.launch` and `grpc.launch` are two."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from fedselect.network.plan import Home


class Engine(Protocol):
    """`part` is the server's or a client's part of a site, `place` the directory of a run in it."""

    def need(self) -> None:
        """Say what to install where a package is missing."""

    def serve(self, part: Path, say: Callable[[str], None], shipped_code: bool) -> None:
        """The site's server, until Ctrl-C or a termination signal."""

    def work(self, part: Path, home: Home, say: Callable[[str], None], shipped_code: bool) -> None:
        """A client, until Ctrl-C or a termination signal; raises where the server does not want it."""

    def server(self, part: Path, log: Path) -> AbstractContextManager[object]:
        """The server in a process of its own, up as the block begins and stopped with it."""

    def client(self, part: Path, home: Home, log: Path) -> AbstractContextManager[object]:
        """A client in a process of its own, stopped with the block."""

    def healthy(self, part: Path) -> bool:
        """Whether the server of this machine is up."""

    def connected(self, part: Path) -> dict[int, str]:
        """How it is with each client that the server knows: online, or what else the engine says."""

    def submit(self, part: Path, place: Path) -> None:
        """Hand a prepared run to the server, for the first time or again."""

    def stop(self, part: Path, place: Path) -> None:
        """Stop a run that is going."""
