"""Clients with several inputs: each packed into one tensor, all in the same way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedselect.core.errors import DataError
from fedselect.models.inputs import Layout, are_several

if TYPE_CHECKING:
    from fedselect.data.federation import ClientData

PARTS = {"train": "training", "test": "test", "val": "validation"}


def packed(clients: "Sequence[ClientData]") -> "Sequence[ClientData]":
    """The clients with their inputs packed into one tensor and its layout; unchanged if all have one input."""
    several = [client.layout is not None or any(are_several(x) for x, _ in _pairs(client).values()) for client in clients]
    if not any(several):
        return clients
    first = clients[0]
    layout = first.layout or Layout.of(first.train[0], f"the training inputs of client {first.name or 0}")
    return [_packed(client, client.name or str(i), layout) for i, client in enumerate(clients)]


def _packed(client: "ClientData", name: str, layout: Layout) -> "ClientData":
    if client.layout not in (None, layout):
        raise DataError(f"client {name} has the inputs {client.layout}; the first client has {layout}.")
    made: Any = {
        part: (
            x if client.layout and isinstance(x, Tensor) else layout.pack(x, f"the {PARTS[part]} inputs of client {name}"),
            y,
        )
        for part, (x, y) in _pairs(client).items()
    }
    return replace(client, **made, layout=layout)


def _pairs(client: "ClientData") -> dict[str, Any]:
    return {part: pair for part in PARTS if (pair := getattr(client, part)) is not None}
