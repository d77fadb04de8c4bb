"""A client's best round so far, in its vault: the models that score best on its validation data."""

from fedselect.core.tree import Tree, flat, nested
from fedselect.network.letters import Letter
from fedselect.network.vault import Vault
from fedselect.simulate.keeping import better
from fedselect.tasks.metrics import Measure

BEST = "best"  # folder next to the states of a run


class Best:
    """Keeps the models of rounds that may turn out to be the best.

    With keep=own the client decides alone and keeps one round. With keep=best the server decides from what all clients
    measured, and every message says which round is best so far: the client keeps that one and the one it measured last.
    """

    def __init__(self, vault: Vault, keep: str, measure: Measure) -> None:
        self._vault, self._keep, self._measure = vault, keep, measure

    def see(self, letter: Letter, round: int, views: dict[str, Tree], score: float | None, chosen: str | None) -> None:
        """Note the models after a round, the reported one's validation score, and the chosen view if clients choose."""
        there = self._vault.rounds()
        if self._keep == "best":
            self._save(round, views, score, chosen, keep={r for r in there if r == _told(letter)})
            return
        found = self._vault.find(there[-1]) if there else None
        best = None if found is None or found.round >= round else found.notes["score"]
        if score is not None and (found is None or found.round >= round or better(score, best, self._measure)):
            self._save(round, views, score, chosen, keep=set())

    def choose(
        self, letter: Letter, round: int, views: dict[str, Tree], chosen: str | None
    ) -> tuple[int, dict[str, Tree], str | None]:
        """The round to keep, its models, and the client's chosen view, if it chooses.

        Falls back to the last round if there is no better one, for example because the client was away then.
        """
        there = self._vault.rounds()
        wanted = [r for r in there if r == _told(letter)] if self._keep == "best" else there[-1:]
        found = self._vault.find(wanted[-1]) if self._keep != "last" and wanted else None
        if found is None:
            return round, views, chosen
        return found.round, nested("views", found.tensors), found.notes.get("chosen")

    def _save(self, round: int, views: dict[str, Tree], score: float | None, chosen: str | None, keep: set[int]) -> None:
        notes = {"score": score, **({} if chosen is None else {"chosen": chosen})}
        self._vault.save(round, flat("views", views), notes, keep)


def _told(letter: Letter) -> int | None:
    said = letter.head.get("best")
    return said if type(said) is int else None
