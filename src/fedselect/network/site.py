"""A site: the folder that is distributed before a federation starts, with one part for the server and one for each client."""

import ipaddress
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import disk, read_json, write_bytes, write_json
from fedselect.network.home import own_kind
from fedselect.network.plan import Shape
from fedselect.network.vault import private
from fedselect.secret.keys import ROSTER, write_roster

CA_DAYS = 3650


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
        _authority(root / "ca")
        renew(root, days)
        with disk(root):
            (root / "server" / "keys").mkdir()
        for i in range(clients):
            write_bytes(root / f"client-{i}" / "ca.crt", (root / "ca" / "ca.crt").read_bytes())
            _node_key(root / f"client-{i}" / "node.key", root / "server" / "keys" / f"client-{i}.pub")
            if engine == "grpc":
                _node_certificate(root / "ca", root / f"client-{i}", f"client {i}")
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
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    site, key = Site.read(root), _new_key()
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    if site.host not in ("localhost", "127.0.0.1"):
        names.append(_general_name(site.host))
    host = x509.SubjectAlternativeName(names)
    certificate = _vouched(root / "ca", "fedselect server", key.public_key(), days, ExtendedKeyUsageOID.SERVER_AUTH, host)
    _write(root / "server" / "server.crt", certificate)
    _write(root / "server" / "server.key", key)
    write_bytes(root / "server" / "ca.crt", (root / "ca" / "ca.crt").read_bytes())


def _vouched(folder: Path, name: str, public: Any, days: int, purpose: Any, *more: Any) -> Any:
    """A certificate for a server or a client, signed by the authority in this folder."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        signer = _load_key((folder / "ca.key").read_bytes())
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (OSError, ValueError) as e:
        raise RunError(f"{folder} cannot be read ({e}); renew where the site was made.") from None
    certificate = _certificate(name, authority.subject, public, days)
    for extension in (*more, x509.ExtendedKeyUsage([purpose])):
        certificate = certificate.add_extension(extension, critical=False)
    return (
        certificate.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )


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


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _load_key(pem: bytes) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return load_pem_private_key(pem, None)


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(name: str, issuer: Any, public: Any, days: int) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + timedelta(days=days)) - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)  # RFC 5280; Python 3.13 insists
    )


def _key_usage(signs: bool) -> Any:
    """The purpose of a key: to sign certificates, or to authenticate the server."""
    from cryptography import x509

    never = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
        False,
    )
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **never)


def _authority(folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _new_key()
    certificate = (
        _certificate("fedselect site", None, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write(folder / "ca.crt", certificate)
    _write(folder / "ca.key", key)


def _node_key(private_path: Path, public_path: Path) -> None:
    """A client's key: Flower requires ECDSA P-384 in OpenSSH's format."""
    from cryptography.hazmat.primitives import serialization as s

    key = _new_key()
    write_bytes(private_path, key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()))
    private_path.chmod(0o600)
    write_bytes(public_path, key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH))


def _node_certificate(authority: Path, part: Path, name: str) -> None:
    """A client's certificate for mutual TLS. It is valid as long as the authority: servers identify clients by their keys."""
    from cryptography.x509.oid import ExtendedKeyUsageOID

    public = _node_private(part).public_key()
    _write(part / "node.crt", _vouched(authority, name, public, CA_DAYS, ExtendedKeyUsageOID.CLIENT_AUTH))


def _node_private(part: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        return load_ssh_private_key((part / "node.key").read_bytes(), None)
    except ValueError:
        raise InputError(f"{part / 'node.key'} is not a key; copy it from the site again.") from None


def node_identity(part: Path) -> tuple[bytes, bytes]:
    """A client's certificate and key for TLS; they must match."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization as s

    key, certificate = _node_private(part), (part / "node.crt").read_bytes()
    if public_key(x509.load_pem_x509_certificate(certificate).public_key()) != public_key(key.public_key()):
        raise InputError(f"{part / 'node.crt'} does not match node.key; copy both from the site again.")
    return certificate, key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def client_keys(part: Path, clients: int) -> dict[bytes, int]:
    """The client that each public key belongs to, as the server knows them."""
    known = {}
    for i in range(clients):
        path = part / "keys" / f"client-{i}.pub"
        if not path.is_file():
            raise InputError(f"{path} is missing; copy it from the site, or make the site again with: fedselect deploy init.")
        known[b" ".join(path.read_bytes().split()[:2])] = i
    return known


def public_key(key: Any) -> bytes:
    """A public key in the format that a site stores."""
    from cryptography.hazmat.primitives import serialization as s

    found: bytes = key.public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    return found


def _rosters(root: Path, site: Site) -> None:
    """Write for each client a list of all clients, signed by the site's authority, so that a server cannot invent clients."""
    authority = _load_key((root / "ca" / "ca.key").read_bytes())
    public = [(root / "server" / "keys" / f"client-{i}.pub").read_text() for i in range(site.clients)]
    for i in range(site.clients):
        write_roster(root / f"client-{i}" / ROSTER, site.federation, public, authority)


def _write(path: Path, thing: Any) -> None:
    from cryptography.hazmat.primitives import serialization as s

    if hasattr(thing, "private_bytes"):
        write_bytes(path, thing.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
        path.chmod(0o600)
    else:
        write_bytes(path, thing.public_bytes(s.Encoding.PEM))


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
