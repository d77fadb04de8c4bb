"""Why something failed in Flower, in words: from a process's log, a command's output, or an error in place of a reply."""

import json
import re
from pathlib import Path

NOTHING = "it did not say why"
REFUSED = f"{NOTHING}, as when the server rejects the time or the signature of a request: compare the clocks of both machines"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_START = re.compile(r"Starting Flower (SuperNode|SuperLink)[^\n]*\n?")
_ROUTINE = re.compile(r"^(\S+Z )?\W*(INFO|DEBUG)\b|^[\W_]*$")  # lines without a reason: routine notes, and brackets
_CODES = {
    1: "could not load the app",
    2: "raised an error",
    4: "replied too late",
    5: "is disconnected",
    7: "got an app that it cannot read",
    8: "died during its work",
}


def of_log(log: Path, code: int | None) -> str:
    """Why a process ended: its log's message about an exit, or else the last line that is more than a note."""
    if turned_away(log):
        return (
            "the server does not know this client's node.key (use the client folder of the same site), or another copy of this "
            "client is connected (stop it)."
        )
    what, said = _last_start(log)
    _, found, told = said.rpartition("Exit Code:")
    words = " ".join(told.partition("For more information")[0].split()[-30:]) if found else _last(told)
    if not found and code is not None and code < 0:
        words = f"it was killed by signal {-code}"
    return f"{words or (REFUSED if what == 'SuperNode' else NOTHING)} (code {code}; see {log})."


def turned_away(log: Path) -> bool:
    """Whether the server refused the SuperNode that was last started."""
    return "Failed to activate SuperNode" in _last_start(log)[1]


def _last_start(log: Path) -> tuple[str, str]:
    """Which Flower process started last, and its log since; helpers that it starts itself do not count."""
    text = _COLOUR.sub("", log.read_text(errors="replace"))
    starts = list(_START.finditer(text))
    return (starts[-1][1], text[starts[-1].end() :]) if starts else ("", text)


def of_command(output: str) -> str:
    """Why a command failed: the message in its JSON, or else its last line that is more than a note."""
    for at in (m.start() for m in re.finditer(r"^\{", output, re.MULTILINE)):
        try:
            said, _ = json.JSONDecoder().raw_decode(output, at)
        except ValueError:
            continue
        if message := said.get("error-message"):
            return " ".join(str(message).split())
    return _last(output) or NOTHING


def of_error(code: int, reason: str) -> str:
    """Why a node did not reply; an app's own error comes in its own words."""
    if code == 2:
        return f"raised an error: {reason}"
    if code == 3 and "upload" in reason:
        return "was cut off while it sent its reply"
    if code == 3:
        return "got no message within its time-out; if that happens again, raise --timeout and compare the clocks"
    told = f": {reason}" if reason else ""
    return _CODES.get(code) or f"failed{told} (Flower's code {code})"


def _last(text: str) -> str:
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if not _ROUTINE.search(line.strip())]
    return lines[-1] if lines else ""
