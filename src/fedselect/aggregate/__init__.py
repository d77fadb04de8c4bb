"""Aggregation of uploads into one value per entry, and uploads as bytes."""

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
