import sys, time; sys.path.insert(0, "src")
import torch, fedselect as fs
from torch import nn
print(torch.cuda.get_device_name())
def fed(make, C=4):
    g = torch.Generator().manual_seed(0); out=[]
    for i in range(C):
        x = torch.randn(120, 4, generator=g); y = make(x, i); out.append(fs.ClientData((x[:90], y[:90]), (x[90:], y[90:])))
    return fs.Federation(out)
wide = lambda o: fs.Model.wrap(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, o)))
K = 20
g = torch.Generator().manual_seed(1)
seq = fs.Federation([fs.ClientData((x := torch.randint(0, K, (200, 40), generator=g), (x + i + 1) % K), (x2 := torch.randint(0, K, (60, 40), generator=g), (x2 + i + 1) % K)) for i in range(10)], classes=K)
cases = {
 "classification": (fed(lambda x, i: (x[:, 0] > 0).long()), wide(2), fs.Classification(class_weights="balanced", label_smoothing=0.1)),
 "binary": (fed(lambda x, i: (x[:, 0] > 0).long()), wide(1), fs.Binary(class_weights="1 3")),
 "multilabel": (fed(lambda x, i: (x[:, :3] > 0).float()), wide(3), fs.Multilabel()),
 "regression": (fed(lambda x, i: torch.stack([100 + 20 * x.sum(1), x[:, 0]], 1)), wide(2), fs.Regression()),
 "sequences": (seq, fs.models.gru(seq), fs.Sequences()),
}
import warnings; warnings.simplefilter("always")
for name, (data, model, task) in cases.items():
    found = {}
    for device in ("cpu", "cuda") if name != "sequences" else ("cuda",):
        t = time.time()
        r = fs.run(fs.FedAvgFT(lr=0.1 if name != "sequences" else 1.0), model=model, data=data, rounds=4, task=task, metrics=[m.name for m in task.more], device=device, precision="float32")
        found[device] = {m.name: r.history[-1][m.name] for m in r.simulation.metrics}; print(name, device, round(time.time() - t, 2), [h["seconds"] for h in r.history])
    print(name, found)
class NG(nn.Module):
    def __init__(s, w=64):
        super().__init__(); s.e = nn.Embedding(K, w); s.g = nn.GRU(w, w, batch_first=True); s.fc = nn.Linear(w, K)
    def forward(s, x): return s.fc(s.g(s.e(x))[0])
r = fs.run(fs.FedAvgFT(lr=1.0), model=fs.Model.wrap(NG), data=seq, rounds=3, device="cuda"); print("nn.GRU", [h["seconds"] for h in r.history], r.accuracy)
