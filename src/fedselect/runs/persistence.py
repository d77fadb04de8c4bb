"""What a run keeps of its clients' persistent disagreement, where its method measures it: persistence.json.

"persistence" has a number for each client, by tensor in the model's order, null for who is not tested yet; "roles" says where
each tensor is and what: "body weights", "head vector". Over a network none of this leaves a client: such a run has no file.
"""

from pathlib import Path

from fedselect.diagnosis.diagnosis import plain, roles
from fedselect.runs import kept
from fedselect.simulate import Simulation

NAME = "persistence.json"


def find(simulation: Simulation) -> kept.Found | None:
    """What a simulation's clients have measured so far; None until somebody has."""
    found = plain(simulation.persistence())
    known = any(v is not None for values in found.values() for v in values)
    return {"persistence": found, "roles": roles(simulation)} if known else None


def read(out: Path) -> kept.Found | None:
    """What a run has of it, if anything."""
    return kept.read(out / NAME, _whole, "has not a number for each client and tensor")


def _whole(found: kept.Found) -> bool:
    columns = found["persistence"].values()
    same = found["persistence"].keys() == found["roles"].keys() and len({len(v) for v in columns}) == 1
    return same and all(v is None or isinstance(v, int | float) for column in columns for v in column)
