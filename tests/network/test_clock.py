"""A clock that Flower does not believe is named before Flower refuses the client without a word."""

import ssl
import threading
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import time

import pytest

from fedselect.core.errors import InputError
from fedselect.network import site
from fedselect.network.flower import clock, launch
from fedselect.network.home import Home
from fedselect.network.plan import Shape


class Clock(BaseHTTPRequestHandler):
    off = 0.0

    def do_GET(self):
        self.send_response_only(200)
        self.send_header("Date", formatdate(time() + self.off, usegmt=True))
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A site whose server says what time it is."""
    place, port = tmp_path_factory.mktemp("clock") / "site", site.free_port()
    site.make(place, 1, f"127.0.0.1:{port}", {"name": "folder"}, Shape((4,), ("a", "b")), insecure=False, days=1, names=())
    server = ThreadingHTTPServer(("127.0.0.1", port), Clock)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "server" / "server.crt", place / "server" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield place
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("off", "said"),
    [
        (0.0, None),
        (-2.0, None),
        (290.0, None),
        (-20.0, "s ahead of the clock"),
        (400.0, "s behind the clock"),
        (-1e6, "s ahead of the clock"),
    ],
)
def test_a_clock_that_differs_too_much_is_named(root, monkeypatch, off, said):
    monkeypatch.setattr(Clock, "off", off)  # that of the server
    found = clock.wrong(root / "client-0", site.Site.read(root / "client-0"))
    assert (found is None) if said is None else (said in found and "set the clock" in found)


def test_a_client_with_a_wrong_clock_is_not_started(root, monkeypatch, tmp_path):
    monkeypatch.setattr(Clock, "off", -60.0)
    with (
        pytest.raises(
            InputError, match=r"clock is (59|60|61) s ahead of the clock of the server at 127.0.0.1:\d+, which allows"
        ),
        launch.client(root / "client-0", Home(0, tmp_path), tmp_path / "log.txt"),
    ):
        pass


def test_without_a_server_or_keys_nothing_is_said(root):
    known = site.Site.read(root / "client-0")
    assert clock.wrong(root / "client-0", replace(known, address=f"127.0.0.1:{site.free_port()}")) is None
    assert clock.wrong(root / "client-0", replace(known, insecure=True)) is None
