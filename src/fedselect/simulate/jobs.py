"""Jobs: what a round asks of its clients. Whoever drives the round answers, and may answer several rounds at once."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from fedselect.core.tree import State, expand
from fedselect.methods.method import Down, Method
from fedselect.training.work import Work


@dataclass(frozen=True)
class Job:
    """One task for a set of clients: join, train a round, merge with the server's values, choose a model, or test.

    A choice is made on validation data. A test scores the tree state["model"] on one part of the clients' own data.
    """

    what: Literal["join", "client", "personal", "choose", "score"]
    ids: Tensor
    round: int
    state: State = field(default_factory=dict)
    down: Down = field(default_factory=lambda: Down({}))
    part: Literal["train", "val", "test"] = "test"

    def heard(self) -> State:
        """What the server sends these clients, one row for each."""
        return {**{k: expand(t, len(self.ids)) for k, t in self.down.shared.items()}, **self.down.rows}


@dataclass
class Turn:
    """How a round is run: whether clients are evaluated, and when it was asked for (it may have started before)."""

    evaluate: bool = False
    began: float = 0.0


Asked = Job | None
"""None once all of a round is queued on the GPU: it reads the outcome next, so other rounds may queue theirs first."""


class Full(Exception):  # noqa: N818
    """Thrown into a round whose job did not fit into the GPU's memory: ask for fewer clients at a time."""


def do(job: Job, method: Method, work: Work) -> Any:
    """Run a job: returns the clients' state for join, (state, upload, loss) for client, models for personal."""
    if job.what == "join":
        return method.join(work, work.initial)
    if job.what == "personal":
        return method.personal(work, job.state, job.heard())
    state, up = method.client(work, job.state, job.heard())
    return state, up, work.loss
