"""persistence.json: the persistence of each client's disagreement, for methods that measure it.

"persistence" has a number per client and tensor, in the model's order, or null if the client is not tested yet. "roles" says
what each tensor is: "body weights", "head vector". In a deployment, persistence never leaves a client, so there is no file.
"""

from pathlib import Path

from fedselect.diagnosis.diagnosis import plain, roles
from fedselect.runs import kept
from fedselect.simulate import Simulation

NAME = "persistence.json"


def find(simulation: Simulation) -> kept.Found | None:
    """The clients' measurements so far; None until there are any."""
    found = plain(simulation.persistence())
    known = any(v is not None for values in found.values() for v in values)
    return {"persistence": found, "roles": roles(simulation)} if known else None


def read(out: Path) -> kept.Found | None:
    """Read the file of a run, if it has one."""
    return kept.read(out / NAME, _whole, "does not have a number for each client and tensor")


def _whole(found: kept.Found) -> bool:
    columns = found["persistence"].values()
    same = found["persistence"].keys() == found["roles"].keys() and len({len(v) for v in columns}) == 1
    return same and all(v is None or isinstance(v, int | float) for column in columns for v in column)
