"""One round of a simulation: clients join, the cohort trains, the server aggregates, and clients are evaluated."""

import time
import warnings
from collections import deque
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedselect.aggregate import codec
from fedselect.aggregate.aggregator import Fold
from fedselect.core import doing, random
from fedselect.core.errors import RunError, TrainingError
from fedselect.core.tree import State, together
from fedselect.methods.choice import CHOICES
from fedselect.methods.method import check_upload
from fedselect.secret.mean import ROUNDING
from fedselect.secret.sizes import Sizes
from fedselect.simulate import measures, ranks
from fedselect.simulate.disk import Disk
from fedselect.simulate.jobs import Asked, Full, Job, Turn
from fedselect.simulate.records import (
    CHOSEN,
    ID,
    SENT,
    Finite,
    Notes,
    Record,
    check_defined,
    check_figures,
    evaluated,
    listed,
    mean_of,
    validated,
)
from fedselect.simulate.store import Store
from fedselect.simulate.trial import TOO_LARGE

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation

CHECKED = 2
"""Rounds whose first uploads are checked; growing masks have grown by the second."""


class Round:
    """The next round of a simulation, as jobs for its clients."""

    def __init__(self, run: "Simulation", turn: Turn) -> None:
        self.run, self.turn = run, turn
        self._notes = Notes(run._columns)
        self._finite = Finite(run.data)

    def asks(self) -> Generator[Asked, Any, Record]:
        """Yields jobs; send the answer to each, and get the record at the end.

        Until the first answer is sent, nothing in the simulation changes, unless samples or clients are private.
        """
        s = self.run
        if s.budget is not None:
            s.budget.charge(s.round + 1)
        present = (s._from <= s.round).nonzero().flatten()
        here = ranks.own(present)
        if not isinstance(s.store, Disk):  # there clients join when they are first needed
            yield from self._join(here)
        cohort = s._cohort(present)
        folded = s._folds.fold(s.memory, s._shared())
        folded.expect(len(cohort))
        order, extras = yield from self._train(cohort, folded)
        if ranks.world() > 1:
            folded.exchange(ranks.everywhere)
        if folded.sums is not None:
            ranks.add_up(folded.sums, s.device)
        with doing.within(f"round {s.round + 1}"):
            mean, heard, memory = folded.finish()
        server = s.method.server(s.server, s._received(order, extras, mean, heard))
        s.server = {k: together(t, clients=False) for k, t in server.items()}
        s.memory = {k: together(t, clients=False) for k, t in memory.items()}
        del folded, extras, server, mean, heard, memory
        s.round += 1
        if self.turn.evaluate:
            yield from self._evaluate(ranks.own(s._drawn(present)))
        yield None
        return self._record()

    def _join(self, here: Tensor) -> Generator[Job, Any, None]:
        """Let the clients join that are new."""
        s = self.run
        waiting = deque(s._chunks(here[~s.store.joined[ranks.place(here)]]))
        while waiting:
            ids = waiting.popleft()
            try:
                state = yield Job("join", ids, s.round)
                scores = yield from self._last_look(ids, state, evaluate=False)
            except Full:
                waiting.extendleft(reversed(self._halve(ids)))
                continue
            self._put(ids, state, scores)
            del state, scores

    def _train(self, cohort: Tensor, folded: Fold) -> Generator[Job, Any, tuple[list[Tensor], list[State]]]:
        """Let this process's part of the cohort train and fold in its uploads; returns who uploaded, and side statistics."""
        s = self.run
        sizes = codec if s.secret is None else Sizes(s.secret.ring, len(cohort))
        extras: list[State] = []
        order: list[Tensor] = []
        mine = ranks.own(cohort)
        waiting = deque(s._chunks(mine))
        while waiting:
            ids = waiting.popleft()
            before, down = s._open(ids, ahead=waiting)
            try:
                state, up, loss = yield Job("client", ids, s.round, before, down)
                scores = yield from self._last_look(ids, state, self.turn.evaluate)
            except Full:
                del before, down
                waiting.extendleft(reversed(self._halve(ids)))
                continue
            if s.round < CHECKED and not order:  # report here what a deployment would refuse
                check_upload(up, s.method.wants(s.model, state), s.inputs.n[ids.to(s.device)])
            wanted = s.method.wants(s.model, before)
            self._notes.add("bytes_down", ids, sizes.down_size(down, wanted, len(ids)))  # counted while a GPU is busy training
            del before, down
            self._put(ids, state, scores)
            there = ids.to(s.device, non_blocking=True)  # do not wait while a GPU trains
            folded.take(up, partial(random.client_keys, s.seed, there, s.round, ROUNDING))
            extras.append(up.extra)
            order.append(ids)
            self._notes.add("bytes_up", ids, sizes.up_size(up))
            if s.private is None:
                self._notes.add("train_loss", ids, loss)
            self._finite.watch(ids, s.method.local(state), up.values)
            del state, up, loss, scores
            if len(mine) > s.chunk:  # do not keep all chunks in memory
                self._finite.settle(s.round + 1)
        return order, extras

    def _evaluate(self, drawn: Tensor) -> Generator[Job, Any, None]:
        """Score the models of the clients that this evaluation covers."""
        s = self.run
        waiting = deque(s._chunks(drawn))
        while waiting:
            ids = waiting.popleft()
            state, down = s._open(ids, ahead=waiting)
            try:
                best = None
                if s.view == "best":
                    merged, best, which = yield Job("choose", ids, s.round - 1, state, down)
                    chosen = yield Job("score", ids, s.round - 1, {"model": best})
                else:
                    merged = yield Job("personal", ids, s.round - 1, state, down)
                found = yield Job("score", ids, s.round - 1, {"model": merged})
                if not isinstance(s.store, Store) and s.store.forgets:
                    local = s._remembered(ids)
                else:
                    local = yield Job("score", ids, s.round - 1, {"model": s.method.local(state)})
                own = {"local": s.method.local(state), "merged": merged, "best": best}[s.view]
                held = (yield Job("score", ids, s.round - 1, {"model": own}, part="val")) if s.val else {}
            except Full:
                del state, down
                waiting.extendleft(reversed(self._halve(ids)))
                continue
            if s.kept:
                s.kept.see(ids, own)
            self._note("local", ids, local)
            self._note("merged", ids, found)
            if best is not None:
                self._note("best", ids, chosen)
                self._notes.add(CHOSEN, ids, which)
            for name, values in held.items():
                self._notes.add(validated(name), ids, values)
            self._notes.add("share", ids, measures.personal_share(s, state))
            self._finite.watch(ids, merged)
            if len(drawn) > s.chunk:
                self._finite.settle(s.round)

    def _note(self, view: str, ids: Tensor, found: dict[str, Tensor]) -> None:
        headline = self.run.metrics[0].name
        if view != "best":
            self._notes.add(f"{headline}_{view}", ids, found[headline])
        if view == self.run.view:
            for name, values in found.items():
                self._notes.add(name, ids, values)

    def _last_look(self, ids: Tensor, state: State, evaluate: bool) -> Generator[Job, Any, dict[str, Tensor] | None]:
        """Scores of local models that are dropped with this round, if their clients may miss the next evaluation."""
        s = self.run
        if s.store.forgets and (evaluate or s.fraction < 1.0):
            return (yield Job("score", ids, s.round, {"model": s.method.local(state)}))  # type: ignore[no-any-return]
        return None

    def _put(self, ids: Tensor, state: State, scores: dict[str, Tensor] | None) -> None:
        s = self.run
        if isinstance(s.store, Store):
            s.store.put(ranks.place(ids), state)
        else:
            s.store.put(ids, state, None if scores is None else torch.stack([scores[n] for n in s._kept], 1).cpu())

    def _halve(self, ids: Tensor) -> list[Tensor]:
        """The GPU is full: split these clients in two, and use the smaller chunk from now on."""
        s = self.run
        if len(ids) == 1:
            raise RunError(TOO_LARGE)
        s.chunk = (len(ids) + 1) // 2
        s._programs.clear()
        s.store.to(torch.device("cpu"))
        torch.cuda.empty_cache()
        warnings.warn(f"the GPU's memory is full; continuing with {s.chunk} clients at a time.", stacklevel=2)
        return list(torch.split(ids, s.chunk))

    def _record(self) -> Record:
        """Every process gets the same record, or the same error."""
        s = self.run
        self._finite.settle(s.round)
        found = ranks.everywhere((self._notes.values(), self._finite.problem))
        problem = next((p for _, p in found if p), None)
        if problem:
            raise TrainingError(problem)
        own = {k: {i: v for theirs, _ in found for i, v in theirs[k].items()} for k in s._columns}
        if CHOSEN in own:
            own[CHOSEN] = {i: CHOICES[c] for i, c in own[CHOSEN].items()}
        who, lists = listed(own, s.clients, everybody=s.kept is not None)
        check_figures(lists, s.metrics, [s.data.clients[i].name or i for i in who], s.round)
        record = {
            "round": s.round,
            "seconds": round(time.perf_counter() - self.turn.began, 4),
            **({"epsilon": s.budget.spent_so_far} if s.budget else {}),
            **{k: mean_of(v) for k, v in lists.items() if k not in (*SENT, CHOSEN, ID)},
            **{k: sum(v or 0 for v in lists[k]) for k in SENT},
            "clients": lists,
            **({"of": s.clients} if ID in lists else {}),
            **({"cut": round(float(s.memory["cut"]["share"]), 6)} if s.secret else {}),
        }
        if s.kept and evaluated(record):
            record["kept"] = s.kept.settle(s.round, lists[validated(s.metrics[0].name)], complete=s.round > int(s._from.max()))
        if s.round <= s.eval_every and s.data.has("test"):
            check_defined(record, s.metrics)
        return record
