"""What a trace leaves out, and what is prepared of frozen parts: neither changes a number."""

import torch
from cases import assert_equal
from test_program import CLIENTS, SIZE, TASK, N, cnn, cross_entropy, setting, train
from torch.utils._python_dispatch import TorchDispatchMode

from fedselect.training import recorded, traced
from fedselect.training.fitted import Fitted
from fedselect.training.recorded import Programs, Walk
from fedselect.training.step import Aim
from fedselect.training.traced import Traced
from fedselect.training.work import Pass, Work

aten = torch.ops.aten


class Operations(TorchDispatchMode):
    """The operations that run, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def inputs():
    return {"tree": {"w": torch.randn(2, 3)}, "sums": {"at": torch.zeros(1, dtype=torch.int64)}}


def replayed(body, times=2):
    """The operations of some replays, after checking that they do what as many runs of the body do."""
    given = inputs()
    want = {k: {n: v.clone() for n, v in t.items()} for k, t in given.items()}
    trace = Traced(body, given)
    for _ in range(times):
        body(want)
    with Operations() as found:
        trace(given, times)
    assert_equal({**given["tree"], **given["sums"]}, {**want["tree"], **want["sums"]})
    return found.seen


def test_what_nobody_reads_is_left_out():
    def body(i):
        waste = i["tree"]["w"] * 3
        waste.add_(1).view(3, 2).mul_(2)  # changes memory of its own only
        i["tree"]["w"].mul_(0.5)
        i["sums"]["at"] += 1

    assert replayed(body) == [aten.mul_.Tensor, aten.add_.Tensor] * 2


def test_a_write_to_memory_that_is_read_later_stays():
    def body(i):
        w = i["tree"]["w"]
        kept = w * 3
        kept.view(3, 2).add_(1)  # through a view that is not used again
        w.copy_(kept)
        i["sums"]["at"] += 1

    assert replayed(body) == [aten.mul.Tensor, aten.view.default, aten.add_.Tensor, aten.copy_.default, aten.add_.Tensor] * 2


def test_what_follows_from_shapes_is_computed_once():
    def body(i):
        w = i["tree"]["w"]
        w.mul_(torch.arange(3) * 2 + torch.ones_like(w.sum()))
        i["sums"]["at"] += 1

    assert replayed(body) == [aten.mul_.Tensor, aten.add_.Tensor] * 2


def test_a_filled_tensor_that_is_written_to_is_filled_again():
    def body(i):
        w = i["tree"]["w"]
        sums = w.new_zeros(3)
        part = sums[:2]
        part.add_(w[0, :2])
        w.add_(sums + torch.arange(3) * 0)
        i["sums"]["at"] += 1

    assert aten.new_zeros.default in replayed(body)


def test_views_of_the_inputs_are_taken_once():
    def body(i):
        w = i["tree"]["w"]
        w.t().mul_(w.t()[0].sum().view(1) + w.t()[0].sum())
        i["sums"]["at"] += 1

    found = replayed(body, times=3)
    assert (found.count(aten.t.default), found.count(aten.select.int)) == (1, 1)
    assert found.count(aten.mul_.Tensor) == 3


def test_shapes_that_change_in_place_are_followed():
    def body(i):
        w = i["tree"]["w"]
        copy = w.clone()
        first = copy.view(6).clone()
        copy.t_()
        w.add_(first.view(2, 3) + copy.reshape(6).view(2, 3))
        i["sums"]["at"] += 1

    replayed(body)


def test_another_number_of_clients_needs_no_other_text(monkeypatch):
    monkeypatch.setitem(recorded.RECORD_AFTER, "cpu", 1)
    traced._compiled.cache_clear()
    for clients in (2, 3, 5):
        programs, tree, data = setting(clients=clients)
        train(programs, tree, data)
    assert traced._compiled.cache_info()[:2] == (2, 1)


def frozen(programs):
    """Everything but the convolution whose outer taps meet only padding."""
    return {n: n != "4.weight" for n in programs.model.params}


def alone(monkeypatch, build=cnn):
    monkeypatch.setattr(Fitted, "stackable", False)
    programs, tree, data = setting(build, clients=1)
    assert "4.weight" in programs.fitted.taps
    return programs, tree, data


def test_a_frozen_kernels_live_taps_are_copied_once_and_change_nothing(monkeypatch):
    programs, tree, data = alone(monkeypatch)
    calls = []
    hold = recorded.hold
    monkeypatch.setattr(recorded, "hold", lambda *a: calls.append(1) or hold(*a))
    got = train(programs, tree, data, only=frozen(programs), times=3)
    assert len(calls) == 1
    monkeypatch.setattr(recorded, "hold", lambda *a: {})
    assert_equal(train(Programs(programs.fitted, programs.training, TASK), tree, data, only=frozen(programs), times=3), got)


def test_a_kernel_with_other_values_is_not_taken_for_the_one_before(monkeypatch):
    programs, tree, data = alone(monkeypatch)
    only = frozen(programs)
    order, shuffle = torch.arange(N).unsqueeze(0), torch.zeros(1, dtype=torch.int64)
    walk = Walk(order, shuffle, SIZE)
    losses = []
    for _ in range(2):
        fresh = Programs(programs.fitted, programs.training, TASK)
        for these in (programs, fresh):
            now = {n: v if n == "4.weight" else v.clone() for n, v in tree.items()}
            memory = these.rest({n: now[n] for n in these.model.params})
            losses.append(these.train(now, memory, Aim(only, 0.1, cross_entropy), data, [walk], first=0, last=2))
        tree["4.weight"].mul_(-2)  # in place: the same memory
    assert losses[0].equal(losses[1])
    assert losses[2].equal(losses[3])
    assert not losses[0].equal(losses[2])


def test_frozen_parts_are_not_copied_one_by_one(monkeypatch):
    monkeypatch.setattr(Fitted, "stackable", False)
    programs, tree, data = setting(cnn)
    before = {n: v.clone() for n, v in tree.items()}
    work = Work(programs, data, data, ids=torch.arange(CLIENTS), round=0, seed=0, initial=dict)
    out = work.train(tree, [Pass(frozen(programs), 0.1, 0)])
    assert list(out) == list(tree)
    assert {n for n in tree if out[n] is tree[n]} == {"4.weight"}
    assert_equal(tree, before)
    assert not out["6.weight"].equal(tree["6.weight"])
