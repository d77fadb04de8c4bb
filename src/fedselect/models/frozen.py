"""Models with a frozen base: what trains is low-rank adapters, biases, norm layers, the head, or chosen layers.

The base is the same for all clients and seeds. It is stored once on the device and never sent; only its digest is. BatchNorm
layers in the base keep their statistics, and use them in training too; BatchNorm layers that train update them as usual.
"""

from collections.abc import Callable, Iterable
from math import isfinite

from torch import nn

from fedselect.core.errors import InputError
from fedselect.core.names import matching, some
from fedselect.models.adapters import Adapters, adaptable, check_rank
from fedselect.models.model import Model

Given = Model | nn.Module | Callable[[], nn.Module]


def everything(model: Given) -> Model:
    """Train all parameters; nothing is frozen."""
    return _model(model)


def lora(
    model: Given, rank: int = 8, targets: str | Iterable[str] = "*", alpha: float | None = None, beside: str = "head"
) -> Model:
    """Freeze the base and train low-rank adapters: a weight W becomes W + (alpha / rank) B A.

    rank: rank of each adapter: the rows of A and columns of B
    targets: layers that get an adapter: names separated by commas; * matches anything (but no weight that is used twice)
    alpha: adapters are scaled by alpha / rank; none: twice the rank
    beside: what else trains: head, nothing, or layer names separated by commas

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=2, seed=0)
        >>> sorted(fs.lora(fs.models.mlp(data), rank=4).params)
        ['1.lora_a', '1.lora_b', '3.bias', '3.weight']
    """
    made = _model(model)
    also = _beside(made, beside)
    weights = {n: set(Adapters((n,)).pairs(made.module)) for n in adaptable(made.module)}
    twice = {*made.tied, *made.tied.values()}
    tied = [n for n, own in weights.items() if own & twice]
    free = [n for n, own in weights.items() if own.isdisjoint(also) and n not in tied]
    patterns = _words(targets)
    for pattern in patterns:
        if (found := matching(pattern, tied)) and not matching(pattern, free):
            raise InputError(
                f"the weight of {found[0]} is used elsewhere in {made.name}, too, so an adapter cannot be merged into it; "
                "leave it out of the targets, or train another part (--adapt)."
            )
    if not free:
        why = "all of them train whole (--beside)" if weights else "it has no Linear, convolution or attention layer"
        raise InputError(f"{made.name} has no layer for an adapter: {why}; train another part (--adapt).")
    layers = _matched(made, patterns, free, "layer", "--targets")
    check_rank(rank, made.module, layers)
    size = 2.0 * rank if alpha is None else alpha
    if not (isfinite(size) and size > 0):
        raise InputError(f"alpha must be positive, not {alpha}.")
    return made.adapted(Adapters(tuple(layers), tuple(also), rank, size / rank))


def bias_only(model: Given, beside: str = "head") -> Model:
    """Freeze the base and train only biases (BitFit).

    beside: what else trains: head, nothing, or layer names separated by commas
    """
    made = _model(model)
    biases = [n for n in made.params if n.rpartition(".")[2].endswith("bias")]
    return _only(made, biases, _beside(made, beside), "bias")


def norm_only(model: Given, beside: str = "head") -> Model:
    """Freeze the base and train only norm layers, with their statistics.

    beside: what else trains: head, nothing, or layer names separated by commas
    """
    made = _model(model)
    return _only(made, [n for n in made.params if n in made.norms], _beside(made, beside), "norm layer")


def head_only(model: Given) -> Model:
    """Freeze the base and train only the head."""
    made = _model(model)
    made.need_head("training only the head")
    return _only(made, _beside(made, "head"), [], "head")


def layers_only(model: Given, targets: str | Iterable[str]) -> Model:
    """Freeze the base and train only these layers.

    targets: layer or parameter names separated by commas; * matches anything
    """
    made = _model(model)
    return _only(made, _matched(made, _words(targets), made.params, "parameter", "--targets"), [], "layer")


def _model(given: Given) -> Model:
    if isinstance(given, str):
        raise InputError(f"give a model, not its name: fs.models.{given}(data).")
    made = given if isinstance(given, Model) else Model.wrap(given)
    if made.adapters is not None:
        raise InputError(f"{made.name} already has a frozen base; pass the original model.")
    return made


def _only(model: Model, names: list[str], beside: list[str], what: str) -> Model:
    if not names:
        raise InputError(f"{model.name} has no {what} to train; choose another part (--adapt).")
    chosen = {*names, *beside}
    return model.adapted(Adapters(trains=tuple(n for n in model.params if n in chosen)))


def _beside(model: Model, said: str) -> list[str]:
    words = _words(said)
    names = [n for n in model.params if "head" in words and (model.is_head(n) or n in model.fresh)]
    rest = [w for w in words if w not in ("head", "nothing")]
    return list(dict.fromkeys([*names, *_matched(model, rest, model.params, "parameter", "--beside")]))


def _matched(model: Model, patterns: list[str], names: list[str], what: str, flag: str) -> list[str]:
    """The names that match any pattern, in the model's order; each pattern must match at least one."""
    found: set[str] = set()
    for pattern in patterns:
        own = matching(pattern, names)
        if not own:
            raise InputError(f"no {what} of {model.name} matches {pattern!r} ({flag}); choose from {some(names, 24)}.")
        found.update(own)
    return [n for n in names if n in found]


def _words(said: str | Iterable[str]) -> list[str]:
    words = [w.strip() for w in said.split(",")] if isinstance(said, str) else list(said)
    found = [w for w in words if w]
    if not found:
        raise InputError("name at least one layer, or * for all.")
    return found


ADAPTERS: dict[str, Callable[..., Model]] = {
    "all": everything,
    "lora": lora,
    "bias": bias_only,
    "norm": norm_only,
    "head": head_only,
    "layers": layers_only,
}
