"""Write manuals/: one CSV file for each of five packages, with what its classes, functions and methods say of themselves.

The text is real: the first sentence of docstrings of packages that fedselect needs anyway. Each has its own authors and habits
("Returns the ..." here, "Compute the ..." there) and its own words.
"""

import csv
import inspect
from importlib import import_module
from pathlib import Path

import numpy as np

PACKAGES = {
    "numpy": ("numpy", "numpy.ma", "numpy.random", "numpy.polynomial"),
    "python": ("argparse", "calendar", "datetime", "decimal", "email.message", "fractions", "logging", "pathlib", "unittest"),
    "scikit-learn": ("sklearn.cluster", "sklearn.linear_model", "sklearn.metrics", "sklearn.preprocessing", "sklearn.tree"),
    "scipy": ("scipy.interpolate", "scipy.linalg", "scipy.optimize", "scipy.signal", "scipy.sparse"),
    "torch": ("torch.nn", "torch.nn.functional", "torch.optim", "torch.distributions", "torch.utils.data"),
}
EACH = 40  # sentences of each kind, at most


def sentences(modules: tuple[str, ...]) -> dict[str, list[str]]:
    """The first sentence of everything that has one, by kind."""
    found: dict[str, dict[str, None]] = {"class": {}, "function": {}, "method": {}}
    for module in map(import_module, modules):
        for name, thing in sorted(vars(module).items()):
            if name.startswith("_") or not callable(thing):
                continue
            found["class" if inspect.isclass(thing) else "function"][said(thing)] = None
            for own, method in sorted(vars(thing).items()) if inspect.isclass(thing) else ():
                if not own.startswith("_") and inspect.isfunction(method):
                    found["method"][said(method)] = None
    return {kind: [text for text in texts if len(text) > 10] for kind, texts in found.items()}


def said(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def main(folder: Path = Path("manuals")) -> None:
    draw = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for package, modules in PACKAGES.items():
        rows = [(kind, text) for kind, texts in sentences(modules).items() for text in draw.permutation(texts)[:EACH]]
        with (folder / f"{package}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("kind", "text"), *(rows[i] for i in draw.permutation(len(rows)))])


if __name__ == "__main__":
    main()
