"""Draw docs/img/corruptions.png: every corruption on one picture, at severity 5 or the one given as argument."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

from fedselect.data.corruptions import CORRUPTIONS, STANDARD, corrupt

SEED, SIDE, COLUMNS = 0, 32, 5
OUT = Path(__file__).parents[1] / "docs" / "img" / "corruptions.png"


def patch() -> np.ndarray:
    """The middle of scikit-learn's picture of a flower as one image (1, 32, 32, 3)."""
    flower = load_sample_image("flower.jpg")[60:410, 190:540]
    return np.asarray(Image.fromarray(flower).resize((SIDE, SIDE), Image.Resampling.LANCZOS))[None]


def main(severity: int = 5, out: Path = OUT) -> None:
    original, ids = patch(), np.zeros(1, np.int64)
    shown = {"original": original} | {name: corrupt(original, name, severity, SEED, ids) for name in CORRUPTIONS}
    rows = -(-len(shown) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(1.7 * COLUMNS, 1.95 * rows), layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for axis, (name, image) in zip(axes.flat, shown.items(), strict=False):
        axis.imshow(image[0], interpolation="nearest")
        extra = " (extra)" if name != "original" and name not in STANDARD else ""
        axis.set_title(name.replace("_", " ") + extra, fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:2]), *(Path(a) for a in sys.argv[2:3]))
