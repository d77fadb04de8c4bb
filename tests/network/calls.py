"""gRPC in one process: a real server with mutual TLS on loopback, clients in threads, and callers that do as a test says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread

from children import until

from fedselect.network import site
from fedselect.network.desk import Desk
from fedselect.network.drive import serve
from fedselect.network.grpc import hub
from fedselect.network.grpc.hub import Hub, HubNodes
from fedselect.network.grpc.line import Caller
from fedselect.network.home import Home
from fedselect.network.letters import Letter
from fedselect.network.plan import Shape
from fedselect.network.site import Site

SHAPE = Shape((1, 8, 8), tuple("0123456789"))
ONE_AT_A_TIME = Lock()  # clients are processes; as threads of one they must not train at once


def make_site(root: Path, clients: int, **how) -> Path:
    how = {"insecure": False, "days": 2, **how}
    site.make(root, clients, f"127.0.0.1:{site.free_port()}", {"name": "digits"}, SHAPE, engine="grpc", **how)
    return root


@contextmanager
def opened(root: Path, said: list[str] | None = None) -> Iterator[Hub]:
    with hub.opened(root / "server", Site.read(root), [].append if said is None else said.append) as switch:
        yield switch


class Waiting(Desk):
    def answer(self, letter: Letter) -> Letter:
        with ONE_AT_A_TIME:
            return super().answer(letter)


def call(root: Path, desk: Desk, said: list[str] | None = None, sleep: Callable[[float], None] | None = None) -> Thread:
    """A client in a thread, which ends when the server is gone, unless `sleep` has it call again."""

    def end(seconds: float) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        with suppress(KeyboardInterrupt):
            caller.work()

    tell = [].append if said is None else said.append
    caller = Caller(root / f"client-{desk.home.client}", Site.read(root), desk, tell, sleep or end)
    thread = Thread(target=work)
    thread.start()
    return thread


@contextmanager
def connected(root: Path, desks: list[Desk]) -> Iterator[Hub]:
    """A server and these clients."""
    threads = []
    try:
        with opened(root) as switch:
            threads += [call(root, desk) for desk in desks]
            until(lambda: len(switch.present()) == len(desks))
            yield switch
    finally:
        for thread in threads:
            thread.join()


def run_server(root: Path, homes: list[Home], plan: dict, out: Path) -> None:
    """A run to its end, with a client for each home."""
    with connected(root, [Waiting(home) for home in homes]) as switch:
        keys = {i: i for i in range(switch.site.clients)}
        serve(out, HubNodes(switch, Letter({"plan": plan}), lambda: None), keys, lambda *record: None)
