"""Ctrl-C, answered with one sentence. Imports next to nothing, so that it works from the first moment on."""

import signal
import sys

BY_HAND = "stopped by Ctrl-C"


class Interruptible:
    """A context in which Ctrl-C says one sentence. A library that is interrupted while it is imported may raise any error."""

    def __enter__(self) -> None:
        self._pressed = self._ours = False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._press)
                self._ours = True
            except ValueError:  # only the main thread may
                pass

    def _press(self, *of: object) -> None:
        self._pressed = True
        raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self._pressed or error is None:
            return
        from fedselect.core.errors import FedselectError

        if isinstance(error, FedselectError) or (isinstance(error, SystemExit) and error.code != 130):
            return
        print(BY_HAND, file=sys.stderr)
        sys.exit(130)
