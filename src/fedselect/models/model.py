"""Model: a network as a pure function of a Tree, split into body and head."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedselect.errors import InputError, nearest
from fedselect.stacked import Forward, Taps
from fedselect.tree import Tree

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class Output:
    logits: Tensor
    features: Tensor | None  # what the head was given; None for a model without a head


class Model:
    """A network whose values live outside it, in a Tree of its trainable parameters and its running statistics.

    `build` makes the module; its values come from `build` run under the seed. Parameters that do not require a
    gradient and integer buffers are constants of the model: never trained, never sent.
    """

    def __init__(self, build: Callable[[], nn.Module], *, head: str | None = None, name: str = "model") -> None:
        self._build = build
        self.name = name
        self.module = _seeded(build, 0)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in self.module.parameters()):
            raise InputError("the model has lazy layers; run one batch through it first, so that it knows its shapes.")
        for path, m in self.module.named_modules():
            if isinstance(m, _BATCH_NORMS) and not m.track_running_stats:
                raise InputError(
                    f"{path}: BatchNorm without running statistics makes a prediction depend on the others in its batch; "
                    "use track_running_stats=True."
                )
            if isinstance(m, _BATCH_NORMS) and m.track_running_stats and m.momentum is None:
                raise InputError(
                    f"{path}: BatchNorm with momentum=None counts its batches, which a client's model cannot carry; "
                    "give it a momentum such as 0.1."
                )
        self.params = [n for n, p in self.module.named_parameters() if p.requires_grad]
        persistent = self.module.state_dict(keep_vars=True)
        self.stats = [n for n, b in self.module.named_buffers() if b.is_floating_point() and n in persistent]
        tree = set(self.params) | set(self.stats)
        self.names = [*self.params, *self.stats]  # so a mask over the parameters lies along the front of a tree
        named = {id(v): n for n, v in self.module.named_parameters()}
        self.tied = {n: named[id(v)] for n, v in persistent.items() if named.get(id(v), n) != n}
        rest = {n: v for n, v in persistent.items() if n not in tree and n not in self.tied}
        self.constants = {n: v.detach().to("cpu", copy=True) for n, v in rest.items()}
        if not self.params:
            raise InputError("the model has no trainable parameter.")
        self.norms = self._of(_NORMS)
        self.convolutions = self._of((nn.Conv1d, nn.Conv2d, nn.Conv3d))
        self.size = sum(p.numel() for n, p in self.module.named_parameters() if n in tree)
        self._guessed = head is None
        found = self._find_head() if head is None else head
        self.head = None if found is None else self._check_head(found)
        self._seen: list[Tensor] = []
        if self.head is not None:
            self.module.get_submodule(self.head).register_forward_pre_hook(self._see)
        homes = {f"{path}.{n}" if path else n: (m, n) for path, m in self.module.named_modules() for n in m._buffers}
        self._homes = {n: homes[n] for n in self.stats}
        self._others = {n: at for n, at in homes.items() if n not in tree and at[1] != "num_batches_tracked"}
        self._values: Tree = {}  # of the client whose forward pass is under way
        self.module.register_forward_hook(self._write_back)
        self._train = self.module.training
        self.precision = "float32"  # how products are computed: float32, or on a GPU tf32 or bf16
        self.slow: set[str] = set()  # what of it has no fast rule for stacked clients
        self.taps: Mapping[str, Taps] = {}  # known from `check` on: kernels of which only these taps ever meet the input
        self._dead: Tree = {}
        self.steady = False  # until a step of training has shown that it draws no random numbers by itself
        self.stackable = True  # until it turns out to use something that cannot run for all clients at once
        self._lent = False  # until a run has it

    @classmethod
    def wrap(cls, module: nn.Module | Callable[[], nn.Module], head: str | None = None) -> "Model":
        """Any nn.Module as a Model.

        A module keeps the values it has, whatever the seed; a function that makes one is called under the seed.
        `head` names the submodule that turns features into class scores; without it the last Linear is taken.
        """
        if isinstance(module, nn.Module):
            kept = copy.deepcopy(module)
            return cls(lambda: copy.deepcopy(kept), head=head, name=type(module).__name__)
        if not callable(module):
            raise InputError(f"a model is an nn.Module or a function that makes one, not {type(module).__name__}.")
        return cls(module, head=head, name=getattr(module, "__name__", "model"))

    def lend(self) -> "Model":
        """This model for a run: itself, and after that one like it for each, as a run moves it and learns of it by its data."""
        if not self._lent:
            self._lent = True
            return self
        other = Model(self._build, head=None if self._guessed else self.head, name=self.name)
        other.module.load_state_dict(self.module.state_dict())
        other.constants, other.stackable, other._lent = self.constants, self.stackable, True
        return other

    def build(self) -> nn.Module:
        """A plain module of this kind, apart from this one."""
        return _seeded(self._build, 0)

    def init(self, seed: int) -> Tree:
        """The common initial values; without a client axis."""
        values = _seeded(self._build, seed).state_dict()
        return {n: values[n].detach().clone() for n in self.names}

    def is_head(self, name: str) -> bool:
        return self.head is not None and (name == self.head or name.startswith(self.head + "."))

    def need_head(self, who: str) -> None:
        if self.head is None:
            raise InputError(
                f"{who} needs to know the model's head, and {self.name} has no Linear to take for it; "
                "name it: Model.wrap(module, head='...')."
            )

    def to(self, device: torch.device) -> "Model":
        self.module.to(device)
        self._dead = {}
        return self

    def apply(self, tree: Tree, x: Tensor, train: bool = False) -> Output:
        """One client's forward pass; in training its running statistics are updated in `tree`, in place."""
        if self._train != train:
            self.module.train(train)
            self._train = train
        with self._features(tree) as seen:
            logits = functional_call(self.module, tree, (x,))
            return Output(logits, seen[-1] if seen else None)

    def check(self, x: Tensor, classes: int) -> None:
        """Run one batch and complain in words when the model does not fit the data."""
        inner: list[Tensor] = []
        handle = None
        if self.head is not None:
            handle = self.module.get_submodule(self.head).register_forward_hook(lambda m, i, o: inner.append(o))
        try:
            values = {n: v for n, v in self.module.state_dict().items() if n in set(self.names)}
            with torch.no_grad(), Forward(None, stacked=False) as mode:
                mode.watched = {id(values[n]): n for n in self.params}
                out = self.apply(values, x)
            self.taps, self._dead = mode.crops(), {}
        except (RuntimeError, IndexError, ValueError, TypeError) as e:
            raise InputError(f"{self.name} cannot take inputs of shape {tuple(x.shape[1:])}: {e}") from e
        finally:
            if handle is not None:
                handle.remove()
        if not isinstance(out.logits, Tensor):
            raise InputError(
                f"{self.name} returns a {type(out.logits).__name__}; wrap it in a module that returns class scores alone."
            )
        if out.logits.shape != (len(x), classes):
            raise InputError(
                f"{self.name} returns {tuple(out.logits.shape)} for {len(x)} inputs; labels from 0 to {classes - 1} need "
                f"({len(x)}, {classes}), or say how many classes there are: Federation(clients, classes=...)."
            )
        if self._guessed and inner and inner[-1] is not out.logits:
            raise InputError(
                f"the last Linear of {self.name}, {self.head!r}, does not produce its output; name the head: "
                f"Model.wrap(module, head=...) with one of {', '.join(self._linears())}."
            )

    def others(self) -> Tree:
        """What its buffers hold that are no part of a client's model, but for the counters of norm layers."""
        found = {n: home._buffers[key] for n, (home, key) in self._others.items()}
        return {n: b.detach().clone() for n, b in found.items() if b is not None}

    def check_others(self, before: Tree) -> None:
        """Complain where training has written to them: clients would share what one has left there."""
        for n, b in self.others().items():
            if n in before and b.shape == before[n].shape and not torch.equal(b, before[n]):
                raise InputError(
                    f"{self.name} writes to its buffer {n!r} while it trains, and clients would share that; make it a "
                    "persistent buffer of floats, and every client has its own."
                )

    def dead(self) -> Tree:
        """Of kernels with taps that only ever meet padding, which entries these are, each in a line: they never move."""
        if not self._dead:
            for n, taps in self.taps.items():
                marks = torch.ones_like(self.module.get_parameter(n), dtype=torch.bool)
                taps.of(marks)[:] = False
                self._dead[n] = marks.flatten()
        return self._dead

    def state_dict(self, tree: Tree) -> Tree:
        """One client's values as a state_dict that the plain module loads strictly."""
        order = self.module.state_dict()
        full = {**self.constants, **tree}
        return {n: full[self.tied.get(n, n)].detach().clone() for n in order}

    def _of(self, kinds: tuple[type[nn.Module], ...]) -> frozenset[str]:
        """The parameters and buffers of all layers of these kinds."""
        layers = [(path, m) for path, m in self.module.named_modules() if isinstance(m, kinds)]
        return frozenset(
            f"{p}.{n}" if p else n for p, m in layers for n in (*dict(m.named_parameters()), *dict(m.named_buffers()))
        )

    def _linears(self) -> list[str]:
        return [n for n, m in self.module.named_modules() if isinstance(m, nn.Linear)]

    def _find_head(self) -> str | None:
        leaves = [n for n, m in self.module.named_modules() if next(m.parameters(recurse=False), None) is not None]
        linears = self._linears()
        if not linears:
            return None
        if leaves[-1] != linears[-1]:
            raise InputError(
                f"cannot tell the head of {self.name}: its last layer {leaves[-1]!r} is not a Linear; name it: "
                f"Model.wrap(module, head=...) with one of {', '.join(linears)}."
            )
        return linears[-1] or None

    def _check_head(self, head: str) -> str:
        names = [n for n, _ in self.module.named_modules() if n]
        if head not in names:
            near = nearest(head, names) or self._linears()
            raise InputError(f"{self.name} has no submodule {head!r}; candidates: {', '.join(near)}.")
        if not any(n == head or n.startswith(head + ".") for n in self.params):
            raise InputError(f"the head {head!r} of {self.name} has no trainable parameter.")
        return head

    def _see(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._values:  # or it is another model's turn, of the same module
            self._seen.append(inputs[0])

    def _write_back(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Statistics that the module replaced (`self.mean = ...`) are written where they lie, as if it had done that."""
        for n, (home, key) in self._homes.items() if self._train and self._values else ():
            now = home._buffers[key]
            if now is not None and now is not self._values[n]:
                with torch.no_grad():
                    self._values[n].copy_(now)

    @contextmanager
    def _features(self, tree: Tree) -> Iterator[list[Tensor]]:
        self._values = tree
        try:
            yield self._seen
        finally:
            self._seen.clear()
            self._values = {}


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
