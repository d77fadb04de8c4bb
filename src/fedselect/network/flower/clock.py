"""Checks this machine's clock against the server's: Flower rejects nodes whose clock differs too much.

A node signs the time of each request. The server refuses a time more than 5 s ahead of its own or 305 s behind it, with the
same words as for a wrong key. Every answer of the server states its time, to the second.
"""

import ssl
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedselect.network.site import Site

AHEAD, BEHIND = 5.0, 305.0  # seconds; flwr.common.constant
_SLACK = 1.0  # the server's time is rounded down, and its answer takes time


def wrong(part: Path, site: Site) -> str | None:
    """What is wrong with this machine's clock; None if it is right or no server answers."""
    off = None if site.insecure else _off(part, site)  # without keys nothing is signed
    if off is None or -BEHIND + _SLACK < off < AHEAD - _SLACK:
        return None
    side = "ahead of" if off > 0 else "behind"
    return (
        f"this machine's clock is {abs(off):.0f} s {side} the clock of the server at {site.address}, which allows "
        f"{AHEAD:.0f} s ahead or {BEHIND:.0f} s behind: set the clock, best with a time service (NTP) on both machines."
    )


def _off(part: Path, site: Site) -> float | None:
    """Seconds by which this machine's clock is ahead, if the server states its time."""
    context = ssl.create_default_context(cafile=str(part / "ca.crt"))
    began = time.time()
    try:
        with urllib.request.urlopen(f"https://{site.address}/health", timeout=5, context=context) as answer:
            there = parsedate_to_datetime(answer.headers["Date"]).timestamp() + 0.5
    except (urllib.error.URLError, OSError, TypeError, ValueError):
        return None
    return (began + time.time()) / 2 - there
