"""Write patients.parquet: one table, whose column `practice` says which of four practices a patient goes to.

The patients are real: the diabetes set that comes with scikit-learn. What is to be predicted from age, sex and blood is four
columns of 0 and 1: overweight, high pressure, high glucose, and whether the disease got worse; a patient may have all of
them or none. Practices differ in whom they see: one is for women, one for men, one for the old, and one takes everybody.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_diabetes


def main(path: Path = Path("patients.parquet")) -> None:
    raw = load_diabetes(scaled=False)
    age, sex, bmi, pressure, cholesterol, ldl, hdl, ratio, triglycerides, glucose = raw.data.T
    rules = [age >= 58, np.random.default_rng(0).random(len(age)) < 0.25, sex == 1]
    table = {
        "practice": np.select(rules, ["for the old", "for everybody", "for women"], "for men"),
        "age": age,
        "sex": np.where(sex == 1, "female", "male"),
        "cholesterol": cholesterol,
        "ldl": ldl,
        "hdl": hdl,
        "ratio": ratio,
        "triglycerides_log": triglycerides,
        "overweight": (bmi >= 27).astype(int),
        "high_pressure": (pressure >= 97).astype(int),
        "high_glucose": (glucose >= 95).astype(int),
        "got_worse": (raw.target >= 150).astype(int),
    }
    pq.write_table(pa.table(table), path)


if __name__ == "__main__":
    main()
