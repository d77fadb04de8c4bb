"""schema.json: what the columns of a run's table were when it began, so that a table that was changed since shows."""

import json
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import read_json, write_json
from fedselect.data import Federation, Schema

NAME = "schema.json"


def keep(out: Path, data: Federation) -> None:
    """Write the schema of a run that begins; of one that goes on, check it."""
    if (out / NAME).exists():
        check(out, data)
    elif (found := _found(data)) is not None:
        write_json(out / NAME, found)


def check(out: Path, data: Federation) -> None:
    """Refuse to go on with a model whose inputs would now be others."""
    if (out / NAME).exists() and read_json(out / NAME, "put it back as it was.") != _found(data):
        raise RunError(f"the table of {out} was changed since the run began; put it back as it was, or start another run.")


def read(out: Path, clients: int) -> list[Schema | None]:
    """Each client's schema, where the data is a table."""
    if not (out / NAME).exists():
        return [None] * clients
    said = read_json(out / NAME, "put it back as it was.")
    own = said["clients"] if "clients" in said else [said] * clients
    return [Schema.from_json(s) for s in own]


def _found(data: Federation) -> dict[str, Any] | None:
    """The schema of all clients, or of each where each has its own; None where data is no table."""
    own = [c.schema for c in data.clients if c.schema is not None]
    if not own:
        return None
    said = own[0].to_json() if len(set(own)) == 1 else {"clients": [s.to_json() for s in own]}
    found: dict[str, Any] = json.loads(json.dumps(said))  # as the file gives it back
    return found
