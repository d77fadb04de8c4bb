"""What of a model trains, the rest being a frozen base: low-rank adapters, biases, norm layers, the head, or chosen layers.

The base is one for all clients, whatever the seed. It lies once on the device, is never sent, and only its digest travels.
BatchNorm in the base keeps its statistics and uses them in training too; where it trains, its statistics move as ever.
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
    """All parameters train; nothing is frozen."""
    return _model(model)


def lora(
    model: Given, rank: int = 8, targets: str | Iterable[str] = "*", alpha: float | None = None, beside: str = "head"
) -> Model:
    """Low-rank adapters on a frozen base; a rank is a column of B and a row of A.

    rank: of each adapter
    targets: the layers that get one, by name, with commas between; * stands for anything
    alpha: adapters are scaled by alpha / rank; none: twice the rank
    beside: what else trains: head, nothing, or layers by name, with commas between
    """
    made = _model(model)
    also = _beside(made, beside)
    whole = {n.rpartition(".")[0] for n in also}
    free = [n for n in adaptable(made.module) if n not in whole]
    patterns = _words(targets)
    if not free:
        raise InputError(f"{made.name} has no Linear, convolution or attention that could have an adapter.")
    layers = _matched(made, patterns, free, "layer", "--targets")
    check_rank(rank, made.module, layers)
    size = 2.0 * rank if alpha is None else alpha
    if not (isfinite(size) and size > 0):
        raise InputError(f"alpha must be a positive number, not {alpha}.")
    return made.adapted(Adapters(tuple(layers), tuple(also), rank, size / rank))


def bias_only(model: Given, beside: str = "head") -> Model:
    """Only biases train, on a frozen base (BitFit).

    beside: what else trains: head, nothing, or layers by name, with commas between
    """
    made = _model(model)
    biases = [n for n in made.params if n.rpartition(".")[2].endswith("bias")]
    return _only(made, biases, _beside(made, beside), "bias")


def norm_only(model: Given, beside: str = "head") -> Model:
    """Only norm layers train, with their statistics, on a frozen base.

    beside: what else trains: head, nothing, or layers by name, with commas between
    """
    made = _model(model)
    return _only(made, [n for n in made.params if n in made.norms], _beside(made, beside), "norm layer")


def head_only(model: Given) -> Model:
    """Only the head trains, on a frozen base."""
    made = _model(model)
    made.need_head("training the head alone")
    return _only(made, _beside(made, "head"), [], "head")


def layers_only(model: Given, targets: str | Iterable[str]) -> Model:
    """Only these layers train, on a frozen base.

    targets: layers or parameters by name, with commas between; * stands for anything
    """
    made = _model(model)
    return _only(made, _matched(made, _words(targets), made.params, "parameter", "--targets"), [], "layer")


def _model(given: Given) -> Model:
    if isinstance(given, str):
        raise InputError(f"give a model, not its name: fs.models.{given}(data).")
    made = given if isinstance(given, Model) else Model.wrap(given)
    if made.adapters is not None:
        raise InputError(f"{made.name} has a frozen base already; begin with the model as it was before.")
    return made


def _only(model: Model, names: list[str], beside: list[str], what: str) -> Model:
    if not names:
        raise InputError(f"{model.name} has no {what} that could train; choose another --adapt.")
    chosen = {*names, *beside}
    return model.adapted(Adapters(trains=tuple(n for n in model.params if n in chosen)))


def _beside(model: Model, said: str) -> list[str]:
    words = _words(said)
    names = [n for n in model.params if "head" in words and model.is_head(n)]
    rest = [w for w in words if w not in ("head", "nothing")]
    return list(dict.fromkeys([*names, *_matched(model, rest, model.params, "parameter", "--beside")]))


def _matched(model: Model, patterns: list[str], names: list[str], what: str, flag: str) -> list[str]:
    """The names that match any pattern, in the model's order; each pattern must match one."""
    found: set[str] = set()
    for pattern in patterns:
        own = matching(pattern, names)
        if not own:
            raise InputError(f"no {what} of {model.name} matches {pattern!r} ({flag}); it has {some(names, 24)}.")
        found.update(own)
    return [n for n in names if n in found]


def _words(said: str | Iterable[str]) -> list[str]:
    words = [w.strip() for w in said.split(",")] if isinstance(said, str) else list(said)
    found = [w for w in words if w]
    if not found:
        raise InputError("name at least one layer, or * for all of them.")
    return found


ADAPTERS: dict[str, Callable[..., Model]] = {
    "all": everything,
    "lora": lora,
    "bias": bias_only,
    "norm": norm_only,
    "head": head_only,
    "layers": layers_only,
}
