"""Export: one client's personalized model as a file that other programs can load, with a model card.

The exported model is the one whose score the run reports. Graphs (pt2, onnx) take raw inputs: images as bytes, table rows
as one number per column. They return predictions in the units of the targets. A safetensors file contains only tensors: the
parameters and, if needed, input.scale, input.shift, output.scale and output.shift.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedselect import models
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import replace, write_bytes
from fedselect.core.names import client_number, client_said
from fedselect.core.tree import Tree
from fedselect.core.version import package_version
from fedselect.models import Layout
from fedselect.runs import schemas, tables
from fedselect.runs.config import Config
from fedselect.runs.rundir import check_client, finished, read_records, reopen
from fedselect.serve import formats, load_model
from fedselect.serve.about import About, about
from fedselect.serve.card import card, interval
from fedselect.serve.module import Standalone, standalone
from fedselect.serve.predictor import Inputs, Meaning
from fedselect.simulate import Simulation
from fedselect.simulate.keeping import choices, final
from fedselect.simulate.records import Record
from fedselect.tasks import Measure, Task
from fedselect.tasks.metrics import Metric

BATCH = 256


@dataclass(frozen=True)
class Export:
    path: Path
    client: str  # in words
    snippet: str  # Python code that loads the model and computes logits from inputs x
    _: KW_ONLY
    round: int
    rounds: int
    headline: Measure
    value: float  # headline metric of the reloaded file on the client's test data
    said: float | None  # headline metric that the run recorded for this client
    score: str  # data of these values: test, or val (held-out training data)


def export(run: Path, whose: int | str, form: str, out: Path | None = None) -> Export:
    """Write a client's model, load it again, and evaluate it on the client's test data. `whose`: its number or name."""
    if form not in formats.FORMS:
        raise InputError(f"--format must be {', '.join(formats.FORMS)}, not {form!r}.")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"{out.parent} is not a directory; create it first, or choose another --out.")
    if out is not None and out.suffix != f".{form}":
        raise InputError(f"a {form} file must end in .{form}, unlike {out.name}; choose another --out.")
    check_client(run, whose)
    config, simulation = reopen(run)
    client = client_number(whose, simulation.data.names)
    schemas.check(run, simulation.data)
    model = module_of(simulation, client, simulation.personal(client))
    path = out or run / f"client-{client}.{form}"
    test = simulation.data.clients[client].test
    assert test is not None  # every run in a directory has test data
    x, y = test
    wanted = _as_learned(simulation.task, _outputs(model, x))
    headline = simulation.metrics[0]
    records = read_records(run / "metrics.jsonl", growing=not finished(run))
    last = final(records[: simulation.round], headline.name)
    said = _about(simulation, config, client, headline, wanted, y, chosen=_chosen(last, client))
    found = write_model(model, simulation, form, path, x, said)
    snippet = SNIPPETS[form](path, simulation, config.model)
    write_bytes(card_file(path), card(path, said, snippet).encode())
    return Export(
        path,
        client_said(client, simulation.data.names),
        snippet,
        round=simulation.round,
        rounds=simulation.round if finished(run) else config.rounds,
        headline=headline,
        value=headline.value(found, y),
        said=last["clients"][headline.name][client] if last else None,
        score=config.score,
    )


def _chosen(last: Record | None, client: int) -> str | None:
    """The model that the client chose, in words, or None if clients do not choose."""
    made = choices(last) if last else None
    return f"{made[client]['model']}, of round {made[client]['round']}" if made and made[client]["model"] else None


def module_of(simulation: Simulation, client: int, values: Tree) -> Standalone:
    """A client's network with these values, for raw inputs."""
    net = simulation.model.build()
    net.load_state_dict(values)
    split = simulation.data.split("test", simulation.initial[simulation.model.params[0]].dtype)
    schema = simulation.data.clients[client].schema
    return standalone(simulation.model, net, split, simulation.task, simulation.data.layout, schema)


def write_model(model: Standalone, simulation: Simulation, form: str, path: Path, x: Tensor, said: About) -> Tensor:
    """Write a model, load the file again, and return its outputs for x, which must equal those of the model."""
    example = x[:1].repeat(2, *[1] * (x.ndim - 1))  # torch.export treats a batch of 0 or 1 as fixed
    replace(path, lambda fresh: formats.write(form, model, model.given(example), fresh, said))
    found = load_model(path, simulation.model, simulation.task).outputs(x)
    wanted = _as_learned(simulation.task, _outputs(model, x))
    if not bool(torch.isfinite(wanted).all()):
        raise RunError("the model's outputs are not finite, because its training diverged; train it with a lower rate.")
    if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3):
        off = float((found - wanted).abs().max())
        raise RunError(f"the outputs of {path} differ from those of the model by up to {off:.2g}; choose another --format.")
    return found


def card_file(model: Path) -> Path:
    return model.with_suffix(".md")


def _about(
    s: Simulation, config: Config, client: int, headline: Metric, outputs: Tensor, targets: Tensor, *, chosen: str | None
) -> About:
    """The description of the model that is stored in the file."""
    data, own = s.data, s.data.clients[client]
    low, high = interval(headline, outputs, targets) or (None, None)
    meaning = Meaning(s.task, data.target_shape, tuple(data.class_names))
    return {
        **about(s.model, Inputs.of(s), meaning),
        "schema": None if own.schema is None else own.schema.to_json(),
        "card": {
            "client": data.names[client],
            "clients": s.clients,
            "data": data.name,
            "method": repr(s.method),
            "chosen": chosen,
            "rounds": s.round,
            "seed": s.seed,
            "train": len(own.train[1]),
            "metric": headline.name,
            "value": headline.said(headline.value(outputs, targets)),
            "low": None if low is None else headline.said(low),
            "high": None if high is None else headline.said(high),
            "tested": len(targets),
            "on": tables.DATA[config.score],
            "date": date.today().isoformat(),
            "version": f"fedselect {package_version()}, torch {torch.__version__}",
        },
    }


def _outputs(model: Standalone, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(*model.given(rows)) for rows in torch.split(x, BATCH)])


def _as_learned(task: Task, y: Tensor) -> Tensor:
    """Outputs in the scale of the network, which metrics expect."""
    if task.units is None:
        return y
    scale, shift = (torch.tensor(v, dtype=y.dtype) for v in task.units)
    return (y - shift) / scale


def _result(simulation: Simulation) -> str:
    """The name of the outputs: "predicted" if they are in the units of the targets."""
    return "logits" if simulation.task.units is None else "predicted"


def _names(simulation: Simulation) -> list[str]:
    return ["x"] if simulation.data.layout is None else simulation.data.layout.names


def _shape(simulation: Simulation) -> str:
    if (layout := simulation.data.layout) is not None:
        return _parts(layout)
    if (schema := simulation.data.clients[0].schema) is not None:
        return "x: " + _inputs(torch.float64, (len(schema.columns),))
    return "x: " + _inputs(simulation.data.clients[0].train[0].dtype, simulation.data.shape)


def _inputs(kind: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(kind).removeprefix('torch.')} (N, {', '.join(map(str, shape))})"


def _parts(layout: Layout) -> str:
    """A description of several inputs."""
    kinds = {"floats": "float32", "integers": "int64", "bools": "bool"}
    return "; ".join(f"{f.name}: {_inputs(getattr(torch, kinds[f.kind]), f.shape)}" for f in layout.fields)


def _say_safetensors(path: Path, s: Simulation, model: dict[str, Any]) -> str:
    data, task = s.data, s.task
    return loading(
        path, model, data.shape, data.classes, data.clients[0].train[0].dtype, data.class_names,
        outputs=task.outputs(data), units=task.units is not None, table=data.clients[0].schema is not None,
        layout=data.layout, bare=s.bare,
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
    """Python code that loads a safetensors file. With inputs of bytes (`kind`), the file has input.scale and input.shift.

    `outputs`: size of the output, by default one number per class. `units`: whether the file has output.scale and
    output.shift. `table`: whether inputs come from a table. `layout`: the layout of several inputs. `bare`: whether the
    network returns a single tensor.
    """
    if model["name"] == "hf" or (model.get("weights") and model["name"].startswith("vit")):
        said = f"x: {_inputs(kind, shape)}" if layout is None else _parts(layout)  # what the weights decide is in the file
        return "\n".join([
            "import fedselect as fs", "", f"model = fs.load_model({str(path)!r})", f"logits = model.outputs(x)  # {said}",
            *_classes(names),
        ])  # fmt: skip
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
        "",
        f"values = fs.models.load_values({str(path)!r})",
        *(["scale, shift = values.pop('input.scale'), values.pop('input.shift')"] if scaled else []),
        *(["unit, zero = values.pop('output.scale'), values.pop('output.shift')"] if units else []),
        f"data = SimpleNamespace(shape={shape}, classes={classes})",
        *([f"net = {make}.build(){note}"] if bare else [f"model = {make}{note}", "net = model.build()"]),
        "net.load_state_dict(values)",
        *(_rows(path, graph=False) if table else []),
        f"{f'predicted = {said} * unit + zero' if units else f'logits = {said}'}  # "
        + (f"x: {_inputs(kind, shape)}" if layout is None else _parts(layout)),
        *_classes(names),
    ])  # fmt: skip


def _rows(model: Path, graph: bool) -> list[str]:
    """Code that makes inputs from the raw rows of a table. A graph scales them itself."""
    return [
        f"schema = fs.load_model({str(model)!r}).schema",
        f"x = schema.{'numbers' if graph else 'features'}(rows)  # rows: a file, a pandas DataFrame or a dict of columns",
    ]


def _classes(names: Sequence[str]) -> list[str]:
    """Code that lists the class of each logit, if classes have names."""
    return [f"classes = {list(names)}  # in the order of the logits"] if names else []


def _say_pt2(path: Path, s: Simulation, model: dict[str, Any]) -> str:
    return "\n".join([
        *(["import fedselect as fs"] if (table := s.data.clients[0].schema is not None) else []),
        "import torch",
        "",
        f"net = torch.export.load({str(path)!r}).module()",
        *(_rows(path, graph=True) if table else []),
        f"{_result(s)} = net({', '.join(_names(s))})  # {_shape(s)}",
        *_classes(s.data.class_names),
    ])  # fmt: skip


def _say_onnx(path: Path, s: Simulation, model: dict[str, Any]) -> str:
    return "\n".join([
        *(["import fedselect as fs"] if (table := s.data.clients[0].schema is not None) else []),
        "import onnxruntime",
        "",
        f"net = onnxruntime.InferenceSession({str(path)!r})",
        *([*_rows(path, graph=True), "x = x.numpy()"] if table else []),
        f"({_result(s)},) = net.run(None, {{{', '.join(f'{n!r}: {n}' for n in _names(s))}}})  # {_shape(s)}, a NumPy array",
        *_classes(s.data.class_names),
    ])  # fmt: skip


SNIPPETS = {"safetensors": _say_safetensors, "pt2": _say_pt2, "onnx": _say_onnx}
