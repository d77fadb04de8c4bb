"""Fitted: a model in one run, on its device and in its precision, with what the run has learned about it from the data."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedselect.core.errors import InputError
from fedselect.core.tree import Tree
from fedselect.models import Layout, Model, Output
from fedselect.tasks.task import Targets, Task
from fedselect.training import blocks
from fedselect.training.stacked import Forward
from fedselect.training.taps import Taps


class Fitted:
    """A run's own copy of a model's module, which computes with any client's values.

    What a run learns about the model is stored here, so that runs that share a Model do not affect each other.
    """

    stackable = True  # until it uses something that cannot run for all clients at once
    compiling = False  # until it runs for all clients at once only when told that it is being compiled

    def __init__(
        self,
        model: Model,
        device: torch.device | str = "cpu",
        precision: str = "float32",
        *,
        layout: Layout | None = None,
        recompute: bool = False,
        inner: bool = False,
    ) -> None:
        self.model = model
        self.bare = True  # whether the module returns a single tensor
        self.layout = layout  # of several inputs: how they are packed into the one tensor of a batch
        self.inner = inner  # whether its inputs are what other layers computed, whose dtype must stay
        self._floats = model.module.get_parameter(model.params[0]).dtype
        self.precision = precision  # of matrix products: float32, bf16, or on a GPU tf32
        self.slow: set[str] = set()  # its operations without a fast rule for stacked clients
        self.steady = False  # until a training step has shown that it draws no random numbers itself
        self.taps: Mapping[str, Taps] = {}  # set by `check`: kernels of which only these taps ever meet the input
        self._dead: Tree = {}
        made = model.assemble()
        self.module = copy.deepcopy(made) if made is model.module else made  # a function may return the same one each time
        self.module.load_state_dict(model.module.state_dict())
        if precision == "bf16" and model.adapters is not None:
            for p in self.module.parameters():
                if not p.requires_grad and p.is_floating_point():  # the frozen base
                    p.data = p.data.bfloat16()
        self.module.to(device)
        self._still = [self.module.get_submodule(path) for path in model.still]
        self.switch(self.module.training)
        self._values: Tree = {}  # of the client in the current forward pass
        self._seen: list[Tensor] = []
        tree = set(model.names)
        homes = {f"{path}.{n}" if path else n: (m, n) for path, m in self.module.named_modules() for n in m._buffers}
        self._homes = {n: homes[n] for n in model.stats}
        self._others = {n: at for n, at in homes.items() if n not in tree and at[1] != "num_batches_tracked"}
        self.recompute = recompute  # whether activations within blocks are recomputed in the backward pass
        if recompute:
            blocks.recompute(self.module, model)
        self.module.register_forward_hook(self._write_back)
        if model.head is not None:
            self.module.get_submodule(model.head).register_forward_pre_hook(self._see, with_kwargs=True)
        self._places = _places(self.module)

    def apply(self, tree: Tree, x: Tensor, train: bool = False, *, floats: torch.dtype | None = None) -> Output:
        """One client's forward pass; in training its running statistics are updated in `tree`, in place.

        `floats`: the dtype in which float inputs are given to the module, if not the model's.
        """
        if self.layout is not None:
            args, named = self.layout.unpack(x, floats or self._floats)
        else:
            args, named = (x if floats is None or self.inner or not x.is_floating_point() else x.to(floats),), {}
        if self._train != train:
            self.switch(train)
        with self._features(tree) as seen:
            returned = self._call(tree, args, named)
            return Output(self.model.outputs_of(returned), seen[-1] if seen else None)

    def _call(self, tree: Tree, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The module with these values in place of its own: torch.func.functional_call, which looks for them in every call."""
        places = [(store, key, v) for n, v in tree.items() for store, key in self._places.get(n, ())]
        own = [store[key] for store, key, _ in places]
        try:
            for store, key, v in places:
                store[key] = v
            return self.module(*args, **named)
        finally:
            for (store, key, _), v in zip(places, own, strict=True):
                store[key] = v

    def switch(self, train: bool) -> None:
        """Switch to training or evaluation; layers with fixed statistics always evaluate."""
        self._train = train
        self.module.train(train)
        for m in self._still:
            m.eval()

    def check(self, x: Tensor, task: Task, data: Targets) -> Tensor:
        """Run one batch and raise a clear error if the model does not fit the data; returns its outputs."""
        model, inner = self.model, list[Tensor]()
        handle = None
        if model.head is not None:
            handle = self.module.get_submodule(model.head).register_forward_hook(lambda m, i, o: inner.append(o))
        try:
            values = {n: v for n, v in self.module.state_dict().items() if n in set(model.names)}
            with torch.no_grad(), Forward(None, False, self.precision) as mode:
                mode.watched = {id(values[n]): n for n in model.params}
                out = self.apply(values, x)
            self.taps, self._dead = mode.crops(), {}
        except (RuntimeError, IndexError, ValueError, TypeError) as e:
            given = f"of shape {tuple(x.shape[1:])}" if self.layout is None else str(self.layout)
            number = self.layout is None and not x.is_floating_point()
            whole = " (whole numbers are for an embedding; give measurements as floats)" if number else ""
            raise InputError(f"{model.name} cannot take inputs {given}: {e}{whole}") from e
        finally:
            if handle is not None:
                handle.remove()
        rows = len(out.logits) if out.logits.ndim else 0
        if why := "it must return one row per input." if rows != len(x) else task.unfit_outputs(out.logits, data):
            raise InputError(f"{model.name} returns {tuple(out.logits.shape)} for {len(x)} inputs; {why}")
        if model.head_was_guessed and inner and inner[-1] is not out.logits:
            raise InputError(
                f"the last Linear of {model.name}, {model.head!r}, does not produce its output; name the head: "
                f"Model.wrap(module, head=...) with one of {', '.join(model.linears())}."
            )
        return out.logits

    def others(self) -> Tree:
        """Its buffers that are not part of a client's model, except the counters of norm layers."""
        found = {n: home._buffers[key] for n, (home, key) in self._others.items()}
        return {n: b.detach().clone() for n, b in found.items() if b is not None}

    def check_others(self, before: Tree) -> None:
        """Refuse a model whose training writes to these buffers, which clients would share."""
        for n, b in self.others().items():
            if n in before and b.shape == before[n].shape and not torch.equal(b, before[n]):
                raise InputError(
                    f"{self.model.name} writes to its buffer {n!r} during training, and clients would share it; make it a "
                    "persistent buffer of floats, so that every client has its own."
                )

    def dead(self) -> Tree:
        """For kernels with taps that only ever meet padding, these entries, each kernel's in a row; they never move."""
        if not self._dead:
            for n, taps in self.taps.items():
                marks = torch.ones_like(self.module.get_parameter(n), dtype=torch.bool)
                taps.of(marks)[:] = False
                self._dead[n] = marks.flatten()
        return self._dead

    def _see(self, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        self._seen.append(inputs[0] if inputs else next(iter(named.values())))

    def _write_back(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Copy statistics that the module replaced (`self.mean = ...`) to where the originals are stored."""
        self.bare = isinstance(output, Tensor)
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


def _places(module: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Where each of a module's tensors is stored: the dict and the key. A tensor under several names is in several places."""
    homes: dict[str, tuple[int, dict[str, Any], str]] = {}
    for path, m in module.named_modules(remove_duplicate=False):
        for store in (m._parameters, m._buffers):
            homes |= {f"{path}.{n}" if path else n: (id(v), store, n) for n, v in store.items() if v is not None}
    tied: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for same, store, n in homes.values():
        tied.setdefault(same, []).append((store, n))
    return {name: tied[same] for name, (same, _, _) in homes.items()}
