"""Jobs: what a round asks of its clients. Whoever drives the round answers, and may answer several rounds at once."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from fedselect.core.tree import State, expand
from fedselect.methods.method import Down, Method
from fedselect.training.work import Work


@dataclass(frozen=True)
class Job:
    """Something that clients do, all alike: join, a round of training, merging with the server, choosing a model, or a test.

    A choice is among models, on validation data. A test is of the tree state["model"] on the clients' own data of one part.
    """

    what: Literal["join", "client", "personal", "choose", "score"]
    ids: Tensor
    round: int
    state: State = field(default_factory=dict)
    down: Down = field(default_factory=lambda: Down({}))
    part: Literal["train", "val", "test"] = "test"

    def heard(self) -> State:
        """What the server tells these clients, as they get it: a row for each."""
        return {**{k: expand(t, len(self.ids)) for k, t in self.down.shared.items()}, **self.down.rows}


@dataclass
class Turn:
    """What is asked of a round, which may have begun before: whether clients are evaluated, and when it was asked for."""

    evaluate: bool = False
    began: float = 0.0


Asked = Job | None
"""None when all of a round is on its way to the GPU: it reads the outcome next, so others may first send theirs there."""


class Full(Exception):  # noqa: N818
    """Thrown into a round whose job did not fit into the GPU's memory: ask for less at a time."""


def do(job: Job, method: Method, work: Work) -> Any:
    """The clients' state for join, (state, upload, loss) for client, models for personal."""
    if job.what == "join":
        return method.join(work, work.initial)
    if job.what == "personal":
        return method.personal(work, job.state, job.heard())
    state, up = method.client(work, job.state, job.heard())
    return state, up, work.loss
