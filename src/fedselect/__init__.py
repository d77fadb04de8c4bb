"""fedselect: personalized federated learning where every client gets its own model.

The names are those of `fedselect.public`, which is loaded when the first of them is asked for: a command line that only
prints its help does not wait for torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # for mypy; importing it from typing takes time in which Ctrl-C is not answered yet
if TYPE_CHECKING:
    from fedselect.public import *  # noqa: F403
    from fedselect.public import __all__ as __all__
    from fedselect.public import __version__ as __version__
else:

    def __getattr__(name: str) -> object:
        from importlib.util import find_spec

        if find_spec(f"{__name__}.{name}"):  # a room, such as fedselect.models
            return import_module(f"{__name__}.{name}")
        if not name.startswith("__") or name in ("__all__", "__version__"):
            public = import_module(f"{__name__}.public")
            globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    import_module("fedselect").__all__  # noqa: B018  (loads them)
    return sorted(globals())
