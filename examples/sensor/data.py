"""Write pumps/: one CSV file for each of four pumps, as a logger would: a row for every 10 ms, with the state that was noted.

No sensor data ships with the packages that fedselect needs, so this is synthetic: three channels of vibration, in which a
fault shows as a tone beside that of the rotation. Pumps differ in speed, and in how their sensor is mounted: which way it
lies, and how well it couples.
"""

import csv
from pathlib import Path

import numpy as np

STATES = {"normal": (0.0, 0.0), "unbalanced": (1.0, 0.0), "bearing": (0.0, 3.3), "loose": (0.0, 0.5)}
"""How much the rotation itself grows, and at which multiple of it a tone appears."""
PUMPS, RECORDINGS, ROWS = 4, 6, 256


def main(folder: Path = Path("pumps")) -> None:
    draw = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    time = np.arange(ROWS) / 100
    for pump in range(PUMPS):
        speed, gain = draw.uniform(6, 9), draw.uniform(0.5, 2)
        lies, _ = np.linalg.qr(np.eye(3) + 0.3 * draw.normal(size=(3, 3)))
        with (folder / f"pump-{pump}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["recording", "x", "y", "z", "state"])
            for recording in range(RECORDINGS * len(STATES)):
                state = list(STATES)[recording % len(STATES)]
                grows, multiple = STATES[state]
                turn = 2 * np.pi * (speed * draw.uniform(0.9, 1.1) * time + draw.random())
                axes = np.stack([np.cos(turn), 0.7 * np.sin(turn), 0.3 * np.cos(turn)]) * (1 + grows * draw.uniform(0.5, 1))
                if multiple:
                    axes += draw.uniform(0.4, 0.8) * np.array([[0.3], [0.5], [1.0]]) * np.sin(multiple * turn)
                values = gain * lies @ (axes + draw.normal(0, 0.2, axes.shape))
                out.writerows([recording, *(f"{v:.3f}" for v in row), state] for row in values.T)


if __name__ == "__main__":
    main()
