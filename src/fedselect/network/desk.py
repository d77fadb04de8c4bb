"""A client at work: messages of any run, answered from its own data and vault."""

from fedselect.core.errors import FedselectError
from fedselect.data import Federation
from fedselect.network.assignment import Assignment
from fedselect.network.client import Node
from fedselect.network.home import Home
from fedselect.network.letters import Letter, refusal
from fedselect.network.plan import Plan, Scalars, need_plugins
from fedselect.runs.config import load_plugins
from fedselect.secret.keys import Identity


class Desk:
    """Sets up a run on its first message and reuses that for all others; each message is answered from the vault alone."""

    def __init__(self, home: Home, flat: Scalars | None = None, run: str = "") -> None:
        """`flat` is the plan of the run that the messages belong to; `run` names it if the plan does not."""
        self.home, self._run = home, run
        self._flat: Scalars = flat or {}
        self._made: tuple[Assignment, Federation, Identity | None] | None = None

    def take(self, flat: Scalars) -> None:
        """Switch to the run with this plan."""
        if flat != self._flat:
            self._flat, self._made = flat, None

    def answer(self, letter: Letter) -> Letter:
        """The reply; an error becomes a reply that says what is wrong."""
        try:
            if self._made is None:
                self._made = self._make()
            assigned, data, identity = self._made
            return Node(assigned, self.home.client, data, self.home.vault, identity).answer(letter)
        except FedselectError as e:
            return refusal(e)

    def _make(self) -> tuple[Assignment, Federation, Identity | None]:
        load_plugins()
        need_plugins(self._flat, "client")
        plan = self.home.adapt(Plan.from_flat(self._flat, self._run))
        return plan.assignment(self.home.device), self.home.load(plan), self.home.identity(plan)
