"""The public names of fedselect, which `import fedselect` loads when one of them is first asked for."""

from fedselect import models
from fedselect.adaptation.adapted import Adapted
from fedselect.adaptation.adapting import adapt
from fedselect.aggregate import AGGREGATORS
from fedselect.aggregate.aggregator import Aggregator, FedAdam, Fold, Mean
from fedselect.aggregate.clipped import ClippedMean
from fedselect.aggregate.entrywise import Median, TrimmedMean
from fedselect.aggregate.product import Products
from fedselect.core.errors import CheckpointError, DataError, FedselectError, InputError, RunError, TrainingError
from fedselect.core.tree import Mask, State, Tree, merge, negate
from fedselect.core.version import package_version
from fedselect.data import DATA, ClientData, Federation, Images, Schema, deal_images, from_datasets, load, shifted
from fedselect.diagnosis.diagnosis import Diagnosis, diagnose
from fedselect.methods import (
    APFL,
    METHODS,
    Ditto,
    FedAlike,
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedBN,
    FedPAC,
    FedPer,
    FedPersist,
    FedProx,
    FedRep,
    FedSelect,
    LGFedAvg,
    Local,
    LotteryFL,
    Partial,
    PersonalLayers,
    Scaffold,
)
from fedselect.methods.disagree import Disagreement
from fedselect.methods.method import Down, Method, Received, Up
from fedselect.methods.select import DeltaSelect, Fixed, RandomSelect, Reading, Selector, layers
from fedselect.models import ADAPTERS, MODELS, Model, bias_only, head_only, layers_only, lora, norm_only
from fedselect.private import Private
from fedselect.results import Result, compare, load_result, run
from fedselect.serve import load_model
from fedselect.simulate import Simulation
from fedselect.tasks import TASKS, Binary, Classification, Metric, Multilabel, Regression, Sequences, Spread, Task
from fedselect.training.optim import OPTIMIZERS, SCHEDULES, SGD, Adam, AdamW, Optimizer, Schedule
from fedselect.training.settings import Training
from fedselect.training.work import Pass, Work
from fedselect.tuning.memory import Tuned, tune

__version__ = package_version()

__all__ = [
    "ADAPTERS",
    "AGGREGATORS",
    "APFL",
    "DATA",
    "METHODS",
    "MODELS",
    "OPTIMIZERS",
    "SCHEDULES",
    "SGD",
    "TASKS",
    "Adam",
    "AdamW",
    "Adapted",
    "Aggregator",
    "Binary",
    "CheckpointError",
    "Classification",
    "ClientData",
    "ClippedMean",
    "DataError",
    "DeltaSelect",
    "Diagnosis",
    "Disagreement",
    "Ditto",
    "Down",
    "FedAdam",
    "FedAlike",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBN",
    "FedPAC",
    "FedPer",
    "FedPersist",
    "FedProx",
    "FedRep",
    "FedSelect",
    "Federation",
    "FedselectError",
    "Fixed",
    "Fold",
    "Images",
    "InputError",
    "LGFedAvg",
    "Local",
    "LotteryFL",
    "Mask",
    "Mean",
    "Median",
    "Method",
    "Metric",
    "Model",
    "Multilabel",
    "Optimizer",
    "Partial",
    "Pass",
    "PersonalLayers",
    "Private",
    "Products",
    "RandomSelect",
    "Reading",
    "Received",
    "Regression",
    "Result",
    "RunError",
    "Scaffold",
    "Schedule",
    "Schema",
    "Selector",
    "Sequences",
    "Simulation",
    "Spread",
    "State",
    "Task",
    "Training",
    "TrainingError",
    "Tree",
    "TrimmedMean",
    "Tuned",
    "Up",
    "Work",
    "__version__",
    "adapt",
    "bias_only",
    "compare",
    "deal_images",
    "diagnose",
    "from_datasets",
    "head_only",
    "layers",
    "layers_only",
    "load",
    "load_model",
    "load_result",
    "lora",
    "merge",
    "models",
    "negate",
    "norm_only",
    "run",
    "shifted",
    "tune",
]
