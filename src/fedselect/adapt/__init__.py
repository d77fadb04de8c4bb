"""A model for a client that was not there: from what a finished run shares, and the client's own few samples."""

from fedselect.adapt.adapted import Adapted
from fedselect.adapt.adapting import adapt

__all__ = ["Adapted", "adapt"]
