"""Common option names that are called differently here, and what to type instead."""

from pathlib import Path

from fedselect.core.errors import InputError
from fedselect.core.options import named
from fedselect.data import DATA
from fedselect.data.frame_files import is_table

OPTIONS = {
    "alpha": "for a Dirichlet partition type --split dirichlet --concentration {0}, for FedSelect --limit {0}, and "
    "for APFL --method apfl --alpha {0}",
    "classes": "type --classes-per-client {0}",
    "client_fraction": "type --fraction {0}",
    "cuda": "type --device cuda",
    "dataset": "type --data {0}",
    "dirichlet": "type --split dirichlet --concentration {0}",
    "gpu": "type --device cuda, or --device cuda:1 for one of several GPUs",
    "lambda": "type --lam {0}",
    "learning_rate": "type --lr {0}",
    "method": "this command takes several methods: --methods {0}",
    "methods": "to compare several methods, type: fedselect compare --methods {0}",
    "metric": "type --headline {0}, the metric that tables show first",
    "output": "type --out {0}",
    "output_dir": "type --out {0}",
    "participation": "type --fraction {0}",
    "partition": "type --split {0}",
    "robust": "type --aggregate {0}: clip, median or trimmed",
    "seed": "this command takes several seeds: --seeds {0}",
    "seeds": "a run has one seed, --seed 0; for several: fedselect compare --methods NAME --seeds {0}",
    "wd": "type --weight-decay {0}",
}
"""What to type instead of common names of options."""


def option(name: str, value: str = "VALUE") -> InputError | None:
    """The error for an unknown option that has another name here, or None."""
    said = OPTIONS.get(name.replace("-", "_"))
    return InputError(f"there is no option {name!r}; {said.format(value)}.") if said else None


def check_no_path(data: str) -> None:
    """Refuse a bare path as the name of a data set, and suggest how to write it."""
    if named(data, DATA) in DATA:
        return
    place = Path(data).expanduser()
    if not place.exists() and is_table(place):
        raise InputError(f"there is no table {data}; check the path, then type --data table:{data}.")
    if not place.exists() and "/" in data:
        raise InputError(f"there is no folder {data}; check the path, then type --data folder:{data}.")
    if is_table(place):
        raise InputError(f"{data} is a table; type --data table:{data} --client COLUMN --target COLUMN.")
    if place.is_dir():
        raise InputError(
            f"{data} is a folder; type --data folder:{data} (one folder of images per class), domains:{data} (one folder "
            f"per client, with class folders in it) or table:{data} (one table per client)."
        )
