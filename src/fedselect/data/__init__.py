"""Data: data sets by name, partitions among clients, and your own tensors."""

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
    """Load a data set by name, partitioned among clients.

    Args:
        name: A name from `fs.DATA`.
        options: Options of the data set, as `fedselect data list` shows them, and `seed`.

    Returns:
        The clients with their data.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=4, classes_per_client=2, seed=0)
        >>> len(data.clients), data.classes
        (4, 10)
    """
    return build("data", named(name, DATA), DATA, options)


__all__ = ["DATA", "ClientData", "Federation", "Images", "Schema", "deal_images", "from_datasets", "load", "shifted"]
