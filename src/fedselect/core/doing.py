"""What long work inside a round is at: said by whoever works, shown by whoever listens."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OFTEN = 1.0
"""Seconds between two messages. Work that takes less says nothing."""

Listener = Callable[[str, float | None], None]
"""Gets what is being done and the share of it that is done; None: it is over."""
_listeners: list[Listener] = []
_within: list[str] = []


@contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """Tell this listener, too."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def within(name: str) -> Iterator[None]:
    """What the work in this block is a part of, such as "round 3"."""
    _within.append(name)
    try:
        yield
    finally:
        _within.pop()


def tell(what: str, share: float | None) -> None:
    for listener in list(_listeners):
        listener(what, share)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """For work of so many steps: call what this yields with the number of steps just done."""
    name, done, last, told = ": ".join([*_within, what]), 0, time.monotonic(), False

    def advance(steps: int) -> None:
        nonlocal done, last, told
        done += steps
        if (now := time.monotonic()) - last >= OFTEN:
            last, told = now, True
            tell(name, done / total)

    try:
        yield advance
    finally:
        if told:
            tell(name, None)
