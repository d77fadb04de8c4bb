"""What the README and the shipped configurations promise."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.runs.config import Config, read

ROOT = Path(__file__).parents[2]


def test_the_readmes_example_runs():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)

    class MyNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
            self.classifier = nn.Linear(8, 3)

        def forward(self, x):
            return self.classifier(self.body(x))

    g = torch.Generator().manual_seed(0)
    hospitals = []
    for n in (30, 20, 25, 40):
        x = torch.randn(n, 4, generator=g)
        y = x[:, :3].argmax(1)
        hospitals.append((x[10:], y[10:], x[:10], y[:10]))
    scope = {"hospitals": hospitals, "MyNet": MyNet}
    exec(code, scope)
    result = scope["result"]
    assert len(result.history) == 30
    assert result.accuracy > 1 / 3  # better than chance
    MyNet().load_state_dict(result.personal(3))
    assert len([line for line in code.splitlines() if line.strip()]) < 10


@pytest.mark.parametrize("path", sorted((ROOT / "src/fedselect/cli").glob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path):
    raw = read(path)
    methods = raw.pop("methods")
    seeds = raw.pop("seeds")
    assert methods
    assert seeds
    for name, options in methods.items():
        config = Config.from_dict({**raw, "method": {"name": name, **options}, "seed": seeds[0]}, path.name)
        assert isinstance(config.make_method(), fs.Method)
