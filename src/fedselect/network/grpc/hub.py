"""The server's end: which clients are connected, messages out, replies in. Clients call; the server calls nobody.

Each client keeps one call open for messages from the server, and sends each reply in a separate call. A client is identified by
its certificate: it must be signed by the site's authority (gRPC refuses any other in the handshake), and its key must be in the
server's `keys/`.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, NoReturn

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # we report errors ourselves
import grpc

from fedselect.core.errors import DataError, RunError
from fedselect.core.files import write_json
from fedselect.network.grpc.requests import CONNECTED
from fedselect.network.grpc.wire import ANSWER, LISTEN, OPTIONS, PIECE, PROTOCOL, SERVICE, Parcel
from fedselect.network.identity import client_keys, public_key
from fedselect.network.letters import Letter, heard
from fedselect.network.rounds import Reply
from fedselect.network.site import Site, listens_at

LOOK = 0.2  # seconds between checks whether a run must stop
SPARE = 8  # concurrent calls beyond two for each client
ROOM, TIMES = 256 << 20, 16  # largest reply: this many bytes, or this many times the largest message of the run


@dataclass
class _Line:
    """One client that listens."""

    outbox: "queue.SimpleQueue[Parcel | None]" = field(default_factory=queue.SimpleQueue)
    plan: Letter | None = None  # the run's plan that it was last sent


class Hub:
    """Carries messages to connected clients and their replies back; `say` reports who connects, leaves and is refused."""

    def __init__(self, part: Path, site: Site, keys: dict[bytes, int] | None, say: Callable[[str], None]) -> None:
        self.part, self.site, self.keys, self.say = part, site, keys, say
        self._lock, self._noting = threading.Lock(), threading.Lock()
        self._lines: dict[int, _Line] = {}
        self._awaited: dict[int, int] = {}  # client of each message that has no reply yet, by message number
        self._uploads: dict[int, Any] = {}  # the call in which a client sends its reply
        self._numbers = count(1)
        self._most = ROOM
        self._arrived: queue.SimpleQueue[tuple[int, Parcel | DataError | str]] = queue.SimpleQueue()

    # ---- for the run

    def present(self) -> list[int]:
        with self._lock:
            return sorted(self._lines)

    def post(self, client: int, letter: Letter, plan: Letter) -> int | None:
        """Send a client a message, after its run's plan if it does not have that; returns the message's number."""
        parcel = Parcel.of(next(self._numbers), letter, self._file())
        with self._lock:
            line = self._lines.get(client)
            if line is None:
                parcel.file.close()
                return None
            if line.plan is not plan:
                line.plan = plan
                line.outbox.put(Parcel.of(0, plan, self._file()))
            self._most = max(self._most, TIMES * parcel.body)
            self._awaited[parcel.number] = client
            line.outbox.put(parcel)
        return parcel.number

    def next(self, seconds: float) -> tuple[int, Parcel | DataError | str] | None:
        """The next arrival, or None if nothing comes in time."""
        try:
            return self._arrived.get(timeout=seconds) if seconds > 0 else self._arrived.get_nowait()
        except queue.Empty:
            return None

    def forget(self, numbers: Iterable[int]) -> None:
        """Stop waiting for these replies; a client that still sends one is cut off."""
        with self._lock:
            whose = {self._awaited.pop(n) for n in numbers if n in self._awaited}
            late = [self._uploads[client] for client in whose if client in self._uploads]
        for call in late:
            call.cancel()

    def close(self) -> None:
        """End all calls."""
        while (found := self.next(0)) is not None:
            if isinstance(found[1], Parcel):
                found[1].file.close()

    # ---- for clients

    def listen(self, request: bytes, context: Any) -> Iterator[bytes]:
        """A client's open call: yields messages for it until it disconnects."""
        client, line = self._who(context), _Line()
        with self._lock:
            taken = client in self._lines
            if not taken:
                line.outbox.put(Parcel.of(0, Letter({"kind": "welcome"}), self._file()))
                self._lines[client] = line
        if taken:
            self._refuse(context, grpc.StatusCode.ALREADY_EXISTS, f"client {client} is already connected")
        if not context.add_callback(lambda: self._gone(client, line)):
            self._gone(client, line)
        try:
            self._note_quietly()
            self.say(f"client {self.site.who(client)} is connected")
            while (parcel := line.outbox.get()) is not None:
                with parcel.file:
                    yield from parcel.frames()
        finally:
            self._gone(client, line)
            _emptied(line.outbox)
            self._note_quietly()
            self.say(f"client {self.site.who(client)} is disconnected")

    def answer(self, frames: Iterator[bytes], context: Any) -> bytes:
        """Receive a client's reply to one message."""
        client = self._who(context)
        with self._lock:
            busy = client in self._uploads
            if not busy:
                self._uploads[client] = context
        if busy:
            self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"client {client} sends two replies at once")
        number = 0

        def admit(said: int) -> IO[bytes]:
            nonlocal number
            if self._awaited.get(said) != client:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the server no longer waits for this reply")
            number = said
            return self._file()

        try:
            reply: Parcel | DataError | None = Parcel.take(frames, admit, self._most)
        except DataError as e:
            reply = e
        finally:
            with self._lock:
                del self._uploads[client]
        self._take_in(client, number, reply)
        return b""

    def _take_in(self, client: int, number: int, reply: Parcel | DataError | None) -> None:
        """Pass a reply to whoever waits for it; a reply without a message number answers whatever the client was asked."""
        with self._lock:
            meant = [n for n, whose in self._awaited.items() if whose == client and number in (n, 0)]
            for n in meant:
                del self._awaited[n]
                self._arrived.put((n, reply or DataError("the reply is not a fedselect message.")))
        if not meant and isinstance(reply, Parcel):
            reply.file.close()

    def _who(self, context: Any) -> int:
        """Which client calls; unknown callers are refused."""
        with_it = dict(context.invocation_metadata())
        if with_it.get("protocol") != str(PROTOCOL):
            self._refuse(context, grpc.StatusCode.UNIMPLEMENTED, "the server runs another version of fedselect")
        if self.keys is None:  # an insecure site: the client states its number
            said = str(with_it.get("client", ""))
            client = next((i for i in range(self.site.clients) if str(i) == said), None)
            name = f"client {said[:20]!r}"
        else:
            from cryptography import x509

            certificate = x509.load_pem_x509_certificate(context.auth_context()["x509_pem_cert"][0])
            client = self.keys.get(public_key(certificate.public_key()))
            name = certificate.subject.rfc4514_string()
        if client is None:
            self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, f"this server does not know the key of {name}")
        return client

    def _refuse(self, context: Any, code: Any, why: str) -> NoReturn:
        self.say(f"refused a call from {context.peer()}: {why}")
        context.abort(code, why)
        raise AssertionError("abort raises")

    def _gone(self, client: int, line: _Line) -> None:
        """Note that a client's call has ended; it will not answer what it was asked."""
        with self._lock:
            if self._lines.get(client) is not line:
                return
            del self._lines[client]
            lost = [n for n, whose in self._awaited.items() if whose == client]
            for number in lost:
                del self._awaited[number]
                self._arrived.put((number, "is disconnected"))
        line.outbox.put(None)

    def note(self) -> None:
        """Write down which clients are connected, for `fedselect deploy status`."""
        with self._noting:
            write_json(self.part / CONNECTED, {"clients": self.present()})

    def _note_quietly(self) -> None:
        """The same where a full disk must not end the client's call."""
        with suppress(RunError):
            self.note()

    def _file(self) -> IO[bytes]:
        return SpooledTemporaryFile(PIECE, dir=str(self.part))


def _emptied(outbox: "queue.SimpleQueue[Parcel | None]") -> None:
    """Drop messages that were not sent, and their files."""
    with suppress(queue.Empty):
        while True:
            if (parcel := outbox.get_nowait()) is not None:
                parcel.file.close()


class HubNodes:
    """The hub as the transport of a run. `go_on` is called continually, and raises when the run must stop."""

    def __init__(self, hub: Hub, plan: Letter, go_on: Callable[[], None]) -> None:
        self.hub, self.plan, self.go_on = hub, plan, go_on

    def present(self) -> list[int]:
        self.go_on()
        return self.hub.present()

    def ask(self, letters: Iterable[tuple[int, Letter]], timeout: float) -> Iterator[tuple[int, Reply]]:
        waiting: dict[int, int] = {}  # the client of each message that has no reply yet
        try:
            for client, letter in letters:
                self.go_on()
                number = self.hub.post(client, letter, self.plan)
                if number is None:
                    yield client, "could not be reached"
                else:
                    waiting[number] = client
            yield from self._replies(waiting, time.monotonic() + timeout)
            yield from ((client, f"no reply within {timeout:g} s") for client in waiting.values())
        finally:
            self.hub.forget(waiting)

    def _replies(self, waiting: dict[int, int], until: float) -> Iterator[tuple[int, Reply]]:
        """Replies until all have arrived or time is up; what has arrived by then still counts."""
        while waiting:
            self.go_on()
            left = until - time.monotonic()
            found = self.hub.next(min(left, LOOK))
            if found is None and left <= 0:
                return
            if found is None:
                continue
            number, reply = found
            if number in waiting:
                yield waiting.pop(number), _read(reply)
            elif isinstance(reply, Parcel):
                reply.file.close()  # a late reply to an earlier message


def _read(reply: Parcel | DataError | str) -> Reply:
    if not isinstance(reply, Parcel):
        return reply
    try:
        return heard(reply.open())
    except DataError as e:
        return e


@contextmanager
def opened(part: Path, site: Site, say: Callable[[str], None]) -> Iterator[Hub]:
    """A hub that clients can call while the block runs."""
    hub = Hub(part, site, None if site.insecure else client_keys(part, site.clients), say)
    calls = 2 * site.clients + SPARE
    options = [*OPTIONS, ("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", SPARE)]
    with ThreadPoolExecutor(calls, "letters") as threads:
        server = grpc.server(threads, options=options, maximum_concurrent_rpcs=calls)
        handlers = {
            LISTEN: grpc.unary_stream_rpc_method_handler(hub.listen),
            ANSWER: grpc.stream_unary_rpc_method_handler(hub.answer),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        _listen_at(server, part, site)
        server.start()
        hub.note()
        try:
            yield hub
        finally:
            server.stop(grace=None).wait()
            hub.close()


def _listen_at(server: Any, part: Path, site: Site) -> None:
    at = f"{listens_at(site)}:{site.port}"
    if site.insecure:
        server.add_insecure_port(at)
        return
    key, certificate, authority = ((part / name).read_bytes() for name in ("server.key", "server.crt", "ca.crt"))
    server.add_secure_port(at, grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True))
