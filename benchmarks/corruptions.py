"""Seconds for 60,000 32x32 images of each corruption, from 2,000 of them, severity 5.

python benchmarks/corruptions.py [--images 2000]
"""

import argparse
import json
import time

import numpy as np

from fedselect.data.corruptions import CORRUPTIONS, corrupt

WHOLE = 60_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    count = parser.parse_args().images
    x = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    ids = np.arange(count)
    figures = {}
    for name in CORRUPTIONS:
        corrupt(x[:64], name, 5, 0, ids[:64])  # imports and textures are made once
        began = time.perf_counter()
        corrupt(x, name, 5, 0, ids)
        figures[name] = round((time.perf_counter() - began) * WHOLE / count, 1)
        print(f"{name:<20} {figures[name]:>6} s", flush=True)
    print(json.dumps({"benchmark": "corruptions", "images": WHOLE, "measured_on": count, "seconds": figures}))


if __name__ == "__main__":
    main()
