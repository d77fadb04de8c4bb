"""Clients that have several inputs: each packed into one tensor, all in the same way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedselect.models.inputs import Layout, are_several

if TYPE_CHECKING:
    from fedselect.data.federation import ClientData

PARTS = {"train": "training", "test": "test", "val": "validation"}


def packed(clients: "Sequence[ClientData]", layout: Layout | None) -> "tuple[Sequence[ClientData], Layout | None]":
    """The clients with one tensor of inputs each, and how that is laid out; as they are where they have one already."""
    if not any(are_several(pair[0]) for client in clients for pair in _pairs(client).values()):
        return clients, layout
    layout = Layout.of(clients[0].train[0], f"the training inputs of client {clients[0].name or 0}")
    return [_packed(client, client.name or str(i), layout) for i, client in enumerate(clients)], layout


def _packed(client: "ClientData", name: str, layout: Layout) -> "ClientData":
    made: Any = {
        part: (layout.pack(x, f"the {PARTS[part]} inputs of client {name}"), y) for part, (x, y) in _pairs(client).items()
    }
    return replace(client, **made)


def _pairs(client: "ClientData") -> dict[str, Any]:
    return {part: pair for part in PARTS if (pair := getattr(client, part)) is not None}
