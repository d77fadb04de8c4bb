"""What a run keeps of its clients' persistent disagreement, where its method measures it: persistence.json.

"persistence" has a number for each client, by tensor in the model's order, null for who is not tested yet; "roles" says where
each tensor is and what: "body weights", "head vector". Over a network none of this leaves a client: such a run has no file.
"""

from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import disk, read_json, write_json
from fedselect.diagnosis.diagnosis import plain, roles
from fedselect.simulate import Simulation

NAME = "persistence.json"
Found = dict[str, dict[str, Any]]


class PersistenceFile:
    """Holds what a simulation's clients have measured so far; not there until somebody has."""

    def __init__(self, out: Path, simulation: Simulation) -> None:
        """Begin where the simulation stands: what was written after its round is dropped, for that runs again."""
        self.path, self.simulation = out / NAME, simulation
        self._last: Found | None = None
        with disk(self.path):
            self.path.unlink(missing_ok=True)
        self.update()

    def update(self) -> None:
        """After an evaluated round: write what is new."""
        found: Found = {"persistence": plain(self.simulation.persistence()), "roles": roles(self.simulation)}
        known = any(v is not None for values in found["persistence"].values() for v in values)
        if known and found != self._last:
            write_json(self.path, found)
            self._last = found


def read(out: Path) -> Found | None:
    """What a run has of it, if anything."""
    path, mend = out / NAME, "delete it: the report then goes without."
    if not path.exists():
        return None
    found = read_json(path, mend)
    try:
        columns = found["persistence"].values()
        whole = found["persistence"].keys() == found["roles"].keys() and len({len(v) for v in columns}) == 1
        whole = whole and all(v is None or isinstance(v, int | float) for column in columns for v in column)
    except (KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise RunError(f"{path} has not a number for each client and tensor; {mend}")
    return found
