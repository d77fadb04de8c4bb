"""Write hospitals/: one CSV file for each of four hospitals.

The measurements are real: the Wisconsin breast cancer set, which ships with scikit-learn. The hospitals are made up, and so
is the column `microscope`. They differ as hospitals do: in how many patients they have, in how many of these are ill, and in
a column that the village often leaves empty.
"""

import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

HOSPITALS = {"city": (100, 0.4), "county": (60, 0.3), "university": (80, 0.7), "village": (40, 0.2)}
"""Patients, and the share of them with a malignant tumor."""


def main(folder: Path = Path("hospitals")) -> None:
    draw = np.random.default_rng(0)
    raw = load_breast_cancer()
    names = [name.removeprefix("mean ").replace(" ", "_") for name in raw.feature_names[:10]]
    waiting = {kind: list(draw.permutation(np.flatnonzero(raw.target == kind))) for kind in (0, 1)}  # 0: malignant
    folder.mkdir(exist_ok=True)
    for hospital, (patients, share) in HOSPITALS.items():
        ill = round(share * patients)
        rows = draw.permutation([waiting[0].pop() for _ in range(ill)] + [waiting[1].pop() for _ in range(patients - ill)])
        with (folder / f"{hospital}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["patient", "microscope", *names, "diagnosis"])
            for row in rows:
                cells = {name: f"{value:.5g}" for name, value in zip(names, raw.data[row], strict=False)}
                if hospital == "village" and draw.random() < 0.5:
                    cells["symmetry"] = ""
                scope = "digital" if draw.random() < 0.5 else "optical"
                out.writerow([f"p{row}", scope, *cells.values(), raw.target_names[raw.target[row]]])


if __name__ == "__main__":
    main()
