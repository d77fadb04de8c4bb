"""The report: one self-contained page from run directories, and the same figures and tables as files."""

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import write_bytes
from fedselect.report.runs import Data, gather

__all__ = ["check_page", "gather", "page", "plotly", "write_report"]


def write_report(places: Sequence[Path], out: Path | None = None) -> Path:
    """Write report.html into the directory of a run or comparison, or to `out`."""
    if out is not None:
        check_page(out)
    where = out or (places[0] / "report.html" if len(places) == 1 else Path("report.html"))
    write_bytes(where, page(gather(places)).encode())
    return where


def check_page(out: Path) -> None:
    if out.suffix != ".html":
        raise InputError(
            f"the report is an .html page, not {out.name!r}; to also write figures as PDF and PNG, pass --figures."
        )


def page(data: Data, live: bool = False) -> str:
    """The self-contained page, which opens offline."""
    here = files(__package__)
    own = "\n".join(
        (here / name).read_text() for name in ("charts.js", "figures.js", "sides.js", "masks.js", "tuning.js", "page.js")
    )
    parts = {
        "title": html.escape(data["title"]),
        "live": "live" if live else "still",
        "style": (here / "page.css").read_text(),
        "plotly": plotly(),
        "script": own,
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # no text in it can end the script
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], (here / "page.html").read_text())


def plotly() -> str:
    """The plotly script, from the plotly package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise RunError("a report needs plotly; install it with: pip install 'fedselect[report]'") from None
    return str(get_plotlyjs())
