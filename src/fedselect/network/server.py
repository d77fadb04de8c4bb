"""The server's side of a deployment: rounds as messages, replies aggregated as they arrive, and nothing taken on trust."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedselect.aggregate import codec
from fedselect.aggregate.aggregator import Aggregator, Fold, Mean
from fedselect.aggregate.lengths import remembered, usual
from fedselect.core import doing, random
from fedselect.core.errors import DataError, RunError
from fedselect.core.tree import State, Tree, expand, flat, nested, not_finite
from fedselect.methods.method import Received
from fedselect.network import behind
from fedselect.network.assignment import Assignment, first
from fedselect.network.examiner import Examiner, Hello, Update
from fedselect.network.letters import Letter, quoted
from fedselect.network.protected import for_clients, most_spent
from fedselect.network.rounds import Limits, Nodes, Outcome, check_enough
from fedselect.network.unmasking import Unmasking
from fedselect.network.vault import Vault
from fedselect.network.wishes import Wishes
from fedselect.private.clients import drawn
from fedselect.private.shares import are_enough
from fedselect.secret.mean import SecretMean
from fedselect.simulate.inputs import most
from fedselect.tasks.task import learned

TRIES = 3


@dataclass(frozen=True)
class Guest:
    """A connected client that said hello."""

    node: int
    said: Hello

    @property
    def samples(self) -> int:
        return self.said.samples


class Server:
    """A federation as its server knows it. To save: `state`, `memory`, `past`, `round`, `accepted`, `tested`, `task`
    and who has spent its budget.

    `memory` is the aggregator's state between rounds, `past` the usual update lengths. `task` holds task options derived from
    the statistics of the clients present at the start; all clients get them. `masks` is a folder for the masks that clients
    send in every hello. `keys` maps nodes to clients if the engine identifies nodes by keys; otherwise the first node to
    claim a client's number gets it.
    """

    def __init__(
        self,
        assigned: Assignment,
        limits: Limits,
        masks: Path,
        keys: dict[int, int] | None = None,
        aggregator: Aggregator | None = None,
    ) -> None:
        check_enough(limits, assigned.clients, assigned.private)
        self.assigned, self.limits, self.keys = assigned, limits, keys
        self.aggregator = Mean() if aggregator is None else aggregator
        if assigned.secret is not None:
            self.aggregator = SecretMean(self.aggregator, assigned.secret)
        self.state = assigned.method.init(assigned.initial, assigned.clients, assigned.model)
        self.past: Tree = {}
        self._lengths: dict[int, float] = {}  # of this round's updates
        self.round = 0
        self.accepted = [0] * assigned.clients  # the last accepted round of each client
        self.tested: list[int | None] = [None] * assigned.clients  # test samples of each client
        self.task: dict[str, str] = {}
        self.goes_back = False  # whether clients that are ahead of the server may start over
        self._ahead: dict[int, int] = {}  # the newest round of each client that is ahead
        self.best: int | None = None  # the round kept so far, if one is kept for all
        self._examiner = Examiner(assigned, limits.max_norm)
        self._secret = Unmasking(assigned.secret, self._examiner.sent, assigned.address, masks) if assigned.secret else None
        self.budget, self.aggregator = for_clients(assigned, self._examiner.outline.whole, self.aggregator, limits.fraction)
        self._most_spent, self._spent = most_spent(assigned), set[int]()  # clients that say their budgets are spent
        self.memory = self.aggregator.start({n: assigned.initial[n] for n in assigned.model.params})
        self._asked = 0  # clients that must answer this round, if fewer than min_clients
        self._drawn: tuple[int, list[int]] = (0, [])  # the round's cohort, if it is secret
        self._guests: dict[int, Guest] = {}
        self._wishes = Wishes(masks, self._examiner, hidden=assigned.secret is not None)

    @property
    def spent(self) -> bool:
        """Whether the privacy budget allows no further round: the server's own, or the budgets of too many clients."""
        if self.budget is not None:
            return self.budget.spent
        if not self._spent or self.assigned.private is None:
            return False
        left = self.assigned.clients - len(self._spent)
        return left < self.limits.min_clients or not are_enough(self.assigned.private, left)

    def step(self, nodes: Nodes) -> Outcome:
        """Run one round, and retry if too few clients answered; those that did repeat the same reply."""
        began = time.monotonic()
        outcome = Outcome(self.round + 1)
        for _ in range(TRIES):
            outcome = Outcome(self.round + 1, rejected=outcome.rejected, set_back=outcome.set_back)
            self._gather(nodes, outcome)
            self._fit()
            samples = {i: g.samples for i, g in self._guests.items()}
            folded, updates = self._ask(nodes, outcome)
            if len(updates) >= min(self.limits.min_clients, self._asked):
                break
        else:
            raise RunError(
                f"round {outcome.round}: {len(updates)} clients answered, at least {self.limits.min_clients} must "
                f"({outcome.why()}); {outcome.advice('fix that, then continue with --resume, or start a new run.')}"
            )
        # the same order as in the simulation: methods combine side statistics in it
        order = sorted(updates, key=lambda i: (-samples[i], i))
        if self.budget is not None:
            self.budget.charge(outcome.round, before=self.round)  # losing the file must not free budget
            outcome.epsilon = self.budget.spent_so_far
        self.state, self.memory = self._next(order, folded, [updates[i] for i in order])
        self.past = remembered(self.past, torch.tensor([self._lengths[i] for i in order], dtype=torch.float64))
        self.round = outcome.round
        for i in order:
            self.accepted[i] = self.round
            self._wishes.count(i)
        outcome.seconds = time.monotonic() - began
        return outcome

    def close(self, nodes: Nodes) -> Outcome:
        """After the last round: every client gets the final values, measures, and keeps its model."""
        outcome = Outcome(self.round)
        self._gather(nodes, outcome)
        letters = ((g.node, self._letter(i, "close", self.round)) for i, g in list(self._guests.items()))
        for i, reply in self._answers(nodes, letters, outcome):
            try:
                outcome.measured[i] = self._figures(i, reply, outcome)
            except DataError as e:
                self._turn_away(i, e, outcome)
        return outcome

    def save(self, vault: Vault, notes: dict[str, Any]) -> None:
        tensors = {**flat("server", self.state), **flat("aggregate", self.memory), **flat("lengths", {"past": self.past})}
        known = {"accepted": self.accepted, "tested": self.tested, **({"task": self.task} if self.task else {})}
        known |= {"best": self.best} if self.best is not None else {}
        known |= {"spent": sorted(self._spent)} if self._spent else {}
        vault.save(self.round, tensors, {**notes, **known}, keep={self.round - 1})

    def load(self, vault: Vault, round: int) -> dict[str, Any]:
        """Go back to the state after a round; returns the notes saved with it."""
        found = vault.load(round)
        tensors = {n: v.to(self.assigned.device) for n, v in found.tensors.items()}
        self.state, self.memory = nested("server", tensors), nested("aggregate", tensors)
        self.past = nested("lengths", found.tensors).get("past", {})
        self.round, self.accepted = round, list(found.notes["accepted"])
        self.tested = list(found.notes.get("tested", self.tested))
        self.task = dict(found.notes.get("task", {}))
        self.best = found.notes.get("best")
        self._spent = set(found.notes.get("spent", []))
        return found.notes

    def _fit(self) -> None:
        """Before the first round: derive what the task must know from the statistics of all clients' targets."""
        if not self._examiner.statistics or self.task:
            return
        there = [self._guests[i].said for i in sorted(self._guests)]
        rows = torch.tensor([said.statistics for said in there], dtype=torch.float64)
        samples = torch.tensor([said.samples for said in there], dtype=torch.float64)
        self.task = learned(self.assigned.task, self.assigned.task.fitted(rows, samples))

    def _gather(self, nodes: Nodes, outcome: Outcome) -> None:
        """Greet new clients and wait for enough: at first for all of them, but only for a limited time."""
        least = self.limits.min_clients
        wanted = least if self._guests else self.assigned.clients
        until = time.monotonic() + self.limits.wait
        turned: set[int] = set()
        while True:
            here = set(nodes.present())
            self._guests = {i: g for i, g in self._guests.items() if g.node in here}
            new = here - {g.node for g in self._guests.values()} - turned
            turned |= self._greet(nodes, sorted(new), outcome)
            late = time.monotonic() > until
            if len(self._guests) >= (least if late else wanted):
                break
            if late:
                mend = "fix that" if outcome.missed or outcome.rejected else "start the others"
                raise RunError(
                    f"round {outcome.round}: only {len(self._guests)} of at least {least} clients connected "
                    f"({outcome.why()}); {mend}, then continue with --resume."
                )
            time.sleep(self.limits.poll)
        if not self.goes_back:
            behind.check_ahead(self.round, self._ahead, self._guests, self.assigned.secret is not None)
        for i in range(self.assigned.clients):
            if i not in self._guests:
                outcome.missed.setdefault(i, "not connected")

    def _greet(self, nodes: Nodes, new: list[int], outcome: Outcome) -> set[int]:
        """Ask new nodes which client they are; returns those that were rejected."""
        turned = set()
        hello = Letter({**self.assigned.address, "kind": "hello", "accepted": self.accepted})
        for node, reply in nodes.ask(((node, hello) for node in new), min(self.limits.timeout, self.limits.wait)):
            if isinstance(reply, str):
                turned.add(node)
                if self.keys is not None and node in self.keys:
                    outcome.missed[self.keys[node]] = quoted(reply)
                else:
                    outcome.rejected[f"node {node}"] = quoted(reply)
                continue
            try:
                if isinstance(reply, DataError):
                    raise reply
                said = self._examiner.hello(reply)
                i, base = said.client, said.base
                if self.keys is not None and self.keys.get(node) != i:
                    raise DataError(f"it says it is client {i}, but its key is {_owner(self.keys.get(node))}")
                if i in self._guests:
                    raise DataError(f"it says it is client {i}, but another node already is")
                if base > self.accepted[i]:
                    raise DataError(f"it says it is at round {base}, but its last accepted round is {self.accepted[i]}")
            except DataError as e:
                turned.add(node)
                outcome.rejected[_name(self.keys, node)] = quoted(str(e))
                continue
            if behind.is_ahead(said, self.round, self.accepted[i]):
                self._ahead[i] = said.newest
            if base < self.accepted[i]:
                outcome.set_back[f"client {i}"] = _set_back(self.accepted[i], said)
                self.accepted[i] = base
            self._guests[i], self.tested[i] = Guest(node, said), said.tested
            if self._secret is not None:
                self._secret.keys[i] = said.key
            self._wishes.put(i, said.bits)
        return turned

    def _ask(self, nodes: Nodes, outcome: Outcome) -> tuple[Fold, dict[int, State]]:
        """Let the cohort train, aggregate what it sends as it arrives, and collect each client's side statistics.

        If the round before is to be measured, all other clients measure it and do nothing else.
        """
        left = sorted(self._guests.keys() - self._spent)
        here = torch.tensor(left or sorted(self._guests))  # who has spent everything says so
        cohort = self._cohort(here, outcome.round)
        whose = torch.tensor(cohort, dtype=torch.int64, device=self.assigned.device)
        params = self.assigned.method.down(self.state, whose).shared["params"]
        folded, extras = self.aggregator.fold(self.memory, params), {}
        secret = None
        if self._secret is not None:
            secret = self._secret.begin(outcome.round, cohort, folded, self._letter(cohort[0], "train", outcome.round))
            cohort = [i for i in secret.cohort.ids if i in self._guests]
            if secret.announced is not None:  # the round is decided: no other client can be added to its sum
                self._asked = len(secret.announced)
        others = [i for i in self._guests if i not in cohort] if self._due(outcome.round) else []
        sizes: dict[int, int] = {}

        def letters() -> Iterator[tuple[int, Letter]]:
            for i in cohort:
                letter = self._letter(i, "train", outcome.round, {} if secret is None else secret.head)
                sizes[i] = letter.nbytes
                yield self._guests[i].node, letter
            for i in others:
                yield self._guests[i].node, self._letter(i, "measure", self.round)

        # with client privacy, accepting an update must not depend on the updates of others
        self._lengths, often = {}, usual(self.past) if self.budget is None else None
        for i, reply in self._answers(nodes, letters(), outcome):
            try:
                if i in others:
                    outcome.measured[i] = self._figures(i, reply, outcome)
                    continue
                self._examiner.head(reply, "update", client=i, round=outcome.round, base=self.accepted[i])
                if secret is None:
                    update = self._examiner.update(reply, self._guests[i].samples, params, often)
                else:
                    update = self._examiner.hidden(reply)
                    secret.take(i, reply)
            except DataError as e:
                self._turn_away(i, e, outcome)
                continue
            self._fold(folded, update)
            extras[i], self._lengths[i] = update.extra, update.length
            self._wishes.put(i, update.bits, "new")
            outcome.uploads[i] = {
                "bytes_up": reply.nbytes, "bytes_down": sizes[i], "train_loss": update.train_loss,
            }  # fmt: skip
            if update.measured:
                outcome.measured[i] = update.measured
            _note_lost(i, reply, outcome)
            if update.epsilon is not None:
                outcome.epsilon = max(outcome.epsilon or 0.0, update.epsilon)
                if self._most_spent is not None and update.epsilon >= self._most_spent:
                    self._spent.add(i)
        if secret is not None:
            aside = Outcome(outcome.round)  # a client that sent values but does not open has still taken part
            least = min(self.limits.min_clients, self._asked)
            why = secret.open(
                self.accepted, lambda kind, asked: self._openings(nodes, kind, asked, aside), outcome.uploads, least
            )
            outcome.sealed = f"{why} ({aside.why()})" if why and aside.missed else why
        return folded, {} if outcome.sealed else extras

    def _cohort(self, here: Tensor, round_: int) -> list[int]:
        """The clients that train in a round; on a retry, the same ones."""
        assigned = self.assigned
        if self.budget is None:
            count = most(self.limits.fraction, len(here))
            cohort = random.choose(assigned.seed, here, count, round_ - 1, "cohort").tolist()
            self._asked = self.limits.min_clients
            return cohort
        if self._drawn[0] != round_:
            private = self.budget.guarantee.private
            ids = drawn(torch.arange(assigned.clients), self.limits.fraction, private.entropy, assigned.seed, round_ - 1)
            self._drawn = (round_, ids.tolist())
        cohort = [i for i in self._drawn[1] if i in here.tolist()]
        self._asked = len(cohort)
        return cohort

    def _next(self, order: list[int], folded: Fold, extras: list[State]) -> tuple[State, State]:
        """The server's and the aggregator's state after a round; raises if either is not finite, and keeps neither."""
        extra = {
            k: {n: torch.stack([e[k][n] for e in extras]).to(self.assigned.device) for n in tree}
            for k, tree in (extras[0].items() if extras else ())
        }
        with doing.within(f"round {self.round + 1}"):
            mean, heard, memory = folded.finish()
        ids = torch.tensor(order, dtype=torch.int64, device=self.assigned.device)
        state = self.assigned.method.server(self.state, Received(ids, mean, heard, extra))
        lost = not_finite({**flat("server", state), **flat("aggregate", memory)})
        if lost is not None:
            raise RunError(
                f"round {self.round + 1}: what clients {', '.join(map(str, sorted(order)))} sent is finite, but combines to "
                f"NaN or Inf in {lost}, so it was discarded: stop the client whose update you doubt, then continue with "
                "--resume, or start a new run with a lower learning rate."
            )
        return state, memory

    def _answers(self, nodes: Nodes, letters: Iterator[tuple[int, Letter]], outcome: Outcome) -> Iterator[tuple[int, Letter]]:
        """Replies by client as they arrive; a client that does not answer misses the round and is greeted again."""
        clients = {g.node: i for i, g in self._guests.items()}
        for node, reply in nodes.ask(letters, self.limits.timeout):
            i = clients[node]
            if isinstance(reply, Letter):
                yield i, reply
            elif isinstance(reply, DataError):
                self._turn_away(i, reply, outcome)
            else:
                outcome.missed[i] = quoted(reply)
                self._guests.pop(i)

    def _openings(
        self, nodes: Nodes, kind: str, letters: Iterator[tuple[int, Letter]], aside: Outcome
    ) -> Iterator[tuple[int, Letter]]:
        """The replies of this kind of clients that are asked to agree on a sum, or to open it."""
        for i, reply in self._answers(nodes, ((self._guests[i].node, letter) for i, letter in letters), aside):
            try:
                self._examiner.head(reply, kind, client=i, round=aside.round)
            except DataError as e:
                self._turn_away(i, e, aside)
                continue
            yield i, reply

    def _fold(self, folded: Fold, update: Update) -> None:
        device = self.assigned.device
        sent = {n: m.unsqueeze(0).to(device) if isinstance(m, Tensor) else m for n, m in update.sent.items()}
        values = {n: v.to(device) for n, v in expand(update.values, 1).items()}
        folded.add(values, sent, torch.tensor([update.weight], dtype=torch.float64, device=device))

    def _letter(self, i: int, kind: str, round: int, more: Mapping[str, Any] | None = None) -> Letter:
        """The message for client i: the shared entries it wants, everything else whole; `more` goes into the head."""
        down = self.assigned.method.down(self.state, torch.tensor([i], device=self.assigned.device))
        packet = codec.pack({n: v.cpu() for n, v in down.shared["params"].items()}, self._wishes.of(i))
        values = {"values": packet.values} if packet.values.numel() else {}
        shared = flat("shared", {k: t for k, t in down.shared.items() if k != "params"})
        rows = flat("rows", {k: first(t) for k, t in down.rows.items()})
        head = {**self.assigned.address, "kind": kind, "client": i, "round": round, "base": self.accepted[i]}
        head |= {"task": self.task} if self.task else {}
        head |= {"best": self.best} if self.best is not None else {}
        head |= more or {}
        return Letter({**head, "measure": self._due(round)}, {**values, **shared, **rows})

    def _due(self, round: int) -> bool:
        """Whether clients measure the round before as this one begins."""
        return round > 1 and (round - 1) % self.limits.eval_every == 0

    def _figures(self, i: int, reply: Letter, outcome: Outcome) -> dict[str, float | None]:
        """The metrics of a client that was asked only to measure."""
        self._examiner.head(reply, "measured", client=i, round=self.round, base=self.accepted[i])
        _note_lost(i, reply, outcome)
        return self._examiner.figures(reply)

    def _turn_away(self, i: int, why: DataError, outcome: Outcome) -> None:
        outcome.rejected[f"client {i}"] = outcome.missed[i] = quoted(str(why))
        self._guests.pop(i)


def _note_lost(i: int, reply: Letter, outcome: Outcome) -> None:
    """Note what a client says that its vault has lost, other than its state."""
    if isinstance(lost := reply.head.get("lost"), str):
        outcome.set_back[f"client {i}"] = quoted(lost)


def _set_back(lost: int, said: Hello) -> str:
    """What a client does whose vault lost a round, and what its operator can do."""
    has = f"has later rounds (up to {said.newest}) but no longer round {lost}" if said.newest > lost else f"lost round {lost}"
    goes = f"it continues from round {said.base}" if said.base else "its personal parameters start over"
    copy = "if you have a copy of the vault, stop the client and restore it before the run ends"
    return f"its vault {has}, so {goes}; {copy}"


def _owner(client: int | None) -> str:
    return "unknown" if client is None else f"that of client {client}"


def _name(keys: dict[int, int] | None, node: int) -> str:
    return f"client {keys[node]}" if keys and node in keys else f"node {node}"
