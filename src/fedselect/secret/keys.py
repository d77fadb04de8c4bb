"""Keys: agreement between two clients (X25519, HKDF), sealed shares (ChaCha20-Poly1305), and who a client is (node keys)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedselect.core.errors import DataError, InputError, RunError
from fedselect.core.files import read_json, write_json

SEED = 31
"""Bytes of a pad's seed: a whole number below Shamir's prime."""
ROSTER = "roster.json"


def need_cryptography() -> None:
    if find_spec("cryptography") is None:
        raise InputError("--secret needs the package cryptography; install it with: pip install 'fedselect[flower]'")


def new_key() -> bytes:
    """A secret X25519 key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def public(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, other: bytes) -> bytes:
    """A secret that only two clients know, from one's secret key and the other's public key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # a low-order point, which gives the same secret with every key
        raise DataError("a client's public key is invalid.") from None


def derive(secret: bytes, salt: bytes, purpose: str, length: int) -> bytes:
    """Bytes for one purpose from a secret (HKDF with SHA-256)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), length, salt, purpose.encode()).derive(secret)


def seal(key: bytes, content: bytes) -> bytes:
    """Encrypt and authenticate; each key seals only one thing, so the nonce can be constant."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), content, None)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """What was sealed; None if it was changed or sealed with another key."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag:
        return None


def sign(key: Any, content: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA384

    signed: bytes = key.sign(content, ECDSA(SHA384()))
    return signed


def signed_by(key: Any, signature: bytes, content: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA384

    try:
        key.verify(signature, content, ECDSA(SHA384()))
    except InvalidSignature:
        return False
    return True


def said(what: str, **parts: Any) -> bytes:
    """Bytes to sign or to digest: the same for everyone, and for this purpose only."""
    return json.dumps([f"fedselect secret {what}", parts], sort_keys=True).encode()


@dataclass(frozen=True)
class Identity:
    """A client's node key, and the public node keys of all clients."""

    client: int
    federation: str
    key: Any
    everybody: Mapping[int, Any]

    @classmethod
    def read(cls, part: Path, client: int) -> "Identity":
        """From a client's folder of a site; its roster must be signed by the site's own authority."""
        need_cryptography()
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

        roster = read_json(part / ROSTER, "secure aggregation needs it: make the site again with: fedselect deploy init.")
        try:
            authority = x509.load_pem_x509_certificate((part / "ca.crt").read_bytes()).public_key()
            key = load_ssh_private_key((part / "node.key").read_bytes(), None)
            signature, listed = bytes.fromhex(roster["signature"]), roster["keys"]
            whole = signed_by(authority, signature, _roster(roster["federation"], listed))
            everybody = {i: load_ssh_public_key(text.encode()) for i, text in enumerate(listed)} if whole else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise RunError(f"{part} does not list the federation's clients ({e}); copy it from the site again.") from None
        if not whole:
            raise RunError(f"{part / ROSTER} is not signed by this site's ca.crt; copy both from the site again.")
        return cls(client, str(roster["federation"]), key, everybody)

    def sign(self, content: bytes) -> bytes:
        return sign(self.key, content)

    def is_of(self, client: int, signature: bytes, content: bytes) -> bool:
        """Whether this client of the federation signed the content."""
        key = self.everybody.get(client)
        return key is not None and signed_by(key, signature, content)


def write_roster(path: Path, federation: str, keys: list[str], authority: Any) -> None:
    """Write the signed list of a federation's clients; `keys` are their public node keys in OpenSSH's format."""
    signature = sign(authority, _roster(federation, keys)).hex()
    write_json(path, {"federation": federation, "keys": keys, "signature": signature})


def _roster(federation: str, keys: list[str]) -> bytes:
    return said("roster", federation=federation, keys=keys)
