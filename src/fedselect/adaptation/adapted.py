"""Adapted: a new client's model, how it was chosen, and how it is saved."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn

from fedselect.core.errors import FedselectError, InputError
from fedselect.core.files import is_unused, write_json
from fedselect.core.tree import Tree
from fedselect.network.shared import Shared
from fedselect.runs import export
from fedselect.serve import formats
from fedselect.serve.about import about
from fedselect.serve.predictor import Inputs, Meaning, Predictor
from fedselect.simulate import Simulation
from fedselect.tasks import Measure

ABOUT = "adapted.json"


@dataclass(frozen=True)
class Row:
    """One kind of model, with its best setting on held-out samples."""

    kind: str
    words: str
    epochs: int | None
    lr: float | None
    rounds: int | None
    loss: float  # on held-out samples
    headline: float  # headline metric on held-out samples
    gain: float | None  # decrease of the loss, compared with the shared model
    error: float | None  # standard error of the gain
    test: float | None  # headline metric on the client's test data, if any; never used to choose


@dataclass(frozen=True, eq=False, repr=False)
class Adapted:
    """A model for a new client, as returned by `fs.adapt`.

    Attributes:
        table: One row per kind of model that was tried.
        chosen: The chosen kind; "shared" if no other model is significantly better than the shared one.
        model: The network with the client's parameters.
        values: The same parameters as a state_dict.
        headline: The metric shown first.
    """

    shared: Shared
    simulation: Simulation
    rows: list[Row]
    chosen: str
    candidates: dict[str, Tree]
    seed: int
    samples: int

    def __repr__(self) -> str:
        head = f"Adapted({self.samples} samples, {self.headline.name} on held-out samples)"
        lines = [f"{'*' if r.kind == self.chosen else ' '} {r.words}: {self.headline.said(r.headline)}" for r in self.rows]
        return "\n".join([head, *(line for line, r in zip(lines, self.rows, strict=True) if math.isfinite(r.headline))])

    @property
    def headline(self) -> Measure:
        return self.simulation.metrics[0]

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row per kind of model, ready for pandas.DataFrame(...)."""
        return [{**asdict(r), "chosen": r.kind == self.chosen} for r in self.rows]

    @property
    def values(self) -> Tree:
        return self.simulation.model.state_dict(self.candidates[self.chosen])

    @property
    def model(self) -> nn.Module:
        net = self.simulation.model.build()
        net.load_state_dict(self.values)
        return net.eval()

    def predict(self, x: Any) -> NDArray[Any]:
        """Predict from raw inputs, as `result.predict` does."""
        return self._predictor.predict(self.values, 0, x)

    def predict_proba(self, x: Any) -> NDArray[Any]:
        """Predict class probabilities from raw inputs."""
        return self._predictor.probabilities(self.values, 0, x)

    def save(self, directory: str | Path, form: str = "safetensors", overwrite: bool = False) -> Path:
        """Write the model (safetensors, pt2 or onnx) and adapted.json, which records how it was made, to a folder."""
        out = Path(directory).expanduser()
        check_place(out, form, overwrite)
        out.mkdir(exist_ok=True)
        for old in _ours(out):
            old.unlink()
        file = out / f"model.{form}"
        s = self.simulation
        own = s.data.clients[-1]
        said = {
            **about(s.model, Inputs.of(s), self._meaning),
            "recipe": self.shared.about["recipe"],  # the module itself does not know its recipe
            "schema": None if own.schema is None else own.schema.to_json(),
        }
        module = export.module_of(s, s.clients - 1, self.values)
        try:
            export.write_model(module, s, form, file, own.train[0][: export.BATCH], said)
        except FedselectError:
            file.unlink(missing_ok=True)  # without adapted.json, nobody would know whose it is
            raise
        config = self.shared.about["config"]
        say = form != "safetensors" or config is not None
        write_json(out / ABOUT, {
            **{k: self.shared.about[k] for k in ("run", "round", "method")},
            "samples": self.samples, "seed": self.seed, "headline": self.headline.to_json(), "chosen": self.chosen,
            "table": json.loads(json.dumps(self.table).replace("NaN", "null").replace("Infinity", "null")),
            "load": export.SNIPPETS[form](file, s, (config or {}).get("model", {})) if say else None,
        })  # fmt: skip
        return out

    @property
    def _predictor(self) -> Predictor:
        s = self.simulation
        return Predictor(s.model.build, s.model.output, Inputs.of(s), self._meaning, [s.data.clients[-1].schema])

    @property
    def _meaning(self) -> Meaning:
        return Meaning(self.simulation.task, tuple(self.shared.data.target_shape), tuple(self.shared.data.names))


def check_place(out: Path, form: str, overwrite: bool) -> None:
    """Refuse an unknown format, and to overwrite anything but an adapted model, and that only with --overwrite."""
    if form not in formats.FORMS:
        raise InputError(f"--format must be {', '.join(formats.FORMS)}, not {form!r}.")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent} is not a directory; create it first, or choose another --out.")
    if not (out.exists() or out.is_symlink()) or is_unused(out):
        return
    if out.is_symlink() or not out.is_dir() or {p.name for p in out.iterdir()} != {p.name for p in _ours(out)}:
        raise InputError(f"{out} contains files that are not part of an adapted model; choose another --out.")
    if not overwrite:
        raise InputError(f"{out} already exists; choose another --out, or pass --overwrite to replace it.")


def _ours(out: Path) -> list[Path]:
    known = {ABOUT, *(f"model.{form}" for form in formats.FORMS)}
    return [p for p in out.iterdir() if p.name in known] if (out / ABOUT).is_file() else []
