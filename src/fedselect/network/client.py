"""The client's side of a deployment: answers the server's letters from its own data and its vault.

Its state moves on only with the server: a letter says which round of this client the server last took in (its base), and
the client goes on from exactly that snapshot. So a round is applied once: asked again, the client hands over the same
reply; and what the server never took in, because a reply was late or lost, never happened.
"""

from pathlib import Path
from typing import Any

import torch

from fedselect.aggregate import codec
from fedselect.core.errors import CheckpointError, DataError, diverged
from fedselect.core.files import locked
from fedselect.core.tree import Mask, State, Tree, expand, flat, nested, not_finite
from fedselect.data import Federation
from fedselect.methods.method import check_upload
from fedselect.network.assignment import Assignment, first, first_mask
from fedselect.network.best import BEST, Best
from fedselect.network.letters import Letter, check_finite, put_packet, take_packet, unseal
from fedselect.network.vault import Vault, claim
from fedselect.simulate.records import validated
from fedselect.tasks.metrics import known
from fedselect.tasks.task import Targets
from fedselect.training.work import score

MODEL = "model"  # the finished model, beside the states of a run


class Node:
    """One client: `data` is its own and holds nobody else's, `folder` is its vault."""

    def __init__(self, assigned: Assignment, client: int, data: Federation, folder: Path) -> None:
        if _ends(data) != _ends(assigned.data):
            raise DataError(f"client {client} has {_ends(data)}; this federation has {_ends(assigned.data)}.")
        if why := assigned.task.unfit_data(data):
            raise DataError(f"client {client}: {why}")
        self.assigned, self.client, self.data, self.folder = assigned, client, data, folder
        self.method = assigned.of(client)
        self.vault = Vault(folder / assigned.run)
        self._best = Best(Vault(self.vault.folder / BEST), assigned.keep, assigned.metrics[0])

    def answer(self, letter: Letter) -> Letter:
        """The reply to one letter of the server."""
        head = letter.head
        whose: dict[str, Any] = dict(self.assigned.address)
        if head.get("kind") != "hello":  # which asks who is there
            whose["client"] = self.client
        for name, own in whose.items():
            if head.get(name) != own:
                raise DataError(f"client {self.client} got a letter for {name} {head.get(name)!r}; it is of {own!r}.")
        claim(self.folder, {**self.assigned.identity, "client": str(self.client)})
        answers = {"hello": self._hello, "train": self._train, "measure": self._after, "close": self._after}
        if head.get("kind") not in answers:
            raise DataError(f"client {self.client} got a letter of an unknown kind {head.get('kind')!r}.")
        if head["kind"] != "hello":
            self._be_told(head.get("task"))
        with locked(self.folder):
            return answers[head["kind"]](letter)

    def _statistics(self) -> list[float] | None:
        """What the task must know of this client's targets before anything trains."""
        found = self.assigned.task.statistics(self.data.clients[0].train[1].cpu(), self.assigned.data)
        return None if found is None else found.tolist()

    def _be_told(self, task: object) -> None:
        """Take what the server made of all clients' statistics, where the task needs it."""
        if isinstance(task, dict):
            self.assigned = self.assigned.told(task)
        if self._statistics() is not None:
            raise DataError(f"the server did not tell client {self.client} what the task must know of everybody's targets.")

    def _hello(self, letter: Letter) -> Letter:
        """Who is here, from which round it can go on, and which shared entries it takes from the server."""
        accepted = letter.head.get("accepted")
        if not isinstance(accepted, list) or len(accepted) <= self.client or type(asked := accepted[self.client]) is not int:
            raise DataError(f"client {self.client} is none of the clients of this run.")
        base = max((r for r in self.vault.rounds() if r <= asked), default=0)
        said, parts = put_packet(codec.outline(self.assigned.initial, self._wants(self._state(base))))
        mine = self.data.clients[0]
        known: dict[str, Any] = {"samples": len(mine.train[1]), "tested": mine.tested}
        if (statistics := self._statistics()) is not None:
            known["statistics"] = statistics
        return self._reply("hello", base, {**known, **said}, parts)

    def _train(self, letter: Letter) -> Letter:
        round, base = _whole(letter, "round"), _whole(letter, "base")
        if not 0 <= base < round:
            raise DataError(f"client {self.client} was asked for round {round} after round {base}.")
        done, told = self.vault.find(round), letter.head.get("task")
        same = done is not None and (done.notes["base"], done.notes.get("task")) == (base, told)
        if done is not None and same:  # asked again: the reply was lost, not the round
            return unseal(done.notes["reply"], done.tensors["reply"])
        state = self._state(base)
        down = self._down(letter, state)
        measured = self._measure(round - 1, state, down, letter)[0] if letter.head.get("measure") else {}
        work = self.assigned.work(self.data, self.client, round)
        state, up = self.method.client(work, state, down)
        self._check(round, self.method.local(state), up.values, *up.extra.values())
        check_upload(up, self.method.wants(self.assigned.model, state), work.n)
        said, parts = put_packet(codec.pack(first(up.values), first_mask(up.sent)))
        loss = float(work.loss[0])
        head = {"round": round, "weight": float(up.weight[0]), "train_loss": known(loss), **said}
        extra = flat("extra", {k: first(t) for k, t in up.extra.items()})
        reply = self._reply("update", base, {**head, "measured": measured}, {**parts, **extra})
        text, body = reply.seal()
        notes = {"base": base, "reply": text, **({"task": told} if told else {})}
        self.vault.save(round, {**flat("state", state), "reply": body}, notes, keep={base})
        return reply

    def _after(self, letter: Letter) -> Letter:
        """A round is over: measure it, and keep the finished model after the last one, where `export` finds it."""
        round, base = _whole(letter, "round"), _whole(letter, "base")
        state = self._state(base)
        measured, views = self._measure(round, state, self._down(letter, state), letter)
        if letter.head["kind"] == "close":
            self._keep(*self._best.choose(letter, round, views))
        return self._reply("measured", base, {"round": round, "measured": measured}, {})

    def _keep(self, round: int, views: dict[str, Tree]) -> None:
        """The finished model, and what one who loads it must know: how pictures or rows become inputs, classes, network."""
        test = self.assigned.split(self.data, "test")
        kept = {view: self.assigned.model.state_dict(first(tree)) for view, tree in views.items()}
        if test.scale is not None and test.shift is not None:
            kept["input"] = {"scale": test.scale, "shift": test.shift}
        if (units := self.assigned.task.units) is not None:
            kept["output"] = {n: torch.tensor(v) for n, v in zip(("scale", "shift"), units, strict=True)}
        kind = str(self.data.clients[0].train[0].dtype).removeprefix("torch.")
        whose = {"federation": self.assigned.federation, "client": str(self.client)}
        schema = self.data.clients[0].schema
        table: dict[str, Any] = {} if schema is None else {"schema": schema.to_json()}
        table |= {"layout": layout.to_json()} if (layout := self.assigned.layout) else {}
        table |= {} if self.assigned.programs.fitted.bare else {"bare": False}
        shape = list(self.assigned.data.shape)
        table |= {} if self.assigned.keep == "last" else {"kept": "the best round on validation data"}
        notes = {"view": self.method.view, **self.assigned.card, **whose, "shape": shape, "kind": kind, **table}
        Vault(self.vault.folder / MODEL).save(round, flat("model", kept), notes, keep=set())

    def _measure(
        self, round: int, state: State, down: State, letter: Letter
    ) -> tuple[dict[str, float | None], dict[str, Tree]]:
        """This client's figures after a round, on its own data, as the simulation takes them; and its models by view."""
        assigned, method = self.assigned, self.method
        test = assigned.split(self.data, "test")
        merged = method.personal(assigned.work(self.data, self.client, round), state, down)
        self._check(round, merged)
        views = {"local": method.local(state), "merged": merged}
        scores = {view: score(assigned.programs, tree, test, assigned.metrics) for view, tree in views.items()}
        mask = first_mask(method.mask(assigned.model, state))
        personal = sum(
            int(m.sum()) if isinstance(m, torch.Tensor) else assigned.initial[n].numel() * m for n, m in mask.items()
        )
        headline = assigned.metrics[0].name
        figures = {f"{headline}_{view}": found[headline] for view, found in scores.items()} | scores[method.view]
        if assigned.keep != "last":
            held = score(assigned.programs, views[method.view], assigned.split(self.data, "val"), assigned.metrics)
            figures |= {validated(name): v for name, v in held.items()}
            self._best.see(letter, round, views, known(float(held[headline][0])))
        return {**{name: known(float(v[0])) for name, v in figures.items()}, "share": personal / assigned.model.size}, views

    def _state(self, base: int) -> State:
        """The state after a round, or that of a client that has just joined."""
        if base == 0:
            work = self.assigned.work(self.data, self.client, 1)
            return self.method.join(work, expand(self.assigned.initial, 1))
        found = self.vault.find(base)
        if found is None:
            raise CheckpointError(
                f"client {self.client} has no state of round {base} in {self.vault.folder}, only of "
                f"{', '.join(map(str, self.vault.rounds())) or 'none'}."
            )
        state = nested("state", found.tensors)
        return {k: {n: v.to(self.assigned.device) for n, v in t.items()} for k, t in state.items()}

    def _down(self, letter: Letter, state: State) -> State:
        """What the server sent, as the method takes it. What it did not send is NaN: reading it would show."""
        assigned, wants = self.assigned, self._wants(state)
        check_finite({n: v for n, v in letter.parts.items() if n != "values"}, "the server sent")
        packet = take_packet(Letter({"whole": [], "partly": []}, letter.parts))
        known = codec.outline(assigned.initial, wants)
        values, sent = codec.unpack(codec.Packet(packet.values, known.bits, known.whole, known.partly), _cpu(assigned.initial))
        check_finite(values, "the server sent")
        params = {n: torch.where(torch.as_tensor(sent[n]), v, torch.nan) for n, v in values.items()}
        others = {**nested("shared", letter.parts), **nested("rows", letter.parts)}
        if "params" in others:
            raise DataError("the server sent the shared values twice.")
        return {
            k: {n: v.to(assigned.device).unsqueeze(0) for n, v in t.items()} for k, t in {"params": params, **others}.items()
        }

    def _wants(self, state: State) -> Mask:
        return {
            n: m.cpu() if isinstance(m, torch.Tensor) else m
            for n, m in first_mask(self.method.wants(self.assigned.model, state)).items()
        }

    def _check(self, round: int, *trees: Tree) -> None:
        for tree in trees:
            name = not_finite(tree)
            if name is not None:
                raise diverged(self.client, round, name)

    def _reply(self, kind: str, base: int, head: dict[str, Any], parts: Tree) -> Letter:
        return Letter({"kind": kind, **self.assigned.address, "client": self.client, "base": base, **head}, parts)


def _ends(data: Targets) -> str:
    """What goes into a model and what is asked of it, in words."""
    asked = f"{data.classes} classes" if data.classes else f"targets of shape {tuple(data.target_shape)}"
    return f"inputs {getattr(data, 'layout', None) or f'of shape {tuple(data.shape)}'} and {asked}"


def _whole(letter: Letter, name: str) -> int:
    value = letter.head.get(name)
    if type(value) is not int or value < 0:
        raise DataError(f"a letter has the {name} {value!r}, which is no round.")
    return value


def _cpu(tree: Tree) -> Tree:
    return {n: v.cpu() for n, v in tree.items()}
