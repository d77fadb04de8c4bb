"""Metrics of tasks, against scikit-learn and plain loops: ties, one class alone, classes that are absent."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sk

import fedselect as fs
from fedselect.tasks.metrics import Measure

CLASSES = 4


def softmax(z):
    return torch.softmax(z.double(), -1).numpy()


def calibration(confidence, right, bins=15):
    """Sample by sample, in intervals (low, high] of equal width."""
    total = 0.0
    for b in range(bins):
        inside = [i for i, c in enumerate(confidence) if b / bins < c <= (b + 1) / bins]
        if inside:
            gap = sum(right[i] for i in inside) / len(inside) - sum(confidence[i] for i in inside) / len(inside)
            total += len(inside) / len(confidence) * abs(gap)
    return total


def one_against_rest(of, y, p):
    """The mean over classes that are there; of two classes, of the second."""
    classes = [1] if p.shape[1] == 2 else np.unique(y)
    return np.mean([of(y == c, p[:, c]) for c in classes])


def expected(z, y):
    """What scikit-learn says of scores (N, K) and classes (N,)."""
    p, said = softmax(z), z.argmax(1).numpy()
    y, ranked = y.numpy(), p.round(12)  # probabilities that differ by rounding alone are tied
    return {
        "accuracy": sk.accuracy_score(y, said),
        "balanced_accuracy": sk.balanced_accuracy_score(y, said),
        "f1": sk.f1_score(y, said, average="macro"),
        "auroc": one_against_rest(sk.roc_auc_score, y, ranked),
        "average_precision": one_against_rest(sk.average_precision_score, y, ranked),
        "ece": calibration(p.max(1), said == y),
        "log_loss": sk.log_loss(y, p, labels=range(p.shape[1])),
    }


def found(task, outputs, targets):
    return {m.name: m.value(outputs, targets) for m in task.measured(asked=[m.name for m in task.more])}


def drawn(rows, classes, seed, rounded=False):
    g = torch.Generator().manual_seed(seed)
    z, y = 2 * torch.randn(rows, classes, generator=g), torch.randint(0, classes, (rows,), generator=g)
    return (z.round() if rounded else z), y  # whole scores are tied


CASES = {
    "many": drawn(200, CLASSES, 0),
    "ties": drawn(150, CLASSES, 1, rounded=True),
    "two classes": drawn(80, 2, 2),
    "two classes, ties": drawn(80, 2, 3, rounded=True),
    "absent": (lambda z, y: (z, torch.where(y == 2, 0, y)))(*drawn(60, CLASSES, 4)),
    "few": drawn(3, 2, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_classification_is_that_of_scikit_learn(case):
    z, y = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted and not there
        wanted = expected(z, y)
    ours = found(fs.Classification(), z, y)
    assert {name: ours[name] for name in wanted} == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("two")])
def test_one_logit_is_measured_as_two_scores_are(case):
    z, y = CASES[case]
    logit = (z[:, 1] - z[:, 0]).unsqueeze(1)
    assert found(fs.Binary(), logit, y) == pytest.approx(found(fs.Classification(), z, y), abs=1e-6)


@pytest.mark.parametrize("task", [fs.Classification(), fs.Binary()])
def test_one_class_alone_has_no_ranking(task):
    z, _ = drawn(20, 2, 5)
    outputs = z if isinstance(task, fs.Classification) else z[:, :1]
    ours = found(task, outputs, torch.ones(20, dtype=torch.int64))
    assert [name for name, v in ours.items() if math.isnan(v)] == ["auroc", "average_precision"]


def test_scores_far_apart_are_still_told_apart():
    """Their probabilities are all 1 in float64, so that ranking those would give 0.5."""
    z = torch.tensor([[0.0, 40.0], [0.0, 50.0], [0.0, 60.0], [0.0, 70.0]])
    y = torch.tensor([0, 0, 1, 1])
    assert sk.roc_auc_score(y, softmax(z)[:, 1]) == 0.5
    assert found(fs.Classification(), z, y)["auroc"] == 1.0


def test_multilabel_is_that_of_scikit_learn():
    g = torch.Generator().manual_seed(6)
    z, y = torch.randn(90, 5, generator=g), (torch.rand(90, 5, generator=g) < 0.4).float()
    z[:, 1] = z[:, 1].round()
    y[:, 3] = 0  # a label that nobody has here: it has no ranking, and its F1 is that of what is said wrongly
    y[:, 4], z[:, 4] = 0, -1.0  # and one that is not even said: left out
    p, said, there = torch.sigmoid(z.double()), (z > 0).numpy(), [0, 1, 2]
    wanted = {
        "accuracy": 1 - sk.hamming_loss(y.numpy(), said),
        "f1": sk.f1_score(y.numpy(), said, average="macro", zero_division=np.nan),
        "auroc": sk.roc_auc_score(y[:, there], p[:, there], average="macro"),
        "average_precision": sk.average_precision_score(y[:, there], p[:, there], average="macro"),
        "ece": calibration(torch.maximum(p, 1 - p).flatten().tolist(), (said == y.bool().numpy()).flatten()),
        "log_loss": np.mean([sk.log_loss(y[:, k], p[:, k], labels=[0, 1]) for k in range(5)]),
    }
    ours = found(fs.Multilabel(), z, y)
    assert {name: ours[name] for name in wanted} == pytest.approx(wanted, abs=1e-9)
    assert found(fs.Multilabel(), z, y.long()) == pytest.approx(ours)


def test_sequences_are_measured_over_positions_that_count():
    z, y = drawn(30, CLASSES, 7)
    z, y = z.view(6, 5, CLASSES), y.view(6, 5).clone()
    y[0, 1:], y[3, 4] = -100, -100
    kept = y != -100
    ours, wanted = found(fs.Sequences(), z, y), expected(z[kept], y[kept])
    assert {name: ours[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    nothing = found(fs.Sequences(), z, torch.full_like(y, -100))
    assert all(math.isnan(v) for name, v in nothing.items() if name != "test_loss")
    assert nothing["test_loss"] == 0.0


@pytest.mark.parametrize("targets", [1, 3])
def test_regression_is_that_of_scikit_learn(targets):
    g = torch.Generator().manual_seed(targets)
    y = 10 + torch.randn(50, targets, generator=g)
    outputs = y + 0.3 * torch.randn(50, targets, generator=g)
    wanted = {
        "mae": sk.mean_absolute_error(y, outputs),
        "rmse": sk.root_mean_squared_error(y, outputs),
        "r2": sk.r2_score(y.double(), outputs.double()),
    }
    flat = y.squeeze(1) if targets == 1 else y
    ours = found(fs.Regression(), outputs, flat)
    assert {name: ours[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)


def test_constant_targets_have_no_r2():
    y, outputs = torch.full((7,), 0.1), torch.randn(7, 1)
    assert math.isnan(found(fs.Regression(), outputs, y)["r2"])
    two = torch.stack([y, torch.arange(7.0)], 1)
    ours = found(fs.Regression(), outputs.expand(7, 2), two)["r2"]
    assert ours == pytest.approx(sk.r2_score(two[:, 1], outputs[:, 0]), abs=1e-6)  # of the one that varies


def test_losses_are_those_of_torch():
    z, y = drawn(40, CLASSES, 9)
    weights = torch.tensor([0.5, 1.0, 2.0, 0.0])
    for task, how in (
        (fs.Classification(), {}),
        (fs.Classification(label_smoothing=0.2), {"label_smoothing": 0.2}),
        (fs.Classification(class_weights="0.5 1 2 0"), {"weight": weights}),
        (fs.Classification(class_weights="0.5 1 2 0", label_smoothing=0.2), {"weight": weights, "label_smoothing": 0.2}),
    ):
        assert torch.allclose(task.loss(z, y), F.cross_entropy(z, y, reduction="none", **how), atol=1e-6)
    binary = F.binary_cross_entropy_with_logits(z[:, 0], (y > 1).float(), reduction="none")
    assert torch.allclose(fs.Binary().loss(z[:, :1], (y > 1).long()), binary)
    assert torch.allclose(fs.Binary(class_weights="1 3").loss(z[:, :1], (y > 1).long()), binary * torch.where(y > 1, 3.0, 1.0))
    rows, wanted = z.view(8, 5, CLASSES), y.view(8, 5).clone()
    wanted[0, 2:] = -100
    plain = [F.cross_entropy(row, target, ignore_index=-100) for row, target in zip(rows, wanted, strict=True)]
    assert torch.allclose(fs.Sequences().loss(rows, wanted), torch.stack(plain), atol=1e-6)


def test_over_clients_a_metric_has_a_worst_tenth_and_a_weighted_mean():
    values = [None, *(i / 20 for i in range(20))]  # 0, 0.05, ..., 0.95 and one that is not defined
    up, down = Measure("accuracy"), Measure("error", more_is_better=False)
    spread = fs.Spread.of(up, values, [7, *range(1, 21)])
    assert (spread.defined, spread.clients) == (20, 21)
    assert spread.mean == pytest.approx(0.475)  # (0 + 0.95) / 2
    assert spread.worst_tenth == pytest.approx(0.025)  # two of twenty: 0 and 0.05
    assert fs.Spread.of(down, values).worst_tenth == pytest.approx(0.925)  # 0.9 and 0.95
    assert spread.weighted == pytest.approx(sum(v * (i + 1) for i, v in enumerate(values[1:])) / 210, abs=1e-6)
    assert fs.Spread.of(up, values).weighted is None
    assert fs.Spread.of(up, [0.3, 0.5]).worst_tenth == 0.3  # at least of one
    assert fs.Spread.of(up, [None, None]) == fs.Spread(None, None, None, 0, 2)
