"""Hugging Face models from a local folder, with a new head for the data at hand. No code from the folder is run."""

import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedselect.core.errors import InputError
from fedselect.core.tree import Tree
from fedselect.models.inputs import Layout
from fedselect.models.model import Model
from fedselect.models.shapes import Shaped

TEXT, TAGS, NEXT, IMAGES = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
)


def hf(data: Shaped, weights: str | None = None, *, outputs: int | None = None) -> Model:
    """A Hugging Face model from a local folder, for text or images, with a new head: --model hf:FOLDER.

    weights: folder with config.json and model.safetensors, as save_pretrained writes it
    """
    if not weights:
        raise InputError("give the folder of the model, with config.json and model.safetensors: --model hf:FOLDER.")
    folder, transformers = Path(weights).expanduser(), need_transformers()
    config, kind, count = _config(folder, transformers), _kind_for(data), outputs or data.classes
    if kind == TAGS and count == getattr(config, "vocab_size", None):
        kind = NEXT
    config.num_labels = count
    if getattr(config, "pad_token_id", None) is None and kind == TEXT:
        config.pad_token_id = getattr(config, "eos_token_id", None)  # without it, models refuse batches of several texts
    resized = _check_images(config, data) if kind == IMAGES else False
    start, head = _loaded(folder, config, kind, transformers)
    said = json.loads(config.to_json_string(use_diff=False))
    build = partial(build_hf, said, kind, resized, start=start)
    made = Model(build, head=None if kind == NEXT else head, name=config.model_type)
    made.fresh = [n for n in made.params if n not in start]
    return made


def build_hf(config: Mapping[str, Any], kind: str, resized: bool, start: Tree | None = None) -> nn.Module:
    """A module with this configuration; `resized`: interpolate its position embeddings to the size of the images.

    Parameters that `start` lacks, above all the head, keep their random initial values.
    """
    transformers = need_transformers()
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    net: nn.Module = getattr(transformers, kind).from_config(made)
    net.load_state_dict(start or {}, strict=False)
    if resized:
        net.register_forward_pre_hook(_interpolate, with_kwargs=True)
    return net


def need_transformers() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of transformers about its own parts
            import transformers
    except ImportError:
        raise InputError("Hugging Face models and tokenizers need transformers: pip install 'fedselect[hf]'.") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def check_folder(folder: Path, needed: str = "config.json") -> None:
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; give one that save_pretrained wrote: --model hf:FOLDER.")
    if not (folder / needed).is_file():
        raise InputError(f"{folder} has no {needed}; give a folder that save_pretrained wrote.")


def _config(folder: Path, transformers: Any) -> Any:
    check_folder(folder)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as e:
        said = json.loads((folder / "config.json").read_text()) if _is_json(folder / "config.json") else {}
        kind = said.get("model_type") if isinstance(said, dict) else None
        why = (
            f"its architecture, {kind!r}, is unknown to transformers {transformers.__version__}"
            if kind
            else str(e).splitlines()[0]
        )
        raise InputError(f"{folder} cannot be used: {why}; give another folder.") from None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def _kind_for(data: Shaped) -> str:
    """The kind of head that fits the data."""
    layout: Layout | None = getattr(data, "layout", None)
    if layout is None and len(data.shape) == 3:
        return IMAGES
    if layout is not None and "pixel_values" in layout.names:
        return IMAGES
    if layout is None and not (getattr(data, "whole", False) and len(data.shape) == 1):
        raise InputError(
            f"a Hugging Face model needs images or tokenized text, not inputs of shape {data.shape}; for text, use "
            "--data text:FILE --tokenizer FOLDER."
        )
    return TAGS if getattr(data, "target_shape", ()) and data.classes else TEXT


def _check_images(config: Any, data: Shaped) -> bool:
    """Whether the images differ in size from those of the model's training."""
    layout: Layout | None = getattr(data, "layout", None)
    shape = data.shape if layout is None else next(f.shape for f in layout.fields if f.name == "pixel_values")
    channels, size = getattr(config, "num_channels", shape[0]), getattr(config, "image_size", None)
    if channels != shape[0]:
        raise InputError(f"{config.model_type} takes images with {channels} channel(s), not {shape[0]} as the data has.")
    sides = (size, size) if isinstance(size, int) else tuple(size or shape[1:])
    return tuple(shape[1:]) != sides


def _loaded(folder: Path, config: Any, kind: str, transformers: Any) -> tuple[Tree, str]:
    """The values in the folder except those of the head, and the name of the head."""
    try:
        with torch.random.fork_rng(devices=[]):
            net, found = getattr(transformers, kind).from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
                use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
    except OSError:
        raise InputError(f"{folder} has no model.safetensors; give a folder that save_pretrained wrote.") from None
    except ValueError as e:
        if "Unrecognized configuration class" not in str(e):
            raise InputError(f"{folder} cannot be used: {str(e).splitlines()[0]}") from None
        what = {TEXT: "classification of text", TAGS: "a class for each token", NEXT: "the next token"}.get(kind, "images")
        raise InputError(f"transformers has no model of type {config.model_type!r} for {what}; give another folder.") from None
    head = _head_of(net)
    absent = {*found["missing_keys"], *(m[0] for m in found["mismatched_keys"])}
    other = sorted(n for n in absent if n.split(".")[0] != head)
    if other:
        warnings.warn(
            f"{folder} has no values for {', '.join(other[:4])}{' and others' if len(other) > 4 else ''}; they start from "
            "random values.",
            stacklevel=2,
        )
    return {n: v for n, v in net.state_dict().items() if n not in absent and n.split(".")[0] != head}, head


def _head_of(net: nn.Module) -> str:
    """The head: the last submodule with parameters outside the pretrained model."""
    body = getattr(net, "base_model_prefix", "")
    parts = [n for n, m in net.named_children() if n != body and next(m.parameters(), None) is not None]
    if not parts:
        raise InputError(f"{type(net).__name__} has no separate head; name one in Python: fs.Model.wrap(module, head=...).")
    return parts[-1]


def _interpolate(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**named, "interpolate_pos_encoding": True}
