"""The methods, one row each. A new method is an alias or one small file, one row here, one line in docs/methods.md."""

from collections.abc import Callable

from fedselect.method import Method
from fedselect.methods.aliases import FedAvg, FedAvgFT, FedBABU, FedBN, FedPer, FedRep, FedSelect, LGFedAvg, Local
from fedselect.methods.partial import Partial

METHODS: dict[str, Callable[..., Method]] = {
    "fedselect": FedSelect,
    "local": Local,
    "fedavg": FedAvg,
    "fedavg+ft": FedAvgFT,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "lg-fedavg": LGFedAvg,
    "fedbn": FedBN,
}

__all__ = ["METHODS", "FedAvg", "FedAvgFT", "FedBABU", "FedBN", "FedPer", "FedRep", "FedSelect", "LGFedAvg", "Local", "Partial"]
