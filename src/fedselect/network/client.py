"""The client's side of a deployment: answers the server's messages from its own data and its vault.

Its state advances only with the server. Each message names the last round of this client that the server accepted (its base),
and the client continues from exactly that snapshot. So each round is applied once: asked again, the client repeats the same
reply; and a reply that the server never accepted, because it was late or lost, has no effect.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedselect.aggregate import codec
from fedselect.core import random
from fedselect.core.errors import CheckpointError, DataError, InputError, diverged
from fedselect.core.files import locked
from fedselect.core.tree import Mask, State, Tree, expand, flat, nested, not_finite
from fedselect.data import Federation
from fedselect.methods.choice import CHOICES, choose
from fedselect.methods.method import Up, check_upload
from fedselect.network.assignment import Assignment, first, first_mask
from fedselect.network.best import BEST, Best, Final
from fedselect.network.letters import Letter, check_finite, put_packet, take_packet, unseal
from fedselect.network.masking import Masking
from fedselect.network.protected import budget_of, for_samples, for_uploads
from fedselect.network.vault import Vault, claim, private
from fedselect.secret.keys import Identity
from fedselect.secret.mean import ROUNDING, check_hidden, coded
from fedselect.secret.protocol import Cohort
from fedselect.secret.sizes import whole
from fedselect.serve.about import About, about
from fedselect.serve.predictor import Inputs, Meaning
from fedselect.simulate.protect import check_task
from fedselect.simulate.records import CHOSEN, validated
from fedselect.tasks.metrics import known
from fedselect.tasks.task import Targets
from fedselect.training.batches import Split
from fedselect.training.work import score

MODEL = "model"  # the finished model, next to the states of a run


@dataclass(frozen=True)
class Measured:
    """A client after a round: what it says to the server, its models by view, and the view it reports if clients choose."""

    said: dict[str, Any]
    views: dict[str, Tree]
    chosen: str | None


class Node:
    """One client: `data` is its own only, `folder` is its vault, `identity` its keys for --secret."""

    def __init__(
        self, assigned: Assignment, client: int, data: Federation, folder: Path, identity: Identity | None = None
    ) -> None:
        if _ends(data) != _ends(assigned.data):
            raise DataError(f"client {client} has {_ends(data)}, but this federation has {_ends(assigned.data)}.")
        if why := assigned.task.unfit_data(data):
            raise DataError(f"client {client}: {why}")
        assigned = assigned.for_data(data)
        self.assigned, self.client, self.data, self.folder = assigned, client, data, folder
        if assigned.private is not None:  # a server may have started the run without these checks
            check_task(assigned.task, self._statistics() is not None)
        self.method = assigned.of(client)
        self.vault = Vault(folder / assigned.run)
        self._masking: Masking | None = None
        if assigned.secret is not None:
            if identity is None:
                raise InputError(f"client {client} has no keys for --secret; start it from its folder of a site that has keys.")
            self._masking = Masking(assigned.secret, assigned.address, identity, self.vault.folder)
        self._best = Best(Vault(self.vault.folder / BEST), assigned.keep, assigned.metrics[0])
        self._guard, self._noisy = for_samples(assigned), for_uploads(assigned)

    @property
    def _samples(self) -> int:
        return len(self.data.clients[0].train[1])

    def answer(self, letter: Letter) -> Letter:
        """The reply to one message from the server."""
        head = letter.head
        whose: dict[str, Any] = dict(self.assigned.address)
        if head.get("kind") != "hello":  # "hello" asks which client this is
            whose["client"] = self.client
        for name, own in whose.items():
            if head.get(name) != own:
                raise DataError(f"client {self.client} got a message for {name} {head.get(name)!r}, but its own is {own!r}.")
        claim(self.folder, {**self.assigned.identity, "client": str(self.client)})
        answers = {"hello": self._hello, "train": self._train, "measure": self._after, "close": self._after}
        answers |= {"agree": self._agree, "open": self._open} if self._masking else {}
        if head.get("kind") not in answers:
            raise DataError(f"client {self.client} got a message of unknown kind {head.get('kind')!r}; update both sides.")
        if head["kind"] != "hello":
            self._be_told(head.get("task"))
        with locked(self.folder):
            return answers[head["kind"]](letter)

    def _statistics(self) -> list[float] | None:
        """What the task must know about this client's targets before training starts."""
        found = self.assigned.task.statistics(self.data.clients[0].train[1].cpu(), self.assigned.data)
        return None if found is None else found.tolist()

    def _be_told(self, task: object) -> None:
        """Apply what the server derived from all clients' statistics, if the task needs it."""
        if isinstance(task, dict):
            self.assigned = self.assigned.told(task)
        if self._statistics() is not None:
            raise DataError(f"the server did not send client {self.client} the target statistics that the task needs.")

    def _hello(self, letter: Letter) -> Letter:
        """Which client this is, from which round it can continue, and which shared entries it takes from the server."""
        accepted = letter.head.get("accepted")
        if not isinstance(accepted, list) or len(accepted) <= self.client or type(asked := accepted[self.client]) is not int:
            raise DataError(f"client {self.client} is not one of the clients of this run.")
        there = self.vault.rounds()
        base = max((r for r in there if r <= asked), default=0)
        wants = self._wants(self._state(base))
        if self._masking is None:
            said, parts = put_packet(codec.outline(self.assigned.initial, wants))
        else:  # which tensors, but not which entries of them
            said, parts = put_packet(codec.outline(self.assigned.initial, wants))[0] | {"key": self._masking.key()}, {}
        mine = self.data.clients[0]
        known: dict[str, Any] = {"samples": self._samples, "tested": mine.tested, "newest": max(there, default=0)}
        if (statistics := self._statistics()) is not None:
            known["statistics"] = statistics
        return self._reply("hello", base, {**known, **said}, parts)

    def _train(self, letter: Letter) -> Letter:
        round, base = _whole(letter, "round"), _whole(letter, "base")
        if not 0 <= base < round:
            raise DataError(f"client {self.client} was asked for round {round} after round {base}.")
        done, told = self.vault.find(round), letter.head.get("task")
        cohort = self._masking.cohort(letter, round) if self._masking else None
        listed = {"list": cohort.digest.hex()} if cohort else {}
        same = done is not None and {k: done.notes.get(k) for k in ("base", "task", "list")} == {
            "base": base, "task": told, "list": listed.get("list")
        }  # fmt: skip
        if done is not None and same:  # asked again: only the reply was lost
            self._note(cohort)
            return unseal(done.notes["reply"], done.tensors["reply"])
        if self._masking is not None and cohort is not None:
            self._masking.check_new(cohort)
        state = self._state(base)
        down = self._down(letter, state)
        spent = self._charge(round)
        measured = self._measure(round - 1, state, down, letter).said if letter.head.get("measure") else {"measured": {}}
        work = self.assigned.work(self.data, self.client, round, self._guard)
        state, up = self.method.client(work, state, down)
        self._check(round, self.method.local(state), up.values, *up.extra.values())
        check_upload(up, self.method.wants(self.assigned.model, state), work.n)
        said, parts = self._upload(up, cohort, letter, state)
        loss = None if self.assigned.private else known(float(work.loss[0]))
        head = {"round": round, "weight": float(up.weight[0]), "train_loss": loss, **said, **spent}
        extra = flat("extra", {k: first(t) for k, t in up.extra.items()})
        reply = self._reply("update", base, {**head, **measured}, {**parts, **extra})
        text, body = reply.seal()
        notes = {"base": base, "reply": text, **({"task": told} if told else {}), **listed}
        before = self.vault.notes(base).get("base", 0)  # where the server goes back to if it loses its newest checkpoint
        self.vault.save(round, {**flat("state", state), "reply": body}, notes, keep={base, before})
        self._note(cohort)
        return reply

    def _upload(self, up: Up, cohort: Cohort | None, letter: Letter, state: State) -> tuple[dict[str, Any], Tree]:
        """What an upload adds to a message; under secure aggregation, masked by pads."""
        if self._masking is None or cohort is None:
            return put_packet(codec.pack(first(up.values), first_mask(up.sent)))
        check_hidden(up)
        params, device = self._values(letter, state)[0], self.assigned.device
        names = [n for n in params if up.sent.get(n, False) is not False]
        if len(cohort.address["reach"]) != len(names):
            raise DataError("the server sent ranges for tensors that the method does not share.")
        reach = {n: torch.tensor(r, device=device) for n, r in zip(names, cohort.address["reach"], strict=True)}
        keys = random.client_keys(self.assigned.seed, self.assigned.ids(self.client), cohort.address["round"] - 1, ROUNDING)
        before = {n: v.to(device) for n, v in params.items()}
        codes = coded(self._masking.ring, self._noisy, up, before, reach, keys, clients=len(cohort.ids))
        return self._masking.hide(cohort, first(codes), first_mask(up.sent))

    def _note(self, cohort: Cohort | None) -> None:
        """Record, before masked values are sent under a list of clients, that they are."""
        if self._masking is not None and cohort is not None:
            self._masking.note(cohort)

    def _agree(self, letter: Letter) -> Letter:
        """Say for whom this client will help to unmask the sum of a round."""
        assert self._masking is not None
        round, base = _whole(letter, "round"), _whole(letter, "base")
        return self._reply("agreed", base, {"round": round, **self._masking.agree(letter, round)}, {})

    def _open(self, letter: Letter) -> Letter:
        """Help to unmask the sum of a round in which this client took part."""
        assert self._masking is not None
        round, base = _whole(letter, "round"), _whole(letter, "base")
        said, parts = self._masking.open(letter, round)
        return self._reply("opened", base, {"round": round, **said}, parts)

    def _charge(self, round: int) -> dict[str, Any]:
        """Charge a round to the client's own privacy budget before it trains; returns what is spent, for the server."""
        budget = budget_of(self.assigned, self._samples, self.vault.folder)
        if budget is None:
            return {}
        private(self.vault.folder)
        budget.charge(round, before=round - 1)  # losing the vault must not free budget
        return {"epsilon": budget.spent_so_far}

    def _after(self, letter: Letter) -> Letter:
        """Measure a finished round; after the last one, store the finished model where `export` finds it."""
        round, base = _whole(letter, "round"), _whole(letter, "base")
        state = self._state(base)
        measured = self._measure(round, state, self._down(letter, state), letter)
        if letter.head["kind"] == "close":
            self._keep(self._best.choose(letter, round, measured.views, measured.chosen))
        return self._reply("measured", base, {"round": round, **measured.said}, {})

    def _keep(self, final: Final) -> None:
        """Store the finished model with all that loading it needs: input and output scaling, classes, network."""
        test = self.assigned.raw(self.data, "test")
        kept = {view: self.assigned.model.state_dict(first(tree)) for view, tree in final.views.items()}
        if test.scale is not None and test.shift is not None:
            kept["input"] = {"scale": test.scale, "shift": test.shift}
        if (units := self.assigned.task.units) is not None:
            kept["output"] = {n: torch.tensor(v) for n, v in zip(("scale", "shift"), units, strict=True)}
        kind = str(self.data.clients[0].train[0].dtype).removeprefix("torch.")
        whose = {"federation": self.assigned.federation, "client": str(self.client)}
        schema = self.data.clients[0].schema
        table: dict[str, Any] = {} if schema is None else {"schema": schema.to_json()}
        table |= {"layout": layout.to_json()} if (layout := self.assigned.layout) else {}
        table |= {} if self.assigned.bare else {"bare": False}
        table |= {"kept": "the best round on validation data"} if final.best else {}
        table |= {} if final.chosen is None else {"chosen": final.chosen}
        notes = {
            "view": self.assigned.view or self.method.view,
            **self.assigned.card,
            **whose,
            "shape": list(self.assigned.data.shape),
            "kind": kind,
        }
        notes |= {**table, "about": {**self._about(test), "schema": table.get("schema")}}
        Vault(self.vault.folder / MODEL).save(final.round, flat("model", kept), notes, keep=set())

    def _about(self, split: Split) -> About:
        """What the finished model takes, and what its outputs mean."""
        assigned = self.assigned
        data = assigned.data
        scale, shift = (None if v is None else v.cpu() for v in (split.scale, split.shift))
        inputs = Inputs(tuple(data.shape), self.data.clients[0].train[0].dtype, scale, shift, assigned.layout)
        meaning = Meaning(assigned.task, tuple(data.target_shape), tuple(assigned.card.get("classes", ())))
        return about(assigned.model, inputs, meaning)

    def _measure(self, round: int, state: State, down: State, letter: Letter) -> "Measured":
        """This client's metrics after a round on its own data, measured as in a simulation, and its models by view."""
        assigned, method = self.assigned, self.method
        test, work = assigned.split(self.data, "test"), assigned.work(self.data, self.client, round, self._guard)
        choice = choose(method, work, state, down, assigned.metrics[0]) if assigned.view == "best" else None
        merged = method.personal(work, state, down) if choice is None else choice.merged
        views = {"local": method.local(state), "merged": merged, **({} if choice is None else {"best": choice.best})}
        self._check(round, *views.values())
        reported = assigned.view or method.view
        scores = {view: score(assigned.programs, tree, test, assigned.metrics) for view, tree in views.items()}
        mask = first_mask(method.mask(assigned.model, state))
        personal = sum(
            int(m.sum()) if isinstance(m, torch.Tensor) else assigned.initial[n].numel() * m for n, m in mask.items()
        )
        headline = assigned.metrics[0].name
        figures = {f"{headline}_{view}": scores[view][headline] for view in ("local", "merged")} | scores[reported]
        chosen = None if choice is None else CHOICES[int(choice.which[0])]
        if choice is not None:
            figures |= {CHOSEN: choice.which}
        lost = ""
        if assigned.validates:
            held = score(assigned.programs, views[reported], assigned.split(self.data, "val"), assigned.metrics)
            figures |= {validated(name): v for name, v in held.items()}
            if assigned.keep != "last":
                lost = self._best.see(letter, round, views, known(float(held[headline][0])), chosen)
        said = {**{name: known(float(v[0])) for name, v in figures.items()}, "share": personal / assigned.model.size}
        return Measured({"measured": said, **({"lost": lost} if lost else {})}, views, chosen)

    def _state(self, base: int) -> State:
        """The state after a round, or the initial state of a client that has just joined."""
        if base == 0:
            work = self.assigned.work(self.data, self.client, 1, self._guard)
            return self.method.join(work, expand(self.assigned.initial, 1))
        found = self.vault.find(base)
        if found is None:
            raise CheckpointError(
                f"client {self.client} has no state of round {base} in {self.vault.folder}; rounds there: "
                f"{', '.join(map(str, self.vault.rounds())) or 'none'}."
            )
        state = nested("state", found.tensors)
        return {k: {n: v.to(self.assigned.device) for n, v in t.items()} for k, t in state.items()}

    def _down(self, letter: Letter, state: State) -> State:
        """What the server sent, in the method's form. Entries that were not sent are NaN, so that using one would show."""
        assigned = self.assigned
        check_finite({n: v for n, v in letter.parts.items() if n != "values"}, "the server sent")
        values, wants = self._values(letter, state)
        check_finite(values, "the server sent")
        params = {n: torch.where(torch.as_tensor(wants.get(n, False)), v, torch.nan) for n, v in values.items()}
        others = {**nested("shared", letter.parts), **nested("rows", letter.parts)}
        if "params" in others:
            raise DataError("the server sent the shared values twice.")
        return {
            k: {n: v.to(assigned.device).unsqueeze(0) for n, v in t.items()} for k, t in {"params": params, **others}.items()
        }

    def _values(self, letter: Letter, state: State) -> tuple[Tree, Mask]:
        """The shared values that the server sent, and a mask of those this client wants; with --secret the server sends all."""
        wants = self._wants(state)
        packet = take_packet(Letter({"whole": [], "partly": []}, letter.parts))
        known = codec.outline(self.assigned.initial, whole(wants) if self._masking else wants)
        came = codec.Packet(packet.values, known.bits, known.whole, known.partly)
        return codec.unpack(came, _cpu(self.assigned.initial))[0], wants

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
    """The inputs and outputs of a model for this data, in words."""
    asked = f"{data.classes} classes" if data.classes else f"targets of shape {tuple(data.target_shape)}"
    return f"inputs {getattr(data, 'layout', None) or f'of shape {tuple(data.shape)}'} and {asked}"


def _whole(letter: Letter, name: str) -> int:
    value = letter.head.get(name)
    if type(value) is not int or value < 0:
        raise DataError(f"a message has the {name} {value!r}, which is not a round number.")
    return value


def _cpu(tree: Tree) -> Tree:
    return {n: v.cpu() for n, v in tree.items()}
