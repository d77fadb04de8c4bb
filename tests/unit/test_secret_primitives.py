"""The primitives of secure aggregation: published vectors, slow references, and what is changed does not pass."""

import hashlib
import hmac
import json

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.network import site
from fedselect.network.plan import Shape
from fedselect.secret import keys, pads, shamir
from fedselect.secret.keys import Identity
from fedselect.secret.shamir import PRIME


def test_agreement_gives_the_published_secret():
    """RFC 7748, section 6.1."""
    alice = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    assert keys.public(bob).hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert keys.agree(bob, alice).hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


def test_a_key_with_which_everybody_agrees_on_the_same_is_refused():
    with pytest.raises(fs.DataError, match="public key is invalid"):
        keys.agree(keys.new_key(), bytes(32))


def test_derivation_gives_the_published_bytes():
    """RFC 5869, appendix A.3."""
    found = keys.derive(b"\x0b" * 22, b"", "", 42).hex()
    assert found == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"


@given(st.binary(min_size=1, max_size=40), st.binary(max_size=40), st.text(max_size=20), st.integers(1, 80))
def test_derivation_is_hkdf_written_out(secret, salt, purpose, length):
    first = hmac.new(salt or bytes(32), secret, hashlib.sha256).digest()
    out = last = b""
    for i in range(1, 4):
        last = hmac.new(first, last + purpose.encode() + bytes([i]), hashlib.sha256).digest()
        out += last
    assert keys.derive(secret, salt, purpose, length) == out[:length]


def test_pads_are_the_published_stream():
    """AES-256 of the numbers 0, 1, 2 with a key of zeros: NIST's known answer for 0, and of GCM's test cases 13 and 14."""
    blocks = ["dc95c078a2408989ad48a21492842087", "530f8afbc74536b9a963b4f1c4cb738b", "cea7403d4d606b6e074ec5d3baf39d18"]
    line = np.zeros(12, dtype=np.uint32)
    pads.add(line, bytes(32), 1)
    assert line.tobytes().hex() == "".join(blocks)
    pads.add(line, bytes(32), -1)
    assert not line.any()


def test_a_pad_does_not_show_where_it_was_cut(monkeypatch):
    key = hashlib.sha256(b"key").digest()
    for dtype in ("<u4", "<u8"):
        whole = np.zeros(1000, dtype=dtype)
        pads.add(whole, key, 1)
        with monkeypatch.context() as small:
            small.setattr(pads, "BLOCK", 64)
            cut = np.zeros(1000, dtype=dtype)
            pads.add(cut, key, 1)
        assert (whole == cut).all()
        assert whole.tobytes() == pads.stream(key).update(bytes(whole.nbytes))


def chacha_block(key, counter, nonce):
    """RFC 8439, section 2.3, word by word."""
    words = [int.from_bytes(b"expand 32-byte k"[i : i + 4], "little") for i in range(0, 16, 4)]
    words += [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
    words += [counter, *(int.from_bytes(nonce[i : i + 4], "little") for i in range(0, 12, 4))]
    state = list(words)

    def quarter(a, b, c, d):
        for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[x] = (state[x] + state[y]) % 2**32
            state[z] ^= state[x]
            state[z] = (state[z] << turn | state[z] >> (32 - turn)) % 2**32

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return b"".join(((s + w) % 2**32).to_bytes(4, "little") for s, w in zip(state, words, strict=True))


def sealed_slowly(key, nonce, content, more):
    """ChaCha20-Poly1305 as RFC 8439, section 2.8 has it."""
    stream = b"".join(chacha_block(key, i + 1, nonce) for i in range(len(content) // 64 + 1))
    text = bytes(a ^ b for a, b in zip(content, stream, strict=False))
    once = chacha_block(key, 0, nonce)[:32]
    r, s = int.from_bytes(once[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF, int.from_bytes(once[16:], "little")
    said = more + bytes(-len(more) % 16) + text + bytes(-len(text) % 16)
    said += len(more).to_bytes(8, "little") + len(text).to_bytes(8, "little")
    tag = 0
    for i in range(0, len(said), 16):
        tag = (tag + int.from_bytes(said[i : i + 16] + b"\x01", "little")) * r % (2**130 - 5)
    return text + ((tag + s) % 2**128).to_bytes(16, "little")


def test_the_slow_seal_gives_the_published_bytes():
    """RFC 8439, section 2.8.2: the first bytes of the ciphertext, and the tag."""
    content = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it."
    )
    nonce, more = bytes.fromhex("070000004041424344454647"), bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    found = sealed_slowly(bytes(range(0x80, 0xA0)), nonce, content, more)
    assert found[:16].hex() == "d31a8d34648e60db7b86afbc53ef7ec2"
    assert found[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"


@given(st.binary(max_size=200))
def test_what_is_sealed_is_that_and_comes_back(content):
    key = hashlib.sha256(content).digest()
    sealed = keys.seal(key, content)
    assert sealed == sealed_slowly(key, bytes(12), content, b"")
    assert keys.unseal(key, sealed) == content
    assert keys.unseal(key, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None
    assert keys.unseal(bytes(32), sealed) is None


def test_signatures_pass_that_are_published_and_no_others():
    """RFC 6979, appendix A.2.6, with SHA-384."""
    x = "EC3A4E415B4E19A4568618029F427FA5DA9A8BC4AE92E02E06AAE5286B300C64DEF8F0EA9055866064A254515480BC13"
    y = "8015D9B72D7D57244EA8EF9AC0C621896708A59367F9DFB9F54CA84B3F1C9DB1288B231C3AE0D4FE7344FD2533264720"
    r = "94EDBB92A5ECB8AAD4736E56C691916B3F88140666CE9FA73D64C4EA95AD133C81A648152E44ACF96E36DD1E80FABE46"
    s = "99EF4AEB15F178CEA1FE40DB2603138F130E740A19624526203B6351D0A3A94FA329C145786E679E7B82C71A38628AC8"
    public = ec.EllipticCurvePublicNumbers(int(x, 16), int(y, 16), ec.SECP384R1()).public_key()
    signature = encode_dss_signature(int(r, 16), int(s, 16))
    assert keys.signed_by(public, signature, b"sample")
    assert not keys.signed_by(public, signature, b"simple")
    assert not keys.signed_by(public, b"nonsense", b"sample")
    own = ec.generate_private_key(ec.SECP384R1())
    assert keys.signed_by(own.public_key(), keys.sign(own, b"sample"), b"sample")


# ---- shares


@given(st.integers(0, PRIME - 1), st.integers(1, 8), st.data())
def test_as_many_shares_as_the_threshold_give_the_secret(secret, threshold, data):
    coefficients = data.draw(st.lists(st.integers(0, PRIME - 1), min_size=threshold - 1, max_size=threshold - 1))
    places = data.draw(st.lists(st.integers(1, 40), min_size=threshold, max_size=threshold, unique=True))
    shares = {at: shamir.share(secret, coefficients, at) for at in places}
    for at, s in shares.items():  # the polynomial, written out
        assert s == (secret + sum(c * at**k for k, c in enumerate(coefficients, 1))) % PRIME
    assert shamir.secret(shares) == secret


def test_one_share_less_gives_any_secret_alike():
    """Two shares of a line of degree 2: for every secret there is a polynomial through them."""
    shares = {at: shamir.share(5, [7, 11], at) for at in (1, 2)}
    for other in (0, 6, PRIME - 1):
        # of a curve other + a x + b x^2 through both: a + b = s1 - other and 2 a + 4 b = s2 - other
        b = (shares[2] - other - 2 * (shares[1] - other)) * pow(2, -1, PRIME) % PRIME
        a = (shares[1] - other - b) % PRIME
        assert {at: shamir.share(other, [a, b], at) for at in (1, 2)} == shares
    assert shamir.secret(shares) != 5


# ---- the roster


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A site of three clients."""
    root = tmp_path_factory.mktemp("sites") / "site"
    shape = Shape((1, 8, 8), ("a", "b"))
    site.make(root, 3, "127.0.0.1:8000", {"name": "folder"}, shape, insecure=False, days=1)
    return root


def test_a_site_says_who_is_in_it(made):
    some = [Identity.read(made / f"client-{i}", i) for i in range(3)]
    signature = some[1].sign(b"a key")
    assert all(who.is_of(1, signature, b"a key") for who in some)
    assert not any(who.is_of(0, signature, b"a key") or who.is_of(3, signature, b"a key") for who in some)
    assert not some[0].is_of(1, signature, b"another")
    assert site.is_site(made)


def spoilt(made, tmp_path, change):
    """A client's part with another roster."""
    part = tmp_path / "client"
    part.mkdir()
    for name in ("ca.crt", "node.key"):
        (part / name).write_bytes((made / "client-0" / name).read_bytes())
    roster = json.loads((made / "client-0" / "roster.json").read_text())
    roster.pop("crc32")
    change(roster)
    (part / "roster.json").write_text(json.dumps(roster))
    return part


def forge(roster):
    """A server that swaps a client's key for one of its own."""
    own = ec.generate_private_key(ec.SECP384R1()).public_key()
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    roster["keys"][1] = own.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forge, "is not signed by this site's ca.crt"),
        (lambda r: r["keys"].append(r["keys"][0]), "is not signed by this site's ca.crt"),
        (lambda r: r.update(federation="another"), "is not signed by this site's ca.crt"),
        (lambda r: r.update(signature="no hex"), "does not list the federation's clients"),
        (lambda r: r.pop("keys"), "does not list the federation's clients"),
    ],
)
def test_a_forged_roster_is_refused(made, tmp_path, change, said):
    with pytest.raises(fs.RunError, match=said):
        Identity.read(spoilt(made, tmp_path, change), 0)


def test_a_site_without_a_roster_says_what_to_do(made, tmp_path):
    part = spoilt(made, tmp_path, lambda r: None)
    (part / "roster.json").unlink()
    with pytest.raises(fs.RunError, match=r"roster.json is missing; .* fedselect deploy init"):
        Identity.read(part, 0)
