"""The formulas of metrics, for one client, in float64. A metric that is undefined on its samples is NaN."""

import torch
from torch import Tensor

BINS = 15
"""Number of confidence intervals of equal width in the calibration error."""


def auroc(score: Tensor, positive: Tensor) -> Tensor:
    """The probability that a positive sample has a higher score than a negative one; ties count half."""
    up, down = positive.sum().double(), (~positive).sum().double()
    _, place, count = torch.unique(score, return_inverse=True, return_counts=True)
    rank = count.cumsum(0).double() - (count.double() - 1) / 2  # ranks start at 1; equal scores share their mean rank
    found = (rank[place][positive].sum() - up * (up + 1) / 2) / (up * down)  # 0 / 0 if all samples are of one kind
    return torch.where(score.isnan().any(), torch.nan, found)


def average_precision(score: Tensor, positive: Tensor) -> Tensor:
    """The mean over positive samples of the precision at their score; equal scores share one threshold."""
    values, place = torch.unique(score, return_inverse=True)
    hits = torch.zeros(len(values), dtype=torch.float64, device=score.device)
    here, positives = hits.index_add(0, place, torch.ones_like(score)), hits.index_add(0, place, positive.double())
    precision = positives.flip(0).cumsum(0) / here.flip(0).cumsum(0)  # from the highest score down
    found = (positives.flip(0) * precision).sum() / positives.sum()
    return torch.where(score.isnan().any() | positive.all(), torch.nan, found)


def f1(said: Tensor, truth: Tensor) -> Tensor:
    """The mean F1 over the classes that occur in predictions or targets, both (N, classes) booleans."""
    return (2 * (said & truth).sum(0).double() / (said.sum(0) + truth.sum(0))).nanmean()


def recall(said: Tensor, truth: Tensor) -> Tensor:
    """Balanced accuracy: the mean recall over the classes that occur, from (N, classes) booleans."""
    return ((said & truth).sum(0).double() / truth.sum(0)).nanmean()


def calibration_error(confidence: Tensor, right: Tensor) -> Tensor:
    """The mean distance between accuracy and confidence over confidence intervals, weighted by their samples."""
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    gaps = torch.zeros(BINS, dtype=torch.float64, device=confidence.device)
    gaps = gaps.index_add(0, torch.bucketize(confidence, edges), right.double() - confidence)
    return gaps.abs().sum() / len(confidence)


def log_odds(scores: Tensor) -> Tensor:
    """The log odds of each of K classes against all others together, from (N, K) scores.

    Unlike probabilities they do not saturate. The other scores are summed from smallest to largest, relative to the largest,
    so that samples which differ only by a common shift or by the order of the others get exactly equal odds, and tie.
    """
    count, classes = scores.shape
    order = scores.argsort(1)
    ranked = scores.gather(1, order)
    odds = []
    for c in range(classes):
        others = ranked[order != c].view(count, classes - 1)
        most = others[:, -1:]
        odds.append((scores[:, c : c + 1] - most) - (others - most).exp().sum(1, keepdim=True).log())
    return torch.cat(odds, 1)
