"""Replies pulled in threads of their own: one that never comes to its end holds up nobody else.

Flower hands a reply over as soon as its upload begins, and `pull_messages` then waits for the rest: of a node that died in
between, until the upload's session runs out, 180 s. It cannot be told to wait less, and a reply that was handed over once
cannot be asked for again. So a pull that takes long goes on in the background, and is dropped when its time is over.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
POLL = 0.5  # seconds between looks for replies that have not begun to come
MOMENT = 2.0  # seconds that others wait for a pull before theirs begin
ABREAST = 8  # pulls at most at one time: each may hold a model
LONG = 20.0  # seconds after which a pull is counted as one of a node that died, so that others may begin in its place
MOST = 4 * ABREAST  # with those


class Pulls(Generic[T]):
    """Pulls replies by the numbers of their questions, `pull` one at a time while they come quickly."""

    def __init__(self, pull: Callable[[list[str]], Iterable[T]]) -> None:
        self._pull = pull
        self._done: queue.SimpleQueue[tuple[str, list[T] | BaseException]] = queue.SimpleQueue()
        self._going: dict[str, float] = {}  # since when

    def until(self, deadline: float, numbers: set[str]) -> Iterator[tuple[str, T]]:
        """Replies as they come, each taken out of `numbers`; those left in it have not come by the deadline."""
        while numbers and time.monotonic() < deadline:
            for number in sorted(numbers - self._going.keys()):
                if not self._full:
                    self._start(number)
                yield from self._take(number, numbers, min(MOMENT, deadline - time.monotonic()))
            if numbers:
                time.sleep(max(0.0, min(POLL, deadline - time.monotonic())))
                yield from self._take("", numbers, 0.0)

    @property
    def _full(self) -> bool:
        young = [since for since in self._going.values() if time.monotonic() < since + LONG]
        return len(young) >= ABREAST or len(self._going) >= MOST

    def _start(self, number: str) -> None:
        def work() -> None:
            try:
                self._done.put((number, list(self._pull([number]))))
            except BaseException as e:  # said where the reply is waited for
                self._done.put((number, e))

        self._going[number] = time.monotonic()
        threading.Thread(target=work, name=f"pull {number[:8]}", daemon=True).start()

    def _take(self, number: str, numbers: set[str], patience: float) -> Iterator[tuple[str, T]]:
        """What has come, once this pull is over or patience is."""
        until = time.monotonic() + patience
        while self._going:
            wait = until - time.monotonic() if number in self._going or self._full else 0.0
            try:
                came, found = self._done.get(timeout=max(0.0, wait)) if wait > 0 else self._done.get_nowait()
            except queue.Empty:
                return
            self._going.pop(came, None)
            if isinstance(found, BaseException):
                raise found
            for reply in found:
                numbers.discard(came)
                yield came, reply
