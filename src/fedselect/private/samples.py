"""Sample-level privacy: each client clips gradients and adds noise itself, so the server need not be trusted."""

from collections.abc import Callable
from functools import partial

import torch

from fedselect.core.tree import State, expand
from fedselect.methods.method import Method
from fedselect.private.guarantee import of_samples
from fedselect.private.settings import Private
from fedselect.training.fitted import Fitted
from fedselect.training.per_sample import Counting, Guard, PerSample, check_model
from fedselect.training.settings import Training
from fedselect.training.work import Work


def passes_of(method: Method, work: Callable[[Guard], Work]) -> int:
    """The local epochs of a round, counted on one client that goes through a round without training.

    Refuses a method that does something that noise on gradients does not cover. `work`: access to its data, with a guard.
    """
    counting = Counting()
    door = work(counting)
    state, told = rehearse(method, door)
    passes = counting.passes
    method.personal(door, state, told)
    return passes


def rehearse(method: Method, door: Work) -> tuple[State, State]:
    """One client joins and goes through a round: its state, and what it received. Raises what the method refuses."""
    initial = door.initial
    state = method.join(door, initial)
    server = method.init({n: v[0] for n, v in initial.items()}, len(door.ids), door.model)
    down = method.down(server, torch.zeros_like(door.ids))
    told = {**{k: expand(t, len(door.ids)) for k, t in down.shared.items()}, **down.rows}
    return method.client(door, state, told)[0], told


def guard(private: Private, fitted: Fitted, training: Training, device: torch.device, passes: int, rounds: int) -> PerSample:
    """The guard that lets a method train on private samples; its noise depends on how many samples a client has."""
    check_model(fitted, device)
    noise = partial(_noise, private, training.batch_size, passes, rounds)
    return PerSample(fitted, training, private.clip, noise, passes, private.entropy)


def _noise(private: Private, batch_size: int, passes: int, rounds: int, samples: int) -> float:
    return of_samples(private, samples, batch_size, passes, rounds).noise
