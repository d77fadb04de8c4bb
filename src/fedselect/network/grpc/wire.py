"""Letters as frames: three numbers, then text and body in pieces, so that no message of the network is a whole model."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import torch

from fedselect.core.errors import DataError
from fedselect.network.letters import Letter, unseal

SERVICE = "fedselect.Letters"
LISTEN, ANSWER = "Listen", "Answer"  # the client waits for letters; it sends a reply
PROTOCOL = 1
PIECE = 1 << 20
HEAD = struct.Struct(">QQQ")  # the letter's number, bytes of its text, bytes of its body
OPTIONS = [
    ("grpc.max_receive_message_length", 2 * PIECE),
    ("grpc.max_send_message_length", 2 * PIECE),
    ("grpc.keepalive_time_ms", 10_000),  # a peer that vanished is noticed within fifteen seconds
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # as often as a server lets clients ping
]
"""Of both sides. A peer whose process ends is noticed at once: its system closes the connection."""


@dataclass
class Parcel:
    """A letter on its way, in a file or in memory: at the server files, so that memory holds one letter, not one a client."""

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
        """The next letter of a stream; None where the stream is over. `admit` says where one of this number goes."""
        head = next(frames, None)
        if head is None:
            return None
        if len(head) != HEAD.size:
            raise DataError("a message holds no letter.")
        number, text, body = HEAD.unpack(head)
        file = admit(number)
        try:
            if text + body > most:
                raise DataError(f"a letter of {text + body} bytes came; at most {most} are taken.")
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
        """The letter, checked by `unseal`; the file is done with."""
        with self.file as file:
            file.seek(0)
            try:
                text = file.read(self.text).decode()
            except ValueError as e:
                raise DataError(f"a letter cannot be read ({type(e).__name__}: {e}).") from None
            body = bytearray(self.body)
            file.readinto(body)  # type: ignore[attr-defined]
        return unseal(text, torch.frombuffer(body, dtype=torch.uint8) if body else torch.zeros(0, dtype=torch.uint8))


def _fill(file: IO[bytes], frames: Iterator[bytes], size: int) -> None:
    left = size
    while left:
        piece = next(frames, b"")
        if not 0 < len(piece) <= left:
            raise DataError(f"a letter has other bytes than the {size} it announced.")
        file.write(piece)
        left -= len(piece)
