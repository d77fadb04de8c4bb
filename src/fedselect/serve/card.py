"""The model card, a Markdown file beside the model: what it is, how well it performs, and how to use it."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from fedselect.serve.about import About, inputs_of, schema_of
from fedselect.tasks.metrics import Metric

DRAWS = 1000
Z = NormalDist().inv_cdf(0.975)


def interval(metric: Metric, outputs: Tensor, targets: Tensor) -> tuple[float, float] | None:
    """A 95% confidence interval of a metric for other samples of the same client; None with fewer than two samples.

    Proportions such as accuracy use Wilson's interval, other metrics the bootstrap.
    """
    many = len(targets)
    if many < 2:
        return None
    if metric.by_sample:
        each, count = metric.each(outputs, targets)
        if count is None and bool(((each == 0) | (each == 1)).all()):
            return wilson(float(each.sum()), many)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(many, (DRAWS, many), generator=draw)
    found = torch.tensor([metric.value(outputs[r], targets[r]) for r in rows], dtype=torch.float64)
    found = found[found.isfinite()]
    return None if not len(found) else (float(found.quantile(0.025)), float(found.quantile(0.975)))


def wilson(hits: float, many: int) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion."""
    share, z2 = hits / many, Z * Z / many
    middle, half = share + z2 / 2, Z * math.sqrt(share * (1 - share) / many + z2 / (4 * many))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def card(path: Path, said: About, snippet: str) -> str:
    """The text of the card."""
    told: Mapping[str, Any] = said["card"]
    parts = [
        f"# {path.name}",
        f"The model of client {told['client']} in a federation of {told['clients']}, personalized with federated learning.",
        "\n".join(f"- **{name}**: {value}" for name, value in _facts(said, told).items()),
        "## Performance",
        _score(told),
        "## Inputs",
        _inputs(said),
        "## Usage",
        f"```\nfedselect predict {path.name} FILE\n```",
        f"```python\n{snippet}\n```",
        "## Limits",
        f"The model was trained for the data of client {told['client']}; its accuracy for other people, devices or places is "
        "unknown. The number above was measured on this client's samples and does not cover data that changes over time.",
    ]
    return "\n\n".join(parts) + "\n"


def _facts(said: About, told: Mapping[str, Any]) -> dict[str, Any]:
    classes = said["class_names"]
    return {
        "data": told["data"],
        "method": told["method"],
        **({"chosen by the client on its validation data": told["chosen"]} if told.get("chosen") else {}),
        "network": said["model"],
        "trained": f"{told['rounds']} rounds on {told['train']} samples of this client, seed {told['seed']}",
        "task": said["task"]["name"],
        **({"classes": ", ".join(classes)} if classes else {}),
        "date": told["date"],
        "made with": told["version"],
    }


def _score(told: Mapping[str, Any]) -> str:
    if told["value"] is None:
        return "Not measured, since this client has no test samples."
    between = f" (95% interval {told['low']} to {told['high']})" if told["low"] is not None else ""
    return f"{told['metric']} {told['value']}{between} on {told['tested']} {told['on']} samples of this client."


def _inputs(said: About) -> str:
    schema, inputs = schema_of(said), inputs_of(said)
    if schema is not None:
        rows = [
            f"| {c.name} | " + ("one of " + ", ".join(c.categories) if c.kind == "category" else "a number") + " |"
            for c in schema.columns
        ]
        head = "Rows of a table. A missing value is allowed in every column.\n\n| column | what |\n|---|---|\n"
        graph = (
            "\n\nA pt2 or onnx file takes float64 (N, columns) in this order. Categories are numbered from 0 as listed; a "
            "missing or unlisted value is NaN."
        )
        return head + "\n".join(rows) + graph
    if inputs.layout is not None:
        return "Several inputs, by name: " + ", ".join(inputs.layout.names) + "."
    what = "Images" if inputs.kind == torch.uint8 else "Arrays"
    return f"{what}, {said['kind']} of shape (N, {', '.join(map(str, inputs.shape))})."
