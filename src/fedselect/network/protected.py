"""Privacy in a deployment: for clients by the server, which is trusted; for samples by each client itself."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedselect.aggregate.aggregator import Aggregator
from fedselect.network.assignment import Assignment
from fedselect.private.budget import NAME, Budget, finite
from fedselect.private.clients import private_mean, shared_names
from fedselect.private.guarantee import Guarantee, client_guarantee, sample_guarantee, shared_guarantee
from fedselect.private.samples import guard
from fedselect.private.shares import Shares, check_cohort, shares
from fedselect.secret.mean import SecretMean
from fedselect.simulate.inputs import most
from fedselect.simulate.protect import check_private, check_task
from fedselect.training.per_sample import PerSample, check_model


def check(assigned: Assignment, aggregator: Aggregator, fraction: float) -> Guarantee | None:
    """Rehearse a round and refuse what cannot work or cannot be private. Returns what is promised to clients, if anything."""
    sent = assigned.rehearse().sent
    private = assigned.private
    if private is None:
        return None
    task = assigned.task
    check_task(task, task.statistics(task.example(assigned.data), assigned.data) is not None)
    if private.unit == "sample":
        check_model(assigned.programs.fitted, assigned.device)
        return None
    names = [n for n, m in sent.items() if m is not False]
    if assigned.secret is not None:
        return _shared(assigned, fraction, shared_names(assigned.model, dict.fromkeys(names, True)))
    return _guarantee(assigned, names, aggregator, fraction)[0]


def for_clients(
    assigned: Assignment, sent: Sequence[str], aggregator: Aggregator, fraction: float
) -> tuple[Budget | None, Aggregator]:
    """The budget and aggregator of a server that adds noise for clients; otherwise no budget, and the aggregator as it is."""
    if assigned.private is None or assigned.private.unit == "sample":
        return None, aggregator
    if isinstance(aggregator, SecretMean):
        return None, replace(aggregator, noisy=for_uploads(assigned))
    guarantee, names = _guarantee(assigned, sent, aggregator, fraction)
    return Budget(guarantee), private_mean(guarantee, aggregator, names, assigned.seed)


def _guarantee(
    assigned: Assignment, sent: Sequence[str], aggregator: Aggregator, fraction: float
) -> tuple[Guarantee, tuple[str, ...]]:
    private, rounds = assigned.private, check_private(assigned.rounds)
    assert private is not None
    names = shared_names(assigned.model, dict.fromkeys(sent, True))
    entries = sum(assigned.initial[n].numel() for n in names)
    guarantee = client_guarantee(private, assigned.clients, fraction, rounds, entries)
    private_mean(guarantee, aggregator, names, assigned.seed)  # raises if the options do not fit
    return guarantee, names


def _shared(assigned: Assignment, fraction: float, names: Sequence[str] = ()) -> Guarantee:
    """What is promised to clients that add the noise themselves."""
    private, rounds = assigned.private, check_private(assigned.rounds)
    assert private is not None
    cohort = most(fraction, assigned.clients)
    check_cohort(private, cohort)
    return shared_guarantee(private, assigned.clients, cohort, rounds, sum(assigned.initial[n].numel() for n in names))


def for_uploads(assigned: Assignment) -> Shares | None:
    """Clips and noises a client's update before it is masked, for clients that need not trust the server."""
    private = assigned.private
    if private is None or private.unit == "sample" or assigned.secret is None:
        return None
    return shares(_shared(assigned, 1.0), assigned.secret)


def most_spent(assigned: Assignment) -> float | None:
    """Return the epsilon of a client that adds its own noise and has spent its budget; None if there is no such budget."""
    if for_uploads(assigned) is None:
        return None
    promised = _shared(assigned, 1.0)
    return finite(promised.epsilon(promised.rounds))


def for_samples(assigned: Assignment) -> PerSample | None:
    """The per-sample guard between a client's method and its data when samples are private."""
    private = assigned.private
    if private is None or private.unit == "client":
        return None
    rounds, fitted = check_private(assigned.rounds), assigned.programs.fitted
    return guard(private, fitted, assigned.training, assigned.device, assigned.passes(), rounds)


def budget_of(assigned: Assignment, samples: int, folder: Path) -> Budget | None:
    """The budget in a client's vault; None if nothing is private or the server keeps the budget."""
    if assigned.private is None or (assigned.private.unit == "client" and assigned.secret is None):
        return None
    if assigned.private.unit == "client":
        return Budget(_shared(assigned, 1.0), folder / NAME)
    size, rounds, batch = assigned.model.size, check_private(assigned.rounds), assigned.training.batch_size
    promised = sample_guarantee(assigned.private, [samples], batch, assigned.passes(), rounds, size)
    return Budget(promised, folder / NAME)
