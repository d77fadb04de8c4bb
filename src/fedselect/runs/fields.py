"""What can be asked of a run: its fields, with their defaults and what help texts say of them. Nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Any, Literal


def _option(default: Any, help: str, said: str | None = None) -> Any:
    """A field that is a flag of the command line too; `said`: its default in words, where the value does not say it."""
    return field(default=default, metadata={"help": help, "default": default if said is None else said})


def _table(name: str, help: str, said: str | None = None) -> Any:
    """A field that is a table, {"name": ..., option: value, ...}, of which a flag gives the name; `said` as above."""
    return field(default_factory=lambda: {"name": name}, metadata={"help": help, "default": name, "said": said or name})


@dataclass(frozen=True)
class Fields:
    """One run. What has a name is a table, {"name": ..., option: value, ...}, with every option filled in."""

    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedselect"})
    data: dict[str, Any] = field(default_factory=lambda: {"name": "digits"})
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = _table("classification", "What outputs and targets mean.", "what the data is for")  # noqa: RUF009
    adapt: dict[str, Any] = _table(  # noqa: RUF009
        "all", "What trains: all, or on a frozen base lora (--rank 8), bias, norm, head or layers (--targets)."
    )
    aggregate: dict[str, Any] = _table("mean", "What the server makes of uploads.")  # noqa: RUF009
    rounds: int = _option(30, "Communication rounds.")
    seed: int = _option(0, "Seed of the partition, the initial model and training.")
    fraction: float = _option(1.0, "Share of clients that train in a round.")
    late: str | None = _option(None, "COUNT@ROUND: the last COUNT clients join in that round.")
    eval_every: int = _option(1, "Evaluate every so many rounds.")
    chunk: int | str = _option("auto", "Clients that train side by side, or auto.")
    rows: str = _option("auto", "What is stored per client between rounds: all, or personal (packed).")
    device: str = _option("auto", "auto, cpu, cuda or one GPU such as cuda:1.")
    precision: str = _option("auto", "Precision of matrix multiplication: float32, or on a GPU tf32 or bf16.", "tf32 on a GPU")
    recompute: bool = _option(
        False, "Gradient checkpointing: keep only the inputs of a transformer's blocks, to train more clients at once."
    )
    deterministic: bool = _option(False, "The same bits each time on the same GPU, or an error that says why.")
    cross: bool = _option(False, "At the end, also try every client's model on every other client's data.")
    score: Literal["test", "val"] = _option("test", "Measure on test data, or on val: held out of training data with --val.")
    keep: Literal["last", "best", "own"] | None = _option(
        None,
        "Which round counts: the last, the best on validation data (held out with --val), or each client's own best.",
        "last; with --patience best",
    )
    view: Literal["best"] | None = _option(
        None,
        "Which model of a client counts: local or merged, of methods with that option; best: each client chooses on its "
        "validation data (held out with --val).",
        "what the method says",
    )
    patience: int | None = _option(None, "Stop after so many evaluations without a better one on validation data.")
    headline: str | None = _option(None, "The metric that tables show first.", "the task's own")
    metrics: list[str] = field(
        default_factory=list,
        metadata={"help": "Also measure these of the task's metrics: auroc,f1.", "default": "none"},
    )
    secret: bool = _option(False, "Secure aggregation: the server learns sums, neither a client's values nor its mask.")
    mean: Literal["senders", "cohort"] = _option("senders", "Secret sums are divided by an entry's senders, or by the cohort.")
    private: str | None = _option(None, "Differential privacy: epsilon=8, more options after commas (docs/private.md).")
    preset: str | None = _option(None, "Values to start from: paper, authors (the method's own), or ours (fedselect).")
    plugins: list[str] = field(default_factory=list)  # whose rows it uses; `complete` fills it in
