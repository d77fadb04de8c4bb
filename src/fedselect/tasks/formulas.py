"""The formulas behind metrics, for one client, in float64. What is not defined on its samples is NaN."""

import torch
from torch import Tensor

BINS = 15
"""Of the calibration error: intervals of confidence of equal width."""


def auroc(score: Tensor, positive: Tensor) -> Tensor:
    """The chance that a positive sample has a higher score than a negative one, equal scores counting half."""
    up, down = positive.sum().double(), (~positive).sum().double()
    _, place, count = torch.unique(score, return_inverse=True, return_counts=True)
    rank = count.cumsum(0).double() - (count.double() - 1) / 2  # from 1; equal scores share their mean rank
    found = (rank[place][positive].sum() - up * (up + 1) / 2) / (up * down)  # 0 / 0 where there is one kind alone
    return torch.where(score.isnan().any(), torch.nan, found)


def average_precision(score: Tensor, positive: Tensor) -> Tensor:
    """The mean over positive samples of the precision at their score; equal scores are one threshold."""
    values, place = torch.unique(score, return_inverse=True)
    hits = torch.zeros(len(values), dtype=torch.float64, device=score.device)
    here, positives = hits.index_add(0, place, torch.ones_like(score)), hits.index_add(0, place, positive.double())
    precision = positives.flip(0).cumsum(0) / here.flip(0).cumsum(0)  # from the highest score down
    found = (positives.flip(0) * precision).sum() / positives.sum()
    return torch.where(score.isnan().any() | positive.all(), torch.nan, found)


def f1(said: Tensor, truth: Tensor) -> Tensor:
    """The mean F1 of the classes that occur in either; (N, classes) of yes or no."""
    return (2 * (said & truth).sum(0).double() / (said.sum(0) + truth.sum(0))).nanmean()


def recall(said: Tensor, truth: Tensor) -> Tensor:
    """The mean recall of the classes that occur: balanced accuracy; (N, classes) of yes or no."""
    return ((said & truth).sum(0).double() / truth.sum(0)).nanmean()


def calibration_error(confidence: Tensor, right: Tensor) -> Tensor:
    """How far the share of right answers is from the confidence, over intervals of confidence, weighted by their samples."""
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    gaps = torch.zeros(BINS, dtype=torch.float64, device=confidence.device)
    gaps = gaps.index_add(0, torch.bucketize(confidence, edges), right.double() - confidence)
    return gaps.abs().sum() / len(confidence)


def log_odds(scores: Tensor) -> Tensor:
    """(N, K) scores of K classes: how much more likely each is than all others together, as a logarithm.

    Unlike probabilities they do not saturate. Others are summed from the least to the greatest, against the greatest: samples
    that are equal but for a common shift or the order of the others then have equal odds to the bit, and are tied.
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
