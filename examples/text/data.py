"""Write manuals/: one text file for each of four packages, 3,000 characters of what its functions say of themselves.

The text is real: docstrings of packages that fedselect needs anyway. Each package has its own authors, words and habits.
"""

import inspect
from importlib import import_module
from pathlib import Path

MODULES = {
    "numpy": "numpy",
    "python": "argparse",
    "scikit-learn": "sklearn.metrics",
    "torch": "torch.nn.functional",
}
LENGTH = 3_000


def main(folder: Path = Path("manuals")) -> None:
    folder.mkdir(exist_ok=True)
    for package, name in MODULES.items():
        module = import_module(name)
        things = [thing for name, thing in sorted(vars(module).items()) if inspect.isroutine(thing) or inspect.isclass(thing)]
        said = (" ".join((inspect.getdoc(thing) or "").split()) for thing in things)
        (folder / f"{package}.txt").write_text("\n".join(said)[:LENGTH], encoding="utf-8")


if __name__ == "__main__":
    main()
