"""Groups of clients as plain numbers, for runs, reports and results."""

from collections.abc import Sequence

from fedselect.core.tree import State
from fedselect.methods.method import Method

Groups = list[int | None]
"""Each client's group, identified by its first member; None for clients not tested yet."""


def groups_of(method: Method, server: State) -> Groups | None:
    """The groups that a method has found so far; None if it finds none."""
    found = method.groups(server)
    return None if found is None else [None if g < 0 else g for g in found.tolist()]


def members(groups: Sequence[int | None]) -> list[list[int]]:
    """The clients of each group, ordered by first member; untested clients are in no group."""
    out: dict[int, list[int]] = {}
    for client, group in enumerate(groups):
        if group is not None:
            out.setdefault(group, []).append(client)
    return list(out.values())
