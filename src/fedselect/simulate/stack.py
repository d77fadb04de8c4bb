"""Stack: drives rounds. One run is a stack of one; several runs of the same shapes are batched, their clients side by side.

Settings and seeds stack along the client axis: client work is done for the clients of all runs at once, server work for each
run. A client's numbers do not depend on which others are there, so every run gives the result it would give alone: to the bit
on a CPU; on a GPU up to rounding, because kernels split their sums by the number of clients.
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import Tensor

from fedselect.core.errors import RunError, TrainingError
from fedselect.core.tree import State, Tree, blocks, expand, lay
from fedselect.methods.choice import choose
from fedselect.methods.method import Down, Up, altered
from fedselect.simulate import ahead, ranks
from fedselect.simulate.embedded import has_whole_inputs, no_row
from fedselect.simulate.inputs import deterministic
from fedselect.simulate.jobs import Full, Job, do
from fedselect.simulate.records import Record
from fedselect.training.batches import Split
from fedselect.training.step import one_by_one, precision
from fedselect.training.work import Work, score

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation


def stacks(run: "Simulation") -> tuple[Any, ...] | None:
    """What runs must share to be stacked; None for a run that gains nothing from it."""
    if one_by_one(run.fitted, run.device) or run.chunk < run.clients or ranks.world() > 1 or run.private:
        return None
    shapes = tuple((n, v.shape, v.dtype) for n, v in run.initial.items())
    if run._split["train"].index is not None:  # joining such pools would read them into memory
        return None
    total = run.total if run.training.the_schedule.needs_rounds else None
    asked = (run.training, total, run.task, *(m.name for m in run.metrics), run.eval_every, run.val, run.view)
    how = (run.precision, run.fitted.recompute, run.deterministic, run.device, run.round, run.store.kind)
    joins = (run.fraction < 1.0, *sorted(set(run._from.tolist())))
    return run.ready.kind, shapes, asked, how, joins, form(run.method)


class Stack:
    """One run, or several for which `stacks` is equal; they advance together."""

    def __init__(self, runs: Sequence["Simulation"]) -> None:
        self._set(runs)

    def _set(self, runs: Sequence["Simulation"]) -> None:
        self.runs = list(runs)
        self._most = len(runs)  # runs at a time
        self._programs = runs[0]._programs
        self._begun: ahead.Begun | None = None  # the next round
        self._early = True  # until an early start fails
        self._beside: ahead.Beside | None = None
        self._first = [sum(r.clients for r in runs[:i]) for i in range(len(runs))]
        self._cohort: _Cohort | None = None
        self._split = {part: runs[0].ready.pool([r._split[part] for r in runs]) for part in runs[0]._split}

    @property
    def round(self) -> int:
        return self.runs[0].round

    def step(self, evaluate: bool | None = None, more: bool = False) -> list[Record | TrainingError]:
        """Run one round of every run. A run that is no longer finite returns its error and leaves the stack.

        more: another round will follow; on a GPU it starts while this one is read.
        """
        begun, self._begun = self._begun, None
        if begun is None or not begun.current:
            begun = ahead.begin(self.runs)
        now, due = time.perf_counter(), (self.round + 1) % self.runs[0].eval_every == 0
        for turn in begun.turns:
            turn.began, turn.evaluate = now, due if evaluate is None else evaluate
        rounds, asked, answers = begun.rounds, begun.asked, begun.answers
        del begun
        outcomes: list[Record | TrainingError] = []
        while not outcomes:
            jobs = [job for job in asked if job is not None]
            if answers is None:
                answers = self._answer(jobs) if jobs else [None] * len(rounds)
            asked = []
            if not jobs and more and self._early and all(map(ahead.may, self.runs)):
                self._begin_early()
            del jobs  # frees states that are no longer needed, in case the GPU is full
            with self.beside():
                for r, answer in zip(rounds, answers, strict=True):
                    try:
                        asked.append(r.throw(answer) if isinstance(answer, Full) else r.send(answer))
                    except StopIteration as done:
                        outcomes.append({**done.value, "seconds": round(done.value["seconds"] / len(rounds), 4)})
                    except TrainingError as e:
                        outcomes.append(e)
                    del answer
            answers = None  # the next jobs need their memory
        assert not asked  # runs of the same form ask for the same jobs
        if any(isinstance(o, TrainingError) for o in outcomes):
            self._begun = None
            self.keep([r for r, o in zip(self.runs, outcomes, strict=True) if not isinstance(o, TrainingError)])
        return outcomes

    def beside(self) -> AbstractContextManager[None]:
        """Within this context, reads do not wait for a round that has started early."""
        return nullcontext() if self._begun is None or self._beside is None else self._beside()

    def _begin_early(self) -> None:
        """Start the next round and let its clients train; if that fails, it starts when it is asked for."""
        self._beside = self._beside or ahead.Beside(self.runs[0].device)
        self._beside.mark()
        try:
            begun = ahead.begin(self.runs)
            jobs = [job for job in begun.asked if job is not None]
            with deterministic(self.runs[0].deterministic):
                begun.answers = self._do(list(range(len(jobs))), jobs)
            self._begun = begun
        except Exception as e:  # the round raises it again when it runs
            self._early = False
            if isinstance(e, torch.cuda.OutOfMemoryError):
                self._programs.clear()
        if not self._early:
            torch.cuda.empty_cache()

    def keep(self, runs: Sequence["Simulation"]) -> None:
        """Continue with these runs; the others leave the stack."""
        if len(runs) in (0, len(self.runs)):
            return
        if runs[0]._programs is not self._programs:
            self._programs.clear()  # programs of a run that left would keep its memory
        self._set(runs)

    def do(self, job: Job) -> Any:
        """Do one job of the only run."""
        return self._do([0], [job])[0]

    def work(self, ids: Tensor, round: int) -> Work:
        """Access to the data of these clients of the only run."""
        return self._work([0], [Job("client", ids, round)])

    def _answer(self, jobs: list[Job]) -> list[Any]:
        """Answers to the jobs of all runs; a single run whose job does not fit into the GPU's memory gets `Full`."""
        answers: list[Any] = []
        while len(answers) < len(jobs):
            who = list(range(len(jobs)))[len(answers) : len(answers) + self._most]
            full = False
            try:
                with deterministic(self.runs[0].deterministic):
                    answers += self._do(who, [jobs[i] for i in who])
            except torch.cuda.OutOfMemoryError:
                full = True  # handled outside, where the attempt's memory is released
            if full and len(jobs) == 1:
                return [Full()]
            if full and len(who) == 1:
                raise RunError(
                    "a run does not fit into the GPU's memory in one piece; run it unbatched, it is then split into chunks."
                )
            if full:
                self._most, self._early = len(who) // 2, False
                self._programs.clear()
                torch.cuda.empty_cache()
                warnings.warn(f"the GPU's memory is full; continuing with {self._most} runs at a time.", stacklevel=3)
        return answers

    def _do(self, who: list[int], jobs: list[Job]) -> list[Any]:
        """The jobs of these runs, done as one."""
        runs, counts = [self.runs[i] for i in who], [len(j.ids) for j in jobs]
        whole = jobs[0]
        if len(jobs) > 1:
            ids = torch.cat([j.ids for j in jobs])
            whole = replace(whole, ids=ids, state=_cat(_alike([j.state for j in jobs], counts)), down=_told(jobs))
        try:
            with precision(runs[0].precision):
                answer = self._done(whole, who, jobs)
        except IndexError as e:
            if not has_whole_inputs(runs[0].data):
                raise
            raise no_row(runs[0], jobs[0].ids.tolist()) from e
        if len(jobs) == 1:
            return [answer]
        return [_cut(answer, slice(end - c, end)) for c, end in zip(counts, accumulate(counts), strict=True)]

    def _done(self, whole: Job, who: list[int], jobs: list[Job]) -> Any:
        """The answer to several jobs combined into one."""
        cohort = self._cohort_of(who, jobs)
        if whole.what == "score":
            return score(self._programs, whole.state["model"], cohort.data(whole.part), self.runs[0].metrics)
        work = self._work(who, jobs)
        if whole.what == "choose":
            return choose(cohort.method, work, whole.state, whole.heard(), self.runs[0].metrics[0])
        return do(whole, cohort.method, work)

    def _cohort_of(self, who: list[int], jobs: list[Job]) -> "_Cohort":
        """The clients of these jobs, which are usually those of the jobs before."""
        key = [(i, j.ids.tolist()) for i, j in zip(who, jobs, strict=True)]
        if self._cohort is None or self._cohort.key != key:
            runs, counts, device = [self.runs[i] for i in who], [len(j.ids) for j in jobs], self.runs[0].device
            methods = [r._for(j.ids) for r, j in zip(runs, jobs, strict=True)]
            method = methods[0] if len(jobs) == 1 else _join(methods, counts, device)
            ids = torch.cat([j.ids for j in jobs]).to(device, non_blocking=True)
            each = [torch.full((c,), r.seed, device=device) for r, c in zip(runs, counts, strict=True)]
            seed = torch.cat(each) if len(jobs) > 1 else runs[0].seed
            at = torch.cat([j.ids + self._first[i] for i, j in zip(who, jobs, strict=True)])
            self._cohort = _Cohort(key, method, ids, seed, self._split, at)
        return self._cohort

    def _work(self, who: list[int], jobs: list[Job]) -> Work:
        runs, counts, cohort = [self.runs[i] for i in who], [len(j.ids) for j in jobs], self._cohort_of(who, jobs)
        return Work(
            self._programs,
            cohort.data("train"),
            cohort.data("val"),
            ids=cohort.ids,
            round=jobs[0].round,
            rounds=runs[0].total,
            seed=cohort.seed,
            initial=lambda: _spread([r.initial for r in runs], counts),
            guard=runs[0].guard,
        )


@dataclass
class _Cohort:
    """The clients that one job of each run is for: what is the same for them in every round."""

    key: list[tuple[int, list[int]]]  # runs by number, and their clients
    method: Any
    ids: Tensor
    seed: int | Tensor
    split: dict[str, Split]  # of all runs
    at: Tensor  # positions in it
    parts: dict[str, Split] = field(default_factory=dict)

    def data(self, part: str) -> Split:
        if part not in self.parts:
            self.parts[part] = self.split[part].rows(self.at)
        return self.parts[part]


def form(method: Any) -> tuple[Any, ...]:
    """A method with its per-client numbers reduced to whether they are zero, because zero may mean less work."""
    kind: Any = type(method)
    hints, out = _hints(kind), [kind]
    for f in fields(method):
        value = getattr(method, f.name)
        if is_dataclass(value):
            out.append(form(value))
        elif value is not None and "Tensor" in hints[f.name]:
            out.append("number" if bool(torch.as_tensor(value).any()) else "zero")
        else:
            out.append(value)
    return tuple(out)


@cache
def _hints(kind: Any) -> dict[str, str]:
    return {name: str(hint) for name, hint in get_type_hints(kind).items()}


def _join(methods: Sequence[Any], counts: list[int], device: torch.device) -> Any:
    """One method for the clients of all runs: a number that differs becomes one per client."""
    first, own = methods[0], {}
    for f in fields(first):
        values = [getattr(m, f.name) for m in methods]
        if is_dataclass(values[0]):
            own[f.name] = _join(values, counts, device)
        elif any(isinstance(v, Tensor) for v in values) or any(v != values[0] for v in values):
            each = [torch.as_tensor(v, dtype=torch.float64).to(device, non_blocking=True) for v in values]
            own[f.name] = torch.cat([v.expand(c) for v, c in zip(each, counts, strict=True)])
    return altered(first, own)


def _alike(states: Sequence[State], counts: list[int]) -> list[State]:
    """States with the same trees: a tree that the clients of one run no longer have is zeros, as in a store."""
    known = {k: tree for state in states for k, tree in state.items()}

    def zeros(like: Tree, clients: int) -> Tree:
        return {n: v.new_zeros(clients, *v.shape[1:]) for n, v in like.items()}

    return [{k: s[k] if k in s else zeros(t, c) for k, t in known.items()} for s, c in zip(states, counts, strict=True)]


def _cat(parts: Sequence[Any]) -> Any:
    """Trees or states of several runs, concatenated by client."""
    if isinstance(parts[0], dict):
        tree = all(isinstance(v, Tensor) for v in parts[0].values()) and all(list(p) == list(parts[0]) for p in parts)
        whole = blocks(*parts) if tree else None
        if whole is not None:
            return lay(_below(whole), parts[0])
        return {k: _cat([p[k] for p in parts]) for k in parts[0]}
    return torch.cat(list(parts))


def _told(jobs: Sequence[Job]) -> Down:
    """What the servers send the clients of all runs, one row for each."""
    counts = [len(j.ids) for j in jobs]
    shared = {k: _spread([j.down.shared[k] for j in jobs], counts) for k in jobs[0].down.shared}
    return Down({}, {**shared, **_cat([j.down.rows for j in jobs])})


def _spread(trees: Sequence[Tree], counts: list[int]) -> Tree:
    """Each server's values, repeated for each of its clients."""
    if len(trees) == 1:
        return expand(trees[0], counts[0])
    lines = blocks(*trees, clients=False)
    if lines is None or any(list(t) != list(trees[0]) for t in trees):
        return _cat([expand(t, c) for t, c in zip(trees, counts, strict=True)])  # type: ignore[no-any-return]
    whole = lines[0].new_empty(sum(counts), len(lines[0]))
    for rows, line in zip(torch.split(whole, counts), lines, strict=True):
        rows.copy_(line)
    return lay(whole, trees[0], clients=False)


def _below(parts: list[Tensor]) -> Tensor:
    """Rows concatenated; parts cut from one matrix give that matrix, others a copy."""
    first, at, memory = parts[0], parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for p in parts:
        alike = p.shape[1:] == first.shape[1:] and p.stride() == first.stride() and p.dtype == first.dtype
        if not alike or p.data_ptr() != at or p.stride(0) < p.shape[1] or p.untyped_storage().data_ptr() != memory:
            return torch.cat(parts)
        at += len(p) * p.stride(0) * p.element_size()
    return first.as_strided((sum(map(len, parts)), first.shape[1]), first.stride())


def _cut(value: Any, rows: slice, done: dict[int, Any] | None = None) -> Any:
    """These clients' part of an answer; a value that occurs twice is cut once."""
    done = {} if done is None else done
    if isinstance(value, Tensor):
        return value[rows]
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {k: _cut(v, rows, done) for k, v in value.items()}
        elif isinstance(value, tuple):
            done[id(value)] = tuple(_cut(v, rows, done) for v in value)
        elif isinstance(value, Up):
            done[id(value)] = Up(*(_cut(v, rows, done) for v in (value.values, value.sent, value.weight, value.extra)))
        else:
            return value
    return done[id(value)]
