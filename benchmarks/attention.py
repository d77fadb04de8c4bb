"""Transformers with low-rank adapters for many clients on one GPU: memory and time per step, and against a plain loop.

    python benchmarks/attention.py speed     # stacked against one client after another, ViT-Tiny, 20 clients
    python benchmarks/attention.py memory    # how many clients fit: ViT-Small, and a text encoder of BERT-base's size
    python benchmarks/attention.py memory --model text    # one of the two
    python benchmarks/attention.py profile   # where a step's time goes

Random images and tokens, random weights, batches of 32, rank 8 in attention and a head. The loop is what peft does: a
frozen Linear and beside it A and B, a module and an optimizer for each client, bf16 by autocast. Both run in turns; the
fastest of five counts. The text encoder needs transformers.
"""

import argparse
import copy
import gc
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedselect as fs
from fedselect.core.tree import expand
from fedselect.simulate import Simulation
from fedselect.training.work import Pass

BATCH, STEPS, RANK, TURNS = 32, 12, 8, 5


def images(clients: int, side: int) -> fs.Federation:
    """All clients have the same two batches: what is in them does not matter here."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (2 * BATCH, 3, side, side), generator=g, dtype=torch.uint8)
    y = torch.randint(0, 10, (2 * BATCH,), generator=g)
    return fs.Federation([fs.ClientData((x, y), (x[:2], y[:2])) for _ in range(clients)], 10)


def texts(clients: int, length: int) -> fs.Federation:
    g = torch.Generator().manual_seed(0)
    words, y = torch.randint(0, 30_000, (2 * BATCH, length), generator=g), torch.randint(0, 2, (2 * BATCH,), generator=g)

    def part(n: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"input_ids": words[:n], "attention_mask": torch.ones_like(words[:n])}, y[:n]

    return fs.Federation([fs.ClientData(part(2 * BATCH), part(2)) for _ in range(clients)], 2)


def vit(name: str, side: int) -> fs.Model:
    return fs.lora(getattr(fs.models, name)(images(1, side)), RANK, "*.attn.*")


def bert(dropout: float) -> fs.Model:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return fs.lora(fs.Model.wrap(BertForSequenceClassification(config), head="classifier"), RANK, "*.attention.*")


def stacked(data: fs.Federation, model: fs.Model, steps: int = STEPS, **how: Any) -> Callable[[], None]:
    """So many steps of all clients."""
    training = fs.Training(batch_size=BATCH, momentum=0.9)
    sim = Simulation(fs.FedAvg(), model, data, device="cuda", training=training, **how)
    clients = len(data.clients)
    only = dict.fromkeys(sim.model.params, True)
    walks = [Pass(only, 0.01, e) for e in range(steps // 2)]
    tree = expand(sim.initial, clients)
    return lambda: sim._work(torch.arange(clients), 0).train(tree, walks)


class Peft(nn.Module):
    """A frozen Linear and an adapter, as peft writes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * self.scale


def loop(data: fs.Federation, name: str, precision: str) -> Callable[[], None]:
    """The same, client after client."""
    base = getattr(fs.models, name)(data).build()
    base.requires_grad_(False)
    for block in base.blocks:
        block.attn.qkv, block.attn.proj = Peft(block.attn.qkv), Peft(block.attn.proj)
    base.head.requires_grad_(True)
    modules = [copy.deepcopy(base).cuda().train() for _ in data.clients]
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.01, 0.9) for m in modules]
    parts = [(c.train[0].cuda(), c.train[1].cuda()) for c in data.clients]
    g = torch.Generator(device="cuda").manual_seed(0)
    cast = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16")

    def steps() -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
        for module, optimizer, (x, y) in zip(modules, optimizers, parts, strict=True):
            for _ in range(STEPS // 2):
                for rows in torch.randperm(len(x), generator=g, device="cuda").split(BATCH):
                    with cast:
                        loss = F.cross_entropy(module(x[rows].float() / 255), y[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    return steps


def seconds(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def speed(clients: int) -> None:
    for side in (32, 224):
        for precision in ("tf32", "bf16"):
            data = images(clients, side)
            ours = stacked(data, vit("vit_tiny", side), precision=precision)
            theirs = loop(data, "vit_tiny", precision)
            for run in (ours, ours, theirs):
                run()
            turns = [(seconds(ours), seconds(theirs)) for _ in range(TURNS)]
            one, other = (1000 * min(t) / STEPS for t in zip(*turns, strict=True))
            said: dict[str, Any] = {"model": "vit_tiny", "side": side, "precision": precision, "clients": clients}
            print(
                json.dumps({**said, "stacked ms": round(one, 2), "loop ms": round(other, 2), "times": round(other / one, 1)}),
                flush=True,
            )
            del ours, theirs
            free()


def memory(only: str) -> None:
    """Memory of a client is the slope from two to six clients; then as many as should fit are tried."""
    total = torch.cuda.get_device_properties(0).total_memory
    kinds: dict[str, tuple[Callable[[int], fs.Federation], Callable[[], fs.Model]]] = {
        "vit_small, 224x224": (partial(images, side=224), lambda: vit("vit_small", 224)),
        "text encoder, 110M, 128 tokens": (partial(texts, length=128), lambda: bert(0.0)),
        "text encoder, 110M, 128 tokens, dropout 0.1": (partial(texts, length=128), lambda: bert(0.1)),
    }
    for name, (make_data, make_model) in kinds.items():
        if only not in name:
            continue
        model = make_model()
        for precision, recompute in (("bf16", False), ("bf16", True), ("tf32", False)):
            if "dropout" in name and precision == "tf32":
                continue
            few, more = (measured(make_data(c), model, precision, recompute)[0] for c in (2, 6))
            each = (more - few) / 4
            shared = few - 2 * each
            said = {"model": name, "precision": precision, "recompute": recompute, "GB per client": round(each / 1e9, 3),
                    "GB shared": round(shared / 1e9, 2)}  # fmt: skip
            clients = int((0.9 * total - shared) / each)
            while clients:
                try:
                    peak, ms = measured(make_data(clients), model, precision, recompute)
                    said |= {"clients": clients, "GB at once": round(peak / 1e9, 1), "ms per step": round(ms, 1)}
                    break
                except torch.cuda.OutOfMemoryError:
                    clients = int(0.9 * clients)
            print(json.dumps(said), flush=True)


def measured(data: fs.Federation, model: fs.Model, precision: str, recompute: bool) -> tuple[int, float]:
    """The most memory that was allocated at once, and milliseconds per step."""
    free()
    torch.cuda.reset_peak_memory_stats()
    run = stacked(data, model, 4, precision=precision, recompute=recompute)
    run()
    ms = 1000 * seconds(run) / 4
    return torch.cuda.max_memory_allocated(), ms


def profile(clients: int) -> None:
    for side, precision in ((32, "tf32"), (32, "bf16")):
        run = stacked(images(clients, side), vit("vit_tiny", side), precision=precision)
        run()
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            run()
        print(side, precision)
        print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=90))


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["speed", "memory", "profile"])
    parser.add_argument("--clients", type=int, default=20, help="for speed and profile")
    parser.add_argument("--model", default="", help="for memory: only models whose name contains this")
    args = parser.parse_args()
    {
        "speed": partial(speed, args.clients),
        "memory": partial(memory, args.model),
        "profile": partial(profile, args.clients),
    }[args.what]()
