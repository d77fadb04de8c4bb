"""The fields of a run's configuration, with defaults and help texts. Nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Any, Literal


def _option(default: Any, help: str, said: str | None = None) -> Any:
    """A field that is also a command-line flag. `said`: the default in words, if the value alone is unclear."""
    return field(default=default, metadata={"help": help, "default": default if said is None else said})


def _table(name: str, help: str, said: str | None = None) -> Any:
    """A field that is a table, {"name": ..., option: value, ...}, whose name a flag sets. `said` as above."""
    return field(default_factory=lambda: {"name": name}, metadata={"help": help, "default": name, "said": said or name})


@dataclass(frozen=True)
class Fields:
    """One run. Methods, data sets, models, ... are tables, {"name": ..., option: value, ...}, with every option filled in."""

    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedselect"})
    data: dict[str, Any] = field(default_factory=lambda: {"name": "digits"})
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = _table("classification", "Task: classification, regression, ...", "depends on the data")  # noqa: RUF009
    adapt: dict[str, Any] = _table(  # noqa: RUF009
        "all", "What trains: all, or on a frozen base lora (--rank 8), bias, norm, head or layers (--targets)"
    )
    aggregate: dict[str, Any] = _table("mean", "Rule by which the server combines uploads")  # noqa: RUF009
    rounds: int = _option(30, "Communication rounds")
    seed: int = _option(0, "Seed of the partition, the initial model and training")
    fraction: float = _option(1.0, "Share of clients that train in a round")
    late: str | None = _option(None, "COUNT@ROUND: the last COUNT clients join in that round")
    eval_every: int = _option(1, "Rounds between evaluations")
    eval_fraction: float = _option(1.0, "Share of clients that an evaluation covers, drawn anew each time")
    chunk: int | str = _option("auto", "Number of clients that train in parallel, or auto")
    rows: str = _option(
        "auto", "What is stored per client between rounds: all, or personal (packed, in memory) or disk (in a file)"
    )
    device: str = _option("auto", "auto, cpu, cuda or one GPU such as cuda:1")
    precision: str = _option(
        "auto",
        "Precision of matrix multiplication: float32, bf16 (on a CPU only with AVX512_BF16 or AMX), or on a GPU tf32",
        "tf32 on a GPU",
    )
    recompute: bool = _option(
        False, "Gradient checkpointing of transformer blocks: less memory, so that more clients train in parallel"
    )
    deterministic: bool = _option(False, "Bitwise reproducible on the same GPU; an error if that is impossible")
    cross: bool = _option(False, "At the end, also evaluate every client's model on every other client's data")
    score: Literal["test", "val"] = _option("test", "Data to measure on: test, or val (held out of training data with --val)")
    keep: Literal["last", "best", "own"] | None = _option(
        None,
        "Round to report: the last, the best on validation data (held out with --val), or each client's own best",
        "last; with --patience best",
    )
    view: Literal["best"] | None = _option(
        None,
        "Model to report: local (after local training), merged (with the aggregate), or best (chosen by each client on its "
        "validation data, held out with --val)",
        "depends on the method",
    )
    patience: int | None = _option(None, "Stop after this many evaluations without improvement on validation data")
    headline: str | None = _option(None, "The metric that tables show first", "the task's own")
    metrics: list[str] = field(
        default_factory=list,
        metadata={"help": "More metrics of the task to measure, separated by commas: auroc,f1", "default": "none"},
    )
    secret: bool = _option(False, "Secure aggregation: the server sees only sums, no client's parameters or mask")
    mean: Literal["senders", "cohort"] = _option(
        "senders", "With --secret, divide each entry's sum by its number of senders, or by the size of the cohort"
    )
    private: str | None = _option(
        None, "Differential privacy: epsilon=8, with more options after commas: epsilon=8,unit=sample,clip=0.5"
    )
    preset: str | None = _option(None, "Preset of option values: paper, authors (published for the method) or ours (fedselect)")
    plugins: list[str] = field(default_factory=list)  # plugins that the run uses; `complete` fills this in
