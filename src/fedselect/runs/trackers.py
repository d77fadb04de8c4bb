"""Log every round and each client's metrics to TensorBoard, MLflow or Weights & Biases.

Files go to track/ in the run directory, unless the tracker's own environment variables set another place: WANDB_MODE,
WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

import hashlib
import importlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedselect.core.errors import RunError, unknown
from fedselect.runs.config import Config
from fedselect.runs.labels import flat
from fedselect.runs.loop import Watch
from fedselect.runs.rundir import read_configs
from fedselect.simulate.keeping import is_end
from fedselect.simulate.records import ID, Record, columns
from fedselect.tasks import Measure, Spread
from fedselect.tasks.metrics import LOSS


class Tracker(Protocol):
    """One run in one tracker."""

    def log(self, round: int, values: Mapping[str, float]) -> None: ...
    def close(self, finished: bool) -> None: ...


@contextmanager
def tracking(kind: str, out: Path) -> Iterator[Watch]:
    """Yield the function to call after every round. Each run becomes a run of the tracker."""
    if kind not in TRACKERS:
        raise unknown("tracker", kind, TRACKERS)
    package, make = TRACKERS[kind]
    try:
        importlib.import_module(package)
    except ImportError:
        raise RunError(f"--track {kind} needs {package}; install it with: pip install 'fedselect[track]'") from None
    make.check()
    open_runs: dict[str, Tracker] = {}
    names: dict[str, str] = {}

    def watch(config: Config, record: Record) -> None:
        key = json.dumps(config.to_json(), sort_keys=True)
        if key not in open_runs:
            if not names and (out / "compare.json").exists():  # run directories, so that names stay the same on resume
                names.update({json.dumps(c.to_json(), sort_keys=True): name for name, c in read_configs(out).items()})
            name = names.get(key, f"{config.method['name']}-seed{config.seed}")
            open_runs[key] = make(out / "track", name, config.to_json(), record["round"])
        open_runs[key].log(record["round"], numbers(record, config.measured()))
        if is_end(record, config.rounds):
            open_runs.pop(key).close(finished=True)

    try:
        yield watch
    finally:
        for left in open_runs.values():
            left.close(finished=False)


def numbers(record: Record, metrics: Sequence[Measure]) -> dict[str, float]:
    """The numbers of a round under flat names: accuracy, client/3/accuracy, worst_tenth/accuracy, ..."""
    found = {name: record[name] for name in (*columns(metrics), "seconds")}
    for m in metrics:
        found[f"worst_tenth/{m.name}"] = Spread.of(m, own := record["clients"][m.name]).worst_tenth
        if m.name != LOSS:
            who = record["clients"].get(ID, range(len(own)))
            found.update({f"client/{i}/{m.name}": v for i, v in zip(who, own, strict=True)})
    return {name: float(v) for name, v in found.items() if v is not None}


class TensorBoard:
    @staticmethod
    def check() -> None:
        """Nothing to check: it only writes files."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard" / name), purge_step=first)
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```", first)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)

    def close(self, finished: bool) -> None:
        self._writer.close()


class MLflow:
    @staticmethod
    def check() -> None:
        """Check that the server answers, if one is configured."""
        from mlflow import MlflowClient, MlflowException

        if address := os.environ.get("MLFLOW_TRACKING_URI"):
            try:
                MlflowClient(address).search_experiments(max_results=1)
            except MlflowException as e:
                raise RunError(
                    f"mlflow at {address} does not answer ({str(e).splitlines()[0]}); start it, or unset MLFLOW_TRACKING_URI."
                ) from None

    def __init__(self, folder: Path, name: str, config: dict[str, Any], first: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedselect")
        found = self._client.get_experiment_by_name(project)
        place = found.experiment_id if found else self._client.create_experiment(project)
        self._run = self._client.create_run(place, run_name=name).info.run_id
        params = [Param(k, str(v)) for k, v in flat(config).items()]
        for at in range(0, len(params), 100):  # the limit per request
            self._client.log_batch(self._run, params=params[at : at + 100])

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, round) for name, value in values.items()]
        for at in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[at : at + 1000])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


class WandB:
    @staticmethod
    def check() -> None:
        """Check that the user is logged in, unless wandb is offline."""
        import wandb

        if os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
            return
        try:
            wandb.login()
        except wandb.Error as e:
            raise RunError(
                f"wandb cannot start ({str(e).splitlines()[0]}); log in with: wandb login, or stay offline with: "
                "WANDB_MODE=offline"
            ) from None

    def __init__(self, folder: Path, name: str, config: dict[str, Any], first: int) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        same = hashlib.sha256(f"{folder.resolve()}/{name}".encode()).hexdigest()[
            :16
        ]  # a resumed run continues in the same tracker run
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedselect"), name=name, id=same, resume="allow", config=config,
            dir=folder, reinit="create_new", settings=wandb.Settings(silent=True, x_disable_stats=True),
        )  # fmt: skip

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, tuple[str, type[TensorBoard] | type[MLflow] | type[WandB]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WandB),
}
