"""The connection from a client to its server: whether it exists, which certificate the server shows, and what to report."""

import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile

from fedselect.core.errors import InputError
from fedselect.core.files import disk
from fedselect.network.site import Site

LATE = 30.0  # seconds without an answer after which a client says so


def unreachable(site: Site) -> str | None:
    """Why the server cannot be reached, or None if it can."""
    try:
        with socket.create_connection((site.host, site.port), timeout=5):
            return None
    except OSError as e:
        return e.strerror or str(e)


def check_server(part: Path, site: Site, own: bytes | None = None, room: Path | None = None) -> None:
    """Check that a running server shows a certificate of this site's authority; skip a server that is not up yet.

    own: this client's certificate and key, PEM, which such a server must accept. room: the folder for a short-lived copy of
    them; by default `part`.
    """
    context = ssl.create_default_context(cafile=str(part / "ca.crt"))
    greeted = False
    if own is not None:
        context.set_alpn_protocols(["h2"])
        with NamedTemporaryFile(dir=room or part) as file:  # which only its owner can read
            with disk(Path(file.name)):
                file.write(own)
                file.flush()
            context.load_cert_chain(file.name)
    try:
        with (
            socket.create_connection((site.host, site.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=site.host) as secure,
        ):
            greeted = True
            if own is not None and not secure.recv(1):  # a server that refuses a client hangs up after the handshake
                raise ConnectionResetError
    except ssl.SSLCertVerificationError as e:
        raise InputError(
            f"the server at {site.address} shows a certificate that {part / 'ca.crt'} did not sign "
            f"({e.verify_message}); use the client folder of the same site{_or_clock(e)}."
        ) from None
    except (ssl.SSLError, ConnectionResetError) as e:
        if greeted:
            raise InputError(
                f"the server at {site.address} refuses the certificate {part / 'node.crt'}; "
                "use the client folder of the same site."
            ) from None
        reason = e.reason if isinstance(e, ssl.SSLError) else e.strerror
        raise InputError(
            f"the server at {site.address} does not use TLS ({reason}); use the client folder of the same site."
        ) from None
    except OSError:
        return


def _or_clock(e: ssl.SSLCertVerificationError) -> str:
    """A certificate that is expired or not yet valid may be right and the clock wrong."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f", or set this machine's clock: it says {now}" if e.verify_code in (9, 10) else ""


def waiting(site: Site) -> str:
    return f"waiting for the server at {site.address}"


def silent(site: Site, why: str) -> str:
    """What a client reports if its server has not answered yet."""
    return (
        f"the server at {site.address} does not answer ({why}); this client keeps trying: check that the server "
        "runs (fedselect deploy server) and that its address can be reached from here"
    )


def lost(site: Site, why: str) -> str:
    return f"the server at {site.address} no longer answers ({why}); this client keeps trying, leave it running"


def back(site: Site) -> str:
    return f"the server at {site.address} answers again"


class Reach:
    """Reports once each that a client waits for its server, is connected, loses the server, and finds it again."""

    def __init__(self, site: Site, client: int, say: Callable[[str], None]) -> None:
        self.site, self.client, self.say = site, client, say
        self._late = time.monotonic() + LATE
        self._in = self._waits = self._told = False

    def there(self) -> None:
        if not self._in:
            self.say(f"client {self.client} is connected to the server")
        elif self._told:
            self.say(back(self.site))
        self._in, self._told = True, False

    def away(self, why: str) -> None:
        """Report a lost connection at once if the server was there before; wait for a server that has yet to start."""
        if not self._in and not self._waits:
            self._waits = True
            self.say(waiting(self.site))
        if self._told or (not self._in and time.monotonic() < self._late):
            return
        self._told = True
        self.say(lost(self.site, why) if self._in else silent(self.site, why))
