"""The numbers that the FedSelect paper (CVPR 2024) publishes, in percent, as printed.

Rows and columns are named as in the protocol files in protocol/. The paper's figures have no numbers, except that the one
over data sizes draws those of "data-size".
"""

from dataclasses import dataclass

SETS = ("cifar10", "cifar10c", "miniimagenet", "officehome")


@dataclass(frozen=True)
class Published:
    """One table of the paper. Columns are data sets, or settings on the data set named by `on`."""

    where: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]
    on: str | None = None

    def value(self, row: str, data: str, setting: str | None = None) -> float | None:
        """The paper's number in a cell, or None."""
        column = data if self.on is None else setting if data == self.on else None
        if row not in self.rows or column not in self.columns:
            return None
        return self.rows[row][self.columns.index(column)]


PUBLISHED: dict[str, Published] = {
    "table1": Published(
        "Table 1 (table:table1)",
        SETS,
        {
            "Local Only": (74.60, 69.50, 34.98, 75.60),
            "FedAvg": (27.70, 21.35, 8.06, 74.35),
            "FedAvg + FT": (75.30, 66.65, 30.78, 76.84),
            "Ditto": (72.75, 63.70, 32.30, 77.99),
            "FedPAC": (77.20, 69.50, 37.72, 66.61),
            "FedRep": (67.60, 62.50, 34.71, 80.07),
            "FedPer": (75.40, 65.95, 24.90, 69.01),
            "FedBABU": (75.45, 64.95, 6.99, 65.63),
            "LG-FedAvg": (77.65, 68.55, 36.68, 78.75),
            "FedSelect": (82.25, 72.05, 38.69, 80.51),
        },
    ),
    "table2": Published(
        "Table 2 (tab:table2)",
        SETS,
        {
            "FedSelect (α=0.05)": (80.10, 68.30, 37.60, 78.46),
            "FedSelect (α=0.30)": (82.25, 70.60, 37.84, 80.51),
            "FedSelect (α=0.50)": (82.20, 72.05, 38.69, 76.08),
            "FedSelect (α=0.80)": (81.40, 71.40, 34.51, 76.65),
        },
    ),
    "table3": Published(
        "Table 3 (table:table3)",
        SETS,
        {
            "Personalize Least": (79.87, 64.20, 35.65, 78.23),
            "Layer A": (79.96, 65.76, 35.43, 77.06),
            "Layer B": (78.36, 62.81, 32.74, 79.08),
            "Layer C": (79.24, 64.82, 33.33, 79.64),
            "Layer D": (78.08, 62.50, 34.91, 79.11),
            "Random": (79.73, 61.12, 33.28, 76.33),
            "FedSelect (α=0.30)": (82.25, 70.60, 37.84, 80.51),
            "FedSelect (α=0.50)": (82.20, 72.05, 38.69, 76.08),
        },
    ),
    "p-alpha": Published(
        "appendix, tab:tablevarper",
        ("α=0.05", "α=0.30", "α=0.50", "α=0.80"),
        {
            "p=0.01": (81.35, 81.35, 81.85, 80.65),
            "p=0.05": (80.10, 82.25, 82.20, 81.40),
            "p=0.20": (80.55, 81.70, 81.65, 82.15),
            "p=0.50": (82.05, 82.05, 81.60, 81.20),
        },
        on="cifar10",
    ),
    "alpha": Published(
        "appendix, tab:tablevarperextend",
        ("cifar10", "cifar10c"),
        {
            "α=0.05": (80.10, 68.30),
            "α=0.10": (81.25, 69.05),
            "α=0.20": (81.15, 70.65),
            "α=0.30": (82.25, 70.60),
            "α=0.40": (81.10, 70.55),
            "α=0.50": (82.20, 72.05),
            "α=0.60": (81.60, 70.90),
            "α=0.80": (81.40, 71.40),
        },
    ),
    "data-size": Published(
        "appendix, tab:vardatasize",
        ("N=20", "N=40", "N=100", "N=200"),
        {
            "FedAvg": (23.55, 24.70, 27.70, 26.90),
            "FedAvg + FT": (37.65, 72.35, 75.30, 83.50),
            "FedPAC": (68.30, 67.00, 77.20, 81.65),
            "FedRep": (70.10, 73.00, 67.60, 78.15),
            "FedPer": (55.70, 75.15, 75.40, 83.15),
            "FedBABU": (33.10, 66.10, 75.45, 81.80),
            "Ditto": (37.25, 71.55, 72.75, 81.65),
            "LG-FedAvg": (71.45, 74.70, 77.65, 83.90),
            "FedSelect": (72.25, 78.20, 82.25, 84.85),
        },
        on="cifar10",
    ),
}
