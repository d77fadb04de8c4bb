"""schema.json: the columns of a run's table when it started, to detect later changes of the table."""

import json
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import read_json, write_json
from fedselect.data import Federation, Schema

NAME = "schema.json"


def keep(out: Path, data: Federation) -> None:
    """Write the schema of a new run, or check that of a resumed run."""
    if (out / NAME).exists():
        check(out, data)
    elif (found := _found(data)) is not None:
        write_json(out / NAME, found)


def check(out: Path, data: Federation) -> None:
    """Refuse to continue if the table's columns changed."""
    if (out / NAME).exists() and read_json(out / NAME, "restore the original file.") != _found(data):
        raise RunError(f"the table of {out} has changed since the run started; restore it, or start a new run.")


def read(out: Path, clients: int) -> list[Schema | None]:
    """Each client's schema, or None if the data is not a table."""
    if not (out / NAME).exists():
        return [None] * clients
    said = read_json(out / NAME, "restore the original file.")
    own = said["clients"] if "clients" in said else [said] * clients
    return [Schema.from_json(s) for s in own]


def _found(data: Federation) -> dict[str, Any] | None:
    """The common schema of all clients, or one per client; None if the data is not a table."""
    own = [c.schema for c in data.clients if c.schema is not None]
    if not own:
        return None
    said = own[0].to_json() if len(set(own)) == 1 else {"clients": [s.to_json() for s in own]}
    found: dict[str, Any] = json.loads(json.dumps(said))  # as it will be read from the file
    return found
