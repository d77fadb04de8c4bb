"""The bytes that secure aggregation sends: a simulation counts with this what a deployment puts on the wire."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.aggregate import codec
from fedselect.core.tree import Mask
from fedselect.methods.method import Down, Up
from fedselect.secret.protocol import NEIGHBOURS, TAG
from fedselect.secret.ring import Ring, shapes
from fedselect.secret.shamir import SHARE


@dataclass(frozen=True)
class Sizes:
    """Sizes for a round of this many clients, all of whom arrive; replaces `codec.up_size` and `codec.down_size`."""

    ring: Ring
    cohort: int

    @property
    def _bundles(self) -> int:
        """Bytes of the shares that a client seals for its neighbors, and gets from them."""
        others = min(self.cohort - 1, NEIGHBOURS)
        return others * ((1 + others) * SHARE + TAG)

    def up_size(self, up: Up) -> Tensor:
        line = shapes({n: v.shape[1:] for n, v in up.values.items() if up.sent.get(n, False) is not False})
        opened = (1 + min(self.cohort - 1, NEIGHBOURS)) * SHARE
        bytes_ = sum(s.numel() for s in line.values()) * self.ring.dtype.itemsize + self._bundles + opened
        return torch.full((len(up.weight),), bytes_, dtype=torch.int64, device=up.weight.device)

    def down_size(self, down: Down, wants: Mask, clients: int) -> Tensor:
        return codec.down_size(down, whole(wants), clients) + self._bundles


def whole(mask: Mask) -> dict[str, bool]:
    """All entries of the tensors of which some may be sent: what a server sends if it does not know who wants what."""
    return {n: m is not False for n, m in mask.items()}
