"""fedselect: personalized federated learning where every client gets its own model."""

from fedselect import models
from fedselect.core.errors import CheckpointError, DataError, FedselectError, InputError, RunError, TrainingError
from fedselect.data import ClientData, Federation, Images, deal_images, from_datasets, load
from fedselect.methods import (
    Ditto,
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedBN,
    FedPAC,
    FedPer,
    FedProx,
    FedRep,
    FedSelect,
    LGFedAvg,
    Local,
    LotteryFL,
    Partial,
    PersonalLayers,
)
from fedselect.methods.method import Down, Method, Received, Up
from fedselect.methods.select import DeltaSelect, Fixed, RandomSelect, layers
from fedselect.models import Model
from fedselect.simulate import Result, Simulation, run
from fedselect.training.step import Training
from fedselect.training.work import Pass, Work

__all__ = [
    "CheckpointError",
    "ClientData",
    "DataError",
    "DeltaSelect",
    "Ditto",
    "Down",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBN",
    "FedPAC",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSelect",
    "Federation",
    "FedselectError",
    "Fixed",
    "Images",
    "InputError",
    "LGFedAvg",
    "Local",
    "LotteryFL",
    "Method",
    "Model",
    "Partial",
    "Pass",
    "PersonalLayers",
    "RandomSelect",
    "Received",
    "Result",
    "RunError",
    "Simulation",
    "Training",
    "TrainingError",
    "Up",
    "Work",
    "deal_images",
    "from_datasets",
    "layers",
    "load",
    "models",
    "run",
]
