"""What a run keeps of who shares with whom, where its method makes groups: groups.json.

"groups" has for each client the first member of its group, null for who is not tested yet. It is the server's to know, so a
deployed run has the file too.
"""

from pathlib import Path

from fedselect.methods.groups import Groups
from fedselect.runs import kept

NAME = "groups.json"


def find(groups: Groups | None) -> kept.Found | None:
    """What the file is to hold; None until somebody is in a group."""
    return {"groups": groups} if groups and any(g is not None for g in groups) else None


def read(out: Path) -> Groups | None:
    """The groups of a run, if it has any."""
    found = kept.read(out / NAME, _whole, "has not a group for each client")
    return None if found is None else found["groups"]


def _whole(found: kept.Found) -> bool:
    groups = found["groups"]
    return bool(groups) and all(g is None or (isinstance(g, int) and g >= 0 and groups[g] == g) for g in groups)
