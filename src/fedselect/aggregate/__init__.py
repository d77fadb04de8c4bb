"""What clients upload: as bytes, and folded into one value for each entry."""

from collections.abc import Callable

from fedselect.aggregate.aggregator import Aggregator, FedAdam, Mean
from fedselect.aggregate.clipped import ClippedMean
from fedselect.aggregate.entrywise import Median, TrimmedMean
from fedselect.aggregate.product import Products

AGGREGATORS: dict[str, Callable[..., Aggregator]] = {
    "mean": Mean,
    "clip": ClippedMean,
    "median": Median,
    "trimmed": TrimmedMean,
    "adam": FedAdam,
    "product": Products,
}
