"""A client's end: calls the server, answers its messages one at a time, and calls again when the connection breaks."""

import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # we report errors ourselves
import grpc

from fedselect.core.errors import DataError, RunError
from fedselect.network.desk import Desk
from fedselect.network.grpc.wire import ANSWER, LISTEN, OPTIONS, PROTOCOL, SERVICE, Parcel
from fedselect.network.identity import node_identity
from fedselect.network.letters import Letter, heard, refusal
from fedselect.network.reach import Reach, unreachable
from fedselect.network.site import Site

FIRST, LONGEST = 0.5, 10.0  # seconds before calling again: at first, and at most
RETRY = 30.0  # seconds to retry while the server counts this client as connected; it notices a dead connection in fifteen
LARGEST = 16 << 30  # bytes of a message

Answer = Callable[[Letter], Letter]


class Line:
    """An open connection."""

    def __init__(self, channel: Any, client: int) -> None:
        self._listen = channel.unary_stream(f"/{SERVICE}/{LISTEN}")
        self._answer = channel.stream_unary(f"/{SERVICE}/{ANSWER}")
        self._who = (("protocol", str(PROTOCOL)), ("client", str(client)))

    def letters(self) -> Iterator[tuple[int, Letter]]:
        """Messages as they arrive, each with its number, until the server hangs up."""
        frames = self._listen(b"", metadata=self._who)
        while (parcel := Parcel.take(frames, lambda number: BytesIO(), LARGEST)) is not None:
            yield parcel.number, parcel.open()

    def answer(self, number: int, letter: Letter) -> None:
        with BytesIO() as file:
            try:
                self.send(Parcel.of(number, letter, file).frames())
            except grpc.RpcError as e:
                if e.code() is not grpc.StatusCode.FAILED_PRECONDITION:  # otherwise it was late; continue with the next
                    raise

    def send(self, frames: Iterator[bytes]) -> None:
        self._answer(frames, metadata=self._who)


@contextmanager
def dialled(part: Path, site: Site, client: int) -> Iterator[Line]:
    options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    if site.host in ("127.0.0.1", "localhost"):
        options.append(("grpc.enable_http_proxy", 0))
    if site.insecure:
        channel = grpc.insecure_channel(site.address, options)
    else:
        certificate, key = node_identity(part)
        credentials = grpc.ssl_channel_credentials((part / "ca.crt").read_bytes(), key, certificate)
        channel = grpc.secure_channel(site.address, credentials, options)
    with channel:
        yield Line(channel, client)


@dataclass
class Caller:
    """A client that stays connected until it is stopped."""

    part: Path
    site: Site
    desk: Desk
    say: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    _why: str = ""  # why it did not answer the last message

    def work(self) -> None:
        """Serve the server; raises if it refuses this client for good."""
        reach, pause, turned = Reach(self.site, self.desk.home.client, self.say), FIRST, 0.0
        while True:
            try:
                with dialled(self.part, self.site, self.desk.home.client) as line:
                    for number, letter in line.letters():
                        if number:
                            line.answer(number, self._reply(letter))
                        elif isinstance(plan := letter.head.get("plan"), dict):
                            self.desk.take(plan)
                        else:
                            reach.there()
                            pause, turned = FIRST, 0.0
                why = "it closed the connection"
            except DataError as e:
                why = str(e)
            except grpc.RpcError as e:
                why = unreachable(self.site) or str(e.details())
                if e.code() is grpc.StatusCode.ALREADY_EXISTS:
                    turned = self._turned_away(turned)
                elif e.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED):
                    raise RunError(f"the server refuses this client: {e.details()}; use the folder of the same site.") from None
            if not turned:
                reach.away(why)
            self.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST)

    def _turned_away(self, since: float) -> float:
        """Handle that the server counts this client as connected: another copy, or a dead connection not yet noticed."""
        if not since:
            self.say("the server still counts this client as connected; trying for half a minute (is another copy running?)")
            return time.monotonic()
        if time.monotonic() > since + RETRY:
            raise RunError("another copy of this client is connected to the server; stop it.")
        return since

    def _reply(self, letter: Letter) -> Letter:
        try:
            reply = self.desk.answer(letter)
        except Exception as e:
            self.say(traceback.format_exc())
            return refusal(f"raised an error: {type(e).__name__}: {e}")
        why = said if isinstance(said := heard(reply), str) else ""
        if why and why != self._why:  # not in every round
            self.say(f"this client cannot take part: {why}")
        if not why and self._why:
            self.say("this client takes part again")
        self._why = why
        return reply
