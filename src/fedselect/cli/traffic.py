"""The size of a deployment's model and its cost in traffic, printed before a run starts."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fedselect.core.errors import FedselectError

if TYPE_CHECKING:
    from fedselect.network.plan import Shape
    from fedselect.runs.config import Config

LARGE = 10e6  # bytes per message above which a smaller model is suggested
SMALL = ("small_cnn", "conv1d", "mlp")
SMALL_SIDE = 64  # pixels up to which images may not need a deep network
ENTRY = 4  # bytes per entry


def said_of(config: "Config", shape: "Shape", clients: int) -> str:
    """The model's size and traffic per round. If that is a lot for such inputs, also suggest a smaller model."""
    size = config.make_model(shape).size  # type: ignore[arg-type]  # a model asks for shape and classes alone
    said = (
        f"{config.model['name']} has {size:,} parameters: per round, every client downloads and uploads up to {_bytes(size)} "
        f"each, {clients} clients together up to {_bytes(2 * clients * size)}"
    )
    if ENTRY * size < LARGE or max(shape.shape[-2:]) > SMALL_SIDE:
        return said
    found = _smaller(config, shape, size / 10)
    if found is None:
        return said
    name, small = found
    sides = "x".join(map(str, shape.shape))
    return (
        f"{said}\nfor inputs of {sides} a smaller model may be enough: --model {name}, {small:,} parameters ({_bytes(small)})"
    )


def _smaller(config: "Config", shape: "Shape", most: float) -> tuple[str, int] | None:
    """The first of the small models that accepts these inputs and is small enough."""
    for name in SMALL:
        try:
            size = replace(config, model={"name": name}).complete().make_model(shape).size  # type: ignore[arg-type]
        except FedselectError:  # it takes other inputs
            continue
        if size <= most:
            return name, size
    return None


def _bytes(size: int) -> str:
    n = ENTRY * size
    return f"{n / 1e6:.{0 if n >= 1e7 else 1}f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"
