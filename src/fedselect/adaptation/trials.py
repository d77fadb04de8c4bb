"""The models tried for a new client: the shared model, local training, fine-tuning of parts, and the run's method."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.adaptation.bench import Bench
from fedselect.core.errors import FedselectError
from fedselect.core.shown import made
from fedselect.core.tree import Mask, State, Tree, expand, take, take_mask
from fedselect.methods.disagree import Disagreement, layer_of
from fedselect.methods.method import Method
from fedselect.methods.partial import Partial
from fedselect.training.step import one_by_one, precision
from fedselect.training.work import Pass

RATES = (0.1, 0.3, 1.0)
"""Multiples of the run's learning rate."""
ROUNDS = (1, 3, 10)
"""Rounds of the run's method, with a fixed server."""
WINDOW = 4
"""Rounds in which the client's disagreement with the shared model is measured."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One candidate: outputs for each sample while it was held out, and the model trained on all samples."""

    kind: str
    words: str
    outputs: Tensor
    values: Tree
    epochs: int | None = None
    lr: float | None = None
    rounds: int | None = None


@dataclass(frozen=True, eq=False)
class Tuning:
    """A kind of fine-tuning: the initial models, one row per client of the bench, and which entries train."""

    kind: str
    words: str
    begin: Tree
    only: Mask


def trials(bench: Bench, epochs: Sequence[int], rates: Sequence[float]) -> Iterator[tuple[str, Callable[[], list[Trial]]]]:
    """The trials in order, each as a description and a function. The first is the shared model."""
    yield "the shared model", lambda: [_as_it_is(bench)]
    fixed = [*_fixed(bench)]
    tunings = list(fixed)
    yield "locating disagreement", lambda: tunings.append(_disagreeing(bench, max(rates))) or []  # type: ignore[func-returns-value]
    if one_by_one(bench.simulation.fitted, bench.simulation.device):  # batching would not help
        for i, name in enumerate([*(t.words for t in fixed), "where it disagrees"]):
            yield name, lambda i=i: list(_tuned(bench, [tunings[i]], epochs, rates))  # type: ignore[misc]
    else:
        yield "fine-tuning", lambda: list(_tuned(bench, tunings, epochs, rates))
    yield made(bench.shared.method).name, lambda: list(_as_the_method(bench))


def _as_it_is(bench: Bench) -> Trial:
    said = bench.said(bench.begin, torch.arange(bench.rows))[:-1]
    return Trial("shared", "shared model as it is", bench.pooled(said), _row(bench.begin, -1))


def _fixed(bench: Bench) -> Iterator[Tuning]:
    """Kinds of fine-tuning that are known in advance."""
    model = bench.simulation.model
    everything: Mask = dict.fromkeys(model.params, True)
    yield Tuning("alone", "trained alone", expand(bench.simulation.initial, bench.rows), everything)
    if model.head is not None:
        yield Tuning("head", "head fine-tuned", bench.begin, {n: model.is_head(n) for n in model.params})
    if any(n in model.norms for n in model.params):
        yield Tuning("norms", "norm layers fine-tuned", bench.begin, {n: n in model.norms for n in model.params})
    yield Tuning("all", "everything fine-tuned", bench.begin, everything)


def _disagreeing(bench: Bench, lr: float) -> Tuning:
    """Fine-tuning of the layers in which the client's pull away from the shared model persists."""
    method = Partial(Disagreement(WINDOW), (("all", 1),), lr)
    state, _ = _newcomers(bench, method, [WINDOW + 1], 0)[-1]
    mask = method.mask(bench.simulation.model, state)
    layers = dict.fromkeys(layer_of(n) for n, m in mask.items() if isinstance(m, Tensor) and bool(m[-1].any()))
    found = f"layer {next(iter(layers))} fine-tuned (persistent disagreement)" if layers else "no persistent disagreement"
    return Tuning("disagreement", found, bench.begin, mask)


def _tuned(bench: Bench, tunings: Sequence[Tuning], epochs: Sequence[int], rates: Sequence[float]) -> Iterator[Trial]:
    """Train all of these with every rate in one batch.

    Models are evaluated after each number of epochs; training then continues with a fresh optimizer.
    """
    s, stops, ways = bench.simulation, sorted(set(epochs)), [(t, rate) for t in tunings for rate in rates]
    begin = {n: torch.cat([t.begin[n] for t in tunings]) for n in tunings[0].begin}
    only = _side_by_side(bench, [t.only for t in tunings])
    ids = torch.arange(bench.rows).repeat(len(ways))
    place = torch.arange(len(tunings) * bench.rows).view(len(tunings), 1, -1).expand(-1, len(rates), -1).flatten()
    lr = torch.tensor([rate for _, rate in ways], dtype=torch.float64).repeat_interleave(bench.rows)
    said: dict[int, list[Tensor]] = {stop: [] for stop in stops}
    whole: dict[int, list[Tree]] = {stop: [] for stop in stops}
    for some in torch.split(torch.arange(len(ids)), s.fits):
        rows, rate, done = place[some].to(s.device), lr[some].to(s.device), 0
        work, tree, mask = bench.work(ids[some]), take(begin, rows), take_mask(only, rows)
        for stop in stops:
            with precision(s.precision):
                tree = work.train(tree, [Pass(mask, rate, e) for e in range(done, stop)], key="adapt", scheduled=False)
            done = stop
            said[stop] += bench.said(tree, ids[some])
            whole[stop] += [_row(tree, i) for i, client in enumerate(ids[some].tolist()) if client == bench.rows - 1]
    for stop in stops:
        for i, (t, rate_) in enumerate(ways):
            folds = said[stop][i * bench.rows : (i + 1) * bench.rows - 1]
            yield Trial(t.kind, t.words, bench.pooled(folds), whole[stop][i], epochs=stop, lr=rate_)


def _side_by_side(bench: Bench, masks: Sequence[Mask]) -> Mask:
    """Concatenate masks along clients; a parameter with the same boolean in all of them keeps it."""
    initial, out = bench.simulation.initial, {}
    for n in bench.simulation.model.params:
        marks = [m[n] for m in masks]
        if all(isinstance(m, bool) and m is marks[0] for m in marks):
            out[n] = marks[0]
        else:
            shape = (bench.rows, *initial[n].shape)
            out[n] = torch.cat([torch.as_tensor(m, device=initial[n].device).expand(shape) for m in marks])
    return out


def _as_the_method(bench: Bench) -> Iterator[Trial]:
    """Rounds of the run's method with a fixed server."""
    method = bench.shared.method
    words = f"{made(method).name} for a new client"
    try:
        after = _newcomers(bench, method, ROUNDS, int(bench.shared.about["round"]))
    except FedselectError as e:
        yield Trial("method", f"{words}: not tried ({e})", torch.empty(0), {})
        return
    for rounds, (_, models) in zip(ROUNDS, after, strict=False):
        said = bench.said(models, torch.arange(bench.rows))[:-1]
        yield Trial("method", words, bench.pooled(said), _row(models, -1), rounds=rounds)


def _newcomers(bench: Bench, method: Method, stops: Sequence[int], first: int) -> list[tuple[State, Tree]]:
    """The states and models of clients that join and train from the server's parameters, after each number of rounds.

    If the clients of a method keep nothing between rounds, only after the first.
    """
    s, offers, ids = bench.simulation, bench.shared.offers, torch.arange(bench.rows)
    shared = {k: expand({n: v.to(s.device) for n, v in t.items()}, bench.rows) for k, t in offers.shared.items()}
    own = {k: {n: v[bench.offer.to(v.device)].to(s.device) for n, v in t.items()} for k, t in offers.rows.items()}
    down, found = {**shared, **own}, []
    with precision(s.precision):
        state = method.join(bench.work(ids, first), expand(s.initial, bench.rows))
        for r in range(max(stops)):
            work = bench.work(ids, first + r)
            state, _ = method.client(work, state, down)
            if r + 1 in stops:
                models = method.local(state) if method.view == "local" else method.personal(work, state, down)
                found.append((state, models))
            carried = method.carries(s.model, state).get("params")
            if found and method.view == "merged" and carried is not None and not any(carried.values()):
                break
    return found


def _row(tree: Tree, i: int) -> Tree:
    return {n: v[i].cpu().clone() for n, v in tree.items()}
