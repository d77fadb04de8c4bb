"""Shifts: known differences between clients, by name: `--shift camera+meaning`.

A kind of shift is a function from (data, seed) to a `Way` per client, which depends on the client's number and changes its
training, validation and test samples alike. It uses only shapes of the data, or how far features vary over all clients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedselect.core.errors import InputError, unknown
from fedselect.data.federation import ClientData, Federation
from fedselect.data.partition import Part, Pool, Sizes, SplitName, by_hands, deal, deal_classes, rng

BLOCK = 256
PURPOSE = 8  # of random numbers; the next key is the kind, then the client
PARTS = ("train", "val", "test")
Change = Callable[[Tensor, np.random.Generator], Tensor]
"""Changes inputs; the generator is the client's own, for what is drawn per sample."""


@dataclass(frozen=True)
class Way:
    """How one client is changed: a description, the change of its inputs, and the new label of each class."""

    words: str
    inputs: Change | None = None
    labels: Sequence[int] | None = None
    name: str = ""  # used in the client's name instead of the kind


def none(data: Federation, seed: int) -> list[Way]:
    """No differences."""
    return [Way("no difference")] * len(data.clients)


def labels(data: Federation, seed: int) -> list[Way]:
    """Clients have different classes, by the partition."""
    return [Way("own classes")] * len(data.clients)


def meaning(data: Federation, seed: int) -> list[Way]:
    """Each client's own permutation of the labels."""
    _need_labels(data, "meaning")
    return [_renamed(rng(seed, PURPOSE, 0, i).permutation(data.classes).tolist()) for i in range(len(data.clients))]


def groups(data: Federation, seed: int) -> list[Way]:
    """Two groups of clients; in the second one class c is labelled K - 1 - c."""
    _need_labels(data, "groups")
    clients, backwards = len(data.clients), tuple(reversed(range(data.classes)))
    if clients < 2:
        raise InputError("groups needs at least 2 clients, not 1; raise clients, or use meaning.")
    first = [Way("group 1: labels as they are", name="group 1")] * (clients - clients // 2)
    return first + [Way("group 2: labels reversed", labels=backwards, name="group 2")] * (clients // 2)


def camera(data: Federation, seed: int) -> list[Way]:
    """Each client's own camera: it turns images, mixes colors (or inverts, where there is one channel) and darkens."""
    if not _are_pictures(data):
        raise InputError(
            f"camera is for images (channels, height, width), not inputs of shape {data.shape}; "
            "use --shift scaled, permuted or noisy."
        )
    channels, height, width = data.shape
    turns = rng(seed, PURPOSE, 1).permutation([0, 1, 2, 3] if height == width else [0, 2])
    return [_camera(rng(seed, PURPOSE, 2, i), channels, int(turns[i % len(turns)])) for i in range(len(data.clients))]


def scaled(data: Federation, seed: int) -> list[Way]:
    """Each client's own gain and offset for every feature."""
    spread = _spread(data, "scaled")

    def way(draw: np.random.Generator) -> Way:
        gain, offset = (torch.as_tensor(draw.uniform(-1, 1, spread.shape)).to(spread) for _ in range(2))
        gain, offset = 2**gain, offset * spread
        return Way("own gain and offset", lambda x, _: (x * gain + offset).to(x.dtype))

    return [way(rng(seed, PURPOSE, 3, i)) for i in range(len(data.clients))]


def permuted(data: Federation, seed: int) -> list[Way]:
    """Each client's own order of the features: of pixels in images, of channels in series."""
    images = _are_pictures(data)
    count = data.shape[1] * data.shape[2] if images else data.shape[0] if data.shape else 1
    if count < 2:
        raise InputError("permuted needs inputs of at least two features or channels; use scaled or noisy.")

    def way(order: Tensor) -> Way:
        def inputs(x: Tensor, _: np.random.Generator) -> Tensor:
            there = order.to(x.device)
            return x.flatten(2)[:, :, there].view_as(x) if images else x[:, there]

        return Way(f"own order of the {'pixels' if images else 'channels' if len(data.shape) > 1 else 'features'}", inputs)

    return [way(torch.from_numpy(rng(seed, PURPOSE, 4, i).permutation(count))) for i in range(len(data.clients))]


def noisy(data: Federation, seed: int) -> list[Way]:
    """Each client's own level of noise, up to one standard deviation of a feature."""
    spread = _spread(data, "noisy")

    def way(level: float) -> Way:
        def inputs(x: Tensor, draw: np.random.Generator) -> Tensor:
            noise = torch.from_numpy(draw.standard_normal(x.shape)).to(x.device)
            return (x + level * spread * noise).to(x.dtype)

        return Way(f"noise of {level:.2f} standard deviations", inputs)

    return [way(rng(seed, PURPOSE, 5, i).uniform()) for i in range(len(data.clients))]


KINDS: dict[str, Callable[[Federation, int], list[Way]]] = {
    "none": none,
    "labels": labels,
    "meaning": meaning,
    "groups": groups,
    "camera": camera,
    "noisy": noisy,
    "scaled": scaled,
    "permuted": permuted,
}
"""Applied in this order, however they are named: noise must be added before features are permuted."""
MOTLEY = {"none": 2, "meaning": 5, "camera": 8, "labels": 10}
"""The kinds in a motley federation: consecutive clients, up to this many tenths of them."""
ALONE = ("none", "motley")
DEALT = ("none", "labels", "motley")


def parse(shift: str) -> tuple[str, ...]:
    """The kinds that a text such as camera+meaning names."""
    kinds = tuple(dict.fromkeys(shift.split("+")))
    for kind in kinds:
        if kind not in KINDS and kind != "motley":
            raise unknown("kind of shift", kind, (*KINDS, "motley"))
    for kind in ALONE:
        if kind in kinds and len(kinds) > 1:
            raise InputError(f"{kind} combines with no other kind; give --shift {kind}, or leave it out of {shift}.")
    if {"groups", "meaning"} <= set(kinds):
        raise InputError("groups and meaning both change what labels mean; give one of them.")
    return kinds


def deal_for(
    kinds: Sequence[str], pool: Pool, split: SplitName, clients: int, sizes: Sizes, seed: int,
    *, classes_per_client: int, concentration: float,
) -> list[Part]:  # fmt: skip
    """Partition as the kinds require: motley by class lists, `labels` by the given split, others with the same class mix."""
    if "motley" in kinds:
        if split == "domain":
            raise InputError("motley decides itself who gets which classes; add --split classes.")
        return by_hands(pool, _motley_hands(pool.classes, clients, classes_per_client, seed), sizes, seed)
    chosen = split if "labels" in kinds or split == "domain" else "iid"
    return deal(pool, chosen, clients, sizes, seed, classes_per_client=classes_per_client, concentration=concentration)


def shifted(data: Federation, shift: str, *, seed: int = 0) -> Federation:
    """Make clients differ in a known way.

    Args:
        data: Any federation.
        shift: Kinds of shift, joined by +: `"camera+meaning"`.
        seed: Decides how each client is changed.

    Returns:
        The changed clients; their names and `client.shift` say how each was changed.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.shifted(fs.load("digits", clients=2, seed=0), "meaning", seed=0)
        >>> data.names
        ['0 meaning', '1 meaning']
    """
    for kind in (kinds := parse(shift)):
        if kind in DEALT:
            raise InputError(
                f"{kind} decides which client gets which samples, and this data is already partitioned; use it when loading: "
                f'fs.load("digits", shift="{kind}") or fs.deal_images(images, shift="{kind}").'
            )
    return differ(data, kinds, seed)


def differ(data: Federation, kinds: Sequence[str], seed: int) -> Federation:
    """Apply these kinds to the samples of data that was partitioned for them."""
    if tuple(kinds) in (("none",), ("labels",)):
        return data
    own = _motley(len(data.clients)) if "motley" in kinds else [set(kinds)] * len(data.clients)
    every = {kind: make(data, seed) for kind, make in KINDS.items() if any(kind in mine for mine in own)}
    for kind, made in every.items():
        if data.layout is not None and any(way.inputs for way in made):
            raise InputError(
                f"{kind} changes inputs that are one tensor, and these are several ({data.layout}); change them yourself."
            )
    ways = [{kind: every[kind][i] for kind in every if kind in mine} for i, mine in enumerate(own)]
    pools, parts = {}, []
    for part in PARTS:
        pool, pairs = _part(data, part, ways, seed)
        parts.append(pairs)
        if pool is not None:
            pools[part] = pool
    clients = [
        _told(replace(client, train=train, val=val if client.val is not None else None, test=test), i, ways[i])
        for i, (client, train, val, test) in enumerate(zip(data.clients, *parts, strict=True))
    ]
    return replace(data, clients=clients, pools=pools)


def _told(client: ClientData, number: int, ways: dict[str, Way]) -> ClientData:
    """The client with a name that says how it was changed."""
    name = " ".join([client.name or str(number), *(way.name or kind for kind, way in ways.items())])
    return replace(client, name=name, shift={**client.shift, **{kind: way.words for kind, way in ways.items()}})


@torch.no_grad()
def _part(
    data: Federation, part: str, ways: list[dict[str, Way]], seed: int
) -> tuple[tuple[Tensor, Tensor] | None, list[tuple[Tensor, Tensor]]]:
    """One part of all clients after the change: the pool it lies in, if any, and each client's slice."""
    x0, y0 = data.clients[0].train
    pairs = [getattr(c, part) or (x0[:0], y0[:0]) for c in data.clients]
    whole_x, whole_y = data.pools.get(part, (None, None))
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    if any(way.inputs for mine in ways for way in mine.values()):
        draws = [rng(seed, PURPOSE, 6, i, PARTS.index(part)) for i in range(len(ways))]
        whole_x, xs = _filled(xs, (_inputs(x, mine, draw) for x, mine, draw in zip(xs, ways, draws, strict=True)))
    if any(way.labels for mine in ways for way in mine.values()):
        whole_y, ys = _filled(ys, ([_labels(y, mine)] for y, mine in zip(ys, ways, strict=True)))
    pool = None if whole_x is None or whole_y is None else (whole_x, whole_y)
    return pool, list(zip(xs, ys, strict=True))


def _filled(like: list[Tensor], pieces: Iterator[Sequence[Tensor] | Iterator[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """One block of memory for all clients, filled piece by piece, and each client's slice of it."""
    block = like[0].new_empty((sum(map(len, like)), *like[0].shape[1:]))
    at = 0
    for piece in (piece for client in pieces for piece in client):
        block[at : at + len(piece)] = piece
        at += len(piece)
    return block, list(torch.split(block, [len(v) for v in like]))


def _inputs(x: Tensor, ways: dict[str, Way], draw: np.random.Generator) -> Iterator[Tensor]:
    """A client's inputs after the change, a few at a time: what lies between is floats, and large."""
    for piece in torch.split(x, BLOCK):
        for way in ways.values():
            piece = piece if way.inputs is None else way.inputs(piece, draw)
        yield piece


def _labels(y: Tensor, ways: dict[str, Way]) -> Tensor:
    for way in ways.values():
        if way.labels is not None:
            y = torch.tensor(way.labels, dtype=y.dtype, device=y.device)[y.long()]
    return y


def _renamed(labels: list[int]) -> Way:
    said = " ".join(map(str, labels[:10])) + (" ..." if len(labels) > 10 else "")
    return Way(f"labels become {said}", labels=labels)


def _camera(draw: np.random.Generator, channels: int, turns: int) -> Way:
    """A camera that turns by so many quarters, then mixes or inverts, then darkens; values in [0, 1] stay there."""
    gamma = float(2.0 ** draw.uniform(-1, 1))
    mix, gains, inverts = list(range(channels)), np.ones(channels), False
    if channels == 1:
        inverts = bool(draw.integers(2))
    else:
        mix, gains = draw.permutation(channels).tolist(), draw.uniform(0.5, 1, channels)

    def inputs(x: Tensor, _: np.random.Generator) -> Tensor:
        light = x[:, mix].rot90(turns, (2, 3)).double()  # so that a power's last bit, which differs by place, is rounded away
        light = light / 255 if x.dtype == torch.uint8 else light
        light = light.sign() * light.abs() ** gamma * torch.as_tensor(gains).to(light).view(-1, 1, 1)
        light = 1 - light if inverts else light
        return ((light * 255).round() if x.dtype == torch.uint8 else light).to(x.dtype)

    colours = ["inverted"] if inverts else [] if channels == 1 else [f"channels {' '.join(map(str, mix))}"]
    return Way(", ".join([f"turned {90 * turns}°", *colours, f"gamma {gamma:.2f}"]), inputs)


def _motley(clients: int) -> list[set[str]]:
    """The kind of every client of a motley federation."""
    if clients < 4:
        raise InputError(f"motley needs at least 4 clients, not {clients}; raise clients.")
    ends = {kind: (clients * tenths + 5) // 10 for kind, tenths in MOTLEY.items()}
    return [{next(kind for kind, end in ends.items() if i < end)} for i in range(clients)]


def _motley_hands(classes: int, clients: int, classes_per_client: int, seed: int) -> list[list[int]]:
    """All classes, in an order of the client's own; `classes_per_client` for those that have classes of their own."""
    few = [i for i, kinds in enumerate(_motley(clients)) if "labels" in kinds]
    hands = dict(zip(few, deal_classes(len(few), classes, classes_per_client, seed), strict=True))
    return [hands.get(i) or rng(seed, PURPOSE, 7, i).permutation(classes).tolist() for i in range(clients)]


def _spread(data: Federation, kind: str) -> Tensor:
    """The standard deviation of each feature, or channel of a series, over everybody's training samples."""
    x = data.clients[0].train[0]
    if _are_pictures(data):
        raise InputError(f"{kind} is for vectors and series, not images; use --shift camera or permuted.")
    if not x.is_floating_point():
        raise InputError(f"{kind} needs inputs that are floats, not {x.dtype}; use --shift permuted.")
    count = data.shape[0] if data.shape else 1
    every = torch.cat([c.train[0].detach().double().reshape(len(c.train[0]), count, -1) for c in data.clients])
    return every.std((0, 2), correction=0).view(-1, *[1] * (len(data.shape) - 1)) if data.shape else every.std(correction=0)


def _are_pictures(data: Federation) -> bool:
    x = data.clients[0].train[0]
    return len(data.shape) == 3 and (x.dtype == torch.uint8 or x.is_floating_point())


def _need_labels(data: Federation, kind: str) -> None:
    if not data.classes or data.target_shape:
        raise InputError(f"{kind} changes class labels, which {data.name} does not have; use another kind of shift.")
