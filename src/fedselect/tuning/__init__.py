"""Which method and which settings suit a federation: tried side by side on validation data, the weaker ones dropped early."""

from fedselect.tuning.memory import Tuned, tune

__all__ = ["Tuned", "tune"]
