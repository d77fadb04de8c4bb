"""What clients want of the shared values, as the server remembers it: on disk, so that its memory stays that of the model."""

from pathlib import Path

import torch
from torch import Tensor

from fedselect.aggregate import codec
from fedselect.core.tree import Mask
from fedselect.network.examiner import Examiner
from fedselect.network.vault import private


class Wishes:
    """A mask for each client, as it said hello with it or as its last upload had it; `hidden`: clients keep theirs."""

    def __init__(self, folder: Path, examiner: Examiner, hidden: bool) -> None:
        private(folder)
        self._folder, self._examiner, self._hidden = folder, examiner, hidden

    def put(self, client: int, bits: Tensor, kind: str = "bits") -> None:
        """Keep the mask of a hello, or that of an upload (`new`), which counts once that is taken in."""
        self._path(client, kind).write_bytes(bits.numpy().tobytes())

    def count(self, client: int) -> None:
        self._path(client, "new").replace(self._path(client, "bits"))

    def of(self, client: int) -> Mask:
        """Which of the shared entries a client wants; of one that keeps that to itself, all that anybody may want."""
        if self._hidden:
            return dict.fromkeys(self._examiner.sent, True)
        bits = torch.frombuffer(bytearray(self._path(client, "bits").read_bytes()) or bytearray(1), dtype=torch.uint8)
        outline = self._examiner.outline
        known = codec.Packet(outline.values, bits[: outline.bits.numel()], outline.whole, outline.partly)
        return codec.unmask(known, self._examiner.like)

    def _path(self, client: int, kind: str) -> Path:
        return self._folder / f"{client}.{kind}"
