"""One stacked step against torch.optim.SGD, client by client in float64."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedselect as fs
from fedselect.core.random import client_keys
from fedselect.tasks.losses import Goal
from fedselect.training.fitted import Fitted
from fedselect.training.settings import Training
from fedselect.training.step import Aim, Batch, Shortcuts, find_shortcuts, forward, precision, step
from fedselect.training.taps import Taps

CLIENTS, STEPS, BATCH = 3, 3, 5
cross_entropy = Goal(fs.Classification())
HOWS = {
    "plain": Training(momentum=0.0),
    "momentum": Training(momentum=0.9),
    "decay": Training(momentum=0.5, weight_decay=0.1),
    "clip": Training(momentum=0.5, clip=0.1),
    "loose clip": Training(momentum=0.5, clip=1e6),
    "all": Training(momentum=0.9, weight_decay=0.1, clip=0.1),
}


def net():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 4)
    ).double()


def setting():
    """A model, every client's own values, and their batches."""
    g = torch.Generator().manual_seed(0)
    model = fs.Model.wrap(net)
    trees = [model.init(seed) for seed in range(CLIENTS)]
    tree = {n: torch.stack([t[n] for t in trees]) for n in model.names}
    x = torch.randn(STEPS, CLIENTS, BATCH, 1, 4, 4, generator=g, dtype=torch.float64)
    return model, tree, x, torch.randint(0, 4, (STEPS, CLIENTS, BATCH), generator=g)


def run(how, only=None, lr=0.1, ctx=lambda tree, model: {}):
    """STEPS stacked steps: the values and velocities before and after."""
    model, tree, x, y = setting()
    ctx = ctx(tree, model)
    start = {n: v.clone() for n, v in tree.items()}
    velocity = (
        {n: torch.ones_like(tree[n]) for n in model.params} if only else {n: torch.zeros_like(tree[n]) for n in model.params}
    )
    only = only(model) if only else dict.fromkeys(model.params, True)
    keys = client_keys(0, torch.arange(CLIENTS), 0, "train")
    memory = {"momentum": velocity}
    losses = [
        step(Fitted(model), tree, memory, Batch(x[s], y[s], keys), Aim(only, lr, cross_entropy, ctx), how) for s in range(STEPS)
    ]
    return model, start, tree, velocity, losses


def nowhere(tree, model):
    return {"anchor": {}, "pull": {"mu": torch.zeros(CLIENTS)}}


def pulled(tree, model):
    """Another anchor and another pull for each client, one of them none."""
    anchor = {n: tree[n].flip(0) * 0.5 for n in model.params}
    return {"anchor": anchor, "pull": {"mu": torch.tensor([0.3, 0.0, 1.5], dtype=anchor[model.params[0]].dtype)}}


def corrected(tree, model):
    """Another correction of the gradient for each client."""
    return {"correction": {n: tree[n].flip(0) * 0.3 for n in model.params}}


@pytest.mark.parametrize("ctx", [nowhere, pulled, corrected])
@pytest.mark.parametrize("how", HOWS)
def test_a_stacked_step_is_torchs_sgd_for_every_client(how, ctx):
    how = HOWS[how]
    model, start, tree, _, losses = run(how, ctx=ctx)
    _, _, x, y = setting()
    pull = {**nowhere(start, model), "correction": {}, **ctx(start, model)}
    for c in range(CLIENTS):
        module = net().train()
        module.load_state_dict({n: v[c] for n, v in start.items()}, strict=False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=how.momentum, weight_decay=how.weight_decay)
        for s in range(STEPS):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x[s, c]), y[s, c])
            way = sum(((p - pull["anchor"][n][c]) ** 2).sum() for n, p in module.named_parameters() if n in pull["anchor"])
            along = sum((p * pull["correction"][n][c]).sum() for n, p in module.named_parameters() if n in pull["correction"])
            (loss + 0.5 * pull["pull"]["mu"][c] * way + along).backward()
            torch.testing.assert_close(losses[s][c], loss.detach(), rtol=1e-9, atol=1e-12)
            if how.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), how.clip)
            optimizer.step()
        for n in model.names:  # running statistics among them
            torch.testing.assert_close(
                tree[n][c], module.state_dict()[n], rtol=1e-8, atol=1e-10, msg=lambda m, n=n: f"{n}: {m}"
            )


def tensors_only(model):
    return {"4.weight": True, "6.bias": True}


def entries_only(model):
    """About half of the entries, others for each client; one tensor not at all, one whole."""
    g = torch.Generator().manual_seed(1)
    _, tree, _, _ = setting()
    masks = {n: torch.rand(tree[n].shape, generator=g) < 0.5 for n in model.params}
    return {**masks, "0.bias": False, "6.weight": True}


@pytest.mark.parametrize("only", [tensors_only, entries_only])
@pytest.mark.parametrize("how", ["momentum", "decay", "all"])
def test_frozen_entries_and_their_momentum_do_not_move_at_all(how, only):
    model, start, tree, velocity, _ = run(HOWS[how], only)
    masks = only(model)
    for n in model.params:
        moves = torch.as_tensor(masks.get(n, False)).expand_as(tree[n])
        assert tree[n][~moves].equal(start[n][~moves])
        assert (velocity[n][~moves] == 1.0).all()  # as it was before the first step
        assert (tree[n][moves] != start[n][moves]).all()


def test_the_clipped_norm_is_that_of_the_entries_in_training():
    clip = 1e-3  # far below any gradient here: every client's step then has exactly this norm
    model, tree, x, y = setting()
    before = {n: v.clone() for n, v in tree.items()}
    memory = {"momentum": {n: torch.zeros_like(v) for n, v in tree.items()}}
    keys = torch.zeros(CLIENTS, dtype=torch.int64)
    how = Training(momentum=0.0, clip=clip)
    step(Fitted(model), tree, memory, Batch(x[0], y[0], keys), Aim(entries_only(model), 1.0, cross_entropy), how)
    moved = sum((tree[n] - before[n]).flatten(1).square().sum(1) for n in model.params).sqrt()
    torch.testing.assert_close(moved, torch.full_like(moved, clip), rtol=1e-2, atol=0.0)


def test_a_rate_for_each_client():
    rates = torch.tensor([0.1, 0.0, 0.3], dtype=torch.float64)
    model, start, tree, _, _ = run(HOWS["decay"], lr=rates)
    for c, rate in enumerate(rates.tolist()):
        alone = run(HOWS["decay"], lr=rate)[2]
        for n in model.params:
            torch.testing.assert_close(tree[n][c], alone[n][c], rtol=1e-12, atol=1e-14)
    assert all(tree[n][1].equal(start[n][1]) for n in model.params)


def test_a_rate_for_each_tensor_and_entry():
    model, tree, x, y = setting()
    before = {n: v.clone() for n, v in tree.items()}
    halves = torch.zeros_like(tree["4.weight"])
    halves[:, ::2] = 0.2
    lr = {**dict.fromkeys(model.params, 0.1), "4.weight": halves, "6.bias": torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64)}
    velocity = {n: torch.zeros_like(tree[n]) for n in model.params}
    keys = torch.zeros(CLIENTS, dtype=torch.int64)
    everything = dict.fromkeys(model.params, True)
    memory = {"momentum": velocity}
    step(Fitted(model), tree, memory, Batch(x[0], y[0], keys), Aim(everything, lr, cross_entropy), Training(momentum=0.5))
    for n in model.params:  # after the first step the velocity is the gradient
        rate = lr[n].view(-1, 1) if n == "6.bias" else lr[n]
        torch.testing.assert_close(tree[n], before[n] - rate * velocity[n], rtol=1e-12, atol=1e-14)


def test_a_parameter_the_model_does_not_use_stays_put():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.ones(2))
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(x)

    model = fs.Model.wrap(Spare())
    tree = {n: v.expand(2, *v.shape).clone() for n, v in model.init(0).items()}
    memory = {"momentum": {n: torch.zeros_like(v) for n, v in tree.items()}}
    x, y, keys = torch.ones(2, 5, 4), torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    aim = Aim(dict.fromkeys(model.params, True), 0.1, cross_entropy)
    step(Fitted(model), tree, memory, Batch(x, y, keys), aim, Training())
    assert (tree["spare"] == 1.0).all()  # as under torch.optim.SGD, which skips parameters without a gradient


def test_forward_is_each_clients_module_in_eval_mode():
    model, tree, x, _ = setting()
    logits, features = forward(Fitted(model), tree, x[0])
    assert features.shape[:2] == logits.shape[:2]
    assert not logits.requires_grad
    for c in range(CLIENTS):
        module = net().eval()
        module.load_state_dict({n: v[c] for n, v in tree.items()}, strict=False)
        torch.testing.assert_close(logits[c], module(x[0, c]).detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1.0"),
        ({"momentum": float("nan")}, "momentum must be in"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative, not -0.1"),
        ({"clip": 0.0}, "clip must be positive, not 0.0"),
    ],
)
def test_training_refuses_what_cannot_train(bad, said):
    with pytest.raises(fs.InputError, match=said):
        Training(**bad)


# ---- plans: taps of a kernel that only ever meet padding


class Padded(nn.Module):
    """Pictures of 4 x 2 under a kernel of 7 x 5 with stride 2 x 1: rows 1 to 6 and columns 1 to 3 meet them."""

    def __init__(self, times=1):
        super().__init__()
        self.times = times
        self.conv = nn.Conv2d(2, 2, (7, 5), (2, 1), (3, 2))
        self.norm = nn.BatchNorm2d(2)
        self.point = nn.Conv2d(2, 2, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        for _ in range(self.times):
            y = self.norm(self.conv(x))
            x = torch.cat([y, y], 2)  # as tall as it was
        return self.fc(self.point(self.drop(y)).flatten(1))


@dataclass(frozen=True)
class Signs(fs.Optimizer):
    """Moves every entry by its rate, whatever its gradient."""

    def update(self, value, gradient, memory, rate):
        return torch.where(gradient < 0, value + rate, value - rate), {}


LIVE = Taps(1, 7, 1, 4)


def padded(module=None, **how):
    """A model, every client's values and momentum, and a batch for each."""
    g = torch.Generator().manual_seed(3)
    model = fs.Model.wrap(module or Padded, **how)
    base = model.init(0)
    noise = {n: torch.rand(CLIENTS, *v.shape, generator=g) for n, v in base.items()}
    tree = {n: v + 0.1 * noise[n] for n, v in base.items()}
    velocity = {n: 0.1 * noise[n].flip(0) for n in model.params}
    x = torch.randn(CLIENTS, BATCH, 2, 4, 2, generator=g)
    batch = x, torch.randint(0, 3, (CLIENTS, BATCH), generator=g), client_keys(0, torch.arange(CLIENTS), 0, "train")
    return model, tree, velocity, batch


def plan_for(model, tree, batch, only=None, objective=cross_entropy, ctx=None, how=None):
    only = dict.fromkeys(model.params, True) if only is None else only
    return find_shortcuts(Fitted(model), tree, Batch(*batch), Aim(only, 0.1, objective, ctx or {}), how or Training())


def far(out, y, params, ctx):
    """An objective that looks at the parameters its context names."""
    return cross_entropy(out, y, params, ctx) + sum(((params[n] - v) ** 2).sum() for n, v in ctx["points"].items())


def points(tree, name):
    return {"points": {name: tree[name] * 0.5}}


def test_the_taps_that_only_meet_padding_are_found():
    model, tree, _, batch = padded()
    plan = plan_for(model, tree, batch)
    assert dict(plan.crops) == {"conv.weight": LIVE}
    # they are those that make no difference: values there may be anything
    poisoned = {**tree, "conv.weight": torch.full_like(tree["conv.weight"], torch.nan)}
    LIVE.of(poisoned["conv.weight"]).copy_(LIVE.of(tree["conv.weight"]))
    torch.testing.assert_close(forward(Fitted(model), poisoned, batch[0])[0], forward(Fitted(model), tree, batch[0])[0])


def test_looking_for_a_plan_leaves_everything_alone():
    model, tree, _, batch = padded()
    before = {n: v.clone() for n, v in tree.items()}
    plan_for(model, tree, batch)
    assert all(v.equal(before[n]) for n, v in tree.items())  # running statistics among them


def test_a_kernel_that_meets_the_input_everywhere_has_no_shortcut():
    model, tree, _, batch = padded(lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(16, 3)))
    assert plan_for(model, tree, batch) == Shortcuts()


class Tied(Padded):
    """Its kernel is also used for something else."""

    def forward(self, x):
        return super().forward(x) + self.conv.weight.mean()


def mirrored(out, y, params, ctx):
    return cross_entropy(out, y, params, ctx) + params["conv.weight"].mT.square().mean()


NO_PLAN = {
    "used twice by the model": (lambda: Padded(times=2), {}),
    "used otherwise by the model": (Tied, {}),
    "used by the objective": (Padded, {"objective": far, "ctx": lambda tree, model: points(tree, "conv.weight")}),
    "pulled": (Padded, {"ctx": pulled}),
    "used by the objective in a list": (Padded, {"objective": lambda o, y, p, c: cross_entropy(o, y, p, c)
                                                 + torch.stack([p["conv.weight"]]).square().mean()}),
    "seen by the objective from the side": (Padded, {"objective": mirrored}),
    "weight decay": (Padded, {"how": Training(weight_decay=0.1)}),
    "clipped, where zeros count in the order of a sum": (Padded, {"how": Training(clip=0.1)}),
    "weight decay of its own": (Padded, {"how": Training(optimizer=fs.SGD(weight_decay=0.1))}),
    "an optimizer that does not say that it leaves such taps alone": (Padded, {"how": Training(optimizer=Signs())}),
    "frozen": (Padded, {"only": {"fc.weight": True}}),
    "padded to the same size": (lambda: nn.Sequential(nn.Conv2d(2, 2, 9, padding="same"), nn.Flatten(), nn.Linear(16, 3)), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_PLAN)
def test_a_kernel_that_matters_elsewhere_is_kept_whole(case):
    module, how = NO_PLAN[case]
    model, tree, _, batch = padded(module)
    if "ctx" in how:
        how = {**how, "ctx": how["ctx"](tree, model)}
    assert not plan_for(model, tree, batch, **how).crops


def test_an_objective_that_looks_at_other_parameters_does_not_matter():
    model, tree, _, batch = padded()
    assert plan_for(model, tree, batch, objective=far, ctx=points(tree, "fc.weight")).crops == {"conv.weight": LIVE}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_by_the_plan_is_one_without(momentum, masked):
    """To the bit."""
    how = Training(momentum=momentum)
    model, start, speed, batch = padded()
    only = dict.fromkeys(model.params, True)
    if masked:
        g = torch.Generator().manual_seed(4)
        only = {n: torch.rand(start[n].shape, generator=g) < 0.5 for n in model.params}
    speed["conv.weight"] *= 0.0  # as it is after any number of steps from rest: dead taps never gain any
    plan = plan_for(model, start, batch, only, how=how)
    assert plan.crops
    ends = []
    for by in (plan, Shortcuts()):
        tree, velocity = ({n: v.clone() for n, v in t.items()} for t in (start, speed))
        memory = {"momentum": velocity}
        losses = [
            step(Fitted(model), tree, memory, Batch(*batch), Aim(only, 0.1, cross_entropy), how, shortcuts=by) for _ in range(3)
        ]
        ends.append({**tree, **{f"velocity {n}": v for n, v in velocity.items()}, "losses": torch.stack(losses)})
    for n, v in ends[0].items():
        torch.testing.assert_close(v, ends[1][n], rtol=0.0, atol=0.0, msg=lambda m, n=n: f"{n}: {m}")
    assert not LIVE.of(ends[0]["conv.weight"]).equal(LIVE.of(start["conv.weight"]))


class Normed(nn.Module):
    """Three BatchNorms; `use` says what is made of the first."""

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(3))
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        x = self.use(self.norms[0](x))
        x = F.relu(self.norms[1](x) + x)
        return self.fc(torch.relu(self.norms[2](x)).flatten(1))


def in_place(y):
    F.relu(y, inplace=True)
    return y


class Block(nn.Module):
    """The end of a residual block, written like this; a BatchNorm's own sum is with the input, or with another BatchNorm."""

    def __init__(self, end):
        super().__init__()
        self.end = end
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(3))
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        first = self.norms[0](x)
        x = self.end(first, x)
        x = self.end(self.norms[1](x), self.norms[2](2 * x))
        return self.fc(x.flatten(1))


def added(y, x):
    y += x
    return F.relu(y, inplace=True)


def added_and_kept(y, x):
    z = y
    y += x
    return F.relu(y) + z


def added_to_the_other(y, x):
    x = x + 0
    x += y
    return F.relu(x)


SUMS = {
    "sum": (lambda y, x: F.relu(y + x), {0, 1}),
    "the other way": (lambda y, x: torch.relu(x + y), {0, 1}),
    "a function": (lambda y, x: F.relu(torch.add(x, y)), {0, 1}),
    "in place": (added, {0, 1}),
    "scaled": (lambda y, x: F.relu(torch.add(y, x, alpha=2)), set()),
    "another shape": (lambda y, x: F.relu(y + x[:1]), set()),
    "the sum besides": (lambda y, x: F.relu(s := y + x) + s, set()),
    "itself besides": (lambda y, x: F.relu(y + x) + y, {2}),
    "in place, and kept": (added_and_kept, set()),
    "in place into the other": (added_to_the_other, set()),
    "twice": (lambda y, x: F.relu(y + y), set()),
    "no relu": (lambda y, x: y + x, set()),
}
USES = {
    "relu": (F.relu, {0, 2}),
    "a module": (nn.ReLU(), {0, 2}),
    "in place": (nn.ReLU(inplace=True), {0, 2}),
    "a method": (lambda y: y.relu(), {0, 2}),
    "its form besides": (lambda y: F.relu(y).view(y.shape), {0, 2}),
    "none": (lambda y: y, {2}),
    "twice": (lambda y: F.relu(y) + F.relu(y), {2}),
    "relu and more": (lambda y: F.relu(y) + y, {2}),
    "in place, and then itself": (in_place, {0, 2}),
    "itself, and then in place": (lambda y: 2 * y + in_place(y), {2}),
    "in a list": (lambda y: torch.stack([F.relu(y), y]).sum(0), {2}),
    "another": (torch.tanh, {2}),
}


def rectified(monkeypatch, model, tree, batch):
    with monkeypatch.context() as m:
        m.setattr("fedselect.training.step.kernels", SimpleNamespace(serve=lambda x: True))
        return plan_for(model, tree, batch)


@pytest.mark.parametrize("use", USES)
def test_a_batch_norm_whose_only_use_is_a_relu_is_found(use, monkeypatch):
    module, found = USES[use]
    model, tree, _, batch = padded(lambda: Normed(module))
    assert not plan_for(model, tree, batch).rectified  # a CPU gains nothing from it
    assert rectified(monkeypatch, model, tree, batch).rectified == found


def test_a_batch_norm_that_the_head_is_given_is_not_rectified_for_it(monkeypatch):
    def build():
        head = nn.Sequential(nn.ReLU(), nn.Linear(16, 3))
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), head)

    model, tree, _, batch = padded(build, head="2")
    assert not rectified(monkeypatch, model, tree, batch).rectified


@pytest.mark.parametrize("use", SUMS)
def test_a_batch_norm_whose_only_use_is_a_sum_with_a_relu_is_found(use, monkeypatch):
    end, found = SUMS[use]
    model, tree, _, batch = padded(lambda: Block(end))
    assert not plan_for(model, tree, batch).joined  # a CPU gains nothing from it
    assert rectified(monkeypatch, model, tree, batch).joined == found


@pytest.mark.parametrize(
    "build",
    [*(lambda use=use: Normed(USES[use][0]) for use in ("relu", "in place", "relu and more")),
     *(lambda use=use: Block(SUMS[use][0]) for use in ("sum", "the other way", "in place"))],
)  # fmt: skip
def test_a_step_with_rectified_norms_is_one_without(build, monkeypatch):
    """To the bit."""
    model, start, speed, batch = padded(build)
    plan = rectified(monkeypatch, model, start, batch)
    assert plan.rectified or plan.joined
    ends = []
    for by in (plan, Shortcuts()):
        tree, velocity = ({n: v.clone() for n, v in t.items()} for t in (start, speed))
        everything = dict.fromkeys(model.params, True)
        losses = [
            step(
                Fitted(model),
                tree,
                {"momentum": velocity},
                Batch(*batch),
                Aim(everything, 0.1, cross_entropy),
                Training(),
                shortcuts=by,
            )
            for _ in range(3)
        ]
        ends.append({**tree, "losses": torch.stack(losses)})
    assert all(v.equal(ends[1][n]) for n, v in ends[0].items())
    assert not ends[0]["norms.0.weight"].equal(start["norms.0.weight"])


@pytest.mark.parametrize(
    ("build", "plan"),
    [
        (lambda: Normed(USES["relu and more"][0]), Shortcuts(rectified=frozenset({0}))),
        (lambda: Block(SUMS["itself besides"][0]), Shortcuts(joined=frozenset({0}))),
        (lambda: Block(SUMS["the sum besides"][0]), Shortcuts(joined=frozenset({0}))),
        (lambda: Normed(USES["relu"][0]), Shortcuts(joined=frozenset({0}))),
    ],
)
def test_a_step_that_does_not_follow_its_plan_is_not_taken(build, plan):
    model, tree, speed, batch = padded(build)
    everything = dict.fromkeys(model.params, True)
    with pytest.raises(RuntimeError, match="used in another way than before"):
        step(
            Fitted(model),
            tree,
            {"momentum": speed},
            Batch(*batch),
            Aim(everything, 0.1, cross_entropy),
            Training(),
            shortcuts=plan,
        )


def test_the_precision_of_products_is_set_for_the_time_being():
    def fail():
        assert product.fp32_precision == "ieee"
        raise ZeroDivisionError

    product = torch.backends.cuda.matmul
    before = product.fp32_precision
    with precision("tf32"):
        assert product.fp32_precision == "tf32"
        with pytest.raises(ZeroDivisionError), precision("float32"):
            fail()
        assert product.fp32_precision == "tf32"
    assert product.fp32_precision == before
