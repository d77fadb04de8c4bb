"""What people type that we call something else, and what to type instead."""

from pathlib import Path

from fedselect.core.errors import InputError
from fedselect.core.options import named
from fedselect.data import DATA
from fedselect.data.frame_files import is_table

OPTIONS = {
    "alpha": "of a Dirichlet partition it is --split dirichlet --concentration {0}, of FedSelect --limit {0}, and "
    "of APFL --method apfl --alpha {0}",
    "classes": "give --classes-per-client {0}",
    "client_fraction": "give --fraction {0}",
    "cuda": "give --device cuda",
    "dataset": "give --data {0}",
    "dirichlet": "give --split dirichlet --concentration {0}",
    "gpu": "give --device cuda, or --device cuda:1 for one of several GPUs",
    "lambda": "give --lam {0}",
    "learning_rate": "give --lr {0}",
    "method": "this command takes several: --methods {0}",
    "methods": "several methods are for: fedselect compare --methods {0}",
    "metric": "give --headline {0}, the metric that tables show first",
    "output": "give --out {0}",
    "output_dir": "give --out {0}",
    "participation": "give --fraction {0}",
    "partition": "give --split {0}",
    "robust": "give --aggregate {0}: clip, median or trimmed",
    "seed": "this command takes several: --seeds {0}",
    "seeds": "a run has one seed, --seed 0; for several: fedselect compare --methods NAME --seeds {0}",
    "wd": "give --weight-decay {0}",
}
"""Usual names of options that have another name here."""


def option(name: str, value: str = "VALUE") -> InputError | None:
    """What to say of an option that does not exist, where we know what it is called here."""
    said = OPTIONS.get(name.replace("-", "_"))
    return InputError(f"there is no option {name!r}; {said.format(value)}.") if said else None


def check_no_path(data: str) -> None:
    """Refuse a path in place of the name of data: say what can be read there, and how it is asked for."""
    if named(data, DATA) in DATA:
        return
    place = Path(data).expanduser()
    if not place.exists() and is_table(place):
        raise InputError(f"there is no table {data}; check the path, then give --data table:{data}.")
    if not place.exists() and "/" in data:
        raise InputError(f"there is no folder {data}; check the path, then say what it holds: --data folder:{data}.")
    if is_table(place):
        raise InputError(
            f"{data} is a table; say so, and what its columns are: --data table:{data} --client COLUMN --target COLUMN."
        )
    if place.is_dir():
        raise InputError(
            f"{data} is a folder; say what it holds: --data folder:{data} (a folder of pictures for each class), "
            f"domains:{data} (a folder for each client, with class folders in it) or table:{data} (a table for each client)."
        )
