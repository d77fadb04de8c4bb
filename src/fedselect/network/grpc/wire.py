"""Messages as frames: three numbers, then text and body in pieces, so that no network message holds a whole model."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import torch

from fedselect.core.errors import DataError
from fedselect.network.letters import Letter, unseal

SERVICE = "fedselect.Letters"
LISTEN, ANSWER = "Listen", "Answer"  # the client waits for messages; it sends a reply
PROTOCOL = 1
PIECE = 1 << 20
HEAD = struct.Struct(">QQQ")  # the message's number, bytes of its text, bytes of its body
OPTIONS = [
    ("grpc.max_receive_message_length", 2 * PIECE),
    ("grpc.max_send_message_length", 2 * PIECE),
    ("grpc.keepalive_time_ms", 10_000),  # a vanished peer is noticed within fifteen seconds
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # as often as a server lets clients ping
]
"""For both sides. A peer whose process ends is noticed at once: its system closes the connection."""


@dataclass
class Parcel:
    """A message in transit, in a file or in memory; the server uses files, so that memory holds one message, not all."""

    number: int
    text: int  # bytes of it
    body: int
    file: IO[bytes]

    @classmethod
    def of(cls, number: int, letter: Letter, file: IO[bytes]) -> "Parcel":
        text, body = letter.seal()
        said = text.encode()
        file.write(said)
        file.write(body.numpy().data)
        return cls(number, len(said), body.numel(), file)

    @classmethod
    def take(cls, frames: Iterator[bytes], admit: Callable[[int], IO[bytes]], most: int) -> "Parcel | None":
        """The next message of a stream; None at its end. `admit` says where a message with this number is stored."""
        head = next(frames, None)
        if head is None:
            return None
        if len(head) != HEAD.size:
            raise DataError("the message has no fedselect content.")
        number, text, body = HEAD.unpack(head)
        file = admit(number)
        try:
            if text + body > most:
                raise DataError(f"a message has {text + body} bytes; at most {most} are allowed.")
            _fill(file, frames, text + body)
        except BaseException:
            file.close()
            raise
        return cls(number, text, body, file)

    def frames(self) -> Iterator[bytes]:
        yield HEAD.pack(self.number, self.text, self.body)
        self.file.seek(0)
        while piece := self.file.read(PIECE):
            yield piece

    def open(self) -> Letter:
        """The message, checked by `unseal`; its file is closed."""
        with self.file as file:
            file.seek(0)
            try:
                text = file.read(self.text).decode()
            except ValueError as e:
                raise DataError(f"a message cannot be read ({type(e).__name__}: {e}).") from None
            body = bytearray(self.body)
            file.readinto(body)  # type: ignore[attr-defined]
        return unseal(text, torch.frombuffer(body, dtype=torch.uint8) if body else torch.zeros(0, dtype=torch.uint8))


def _fill(file: IO[bytes], frames: Iterator[bytes], size: int) -> None:
    left = size
    while left:
        piece = next(frames, b"")
        if not 0 < len(piece) <= left:
            raise DataError(f"a message does not have the {size} bytes that it announced.")
        file.write(piece)
        left -= len(piece)
