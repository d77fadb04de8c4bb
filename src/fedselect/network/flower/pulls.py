"""Pulls replies in separate threads, so that a reply that never completes blocks no other.

Flower delivers a reply as soon as its upload begins, and `pull_messages` then waits for the rest. If the node died meanwhile,
that takes until the upload's session expires, 180 s. It has no shorter setting, and a reply that was delivered cannot be asked
for again. So a slow pull continues in the background, and is dropped when its time is over.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
POLL = 0.5  # seconds between checks for replies whose upload has not begun
MOMENT = 2.0  # seconds that others wait for a pull before they start theirs
ABREAST = 8  # most concurrent pulls: each may hold a model
LONG = 20.0  # seconds after which a pull counts as one from a dead node, so that another may start
MOST = 4 * ABREAST  # most concurrent pulls, including those


class Pulls(Generic[T]):
    """Pulls replies by message number with `pull`, one at a time while they come quickly."""

    def __init__(self, pull: Callable[[list[str]], Iterable[T]]) -> None:
        self._pull = pull
        self._done: queue.SimpleQueue[tuple[str, list[T] | BaseException]] = queue.SimpleQueue()
        self._going: dict[str, float] = {}  # start time of each

    def until(self, deadline: float, numbers: set[str]) -> Iterator[tuple[str, T]]:
        """Replies as they arrive, each removed from `numbers`; those left in it did not arrive by the deadline."""
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
            except BaseException as e:  # raised again where the reply is awaited
                self._done.put((number, e))

        self._going[number] = time.monotonic()
        threading.Thread(target=work, name=f"pull {number[:8]}", daemon=True).start()

    def _take(self, number: str, numbers: set[str], patience: float) -> Iterator[tuple[str, T]]:
        """What has arrived once this pull, or the patience for it, is over."""
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
