"""Texts as federated data: a column of a table, tokenized by a Hugging Face tokenizer from a folder."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import DataError, InputError
from fedselect.data.columns import Schema
from fedselect.data.division import Division
from fedselect.data.federation import ClientData, Federation
from fedselect.data.federation import Part as Pair
from fedselect.data.fitting import Targets, fit, merge
from fedselect.data.frame import Frame
from fedselect.data.partition import Indices, Part
from fedselect.data.tables import read_clients

DIVISION = Division()


def text(
    path: str | None = None,
    tokenizer: str | None = None,
    client: str | None = None,
    text: str = "text",
    target: str = "label",
    targets: Targets = "auto",
    *,
    length: int = 64,
    division: Division = DIVISION,
    seed: int = 0,
) -> Federation:
    """Your own texts, a table with columns for client, text and label: --data text:FILE --tokenizer FOLDER.

    path: a table, or a folder with one per client
    tokenizer: folder with the tokenizer's files, as save_pretrained writes it; usually that of the model
    client: column that says which client a row belongs to; not used for a folder, where each file is one client
    text: column with the text
    target: column to predict
    targets: classes or numbers; auto: numbers if they have fractions, else classes
    length: tokens per text; longer texts are cut, shorter ones padded
    """
    if not path:
        raise InputError(
            "give the path of the texts: --data text:FILE, or text:FOLDER with one file per client (in Python: path=...)."
        )
    if not tokenizer:
        raise InputError("name the tokenizer's folder: --tokenizer FOLDER, usually that of --model hf:FOLDER.")
    if length < 1:
        raise InputError(f"length must be at least 1, not {length}.")
    place = Path(path).expanduser()
    frames = read_clients(place, client)
    tokens = Tokens(Path(tokenizer).expanduser(), length)
    division = replace(division, seed=seed)
    return _federate(frames, place.stem, tokens, text=text, target=target, targets=targets, division=division)


class Tokens:
    """The tokenizer in a folder, for texts of a fixed number of tokens."""

    def __init__(self, folder: Path, length: int) -> None:
        from fedselect.models.huggingface import check_folder, need_transformers

        transformers = need_transformers()
        check_folder(folder, "tokenizer_config.json")
        try:
            self._read = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InputError(f"{folder} holds no tokenizer that can be used: {str(e).splitlines()[0]}") from None
        if self._read.pad_token is None:
            self._read.pad_token = self._read.eos_token
        self._length = length

    def __call__(self, texts: list[str]) -> dict[str, Tensor]:
        found = self._read(texts, padding="max_length", max_length=self._length, truncation=True, return_tensors="pt")
        return {n: found[n] for n in ("input_ids", "attention_mask")}


def _federate(
    frames: Mapping[str, Frame], name: str, tokens: Tokens, *, text: str, target: str, targets: Targets, division: Division
) -> Federation:
    schemas, parts = {}, {}
    for who, frame in frames.items():
        for column in (text, target):
            frame.need(column)
        parts[who] = division.parts(frame, who)
        schemas[who] = fit(frame, parts[who].train, [], [target], targets=targets, division=division)
    schema = merge(schemas)
    clients = [_client(who, frame, parts[who], text, schema, tokens) for who, frame in frames.items()]
    return Federation(clients, len(schema.classes), name, schema.classes)


def _client(who: str, frame: Frame, part: Part, text: str, schema: Schema, tokens: Tokens) -> ClientData:
    code, names = frame.codes(text)
    if (code < 0).any():
        raise DataError(f"{frame.source}: row {frame.row_where(code < 0)} has no {text}; fill it in or remove the row.")
    each = tokens(list(names))  # tokenize each distinct text once
    y, at = schema.targets(frame), torch.from_numpy(code).long()

    def pick(rows: Indices) -> Pair | None:
        return ({n: v[at[torch.from_numpy(rows)]] for n, v in each.items()}, y[rows]) if len(rows) else None

    train: Any = pick(part.train)
    return ClientData(train, pick(part.test), pick(part.val), who)
