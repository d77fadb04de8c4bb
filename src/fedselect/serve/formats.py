"""File formats of a model: parameters only (safetensors), or the graph (pt2, onnx), each with its description."""

import importlib
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedselect.core import tensors
from fedselect.core.errors import RunError
from fedselect.core.tree import Tree
from fedselect.serve.about import About
from fedselect.serve.module import Standalone

ABOUT = "about.json"
FORMS = ("safetensors", "pt2", "onnx")
Graph = Callable[..., Tensor]


def write(form: str, model: Standalone, example: tuple[Tensor, ...], path: Path, said: About) -> None:
    text = json.dumps(said)
    if form == "safetensors":
        notes = {"classes": json.dumps(said["class_names"]), ABOUT: text}
        path.write_bytes(tensors.to_bytes({**model.net.state_dict(), **model.beside}, notes))
    elif form == "pt2":
        try:
            program = torch.export.export(model, example, dynamic_shapes=model.shapes())
        except torch._dynamo.exc.UserError as e:
            raise RunError(
                f"the model cannot be exported for batches of any size ({str(e).splitlines()[0]}); write x.shape[0] in place "
                "of len(x) in its forward, or export its values: --format safetensors."
            ) from None
        with path.open("wb") as f:
            torch.export.save(program, f, extra_files={ABOUT: text})
    else:
        _write_onnx(model, example, path, text)


def read_values(path: Path) -> tuple[About, Tree]:
    """The description and tensors of a safetensors file. Tensors named input.* and output.* are not parameters."""
    values, notes = tensors.read_all(path, "export it again.")
    return _said(path, notes.get(ABOUT)), values


def read_graph(path: Path) -> tuple[About, Graph]:
    """The description of a pt2 or onnx file, and its graph as a function of tensors."""
    return _read_pt2(path) if path.suffix == ".pt2" else _read_onnx(path)


def _read_pt2(path: Path) -> tuple[About, Graph]:
    beside = {ABOUT: ""}
    try:
        program = torch.export.load(path, extra_files=beside)
    except Exception as e:  # a damaged archive raises nearly anything
        raise RunError(f"{path} cannot be read as a pt2 file ({type(e).__name__}: {e}); export it again.") from None
    return _said(path, beside[ABOUT]), program.module()


def _write_onnx(model: Standalone, example: tuple[Tensor, ...], path: Path, text: str) -> None:
    _need("onnxscript")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it logs every missing package
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter's own internals
        program: Any = torch.onnx.export(
            model, example, input_names=model.names, output_names=["logits"], dynamic_shapes=model.shapes(),
            dynamo=True, verbose=False,
        )  # fmt: skip
    program.model.metadata_props[ABOUT] = text
    program.save(path, external_data=False)


def _read_onnx(path: Path) -> tuple[About, Graph]:
    runtime = _need("onnxruntime")
    try:
        session: Any = runtime.InferenceSession(str(path))
    except Exception as e:
        raise RunError(f"{path} cannot be read as an onnx file ({type(e).__name__}: {e}); export it again.") from None
    names = [given.name for given in session.get_inputs()]

    def graph(*parts: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: v.numpy() for name, v in zip(names, parts, strict=True)})[0])

    return _said(path, session.get_modelmeta().custom_metadata_map.get(ABOUT)), graph


def _said(path: Path, text: str | bytes | None) -> About:
    if not text:
        raise RunError(f"{path} does not describe its inputs; export it again with this version of fedselect.")
    try:
        said: About = json.loads(text)
    except ValueError:
        raise RunError(f"{path} is damaged: its description is not JSON; export it again.") from None
    return said


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise RunError(f"onnx needs {package}; install it with: pip install 'fedselect[onnx]'") from None
