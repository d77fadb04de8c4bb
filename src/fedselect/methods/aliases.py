"""The named methods that are `Partial` with a choice of mask and phases.

Defaults are those of the paper's protocol, except FedSelect's learning rates, which were chosen from its grid on held-out data
(docs/reproduction.md)."""

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
    """Each client grows a mask of the entries that move most, keeps them personal and shares the rest (CVPR 2024).

    rate: share of entries added to the mask at a time, rounded up
    limit: largest share of personal entries, rounded down
    epochs: pairs of local epochs (personal, then shared) per round
    lr: learning rate of the shared part
    personal_lr: learning rate of the personal part; none: as lr
    by: which entries are added: those that moved most, least, or random ones (ablations)
    select: choices that the paper leaves open: see fs.Reading
    order: train personal and shared entries in alternate epochs, or both together
    server_average: decay of a moving average of the aggregate, which the merged model uses instead of the latest aggregate
    freeze: part that keeps its common initial value until fine-tuning (like the head in FedBABU); needs finetune
    finetune: epochs of fine-tuning the whole merged model before evaluation, as in FedAvg + FT; needs view=merged
    finetune_lr: learning rate of fine-tuning; none: as lr; needs finetune
    answers: own: the merged model predicts only classes that occur in the client's training data
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
    """
    check_choice(("alternate", "joint"), order=order)
    check_choice(("nothing", "head"), freeze=freeze)
    check_finetune_lr("FedSelect", finetune, finetune_lr)
    if finetune == 0 and freeze == "head":
        raise InputError("FedSelect with freeze=head trains the head only when it fine-tunes; set finetune too.")
    if freeze == "head" and by == "least":
        raise InputError("FedSelect with freeze=head and by=least would select the head, which does not move; drop one.")
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
    """Each client keeps the last layer in which it persistently disagrees with the others, shares the rest and fine-tunes.

    window: rounds a client takes part in before it is tested; 0: nothing becomes personal
    threshold: persistence above which a layer may become personal; 1: none does
    epochs: local epochs per round
    lr: learning rate
    unit: unit that is tested and becomes personal: a layer, or single ranks of its adapter
    finetune: epochs of fine-tuning; 0: no fine-tuning
    finetune_lr: learning rate of fine-tuning; none: as lr
    weight: weight of a client in the mean: 1, or its number of training samples
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

    epochs: local epochs per round
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
    """One global model, the mean of all clients' models, evaluated on every client's data.

    epochs: local epochs per round
    lr: learning rate
    answers: own: the reported model predicts only classes that occur in the client's training data
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
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
    """FedAvg, after which every client fine-tunes the global model before evaluation (by default for `epochs`).

    epochs: local epochs per round
    lr: learning rate
    finetune: epochs of fine-tuning; none: as epochs; 0: no fine-tuning
    finetune_lr: learning rate of fine-tuning; none: as lr
    answers: own: the reported model predicts only classes that occur in the client's training data
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    server_average: decay of a moving average of the aggregate, which the merged model uses instead of the latest aggregate
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
    """The head is personal and the body averaged; both train together. For the first `warmup` rounds the head is averaged too.

    epochs: local epochs per round
    lr: learning rate of the body
    personal_lr: learning rate of the head; none: as lr
    warmup: rounds at the start in which the head is averaged too
    finetune: epochs of fine-tuning the merged model before evaluation; needs view=merged
    finetune_lr: learning rate of fine-tuning; none: as lr
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
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
    """The head is personal. Each round trains the head with the body frozen, then the body with the head frozen.

    epochs: local epochs of the body per round
    head_epochs: local epochs of the head per round; none: as epochs
    lr: learning rate of the body
    personal_lr: learning rate of the head; none: as lr
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
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
    """Only the body is trained and averaged, with the head fixed at its initial value; clients fine-tune both for evaluation.

    epochs: local epochs of the body per round
    lr: learning rate of the body
    finetune: epochs of fine-tuning; none: as epochs; 0: no fine-tuning
    finetune_lr: learning rate of fine-tuning; none: as lr
    answers: own: the reported model predicts only classes that occur in the client's training data
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    server_average: decay of a moving average of the aggregate, which the merged model uses instead of the latest aggregate
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
    """The body is personal and the head averaged; both train together. This is how the FedSelect paper interprets LG-FedAvg.

    The authors' CIFAR code shares the convolutions instead (shared="convolutions") and starts from a model trained by
    FedAvg (warmup: all parameters are averaged in these rounds; statistics still follow norm_stats).

    epochs: local epochs per round
    lr: learning rate of the shared part
    personal_lr: learning rate of the personal part; none: as lr
    shared: what is averaged: the head, or the convolutions
    warmup: rounds at the start in which all parameters are averaged; statistics follow norm_stats
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
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
    """The paper's layer ablation: chosen layers are personal, trained in the same way as in FedSelect.

    layers: A, B, C, D, or parameter names separated by commas; * matches anything
    epochs: pairs of local epochs (personal, then shared) per round
    lr: learning rate of the shared part
    personal_lr: learning rate of the personal part; none: as lr
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
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

    epochs: local epochs per round
    lr: learning rate
    mu: strength of the pull
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
    """
    return Partial(Fixed(nothing), (("all", epochs),), lr, None, weight, norm_stats, mu=mu, view=view)


@alias
def FedBN(epochs: int = 3, lr: Scalar = 0.01, weight: Weight = "uniform", view: View = "local") -> Partial:
    """Norm layers are personal, with their affine parameters and statistics; everything else is averaged.

    epochs: local epochs per round
    lr: learning rate
    weight: weight of a client in the mean: 1, or its number of training samples
    view: reported model: after local training, or merged with the aggregate
    """
    return Partial(Fixed(norms), (("all", epochs),), lr, None, weight, "local", view=view)
