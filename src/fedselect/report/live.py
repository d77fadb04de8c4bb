"""The live report of a running run: read-only, for this machine only, until the run ends."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedselect.core.errors import InputError, RunError
from fedselect.report import gather, page, plotly
from fedselect.report.runs import expand

HOST = "127.0.0.1"  # not reachable from other machines
WAITING = """<!doctype html><html lang="en"><meta charset="utf-8"><title>fedselect</title><link rel="icon" href="data:,">
<meta http-equiv="refresh" content="2"><meta name="color-scheme" content="light dark">
<body style="font: 16px system-ui; margin: 4rem auto; max-width: 40rem">
<p>The first round is running. The report will appear here when it is done.</p></body></html>"""
PATIENCE = 5.0  # seconds for an open page to fetch the last round


@contextmanager
def live(out: Path, port: int) -> Iterator[str]:
    """Serve the report of a directory until the block ends. Yields its address."""
    plotly()  # raises before the run if the package is missing
    try:
        server = _Server(out, port)
    except (OSError, OverflowError) as e:
        raise InputError(f"port {port} cannot be used ({e}); choose another --port, or remove it to use a free one.") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_port}/"
        server.farewell()
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, out: Path, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.out = out
        self.asked = 0.0  # when a page last asked for news

    def farewell(self) -> None:
        """Wait until an open page has fetched the last round."""
        ended = time.monotonic()
        while ended - PATIENCE < self.asked < ended and time.monotonic() < ended + PATIENCE:
            time.sleep(0.05)

    def tag(self) -> str:
        """A tag that changes whenever a file of the report changes."""
        names = (
            "config.json",
            "federation.json",
            "metrics.jsonl",
            "masks.jsonl",
            "persistence.json",
            "groups.json",
            "summary.json",
            "failed.json",
        )
        found = [p.stat() for run in expand(self.out) for p in map(run.joinpath, names) if p.exists()]
        return f'"{hashlib.sha256(str([(s.st_size, s.st_mtime_ns) for s in found]).encode()).hexdigest()[:16]}"'


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.headers.get("Host") not in (f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            self._answer(HTTPStatus.FORBIDDEN, b"open the report at its own address\n")  # other web pages must not read it
        elif self.path == "/":
            try:
                self._answer(HTTPStatus.OK, page(gather([self.server.out]), live=True).encode(), "text/html")
            except RunError:
                self._answer(HTTPStatus.OK, WAITING.encode(), "text/html")
        elif self.path == "/data.json":
            self._news()
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"the only pages are / and /data.json\n")

    def _news(self) -> None:
        try:
            tag = self.server.tag()
            same = self.headers.get("If-None-Match") == tag
            body = b"" if same else json.dumps(gather([self.server.out])).encode()
        except RunError:  # nothing to show yet
            self._answer(HTTPStatus.NO_CONTENT)
        else:
            self._answer(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK, body, "application/json", ETag=tag)
        self.server.asked = time.monotonic()

    def _answer(self, status: HTTPStatus, body: bytes = b"", kind: str = "text/plain", **headers: str) -> None:
        try:
            self.send_response(status)
            for name, value in {"Content-Type": f"{kind}; charset=utf-8", "Cache-Control": "no-store", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            pass  # the page was closed

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing; the terminal is for the run."""
