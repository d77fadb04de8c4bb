"""Keys and certificates: how the participants of a site recognize each other."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import write_bytes

CA_DAYS = 3650


def make_authority(folder: Path) -> None:
    """The key and certificate that sign those of a site."""
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


def server_certificate(authority: Path, part: Path, host: str, days: int) -> None:
    """A new key and certificate for the server at this host."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = _new_key()
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    if host not in ("localhost", "127.0.0.1"):
        names.append(_general_name(host))
    known = x509.SubjectAlternativeName(names)
    certificate = _vouched(authority, "fedselect server", key.public_key(), days, ExtendedKeyUsageOID.SERVER_AUTH, known)
    _write(part / "server.crt", certificate)
    _write(part / "server.key", key)


def node_key(private_path: Path, public_path: Path) -> None:
    """A client's key: Flower requires ECDSA P-384 in OpenSSH's format."""
    from cryptography.hazmat.primitives import serialization as s

    key = _new_key()
    write_bytes(private_path, key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()))
    private_path.chmod(0o600)
    write_bytes(public_path, key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH))


def node_certificate(authority: Path, part: Path, name: str) -> None:
    """A client's certificate for mutual TLS. It is valid as long as the authority: servers identify clients by their keys."""
    from cryptography.x509.oid import ExtendedKeyUsageOID

    public = _node_private(part).public_key()
    _write(part / "node.crt", _vouched(authority, name, public, CA_DAYS, ExtendedKeyUsageOID.CLIENT_AUTH))


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


def load_key(pem: bytes) -> Any:
    """A private key from a file's content."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return load_pem_private_key(pem, None)


def _vouched(folder: Path, name: str, public: Any, days: int, purpose: Any, *more: Any) -> Any:
    """A certificate for a server or a client, signed by the authority in this folder."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        signer = load_key((folder / "ca.key").read_bytes())
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


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _node_private(part: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        return load_ssh_private_key((part / "node.key").read_bytes(), None)
    except ValueError:
        raise InputError(f"{part / 'node.key'} is not a key; copy it from the site again.") from None


def _write(path: Path, thing: Any) -> None:
    from cryptography.hazmat.primitives import serialization as s

    if hasattr(thing, "private_bytes"):
        write_bytes(path, thing.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
        path.chmod(0o600)
    else:
        write_bytes(path, thing.public_bytes(s.Encoding.PEM))
