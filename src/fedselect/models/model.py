"""Model: a network as a pure function of a Tree, split into body and head."""

import copy
import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedselect.core.errors import InputError, nearest
from fedselect.core.tree import Tree
from fedselect.models.adapters import Adapters
from fedselect.models.outputs import outputs_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class Output:
    logits: Tensor
    features: Tensor | None  # input of the head; None for a model without a head


class Model:
    """A network whose values are stored outside it, in a Tree of its parameters and running statistics.

    Use `Model.wrap(module)` for your own network. `build` creates the module; the initial values come from running `build`
    under the seed. Parameters that do not require a gradient, and integer buffers, are constants: never trained, never sent.
    `adapters` says what trains on a frozen base.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        head: str | None = None,
        name: str = "model",
        output: str | int | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.build_from = build
        self.name = name
        self.output = output  # which part of the returned value holds the outputs; None: as `outputs_of` finds it
        self.adapters = adapters
        self.module = self.assemble()
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in self.module.parameters()):
            raise InputError("the model has lazy layers without shapes; run one batch through it first.")
        for path, m in self.module.named_modules():
            if isinstance(m, _BATCH_NORMS) and not m.track_running_stats:
                raise InputError(
                    f"{path}: BatchNorm without running statistics makes predictions depend on the rest of the batch; "
                    "set track_running_stats=True."
                )
            if isinstance(m, _BATCH_NORMS) and m.track_running_stats and m.momentum is None:
                raise InputError(
                    f"{path}: BatchNorm with momentum=None counts batches, and this count is not stored per client; set a "
                    "momentum such as 0.1."
                )
        self.params = [n for n, p in self.module.named_parameters() if p.requires_grad]
        persistent = self.module.state_dict(keep_vars=True)
        self.still = self._still()
        still = {f"{path}.{n}" for path in self.still for n in self.module.get_submodule(path)._buffers}
        floats = [n for n, b in self.module.named_buffers() if b.is_floating_point() and n in persistent]
        self.stats = [n for n in floats if n not in still]
        tree = set(self.params) | set(self.stats)
        self.names = [*self.params, *self.stats]  # parameters first, so that a mask over them covers the start of a tree
        named = {id(v): n for n, v in self.module.named_parameters()}
        self.tied = {n: named[id(v)] for n, v in persistent.items() if named.get(id(v), n) != n}
        rest = {n: v for n, v in persistent.items() if n not in tree and n not in self.tied}
        self.constants = {n: v.detach().to("cpu", copy=True) for n, v in rest.items()}
        if not self.params:
            raise InputError("the model has no trainable parameter; set requires_grad=True on some.")
        self.norms = self._of(_NORMS)
        self.convolutions = self._of((nn.Conv1d, nn.Conv2d, nn.Conv3d))
        self.size = sum(p.numel() for n, p in self.module.named_parameters() if n in tree)
        self.pairs = {} if adapters is None else adapters.pairs(self.module)
        self.frozen = sum(p.numel() for p in self.module.parameters() if not p.requires_grad)
        self.head_was_guessed = head is None
        self._named = head
        self.fresh: list[str] = []  # parameters that pretrained weights lack, which must train whatever is frozen
        found = self._find_head() if head is None else head
        self._frozen_head = found if found is not None and self._is_frozen(found) else None
        self.head = None if found is None or self._frozen_head else self._check_head(found)

    @classmethod
    def wrap(
        cls, module: nn.Module | Callable[[], nn.Module], head: str | None = None, *, output: str | int | None = None
    ) -> "Model":
        """Make a Model of any nn.Module.

        Args:
            module: A module, which keeps its values for every seed, or a function that creates one, called under the seed.
            head: Name of the submodule that maps features to outputs; by default the last Linear.
            output: For a module that returns several things, the name or index of the outputs; by default `logits`, or the
                first element of a tuple.

        Examples:
            >>> import fedselect as fs
            >>> from torch import nn
            >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            >>> fs.Model.wrap(net)
            Model(Sequential, 2,410 parameters, head='3')
        """
        if isinstance(module, nn.Module):
            kept = copy.deepcopy(module)
            return cls(partial(copy.deepcopy, kept), head=head, name=type(module).__name__, output=output)
        if not callable(module):
            raise InputError(f"a model must be an nn.Module or a function that creates one, not {type(module).__name__}.")
        return cls(module, head=head, name=getattr(module, "__name__", "model"), output=output)

    def __getstate__(self) -> dict[str, Any]:
        try:
            pickle.dumps(self.build_from)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise InputError(
                f"the function that creates {self.name} cannot be pickled ({e}); define it with def at the top of a module, "
                "or wrap a module: fs.Model.wrap(MyNet())."
            ) from None
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Model":
        out = memo[id(self)] = type(self).__new__(type(self))
        out.__dict__ |= copy.deepcopy(vars(self), memo)
        return out

    def __repr__(self) -> str:
        head = f", head={self.head!r}" if self.head is not None else ""
        base = f", {self.frozen:,} frozen" if self.frozen else ""
        return f"Model({self.name}, {self.size:,} parameters{base}{head})"

    def build(self) -> nn.Module:
        """A new plain module without adapters, which can load `state_dict`."""
        made = _seeded(self.build_from, 0)
        return made if self.adapters is None else self.adapters.taken_from(made)

    def assemble(self, seed: int = 0) -> nn.Module:
        """A new module with its adapters in place."""
        made = _seeded(self.build_from, seed)
        return made if self.adapters is None else self.adapters.put_into(made, seed)

    def adapted(self, adapters: Adapters) -> "Model":
        """This model with a frozen base."""
        head = None if self.head_was_guessed else self.head
        return Model(self.build_from, head=head, name=self.name, output=self.output, adapters=adapters)

    def holding(self, module: nn.Module) -> "Model":
        """This model with the values of an assembled module, whatever the seed."""
        build = partial(copy.deepcopy, module)
        return Model(build, head=self.head, name=self.name, output=self.output, adapters=self.adapters)

    def behind(self, module: nn.Module, bare: bool) -> "Model":
        """The part of this model that an assembled module has left; `bare`: it returns a single tensor."""
        build, output = partial(copy.deepcopy, module), None if bare else self.output
        return Model(build, head=self._named, name=self.name, output=output, adapters=self.adapters)

    def init(self, seed: int) -> Tree:
        """The common initial values, without a client axis."""
        values = self.assemble(seed).state_dict()
        return {n: values[n].detach().clone() for n in self.names}

    @cached_property
    def base(self) -> str:
        """A digest of the frozen base; empty if all parameters train."""
        if not self.frozen:
            return ""
        sum_ = hashlib.sha256()
        for n, v in self.constants.items():
            if not n.endswith("num_batches_tracked"):  # a file may lack this counter, which is not used
                sum_.update(f"{n} {tuple(v.shape)} {v.dtype}".encode())
                sum_.update(v.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return sum_.hexdigest()

    def is_head(self, name: str) -> bool:
        return self.head is not None and (name == self.head or name.startswith(self.head + "."))

    def need_head(self, who: str) -> None:
        if self._frozen_head is not None:
            raise InputError(
                f"{who} needs the model's head, and that of {self.name} ({self._frozen_head}) is frozen; let it train, too: "
                "add it to --targets or --beside."
            )
        if self.head is None:
            raise InputError(
                f"{who} needs the model's head, and {self.name} has no Linear; name it: Model.wrap(module, head='...')."
            )

    def outputs_of(self, returned: Any) -> Tensor:
        """The outputs in what the module returned: a tensor, a tuple, a dict, or an object with attributes."""
        return outputs_of(returned, self.output, self.name)

    def state_dict(self, tree: Tree) -> Tree:
        """One client's values as a state_dict that the plain module loads strictly; adapters are merged into the weights."""
        full = {**self.constants, **tree}
        full = {n: full[self.tied.get(n, n)].detach() for n in self.module.state_dict()}
        if self.adapters is not None:
            full = self.adapters.merged(full, self.pairs)
        return {n: v.clone() for n, v in full.items()}

    def _of(self, kinds: tuple[type[nn.Module], ...]) -> frozenset[str]:
        """The parameters and buffers of all layers of these kinds."""
        layers = [(path, m) for path, m in self.module.named_modules() if isinstance(m, kinds)]
        return frozenset(
            f"{p}.{n}" if p else n for p, m in layers for n in (*dict(m.named_parameters()), *dict(m.named_buffers()))
        )

    def linears(self) -> list[str]:
        """The submodules that can be the head."""
        return [n for n, m in self.module.named_modules() if isinstance(m, nn.Linear)]

    def _still(self) -> list[str]:
        """The BatchNorm layers of a frozen base that do not train, and so keep their statistics."""
        if self.adapters is None:
            return []
        norms = [(path, m) for path, m in self.module.named_modules() if isinstance(m, _BATCH_NORMS)]
        return [path for path, m in norms if not any(p.requires_grad for p in m.parameters())]

    def _is_frozen(self, head: str) -> bool:
        """Whether the whole head belongs to the frozen base."""
        return self.adapters is not None and not any(n.startswith(head + ".") for n in self.params)

    def _find_head(self) -> str | None:
        leaves = [n for n, m in self.module.named_modules() if next(m.parameters(recurse=False), None) is not None]
        linears = self.linears()
        if not linears:
            return None
        if leaves[-1] != linears[-1]:
            raise InputError(
                f"cannot tell the head of {self.name}: its last layer {leaves[-1]!r} is not a Linear; name it: "
                f"Model.wrap(module, head=...) with one of {', '.join(linears)}."
            )
        if f"{linears[-1]}.weight" in self.tied:  # tied, for example to embeddings, so not a separate part
            return None
        return linears[-1] or None

    def _check_head(self, head: str) -> str:
        names = [n for n, _ in self.module.named_modules() if n]
        if head not in names:
            near = nearest(head, names) or self.linears()
            raise InputError(f"{self.name} has no submodule {head!r}; candidates: {', '.join(near)}.")
        if not any(n == head or n.startswith(head + ".") for n in self.params):
            raise InputError(f"the head {head!r} of {self.name} has no trainable parameter.")
        return head


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    seeded = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=[]):
        seeded(seed)  # without a GPU, torch.manual_seed would keep a stack trace of each call
        return build()
