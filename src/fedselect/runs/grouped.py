"""groups.json: which clients share a head, for methods that form groups.

"groups" lists for each client the first member of its group, or null if the client is not tested yet. The server knows the
groups, so a deployed run has the file too.
"""

from pathlib import Path

from fedselect.methods.groups import Groups
from fedselect.runs import kept

NAME = "groups.json"


def find(groups: Groups | None) -> kept.Found | None:
    """The content of the file; None until any client is in a group."""
    return {"groups": groups} if groups and any(g is not None for g in groups) else None


def read(out: Path) -> Groups | None:
    """Read the groups of a run, if it has any."""
    found = kept.read(out / NAME, _whole, "does not have a group for each client")
    return None if found is None else found["groups"]


def _whole(found: kept.Found) -> bool:
    groups = found["groups"]
    return bool(groups) and all(g is None or (isinstance(g, int) and g >= 0 and groups[g] == g) for g in groups)
