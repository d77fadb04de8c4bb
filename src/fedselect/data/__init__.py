"""Data: sources by name, partitions over clients, and one's own tensors."""

from collections.abc import Callable
from typing import Any

from fedselect.core.options import build, named
from fedselect.data.audiomnist import audiomnist
from fedselect.data.columns import Schema
from fedselect.data.digits import digits
from fedselect.data.federation import ClientData, Federation
from fedselect.data.femnist import femnist
from fedselect.data.har import har
from fedselect.data.heart import heart
from fedselect.data.hub import from_datasets
from fedselect.data.images import Images
from fedselect.data.sets import IMAGE_SETS, deal_images
from fedselect.data.shifts import shifted
from fedselect.data.tables import table
from fedselect.data.texts import text

DATA: dict[str, Callable[..., Federation]] = {
    "digits": digits,
    **IMAGE_SETS,
    "femnist": femnist,
    "audiomnist": audiomnist,
    "har": har,
    "heart": heart,
    "table": table,
    "text": text,
}


def load(name: str, **options: Any) -> Federation:
    """A data set by name, partitioned over clients: load("digits", clients=10, classes_per_client=2, seed=0)."""
    return build("data", named(name, DATA), DATA, options)


__all__ = ["DATA", "ClientData", "Federation", "Images", "Schema", "deal_images", "from_datasets", "load", "shifted"]
