"""Write clinics/: one CSV file for each of four clinics.

The patients are real: the diabetes set that comes with scikit-learn, 442 people, and how far the disease had progressed a year
later. The clinics are made up. Each has patients of another age, and two of them measure blood in mmol/l, not in mg/dl.
"""

import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

NAMES = ("age", "sex", "bmi", "pressure", "cholesterol", "ldl", "hdl", "ratio", "triglycerides_log", "glucose")
MMOL = {"cholesterol": 38.67, "ldl": 38.67, "hdl": 38.67, "glucose": 18.02}  # mg/dl in one mmol/l
CLINICS = {"boston": "mg/dl", "chicago": "mg/dl", "lyon": "mmol/l", "turin": "mmol/l"}  # from young to old


def main(folder: Path = Path("clinics")) -> None:
    raw = load_diabetes(scaled=False)
    draw = np.random.default_rng(0)
    by_age = np.argsort(raw.data[:, 0] + draw.normal(0, 8, len(raw.data)))
    folder.mkdir(exist_ok=True)
    for (clinic, unit), rows in zip(CLINICS.items(), np.array_split(by_age, len(CLINICS)), strict=True):
        with (folder / f"{clinic}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow([*NAMES, "progression"])
            for row in draw.permutation(rows):
                values = dict(zip(NAMES, raw.data[row], strict=True))
                if unit == "mmol/l":
                    values |= {name: values[name] / per for name, per in MMOL.items()}
                sex = "female" if values.pop("sex") == 1 else "male"
                age, *rest = (f"{value:.5g}" for value in values.values())
                out.writerow([age, sex, *rest, f"{raw.target[row]:.0f}"])


if __name__ == "__main__":
    main()
