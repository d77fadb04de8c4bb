"""The named methods that are Partial with a choice of mask and phases. Defaults are the paper's protocol, but for FedSelect's
rates, which were chosen from its grid on held-out data (docs/reproduction.md)."""

from typing import Literal

from fedselect.core.checks import check_choice
from fedselect.core.errors import InputError
from fedselect.core.shown import alias
from fedselect.core.tree import Scalar
from fedselect.methods.common import Answers, Stats, Weight, check_finetune_lr
from fedselect.methods.disagree import Disagreement
from fedselect.methods.method import View
from fedselect.methods.partial import Partial, Phases
from fedselect.methods.select import DeltaSelect, Fixed, Reading, body, everything, head, norms, not_convolutions, nothing
from fedselect.methods.select import layers as by_name

LAYERS = {  # the paper's ablation, by torchvision's names for ResNet18
    "A": "conv1.weight",
    "B": "layer1.0.conv1.weight",
    "C": "layer2.0.conv1.weight",
    "D": "layer4.1.conv1.weight",
}


@alias
def FedSelect(
    rate: Scalar = 0.05,
    limit: Scalar = 0.30,
    epochs: int = 3,
    lr: Scalar = 0.1,
    personal_lr: Scalar | None = 0.1,
    *,
    by: Literal["most", "least", "random"] = "most",
    select: Reading = Reading(),  # noqa: B008  # frozen
    order: Literal["alternate", "joint"] = "alternate",
    server_average: Scalar = 0.0,
    freeze: Literal["nothing", "head"] = "nothing",
    finetune: int = 0,
    finetune_lr: Scalar | None = None,
    answers: Answers = "all",
    weight: Weight = "uniform",
    norm_stats: Stats = "local",
    view: View = "local",
) -> Partial:
    """Each client grows a mask of the entries that move most, keeps those personal and shares the rest (CVPR 2024).

    rate: the share of entries that joins the mask at a time, rounded up
    limit: the largest personal share, rounded down
    epochs: pairs of passes (personal, shared) a round
    lr: learning rate of the shared part
    personal_lr: learning rate of the personal part; none: as lr
    by: what joins: entries that moved most, least, or drawn at random (ablations)
    select: how the rule is read where the paper leaves it open: see fs.Reading
    order: personal and shared passes in turn, or passes over both together
    server_average: weight of the past in a moving mean of the aggregate, which the merged view takes in its place
    freeze: what keeps its initial value, the same for all, until fine-tuning (as the head of FedBABU); needs finetune
    finetune: passes over everything on the merged model before it is evaluated, as in FedAvg + FT; needs view=merged
    finetune_lr: learning rate of fine-tuning; none: as lr; needs finetune
    answers: own: the merged model answers only with classes that the client trains on
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: the model reported: after local training, or merged with the aggregate
    """
    check_choice(("alternate", "joint"), order=order)
    check_choice(("nothing", "head"), freeze=freeze)
    check_finetune_lr("FedSelect", finetune, finetune_lr)
    if finetune == 0 and freeze == "head":
        raise InputError(
            "FedSelect without finetune would never train a head that freeze=head keeps as it was; set finetune too."
        )
    if freeze == "head" and by == "least":
        raise InputError("FedSelect with freeze=head and by=least would select the head, which does not move; leave one out.")
    chosen = DeltaSelect(rate, limit, by, **vars(select))
    phases: Phases = (("all", epochs),) if order == "joint" else (("personal", 1), ("shared", 1)) * epochs
    tune: Phases = (("all", finetune),) if finetune else ()
    return Partial(
        chosen, phases, lr, personal_lr, weight, norm_stats, finetune=tune, finetune_lr=finetune_lr,
        server_average=server_average, freeze=head if freeze == "head" else nothing, answers=answers, view=view,
    )  # fmt: skip


@alias
def FedPersist(
    window: int = 10,
    threshold: Scalar = 0.05,
    epochs: int = 3,
    lr: Scalar = 0.1,
    *,
    unit: Literal["layer", "rank"] = "layer",
    finetune: int = 3,
    finetune_lr: Scalar | None = 0.01,
    weight: Weight = "uniform",
    norm_stats: Stats = "local",
) -> Partial:
    """Each client keeps the last layer in which it persistently disagrees with the others, shares the rest, and fine-tunes.

    window: rounds of a client before it is tested; 0: nothing is ever personal
    threshold: the persistence above which a layer may become personal; 1: none does
    epochs: passes over the client's training data a round
    lr: learning rate
    unit: what is tested and becomes personal: a layer, or the ranks of its adapter
    finetune: passes of fine-tuning; 0: no fine-tuning
    finetune_lr: learning rate of fine-tuning; none: as lr
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    """
    tune: Phases = (("all", finetune),) if finetune else ()
    return Partial(
        Disagreement(window, threshold, unit), (("all", epochs),), lr, None, weight, norm_stats,
        finetune=tune, finetune_lr=finetune_lr, view="merged",
    )  # fmt: skip


@alias
def Local(epochs: int = 3, lr: Scalar = 0.01) -> Partial:
    """Every client trains alone; nothing is communicated.

    epochs: passes over the client's training data a round
    lr: learning rate
    """
    return Partial(Fixed(everything), (("all", epochs),), lr)


@alias
def FedAvg(
    epochs: int = 3,
    lr: Scalar = 0.01,
    answers: Answers = "all",
    weight: Weight = "uniform",
    norm_stats: Stats = "shared",
    view: View = "merged",
) -> Partial:
    """One global model, the mean of all clients' models; reported: that model on every client's data.

    epochs: passes over the client's training data a round
    lr: learning rate
    answers: own: the reported model answers only with classes that the client trains on
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: the model reported: after local training, or merged with the aggregate
    """
    return Partial(Fixed(nothing), (("all", epochs),), lr, None, weight, norm_stats, answers=answers, view=view)


@alias
def FedAvgFT(
    epochs: int = 3,
    lr: Scalar = 0.01,
    finetune: int | None = None,
    finetune_lr: Scalar | None = None,
    *,
    answers: Answers = "all",
    weight: Weight = "uniform",
    norm_stats: Stats = "shared",
    server_average: Scalar = 0.0,
) -> Partial:
    """FedAvg; then every client fine-tunes the global model (by default with the round's own epochs) before evaluation.

    epochs: passes over the client's training data a round
    lr: learning rate
    finetune: passes of fine-tuning; none: as epochs; 0: no fine-tuning
    finetune_lr: learning rate of fine-tuning; none: as lr
    answers: own: the reported model answers only with classes that the client trains on
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    server_average: weight of the past in a moving mean of the aggregate, which the merged view takes in its place
    """
    tune: Phases = (("all", epochs if finetune is None else finetune),)
    return Partial(
        Fixed(nothing), (("all", epochs),), lr, None, weight, norm_stats, finetune=tune, finetune_lr=finetune_lr,
        server_average=server_average, answers=answers, view="merged",
    )  # fmt: skip


@alias
def FedPer(
    epochs: int = 3,
    lr: Scalar = 0.01,
    personal_lr: Scalar | None = None,
    *,
    warmup: int = 0,
    finetune: int = 0,
    finetune_lr: Scalar | None = None,
    weight: Weight = "uniform",
    norm_stats: Stats = "local",
    view: View = "local",
) -> Partial:
    """Head personal, body averaged, both trained together; after `warmup` rounds in which the head is averaged too.

    epochs: passes over the client's training data a round
    lr: learning rate of the body
    personal_lr: learning rate of the head; none: as lr
    warmup: rounds at the start in which the head is averaged too
    finetune: epochs in which the merged model is trained before it is evaluated; needs view=merged
    finetune_lr: learning rate of fine-tuning; none: as lr
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: the model reported: after local training, or merged with the aggregate
    """
    tune: Phases = (("all", finetune),) if finetune else ()
    return Partial(
        Fixed(head, warmup), (("all", epochs),), lr, personal_lr, weight, norm_stats,
        finetune=tune, finetune_lr=finetune_lr, view=view,
    )  # fmt: skip


@alias
def FedRep(
    epochs: int = 3,
    head_epochs: int | None = None,
    lr: Scalar = 0.01,
    personal_lr: Scalar | None = None,
    *,
    weight: Weight = "uniform",
    norm_stats: Stats = "local",
    view: View = "local",
) -> Partial:
    """Head personal: first the head with the body frozen, then the body with the head frozen (each for `epochs`).

    epochs: passes of the body a round
    head_epochs: passes of the head a round; none: as epochs
    lr: learning rate of the body
    personal_lr: learning rate of the head; none: as lr
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: the model reported: after local training, or merged with the aggregate
    """
    phases: Phases = (("personal", epochs if head_epochs is None else head_epochs), ("shared", epochs))
    return Partial(Fixed(head), phases, lr, personal_lr, weight, norm_stats, view=view)


@alias
def FedBABU(
    epochs: int = 3,
    lr: Scalar = 0.01,
    finetune: int | None = None,
    finetune_lr: Scalar | None = None,
    *,
    answers: Answers = "all",
    weight: Weight = "uniform",
    norm_stats: Stats = "local",
    server_average: Scalar = 0.0,
) -> Partial:
    """Only the body is trained and averaged, under a head that keeps its initial value; clients fine-tune both at the end.

    epochs: passes of the body a round
    lr: learning rate of the body
    finetune: passes of fine-tuning; none: as epochs; 0: no fine-tuning
    finetune_lr: learning rate of fine-tuning; none: as lr
    answers: own: the reported model answers only with classes that the client trains on
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    server_average: weight of the past in a moving mean of the aggregate, which the merged view takes in its place
    """
    tune: Phases = (("all", epochs if finetune is None else finetune),)
    return Partial(
        Fixed(head), (("shared", epochs),), lr, None, weight, norm_stats, finetune=tune, finetune_lr=finetune_lr,
        server_average=server_average, answers=answers, view="merged",
    )  # fmt: skip


@alias
def LGFedAvg(
    epochs: int = 3,
    lr: Scalar = 0.01,
    personal_lr: Scalar | None = None,
    *,
    shared: Literal["head", "convolutions"] = "head",
    warmup: int = 0,
    weight: Weight = "uniform",
    norm_stats: Stats = "local",
    view: View = "local",
) -> Partial:
    """Body personal, head averaged, both trained together: the FedSelect paper's reading of a name with four meanings.

    The authors' CIFAR code shares the convolutions instead (shared="convolutions") and starts from a model trained by
    FedAvg (warmup: rounds in which every parameter is averaged; statistics follow norm_stats then too).

    epochs: passes over the client's training data a round
    lr: learning rate of the shared part
    personal_lr: learning rate of the personal part; none: as lr
    shared: what is averaged: the head, or the convolutions
    warmup: rounds at first in which every parameter is averaged; statistics follow norm_stats
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: the model reported: after local training, or merged with the aggregate
    """
    check_choice(("head", "convolutions"), shared=shared)
    select = Fixed(body if shared == "head" else not_convolutions, warmup)
    return Partial(select, (("all", epochs),), lr, personal_lr, weight, norm_stats, view=view)


@alias
def PersonalLayers(
    layers: str = "A",
    epochs: int = 3,
    lr: Scalar = 0.1,
    personal_lr: Scalar | None = 0.1,
    *,
    weight: Weight = "uniform",
    norm_stats: Stats = "local",
    view: View = "local",
) -> Partial:
    """The paper's layer ablation: chosen layers personal, trained as FedSelect trains (A, B, C, D, or names with commas).

    layers: A, B, C, D, or names of parameters with commas between; * stands for anything
    epochs: pairs of passes (personal, shared) a round
    lr: learning rate of the shared part
    personal_lr: learning rate of the personal part; none: as lr
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: the model reported: after local training, or merged with the aggregate
    """
    alternate: Phases = (("personal", 1), ("shared", 1)) * epochs
    chosen = [LAYERS.get(name.strip(), name.strip()) for name in layers.split(",")]
    return Partial(Fixed(by_name(*chosen)), alternate, lr, personal_lr, weight, norm_stats, view=view)


@alias
def FedProx(
    epochs: int = 3,
    lr: Scalar = 0.01,
    mu: Scalar = 0.01,
    weight: Weight = "uniform",
    norm_stats: Stats = "shared",
    view: View = "merged",
) -> Partial:
    """FedAvg with a pull towards the global model received: 0.5 mu ||w - w_t||^2.

    epochs: passes over the client's training data a round
    lr: learning rate
    mu: strength of the pull
    weight: what a client counts in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: the model reported: after local training, or merged with the aggregate
    """
    return Partial(Fixed(nothing), (("all", epochs),), lr, None, weight, norm_stats, mu=mu, view=view)


@alias
def FedBN(epochs: int = 3, lr: Scalar = 0.01, weight: Weight = "uniform", view: View = "local") -> Partial:
    """Norm layers personal, affine parameters and statistics; everything else averaged.

    epochs: passes over the client's training data a round
    lr: learning rate
    weight: what a client counts in the mean: 1, or its number of training samples
    view: the model reported: after local training, or merged with the aggregate
    """
    return Partial(Fixed(norms), (("all", epochs),), lr, None, weight, "local", view=view)
