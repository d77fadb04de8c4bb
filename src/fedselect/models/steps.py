"""Steps: networks as parts that run one after another, so that they can be cut between two parts."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

Path = tuple[str, ...]
"""Where a part is: names of attributes, from the network inwards."""


class Steps(nn.Module):
    """A network whose forward pass is its steps in this order, each on the result of the one before.

    A step is a submodule, a list of submodules that run in order, or a method. `order` names each step, and after a method the
    submodules and parameters that it uses.
    """

    order: ClassVar[tuple[tuple[str, ...], ...]]
    begins = ""  # the step to start with; "": the first of all

    def forward(self, x: Tensor) -> Tensor:
        for name in self.left():
            x = run(self, (name,), x)
        return x

    def left(self) -> list[str]:
        """The steps that are there."""
        names = [name for name, *_ in self.order]
        return names[names.index(self.begins) :] if self.begins else names

    def uses(self, step: str) -> Sequence[str]:
        """The submodules and parameters of a step."""
        return (step,) if step in self._modules else next(used for name, *used in self.order if name == step)


class Tail(nn.Module):
    """One submodule in its place in a network that is empty otherwise, so that its parameters keep their names."""

    def __init__(self, path: str, inner: nn.Module) -> None:
        super().__init__()
        self._path = path
        *above, name = path.split(".")
        place: nn.Module = self
        for n in above:
            place.add_module(n, nn.Module())
            place = place.get_submodule(n)
        place.add_module(name, inner)

    def forward(self, x: Tensor) -> Any:
        return self.get_submodule(self._path)(x)


def parts(module: nn.Module) -> list[Path]:
    """The parts that run one after another, as small as possible; the module itself, (), if it cannot be divided."""
    names = _names(module)
    if names is None:
        return [()]
    inner = {name: getattr(module, name) for name in names}
    return [(n, *p) for n, m in inner.items() for p in (parts(m) if isinstance(m, nn.Module) else [()])]


def run(module: nn.Module, path: Path, x: Tensor) -> Tensor:
    """The result of one part."""
    part: Any = module
    for name in path:
        part = getattr(part, name)
    for each in part if isinstance(part, nn.ModuleList) else (part,):
        x = each(x)
    return x


def used(module: nn.Module, path: Path) -> Iterator[str]:
    """The names of the submodules and parameters that a part uses."""
    *above, last = path
    owner = module.get_submodule(".".join(above))
    for name in owner.uses(last) if isinstance(owner, Steps) else (last,):
        yield ".".join((*above, name))


def drop(module: nn.Module, path: Path) -> None:
    """Remove what only the parts before this one use; the module then starts with this part."""
    name, *below = path
    names = _names(module) or []
    before = names[: names.index(name)]
    if isinstance(module, Steps):
        later = {n for step in names[len(before) :] for n in module.uses(step)}
        before = list(dict.fromkeys(n for step in before for n in module.uses(step) if n not in later))
        module.begins = name
    for n in before:
        (module._parameters if n in module._parameters else module._modules).pop(n)
    if below:
        drop(getattr(module, name), tuple(below))


def _names(module: nn.Module) -> list[str] | None:
    """The parts of a module that only runs them in order; None for any other module."""
    kind = type(module)
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if kind is nn.ModuleList or kind.forward is nn.Sequential.forward:
        return list(module._modules)
    return module.left() if isinstance(module, Steps) and kind.forward is Steps.forward else None
