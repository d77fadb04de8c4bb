"""The methods, one row each. A new method is an alias or one small file, a row here and a line in docs/methods.md."""

from collections.abc import Callable

from fedselect.methods.aliases import (
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedBN,
    FedPer,
    FedPersist,
    FedProx,
    FedRep,
    FedSelect,
    LGFedAvg,
    Local,
    PersonalLayers,
)
from fedselect.methods.apfl import APFL
from fedselect.methods.ditto import Ditto
from fedselect.methods.fedalike import FedAlike
from fedselect.methods.fedpac import FedPAC
from fedselect.methods.lotteryfl import LotteryFL
from fedselect.methods.method import Method
from fedselect.methods.partial import Partial
from fedselect.methods.scaffold import Scaffold

METHODS: dict[str, Callable[..., Method]] = {
    "fedselect": FedSelect,
    "fedalike": FedAlike,
    "fedpersist": FedPersist,
    "local": Local,
    "fedavg": FedAvg,
    "fedavg+ft": FedAvgFT,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "ditto": Ditto,
    "apfl": APFL,
    "fedpac": FedPAC,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "lg-fedavg": LGFedAvg,
    "fedbn": FedBN,
    "lotteryfl": LotteryFL,
    "layers": PersonalLayers,
}

__all__ = [
    "APFL", "METHODS", "Ditto", "FedAlike", "FedAvg", "FedAvgFT", "FedBABU", "FedBN", "FedPAC", "FedPer", "FedPersist",
    "FedProx", "FedRep", "FedSelect", "LGFedAvg", "Local", "LotteryFL", "Partial", "PersonalLayers", "Scaffold",
]  # fmt: skip
