"""A client's best round so far, in its vault: the models that score best on its validation data."""

from typing import Any, NamedTuple

from fedselect.core.tree import Tree, flat, nested
from fedselect.network.letters import Letter
from fedselect.network.vault import Vault
from fedselect.simulate.keeping import better
from fedselect.tasks.metrics import Measure

BEST = "best"  # folder next to the states of a run


class Final(NamedTuple):
    """What a client keeps when a run ends: a round, its models by view, and the client's choice if it chooses."""

    round: int
    views: dict[str, Tree]
    chosen: str | None
    best: bool  # whether it is the best round; not if that was missed or damaged


class Best:
    """Keeps the models of rounds that may turn out to be the best.

    With keep=own the client decides alone and keeps one round. With keep=best the server decides from what all clients
    measured, and every message says which round is best so far: the client keeps that one and the one it measured last.
    """

    def __init__(self, vault: Vault, keep: str, measure: Measure) -> None:
        self._vault, self._keep, self._measure = vault, keep, measure

    def see(self, letter: Letter, round: int, views: dict[str, Tree], score: float | None, chosen: str | None) -> str:
        """Note the models after a round, the reported one's validation score, and the chosen view if clients choose.

        Returns what is lost, if the models of the best round so far are damaged.
        """
        there, told = self._vault.rounds(), _told(letter)
        damaged = [r for r in self._vault.damaged() if r < round and (self._keep == "own" or r == told)]
        notes = {"score": score, **({} if chosen is None else {"chosen": chosen})}
        if self._keep == "best":
            self._save(round, views, notes, keep={r for r in there if r == told})
        else:
            found = self._vault.find(there[-1]) if there else None
            best = None if found is None or found.round >= round else found.notes["score"]
            if score is not None and (found is None or found.round >= round or better(score, best, self._measure)):
                lost = bool(damaged) or (found is not None and found.notes.get("lost", False))
                self._save(round, views, {**notes, **({"lost": True} if lost else {})}, keep=set())
        return f"its models of round {damaged[-1]}, its best so far, are damaged, so it cannot keep them" if damaged else ""

    def choose(self, letter: Letter, round: int, views: dict[str, Tree], chosen: str | None) -> Final:
        """What to keep. Falls back to this last round, for example because the client was away in the best one."""
        there = self._vault.rounds()
        wanted = [r for r in there if r == _told(letter)] if self._keep == "best" else there[-1:]
        found = self._vault.find(wanted[-1]) if self._keep != "last" and wanted else None
        if found is None:
            return Final(round, views, chosen, best=False)
        best = not found.notes.get("lost", False)
        return Final(found.round, nested("views", found.tensors), found.notes.get("chosen"), best)

    def _save(self, round: int, views: dict[str, Tree], notes: dict[str, Any], keep: set[int]) -> None:
        self._vault.save(round, flat("views", views), notes, keep)


def _told(letter: Letter) -> int | None:
    said = letter.head.get("best")
    return said if type(said) is int else None
