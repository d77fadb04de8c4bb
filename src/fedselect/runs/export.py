"""Export: one client's personalised model as a file that others can load.

The exported model is the one that the run's headline is of, and takes what the data gives: pictures as uint8 are made
into numbers (pixel * scale + shift, by channel) inside the pt2 and onnx graphs, and outputs of regression come out in the
units of the targets. A safetensors file holds the values alone; there the tensors input.scale, input.shift, output.scale
and output.shift lie beside them, and the snippet applies them. Of a table, the schema is written to a file beside the
model, and the snippet makes inputs of raw rows with it.
"""

import copy
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedselect import models
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import replace
from fedselect.core.tree import Tree
from fedselect.models import Layout
from fedselect.runs import schemas
from fedselect.runs.rundir import check_client, finished, read_records, reopen
from fedselect.simulate import Simulation
from fedselect.tasks import Measure, Task
from fedselect.training.batches import Split

BATCH = 256


class Standalone(nn.Module):
    """A client's network with the making of numbers from pictures in front of it, and that of units behind it."""

    scale: Tensor | None
    shift: Tensor | None
    out_scale: Tensor | None
    out_shift: Tensor | None

    def __init__(self, model: models.Model, net: nn.Module, split: Split, classes: Sequence[str], task: Task) -> None:
        super().__init__()
        self.net, self.classes, self._outputs_of = net, list(classes), model.outputs_of
        out_scale, out_shift = (None, None) if task.units is None else map(torch.tensor, task.units)
        ends = {"scale": split.scale, "shift": split.shift, "out_scale": out_scale, "out_shift": out_shift}
        for name, numbers in ends.items():
            if numbers is None:
                setattr(self, name, None)  # torch.export stumbles over a buffer that is none before one that is
            else:
                self.register_buffer(name, numbers)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None and self.shift is not None:
            x = x.to(self.scale.dtype) * self.scale + self.shift
        return self.in_units(self._outputs_of(self.net(x)))

    def given(self, x: Tensor) -> tuple[Tensor, ...]:
        """What `forward` takes, from inputs as a federation holds them."""
        return (x,)

    @property
    def names(self) -> list[str]:
        return ["x"]

    def shapes(self) -> Any:
        """As torch.export wants it told that any number of rows will do."""
        return ({0: torch.export.Dim("batch")},)

    def in_units(self, y: Tensor) -> Tensor:
        return y if self.out_scale is None or self.out_shift is None else y * self.out_scale + self.out_shift

    def as_learned(self, y: Tensor) -> Tensor:
        """Outputs as the network returns them, which is what metrics and losses take."""
        return y if self.out_scale is None or self.out_shift is None else (y - self.out_shift) / self.out_scale

    @property
    def beside(self) -> dict[str, Tensor]:
        """What stands beside the values in a file that holds no graph."""
        found = {
            "input.scale": self.scale, "input.shift": self.shift, "output.scale": self.out_scale, "output.shift": self.out_shift
        }  # fmt: skip
        return {name: v for name, v in found.items() if v is not None}


class Several(Standalone):
    """The same of a network that takes several inputs; here by their places, also where the network has them by name."""

    def __init__(self, layout: Layout, dtype: torch.dtype, *args: Any) -> None:
        super().__init__(*args)
        self.layout, self.dtype = layout, dtype

    def forward(self, *parts: Tensor) -> Tensor:
        named = dict(zip(self.layout.names, parts, strict=True)) if self.layout.named else {}
        return self.in_units(self._outputs_of(self.net(*(() if named else parts), **named)))

    def given(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.layout.parts(x, self.dtype))

    @property
    def names(self) -> list[str]:
        return self.layout.names

    def shapes(self) -> Any:
        batch = torch.export.Dim("batch")
        return (tuple({0: batch} for _ in self.names),)


@dataclass(frozen=True)
class Export:
    path: Path
    snippet: str  # Python that loads it and turns inputs x into logits
    _: KW_ONLY
    round: int
    rounds: int
    headline: Measure
    value: float  # of the headline metric: the file as loaded back, on the client's test data
    said: float | None  # what the run recorded for this client
    score: str  # test, or val: then that data is held-out training data


def export(run: Path, client: int, form: str, out: Path | None = None) -> Export:
    """Write a client's model, load it back, and score it on the client's own test data."""
    if form not in FORMS:
        raise InputError(f"the format is {', '.join(FORMS)}, not {form!r}.")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"{out.parent} is not a directory; make it first, or choose another --out.")
    check_client(run, client)
    config, simulation = reopen(run)
    schemas.check(run, simulation.data)
    path = out or run / f"client-{client}.{form}"
    test = simulation.data.clients[client].test
    assert test is not None  # as of every run in a directory
    x, y = test
    model, logits = write_model(simulation, client, simulation.personal(client), form, path, x)
    headline = simulation.metrics[0]
    records = read_records(run / "metrics.jsonl", growing=not finished(run))
    last = next((r for r in records if r["round"] == simulation.round), None)
    return Export(
        path,
        SNIPPETS[form](path, simulation, config.model),
        round=simulation.round,
        rounds=config.rounds,
        headline=headline,
        value=headline.value(model.as_learned(logits), y),
        said=last["clients"][headline.name][client] if last else None,
        score=config.score,
    )


def write_model(
    simulation: Simulation, client: int, values: Tree, form: str, path: Path, x: Tensor
) -> tuple[Standalone, Tensor]:
    """Write a client's model with these values, and its schema beside it; returns what the file, loaded back, says of x."""
    net = simulation.model.build()
    net.load_state_dict(values)
    split = simulation.data.split("test", simulation.initial[simulation.model.params[0]].dtype)
    ends = (simulation.model, net, split, simulation.data.class_names, simulation.task)
    layout = simulation.data.layout
    model = (Standalone(*ends) if layout is None else Several(layout, next(net.parameters()).dtype, *ends)).eval()
    write, load = FORMS[form]
    example = x[:1].repeat(2, *[1] * (x.ndim - 1))  # any number of rows will do, but one or none would be taken for fixed
    replace(path, lambda fresh: write(model, model.given(example), fresh))
    if (schema := simulation.data.clients[client].schema) is not None:
        schema.write(schema_file(path))
    wanted, logits = _logits(model, model, x), _logits(model, load(path, model), x)
    if not torch.allclose(logits, wanted, rtol=1e-3, atol=1e-3):
        raise RunError(
            f"{path} does not give what the model gives; it is off by up to {float((logits - wanted).abs().max()):.2g}."
        )
    return model, logits


def schema_file(model: Path) -> Path:
    """Where the schema of a table lies, beside the model that takes it."""
    return model.with_suffix(".schema.json")


def _logits(model: Standalone, net: Callable[..., Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([net(*model.given(rows)) for rows in torch.split(x, BATCH)])


def _write_safetensors(model: Standalone, example: tuple[Tensor, ...], path: Path) -> None:
    values = {n: v.contiguous().clone() for n, v in model.net.state_dict().items()} | model.beside
    path.write_bytes(save(values, {"classes": json.dumps(model.classes)}))


def _load_safetensors(path: Path, model: Standalone) -> Callable[..., Tensor]:
    values = load_file(path)
    loaded = copy.deepcopy(model)
    for v in (*loaded.parameters(), *loaded.beside.values()):
        v.data.fill_(torch.nan)  # what the file does not hold must show
    for name, v in loaded.beside.items():
        v.copy_(values.pop(name))
    loaded.net.load_state_dict(values)
    return loaded


def _write_pt2(model: Standalone, example: tuple[Tensor, ...], path: Path) -> None:
    program = torch.export.export(model, example, dynamic_shapes=model.shapes())
    with path.open("wb") as f:
        torch.export.save(program, f)


def _load_pt2(path: Path, model: Standalone) -> Callable[..., Tensor]:
    return torch.export.load(path).module()


def _write_onnx(model: Standalone, example: tuple[Tensor, ...], path: Path) -> None:
    _need("onnxscript")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it is told of every package that is not there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own parts, about themselves
        torch.onnx.export(
            model, example, path, input_names=model.names, output_names=["logits"], dynamic_shapes=model.shapes(),
            dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip


def _load_onnx(path: Path, model: Standalone) -> Callable[..., Tensor]:
    session: Any = _need("onnxruntime").InferenceSession(str(path))
    return lambda *parts: torch.from_numpy(
        session.run(None, {name: v.numpy() for name, v in zip(model.names, parts, strict=True)})[0]
    )


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise RunError(f"onnx needs {package}; install it with: pip install 'fedselect[onnx]'") from None


def _result(simulation: Simulation) -> str:
    """What a network returns: in the units of targets it is a prediction."""
    return "logits" if simulation.task.units is None else "predicted"


def _names(simulation: Simulation) -> list[str]:
    return ["x"] if simulation.data.layout is None else simulation.data.layout.names


def _shape(simulation: Simulation) -> str:
    if (layout := simulation.data.layout) is not None:
        return _parts(layout)
    return "x: " + _inputs(simulation.data.clients[0].train[0].dtype, simulation.data.shape)


def _inputs(kind: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(kind).removeprefix('torch.')} (N, {', '.join(map(str, shape))})"


def _parts(layout: Layout) -> str:
    """Several inputs, in words."""
    kinds = {"floats": "float32", "integers": "int64", "bools": "bool"}
    return "; ".join(f"{f.name}: {_inputs(getattr(torch, kinds[f.kind]), f.shape)}" for f in layout.fields)


def _say_safetensors(path: Path, s: Simulation, model: dict[str, Any]) -> str:
    data, task = s.data, s.task
    return loading(
        path, model, data.shape, data.classes, data.clients[0].train[0].dtype, data.class_names,
        outputs=task.outputs(data), units=task.units is not None, table=data.clients[0].schema is not None,
        layout=data.layout, bare=s.fitted.bare,
    )  # fmt: skip


def loading(
    path: Path,
    model: dict[str, Any],
    shape: tuple[int, ...],
    classes: int,
    kind: torch.dtype,
    names: Sequence[str] = (),
    *,
    outputs: int | None = None,
    units: bool = False,
    table: bool = False,
    layout: Layout | None = None,
    bare: bool = True,
) -> str:
    """Python that loads a safetensors file; pictures of bytes (kind) have input.scale and input.shift beside the values.

    `outputs`: how many numbers the model returns, by default one for each class; `units`: whether output.scale and
    output.shift are there too; `table`: its inputs come from a table; `layout`: that of several inputs; `bare`: the network
    returns one tensor alone.
    """
    scaled = kind == torch.uint8
    own = not hasattr(models, model["name"])
    more = {"outputs": outputs} if not own and outputs not in (None, classes) else {}
    given = ", ".join(f"{k}={v!r}" for k, v in {**model, **more}.items() if k not in ("name", "weights"))
    called = "x * scale + shift" if scaled else "x"
    if layout is not None:
        called = ", ".join(f"{name}={name}" if layout.named else name for name in layout.names)
    said = f"net.eval()({called})" if bare else f"model.outputs_of(net.eval()({called}))"
    torchvision = model["name"] == "resnet18" and model.get("stem") == "imagenet" and shape[0] == 3
    make = f"{'' if own else 'fs.models.'}{model['name']}(data{', ' + given if given else ''})"
    note = "  # a model of your own" if own else ""
    note = f"  # or torchvision.models.resnet18(num_classes={classes})" if torchvision else note
    return "\n".join([
        "from types import SimpleNamespace",
        "import fedselect as fs",
        "from safetensors.torch import load_file",
        "",
        f"values = load_file({str(path)!r})",
        *(["scale, shift = values.pop('input.scale'), values.pop('input.shift')"] if scaled else []),
        *(["unit, zero = values.pop('output.scale'), values.pop('output.shift')"] if units else []),
        f"data = SimpleNamespace(shape={shape}, classes={classes})",
        *([f"net = {make}.build(){note}"] if bare else [f"model = {make}{note}", "net = model.build()"]),
        "net.load_state_dict(values)",
        *(_rows(path) if table else []),
        f"{f'predicted = {said} * unit + zero' if units else f'logits = {said}'}  # "
        + (f"x: {_inputs(kind, shape)}" if layout is None else _parts(layout)),
        *_classes(names),
    ])  # fmt: skip


def _rows(model: Path) -> list[str]:
    """Inputs from the raw rows of a table."""
    return [
        f"schema = fs.Schema.read({str(schema_file(model))!r})",
        "x = schema.features(rows)  # rows: a file, a pandas DataFrame or a dict of columns, as in the table",
    ]


def _classes(names: Sequence[str]) -> list[str]:
    """Which logit is which class, where classes have names."""
    return [f"classes = {list(names)}  # in the order of the logits"] if names else []


def _say_pt2(path: Path, s: Simulation, model: dict[str, Any]) -> str:
    return "\n".join([
        *(["import fedselect as fs"] if (table := s.data.clients[0].schema is not None) else []),
        "import torch",
        "",
        f"net = torch.export.load({str(path)!r}).module()",
        *(_rows(path) if table else []),
        f"{_result(s)} = net({', '.join(_names(s))})  # {_shape(s)}",
        *_classes(s.data.class_names),
    ])  # fmt: skip


def _say_onnx(path: Path, s: Simulation, model: dict[str, Any]) -> str:
    return "\n".join([
        *(["import fedselect as fs"] if (table := s.data.clients[0].schema is not None) else []),
        "import onnxruntime",
        "",
        f"net = onnxruntime.InferenceSession({str(path)!r})",
        *([*_rows(path), "x = x.numpy()"] if table else []),
        f"({_result(s)},) = net.run(None, {{{', '.join(f'{n!r}: {n}' for n in _names(s))}}})  # {_shape(s)}, a NumPy array",
        *_classes(s.data.class_names),
    ])  # fmt: skip


FORMS: dict[
    str, tuple[Callable[[Standalone, tuple[Tensor, ...], Path], None], Callable[[Path, Standalone], Callable[..., Tensor]]]
] = {
    "safetensors": (_write_safetensors, _load_safetensors),
    "pt2": (_write_pt2, _load_pt2),
    "onnx": (_write_onnx, _load_onnx),
}
SNIPPETS = {"safetensors": _say_safetensors, "pt2": _say_pt2, "onnx": _say_onnx}
