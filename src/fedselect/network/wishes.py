"""Which shared values each client wants, as the server remembers it: on disk, so that memory holds only the model."""

from pathlib import Path

import torch
from torch import Tensor

from fedselect.aggregate import codec
from fedselect.core.tree import Mask
from fedselect.network.examiner import Examiner
from fedselect.network.vault import private


class Wishes:
    """A mask for each client, from its hello or its last upload; `hidden`: clients do not reveal theirs."""

    def __init__(self, folder: Path, examiner: Examiner, hidden: bool) -> None:
        private(folder)
        self._folder, self._examiner, self._hidden = folder, examiner, hidden

    def put(self, client: int, bits: Tensor, kind: str = "bits") -> None:
        """Store the mask of a hello, or of an upload (`new`), which takes effect once the upload is accepted."""
        self._path(client, kind).write_bytes(bits.numpy().tobytes())

    def count(self, client: int) -> None:
        self._path(client, "new").replace(self._path(client, "bits"))

    def of(self, client: int) -> Mask:
        """The shared entries that a client wants; all that any client may want, if it does not reveal its mask."""
        if self._hidden:
            return dict.fromkeys(self._examiner.sent, True)
        bits = torch.frombuffer(bytearray(self._path(client, "bits").read_bytes()) or bytearray(1), dtype=torch.uint8)
        outline = self._examiner.outline
        known = codec.Packet(outline.values, bits[: outline.bits.numel()], outline.whole, outline.partly)
        return codec.unmask(known, self._examiner.like)

    def _path(self, client: int, kind: str) -> Path:
        return self._folder / f"{client}.{kind}"
