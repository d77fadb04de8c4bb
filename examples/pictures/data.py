"""Write offices/: OFFICE/CLASS/*.png, handwritten digits as four offices scan them.

The digits are real: the set of 8x8 pictures that comes with scikit-learn. The offices are made up. Each has few pictures, and a
scanner of its own: too dark, too bright, dusty, and one as it should be.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

DRAW = np.random.default_rng(0)
SCANNERS = {
    "archive": lambda picture: 0.6 * picture,
    "branch": lambda picture: 0.4 + 0.6 * picture,
    "cellar": lambda picture: np.maximum(picture, DRAW.random(picture.shape) < 0.05),
    "desk": lambda picture: picture,
}
EACH = 8  # pictures of each class in an office


def main(folder: Path = Path("offices")) -> None:
    raw = load_digits()
    order = DRAW.permutation(len(raw.target))
    for digit in range(10):
        found = iter(order[raw.target[order] == digit])
        for office, scanned in SCANNERS.items():
            place = folder / office / str(digit)
            place.mkdir(parents=True, exist_ok=True)
            for i in range(EACH):
                picture = scanned(raw.images[next(found)] / 16)
                Image.fromarray((255 * picture).astype(np.uint8)).save(place / f"{i}.png")


if __name__ == "__main__":
    main()
