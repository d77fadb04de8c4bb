"""Results of runs in Python: models, scores and predictions, in memory or from a folder."""

from fedselect.results.folder import load_result
from fedselect.results.result import Result
from fedselect.results.running import compare, run

__all__ = ["Result", "compare", "load_result", "run"]
