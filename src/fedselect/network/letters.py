"""Letters: the messages between server and clients, on any transport: a head of plain values and one flat array of bytes."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedselect.aggregate.codec import Packet
from fedselect.core.errors import DataError
from fedselect.core.tree import Tree, not_finite

FORMAT = 1
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
TEXT = 1 << 22
"""Most characters of a message's text: as JSON it may take twenty times as much memory."""
LONGEST = 300
"""Characters kept of a text that a client sent."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}")


@dataclass(frozen=True)
class Letter:
    """A message: tensors by name, and a head that describes them."""

    head: dict[str, Any]
    parts: Tree = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors on the wire."""
        return sum(v.nbytes for v in self.parts.values())

    def seal(self) -> tuple[str, Tensor]:
        """The message as text and one flat array; many small arrays would be slow to send."""
        layout = [[name, str(v.dtype).removeprefix("torch."), list(v.shape)] for name, v in self.parts.items()]
        flat = [v.detach().cpu().contiguous().flatten().view(torch.uint8) for v in self.parts.values()]
        body = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.zeros(0, dtype=torch.uint8)
        return json.dumps({"format": FORMAT, "head": self.head, "layout": layout}), body


def unseal(text: str, body: Tensor) -> Letter:
    """Decode and check a message from the wire; nothing in it is used unchecked."""
    if len(text) > TEXT:
        raise DataError(f"a message has {len(text)} characters of text; at most {TEXT} are allowed.")
    try:
        said = json.loads(text)
        head, layout = said["head"], [(str(n), str(d), [int(k) for k in shape]) for n, d, shape in said["layout"]]
        version = said["format"]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
        raise DataError(f"a message cannot be read ({type(e).__name__}: {e}).") from None
    if version != FORMAT:
        raise DataError(f"a message has format {version!r}, this version reads {FORMAT}; use the same fedselect on both sides.")
    if not isinstance(head, dict):
        raise DataError("a message has no head.")
    sizes = []
    for name, dtype, shape in layout:
        if not _NAME.fullmatch(name):
            raise DataError(f"a message has a tensor with the invalid name {name!r}.")
        if dtype not in DTYPES:
            raise DataError(f"a message has {name} as {dtype}; allowed: {', '.join(DTYPES)}.")
        if len(shape) > 8 or any(not 0 <= k < 1 << 63 for k in shape):
            raise DataError(f"a message gives {name} the invalid shape {shape}.")
        count = DTYPES[dtype].itemsize
        for k in shape:
            count *= k
        sizes.append(count)
    if len({name for name, _, _ in layout}) < len(layout):
        raise DataError("a message names a tensor twice.")
    if body.dtype != torch.uint8 or body.ndim != 1 or body.numel() != sum(sizes):
        raise DataError(f"a message has {body.numel()} bytes, but its layout needs {sum(sizes)}.")
    parts, at = {}, 0
    for (name, dtype, shape), size in zip(layout, sizes, strict=True):
        part = body[at : at + size]  # bytes can be used in place; wider numbers need an aligned copy
        parts[name] = (part if dtype == "uint8" else part.clone().view(DTYPES[dtype])).view(shape)
        at += size
    return Letter(head, parts)


def refusal(why: object) -> Letter:
    """The message from a client that cannot answer, with the reason."""
    return Letter({"kind": "refused", "why": str(why)})


def heard(letter: Letter) -> Letter | str:
    """A reply, or the client's reason why there is none."""
    return str(letter.head.get("why")) if letter.head.get("kind") == "refused" else letter


def put_packet(packet: Packet) -> tuple[dict[str, Any], Tree]:
    """The head and the parts that a packet adds to a message."""
    parts = {"values": packet.values, "bits": packet.bits}
    said = {"whole": list(packet.whole), "partly": list(packet.partly)}
    return said, {name: v for name, v in parts.items() if v.numel()}


def take_packet(letter: Letter) -> Packet:
    names = [letter.head.get(k) for k in ("whole", "partly")]
    if not all(isinstance(n, list) and all(isinstance(s, str) for s in n) for n in names):
        raise DataError("a message does not say which tensors it holds.")
    values, bits = (letter.parts.get(k, torch.zeros(0, dtype=torch.uint8)) for k in ("values", "bits"))
    if any(v.dtype != torch.uint8 or v.ndim != 1 for v in (values, bits)):
        raise DataError("a message does not hold its values as flat bytes.")
    return Packet(values, bits, tuple(names[0] or ()), tuple(names[1] or ()))


def digest(tree: Tree) -> str:
    """A digest that identifies tensors and their names."""
    sum_ = hashlib.sha256()
    for name, v in tree.items():
        sum_.update(f"{name} {tuple(v.shape)} {v.dtype}".encode())
        sum_.update(v.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sum_.hexdigest()


def quoted(text: str) -> str:
    """A client's text made fit to store and print: shortened, without control characters."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def check_finite(tensors: Tree, who: str) -> None:
    name = not_finite(tensors)
    if name is not None:
        bad = "NaN" if bool(torch.isnan(tensors[name]).any()) else "Inf"
        raise DataError(f"{who} {bad} in {name}.")
