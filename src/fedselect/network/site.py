"""A site: the folder that is distributed before a federation starts, with one part for the server and one for each client."""

import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import disk, read_json, write_bytes, write_json
from fedselect.network import identity
from fedselect.network.home import own_kind
from fedselect.network.plan import Shape
from fedselect.network.vault import private
from fedselect.secret.keys import ROSTER, write_roster


@dataclass(frozen=True)
class Site:
    """What every participant of a federation knows about it."""

    federation: str
    clients: int
    address: str  # host:port of the server, as clients reach it
    insecure: bool
    data: dict[str, Any]  # the data set that is partitioned among clients; `folder` if each brings its own
    shape: Shape
    names: tuple[str, ...] = ()  # of the clients, if they have names as well as numbers
    _: KW_ONLY
    engine: str = "flower"  # the transport of messages

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @classmethod
    def read(cls, part: Path) -> "Site":
        """From site/, site/server or site/client-3."""
        said = read_json(part / "federation.json", "give a folder made by: fedselect deploy init SITE")
        try:
            shape = Shape.from_json(said)
            names = tuple(map(str, said.get("names", ())))
            return cls(
                said["federation"], said["clients"], said["address"], said["insecure"], said["data"], shape, names,
                engine=str(said.get("engine", "flower")),
            )  # fmt: skip
        except (KeyError, TypeError) as e:
            raise RunError(f"{part / 'federation.json'} lacks {e}; make the site again with: fedselect deploy init.") from None

    def to_json(self) -> dict[str, Any]:
        return {
            "federation": self.federation, "clients": self.clients, "address": self.address, "insecure": self.insecure,
            "data": self.data, **self.shape.to_json(), **({"names": self.names} if self.names else {}),
            **({"engine": self.engine} if self.engine != "flower" else {}),
        }  # fmt: skip

    def who(self, client: int) -> str:
        return f"{client} ({self.names[client]})" if self.names else str(client)


def check_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"an address is HOST:PORT, such as fl.example.org:8000, not {address!r}.")
    return address


def make(
    root: Path,
    clients: int,
    address: str,
    data: dict[str, Any],
    shape: Shape,
    *,
    insecure: bool,
    days: int,
    names: Sequence[str] = (),
    engine: str = "flower",
) -> Site:
    """Create the whole folder, with certificates and keys unless the site is insecure.

    names: the clients' names, in order.
    """
    if clients < 1:
        raise InputError(f"a federation needs at least one client, not {clients}.")
    if names and len(set(names)) != clients:
        raise InputError(f"{clients} clients need as many different names, not {', '.join(names)}.")
    check_free(root)
    named = f"{root.name}-{secrets.token_hex(4)}"
    site = Site(named, clients, check_address(address), insecure, data, shape, tuple(names), engine=engine)
    parts = [root / "server", *(root / f"client-{i}" for i in range(clients))]
    for folder in (root, *parts):
        private(folder)
        write_json(folder / "federation.json", site.to_json())
    if not insecure:
        private(root / "ca")
        identity.make_authority(root / "ca")
        renew(root, days)
        with disk(root):
            (root / "server" / "keys").mkdir()
        for i in range(clients):
            write_bytes(root / f"client-{i}" / "ca.crt", (root / "ca" / "ca.crt").read_bytes())
            identity.node_key(root / f"client-{i}" / "node.key", root / "server" / "keys" / f"client-{i}.pub")
            if engine == "grpc":
                identity.node_certificate(root / "ca", root / f"client-{i}", f"client {i}")
        _rosters(root, site)
    for i in range(clients):
        write_json(root / f"client-{i}" / "client.json", {"client": i})
    write_bytes(root / "README.md", _readme(site).encode())
    return site


def check_free(root: Path, replaced: bool = False) -> None:
    """Check that the folder is free, or is a site that may be replaced."""
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        raise InputError(f"{root} is not a folder; a site needs a folder of its own: choose another.")
    if root.exists() and any(root.iterdir()) and not replaced:
        raise InputError(f"{root} exists already; choose another folder, or remove it.")


def is_site(root: Path) -> bool:
    """Whether a folder is a site that `make` created, and holds nothing else."""
    if root.is_symlink() or not (root / "server" / "federation.json").is_file():
        return False
    try:
        parts = {"server", *(f"client-{i}" for i in range(Site.read(root).clients))}
    except RunError:
        return False
    there = {p.name: p for p in root.iterdir()}
    folders = all(there[name].is_dir() and not there[name].is_symlink() for name in there.keys() & (parts | {"ca"}))
    return folders and there.keys() <= parts | {"ca", "federation.json", "README.md"}


def renew(root: Path, days: int) -> None:
    """Create a new server certificate from the site's own authority."""
    identity.server_certificate(root / "ca", root / "server", Site.read(root).host, days)
    write_bytes(root / "server" / "ca.crt", (root / "ca" / "ca.crt").read_bytes())


def check_kind(part: Path, wanted: str) -> None:
    """Check that this is the right part of a site; if it is another one, say which to give."""
    whole = (part / "ca").is_dir() or (part / "server" / "federation.json").is_file()
    found = "client" if (part / "client.json").is_file() else "site" if whole else "server"
    if found == wanted or not (part / "federation.json").is_file():
        return
    here = {"client": "a client's part of a site", "site": "a whole site", "server": "the server's part of a site"}[found]
    root = part if found == "site" else part.resolve().parent
    which = f"the server's part, {root / 'server'}" if wanted == "server" else f"a client's part, such as {root / 'client-0'}"
    raise InputError(f"{part} is {here}; give {which}.")


def check_part(part: Path, needed: tuple[str, ...]) -> None:
    """Check that the files of a part exist and that its certificates have not expired."""
    from cryptography import x509

    for name in needed:
        if not (part / name).is_file():
            raise InputError(
                f"{part / name} is missing; copy it from the site, or make the site again with: fedselect deploy init."
            )
        if not name.endswith(".crt"):
            continue
        try:
            certificate = x509.load_pem_x509_certificate((part / name).read_bytes())
        except ValueError:
            raise InputError(f"{part / name} is not a certificate; copy it from the site again.") from None
        now, until = datetime.now(UTC), certificate.not_valid_after_utc
        if now > until:
            raise InputError(
                f"{part / name} expired on {until:%Y-%m-%d}; where the site was made, run: fedselect deploy renew SITE, "
                "and distribute its files again."
            )


def check_port(host: str, port: int) -> None:
    """Check that the server can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise InputError(
                f"port {port} on {host} cannot be used ({e.strerror}); stop the program that uses it, or make the site with "
                "another --address."
            ) from None


def listens_at(site: Site) -> str:
    """The interface a server listens on: loopback only, if the clients run on the same machine."""
    return "127.0.0.1" if site.host in ("127.0.0.1", "localhost") else "0.0.0.0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rosters(root: Path, site: Site) -> None:
    """Write for each client a list of all clients, signed by the site's authority, so that a server cannot invent clients."""
    authority = identity.load_key((root / "ca" / "ca.key").read_bytes())
    public = [(root / "server" / "keys" / f"client-{i}.pub").read_text() for i in range(site.clients)]
    for i in range(site.clients):
        write_roster(root / f"client-{i}" / ROSTER, site.federation, public, authority)


def write_app(folder: Path, flat: dict[str, bool | float | int | str], version: str) -> Path:
    """The Flower app that starts a run: only a configuration; the code it names is installed on the nodes."""
    tables: dict[str, list[str]] = {"": []}
    for key, value in flat.items():
        table, dot, name = key.rpartition(".")
        tables.setdefault(table if dot else "", []).append(f"{name} = {_toml(value)}")
    head = files("fedselect.network.flower").joinpath("app.toml").read_text().replace("VERSION", version)
    body = "\n".join(tables.pop("")) + "".join(
        f"\n\n[tool.flwr.app.config.{table}]\n" + "\n".join(lines) for table, lines in tables.items()
    )
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "pyproject.toml", f"{head}{body}\n".encode())
    write_bytes(folder / "LICENSE", b"Apache-2.0\n")
    return folder


def _toml(value: bool | float | int | str) -> str:
    return json.dumps(value, ensure_ascii=False)  # plain values look the same in TOML and JSON


def _readme(site: Site) -> str:
    clients = "\n".join(f"- `client-{i}/` to client {site.who(i)}, over a secure channel" for i in range(site.clients))
    place = {"table": "/where/its/table/is.csv", "folder": "/where/its/images/are"}
    own = f"{(kind := own_kind(site.data))}:{place.get(kind, '/where/its/data/is')}"
    keys = "" if site.insecure else "\n- `ca/` stays with you: it signs new certificates (`fedselect deploy renew`)"
    return f"""# Federation {site.federation}

{site.clients} clients, server at {site.address}{", everything in plain text" if site.insecure else ", TLS and node keys"}.
Distribute these folders, then delete them here:
- `server/` to the server
{clients}{keys}

On the server: `fedselect deploy server server`, and to train: `fedselect deploy run . --method fedselect --rounds 50`.
On each client: `fedselect deploy client client-0 --data {own}`.
Afterwards, on the client: `fedselect deploy export client-0`.
"""
