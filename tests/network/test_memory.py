"""The server's memory is that of the model, not of the clients: 200 replies folded in as they come."""

import sys
from pathlib import Path

from children import call, env

# in a process of its own, whose peak of memory is this alone; 200 replies of two megabytes would be 400
CROWD = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from local import QUICK, assignment
import fedselect as fs
from fedselect.aggregate import codec
from fedselect.network.letters import Letter, put_packet
from fedselect.network.server import Server
from fedselect.training.settings import Training

CLIENTS = 200
pair = (torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))
data = fs.Federation([fs.ClientData(pair, pair)] * CLIENTS, classes=10)
made = assignment(fs.FedSelect(), lambda d: fs.models.mlp(d, hidden=6500), data, seed=0, training=Training())
mask = {n: torch.ones_like(v, dtype=torch.bool) for n, v in made.initial.items()}

class Crowd:
    def present(self):
        return list(range(CLIENTS))

    def ask(self, letters, timeout):
        for i, letter in letters:
            whose = {**made.address, "client": i, "base": 0}
            if letter.head["kind"] == "hello":
                said, parts = put_packet(codec.outline(made.initial, mask))
                yield i, Letter({**whose, "kind": "hello", "samples": 2, **said}, parts)
            else:
                said, parts = put_packet(codec.pack({n: v + i / 100 for n, v in made.initial.items()}, mask))
                head = {"kind": "update", "round": 1, "weight": 1.0, "train_loss": 1.0, "measured": {}}
                yield i, Letter({**whose, **head, **said}, parts)

server = Server(made, QUICK, Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
outcome = server.step(Crowd())
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(outcome.uploads) == CLIENTS, len(outcome.rejected)
moved = server.state["params"]["3.bias"] - made.initial["3.bias"]
assert torch.allclose(moved, torch.full_like(moved, 0.995))  # the mean of 0 to 199, hundredths
print(sum(v.nbytes for v in made.initial.values()), (after - before) * 1024)
"""


def test_two_hundred_replies_take_the_memory_of_a_few_models(tmp_path):
    done = call(sys.executable, "-c", CROWD, tmp_path, env=env(PYTHONPATH=str(Path(__file__).parent)))
    assert done.returncode == 0, done.stderr
    model, grown = map(int, done.stdout.split())
    print(f"{grown / model:.1f} models")
    assert grown < 25 * model
