"""Ctrl-C, answered with one sentence. Imports nothing that takes long, so that it works from the first moment on."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedselect.core.errors import FedselectError

BY_HAND = "stopped by Ctrl-C"


@contextmanager
def interruptible() -> Iterator[None]:
    """After Ctrl-C, say one sentence. A library that is interrupted while it is imported may raise any error."""
    pressed = False

    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(signum, frame)

    ours = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    )
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        yield
    except (Exception, KeyboardInterrupt) as e:
        if not pressed or isinstance(e, FedselectError):
            raise
        _stop()
    except SystemExit as e:
        if not pressed or e.code != 130:
            raise
        _stop()
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop() -> None:
    print(BY_HAND, file=sys.stderr)
    sys.exit(130)
