"""summary.json: the results of a run."""

import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedselect.core.errors import RunError
from fedselect.runs.config import Config
from fedselect.runs.environment import environment
from fedselect.simulate.keeping import choices, final, in_tail
from fedselect.simulate.records import Record, means
from fedselect.tasks import Measure, Spread


def summarise(
    config: Config, history: Sequence[Record], tested: Sequence[int | None], validation: Sequence[int | None] = ()
) -> dict[str, Any]:
    """The summary of a run. tested, validation: each client's number of test and validation samples."""
    about = {
        "method": config.method["name"],
        "data": config.data["name"],
        "model": config.model["name"],
        "seed": config.seed,
        "score": config.score,
        **({"eval_fraction": config.eval_fraction} if config.eval_fraction < 1.0 else {}),
        "view": config.view or config.make_method().view,  # the view that the headline reports
    }
    return summary(about, config.measured(), history, tested, environment(config.device, config.precision), validation)


def summary(
    about: Mapping[str, Any],
    metrics: Sequence[Measure],
    history: Sequence[Record],
    tested: Sequence[int | None],
    made_on: Mapping[str, Any],
    validation: Sequence[int | None] = (),
) -> dict[str, Any]:
    """The summary: what ran, its results, and the environment."""
    headline = metrics[0].name
    kept = [r for r in history if r[headline] is not None]
    if not kept:
        raise RunError(f"{headline} is not finite for any client in any round; start a new run with another --headline.")
    last = final(history, headline)
    assert last is not None  # something was evaluated
    tail = [r[headline] for r in kept if in_tail(r["round"], last["round"])]
    own = [a for a in last["clients"][headline] if a is not None]
    return {
        **about,
        "headline": headline,
        "rounds": last["round"],
        **{name: last[name] for name in means(metrics) if name not in ("train_loss", "share")},
        f"{headline}_tail": round(statistics.fmean(tail), 6),  # the last quarter of the run, since a single round is noisy
        "curve": [[r["round"], r[headline]] for r in kept],
        "std_clients": round(statistics.pstdev(own), 6),
        "clients": last["clients"][headline],
        "over_clients": {m.name: Spread.of(m, last["clients"][m.name], tested).to_json() for m in metrics},
        **({"kept": last["kept"], "kept_by": f"{headline} on validation data"} if last.get("kept") is not None else {}),
        **({"chosen": chosen} if (chosen := choices(last, validation)) else {}),
        **({"stopped": True} if last.get("stopped") else {}),
        "share": last["share"],
        "bytes_up": sum(r["bytes_up"] for r in history),
        "bytes_down": sum(r["bytes_down"] for r in history),
        "seconds": round(sum(r["seconds"] for r in history), 3),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": dict(made_on),
    }
