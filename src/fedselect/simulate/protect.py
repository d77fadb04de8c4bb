"""Privacy of a simulation: its noise, its budget, and what it refuses."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fedselect.core.errors import InputError
from fedselect.core.tree import State, expand
from fedselect.methods.method import for_clients
from fedselect.private.budget import Budget
from fedselect.private.clients import private_mean, shared_names
from fedselect.private.guarantee import client_guarantee, sample_guarantee, shared_guarantee
from fedselect.private.samples import guard, passes_of, rehearse
from fedselect.private.settings import Private
from fedselect.private.shares import check_cohort, shares
from fedselect.simulate import ranks
from fedselect.simulate.inputs import most
from fedselect.tasks.task import Task
from fedselect.training.per_sample import Counting, Guard
from fedselect.training.work import Work

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation


def check_private(rounds: int | None) -> int:
    """Refuse a run without a known number of rounds to share the budget, or with several processes."""
    if ranks.world() > 1:
        raise InputError("noise is drawn in one process; start a private run without torchrun.")
    if rounds is None:
        raise InputError("the budget is divided over all rounds; say how many there are: fs.Simulation(..., rounds=30).")
    return rounds


def check_together(private: Private | None, secret: bool, keep: str, view: str | None = None) -> None:
    """Refuse combinations that noise does not cover: a hidden clip, or a choice on validation data."""
    if private is not None and keep != "last":
        raise InputError(
            "keep and patience choose a round on validation data, which differential privacy does not cover; leave them out."
        )
    if private is not None and view is not None:
        raise InputError(
            "view=best chooses a model on validation data, which differential privacy does not cover; leave it out."
        )
    shared = secret and private is not None and private.unit == "client"
    if shared and private is not None and private.quantile is not None:
        raise InputError(
            "with secure aggregation nobody sees update lengths, so the clip cannot follow a quantile; set clip= instead."
        )
    if private is not None and private.colluding != 1 and not shared:
        raise InputError("colluding is for clients that add noise themselves; use it with secret (--secret) and unit=client.")


def check_task(task: Task, learns: bool) -> None:
    """Refuse a task that learns from training targets, which noise does not cover."""
    if learns:
        raise InputError(
            f"the task {type(task).__name__} learns from all clients' training targets, which differential privacy does "
            "not cover; set these numbers: target_mean and target_scale (--target-mean 0 --target-scale 1), or "
            "class_weights ('1 3')."
        )


def protect(simulation: "Simulation", private: Private, state: State) -> None:
    """Install the noise in a simulation; `state`: of a client that has just joined."""
    s, rounds = simulation, check_private(simulation.total)
    check_task(s.asked, s.asked.statistics(s.data.clients[0].train[1].cpu(), s.data) is not None)
    if private.unit == "client":
        rehearse(for_clients(s.method, s.inputs.n.new_zeros(1)), _one(s, Counting(opens=True)))  # refuse before any promise
        names = shared_names(s.model, s.method.wants(s.model, state))
        entries = sum(s.initial[n].numel() for n in names)
        if s.secret is None:
            guarantee = client_guarantee(private, s.clients, s.fraction, rounds, entries)
            s.aggregator = s._folds = private_mean(guarantee, s.aggregator, names, s.seed)
        else:
            cohort = most(s.fraction, s.clients)
            check_cohort(private, cohort)
            guarantee = shared_guarantee(private, s.clients, cohort, rounds, entries)
            s.secret = s._folds = replace(s.secret, noisy=shares(guarantee, s.secret.ring))
        s.memory = s._folds.start({n: s.initial[n] for n in s.model.params})
    else:
        sizes, batch = s.inputs.sizes or (), s.training.batch_size
        passes = passes_of(s.method, lambda guard: _one(s, guard))
        s.guard = guard(private, s.fitted, s.training, s.device, passes, rounds)
        guarantee = sample_guarantee(private, sizes, batch, passes, rounds, s.model.size)
    s.budget = Budget(guarantee)


def _one(s: "Simulation", guard: Guard) -> Work:
    """Access to the first client's data."""
    ids = s.inputs.n.new_zeros(1)
    train, val = (s._split[part].rows(slice(0, 1)) for part in ("train", "val"))
    return Work(s._programs, train, val, ids=ids, round=0, seed=s.seed, initial=lambda: expand(s.initial, 1), rounds=s.total,
                guard=guard)  # fmt: skip
