"""What is tried for a newcomer: the shared model as it is, training alone, fine-tuning parts of it, what the method does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedselect.adapt.bench import Bench
from fedselect.core.errors import FedselectError
from fedselect.core.shown import made
from fedselect.core.tree import Mask, Tree, expand, take, take_mask
from fedselect.methods.disagree import Disagreement, layer_of
from fedselect.methods.partial import Partial
from fedselect.training.step import precision
from fedselect.training.work import Pass

EPOCHS = (1, 3, 10, 30)
ROUNDS = (1, 3, 12)
WINDOW = 4
"""Rounds in which a client finds out where it disagrees with the shared model."""
RATES = (0.1, 0.3, 1.0)
"""Of the run's own learning rate."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One way to make a model: what it says of each sample while that was held out, and the model made with all samples."""

    kind: str
    words: str
    outputs: Tensor
    values: Tree
    epochs: int | None = None
    lr: float | None = None
    rounds: int | None = None


def kinds(bench: Bench, epochs: Sequence[int], rates: Sequence[float]) -> dict[str, Callable[[], Iterator[Trial]]]:
    """What to try, by name, the shared model first; each is trained when it is asked for."""
    s, model = bench.simulation, bench.simulation.model
    everything: Mask = dict.fromkeys(model.params, True)

    def tuned(kind: str, words: str, only: Mask, begin: Tree | None = None) -> Callable[[], Iterator[Trial]]:
        return lambda: _tuned(bench, Trial(kind, words, torch.empty(0), {}), begin or bench.begin, only, epochs, rates)

    found = {
        "shared": lambda: _as_it_is(bench),
        "alone": tuned("alone", "trained alone", everything, expand(s.initial, bench.rows)),
    }
    if model.head is not None:
        found["head"] = tuned("head", "head fine-tuned", {n: model.is_head(n) for n in model.params})
    if any(n in model.norms for n in model.params):
        found["norms"] = tuned("norms", "norm layers fine-tuned", {n: n in model.norms for n in model.params})
    found["disagreement"] = lambda: _disagreeing(bench, epochs, rates)
    found["all"] = tuned("all", "everything fine-tuned", everything)
    found["method"] = lambda: _as_the_method(bench)
    return found


def _as_it_is(bench: Bench) -> Iterator[Trial]:
    said = bench.said(bench.begin, torch.arange(bench.rows))[:-1]
    yield Trial("shared", "shared model as it is", bench.pooled(said), _last(bench.begin))


def _tuned(
    bench: Bench, like: Trial, begin: Tree, only: Mask, epochs: Sequence[int], rates: Sequence[float]
) -> Iterator[Trial]:
    """With every rate at once; after each number of epochs training stops to be looked at, and goes on with a fresh optimizer."""
    s, stops = bench.simulation, sorted(set(epochs))
    ids = torch.arange(bench.rows).repeat(len(rates))
    lr = torch.tensor(rates, dtype=torch.float64, device=s.device).repeat_interleave(bench.rows)
    said: dict[int, list[Tensor]] = {stop: [] for stop in stops}
    whole: dict[int, list[Tree]] = {stop: [] for stop in stops}
    for some in torch.split(torch.arange(len(ids)), s.fits):
        mine, rows = ids[some], ids[some].to(s.device)
        work, tree, mask, done = bench.work(mine), take(begin, rows), take_mask(only, rows), 0
        for stop in stops:
            passes = [Pass(mask, lr[some.to(s.device)], e) for e in range(done, stop)]
            with precision(s.precision):
                tree, done = work.train(tree, passes, key="adapt", scheduled=False), stop
            said[stop] += bench.said(tree, mine)
            whole[stop] += [_row(tree, i) for i, client in enumerate(mine.tolist()) if client == bench.rows - 1]
    for stop in stops:
        for i, rate in enumerate(rates):
            folds = said[stop][i * bench.rows : (i + 1) * bench.rows - 1]
            yield replace(like, outputs=bench.pooled(folds), values=whole[stop][i], epochs=stop, lr=rate)


def _disagreeing(bench: Bench, epochs: Sequence[int], rates: Sequence[float]) -> Iterator[Trial]:
    """Only the last layer in which the client's samples persistently pull away from the shared model, whichever half is asked."""
    method = Partial(Disagreement(WINDOW), (("all", 1),), max(rates))
    state = _newcomers(bench, method, (WINDOW + 1,), 0)[-1][0]
    mask = method.mask(bench.simulation.model, state)
    layers = dict.fromkeys(layer_of(n) for n, m in mask.items() if isinstance(m, Tensor) and bool(m[-1].any()))
    like = Trial("disagreement", f"where it disagrees: {', '.join(layers) or 'nowhere'}", torch.empty(0), {})
    yield from _tuned(bench, like, bench.begin, mask, epochs, rates)


def _as_the_method(bench: Bench) -> Iterator[Trial]:
    """Rounds of the run's own method, in which the server stays as it is."""
    method = bench.shared.method
    name = made(method).name
    try:
        after = _newcomers(bench, method, ROUNDS, int(bench.shared.about["round"]))
    except FedselectError as e:
        yield Trial("method", f"{name} as for a new client: not tried ({e})", torch.empty(0), {})
        return
    for rounds, (_, models) in zip(ROUNDS, after, strict=True):
        said = bench.said(models, torch.arange(bench.rows))[:-1]
        yield Trial("method", f"{name} as for a new client", bench.pooled(said), _last(models), rounds=rounds)


def _newcomers(bench: Bench, method: Partial, stops: Sequence[int], first: int) -> list[tuple[dict[str, Tree], Tree]]:
    """The states and models of clients that join and train alone with what the server offers, after so many rounds."""
    s, offers, ids = bench.simulation, bench.shared.offers, torch.arange(bench.rows)
    shared = {k: expand({n: v.to(s.device) for n, v in t.items()}, bench.rows) for k, t in offers.shared.items()}
    own = {k: {n: v[bench.offer].to(s.device) for n, v in t.items()} for k, t in offers.rows.items()}
    down, found = {**shared, **own}, []
    with precision(s.precision):
        state = method.join(bench.work(ids, first), expand(s.initial, bench.rows))
        for r in range(max(stops)):
            work = bench.work(ids, first + r)
            state, _ = method.client(work, state, down)
            if r + 1 in stops:
                models = method.local(state) if method.view == "local" else method.personal(work, state, down)
                found.append((state, models))
    return found


def _last(tree: Tree) -> Tree:
    return _row(tree, -1)


def _row(tree: Tree, i: int) -> Tree:
    return {n: v[i].cpu().clone() for n, v in tree.items()}
