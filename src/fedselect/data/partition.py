"""Partitions: which client gets which samples.

Every partition depends on its seed. Test sets do not change if only the training size does, larger training sets contain the
smaller ones, and no sample is given twice. In a partition by class, a client is tested on the classes it trains on; otherwise
test and training samples come from the same portion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError

Indices = NDArray[np.int64]
SplitName = Literal["classes", "dirichlet", "iid", "quantity", "domain"]


@dataclass(frozen=True)
class Part:
    """The sample numbers of one client."""

    train: Indices
    test: Indices
    val: Indices


@dataclass(frozen=True)
class Pool:
    """The samples to partition: labels, the official test rows, domains, and names for messages."""

    y: Indices
    test: NDArray[np.bool_] | None = None
    domain: Indices | None = None
    domain_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1


@dataclass(frozen=True)
class Sizes:
    """Samples per client: training (`val` of them held out) and test; None: all, with a tenth for testing."""

    train: int | None
    test: int | None
    val: int = 0

    def __post_init__(self) -> None:
        for name, size in (("train", self.train), ("test", self.test)):
            if size is not None and size < 1:
                raise InputError(f"{name} must be at least 1 sample per client, not {size}.")
        if self.val < 0 or (self.train is not None and self.val >= self.train):
            top = "" if self.train is None else f" to {self.train - 1}"
            raise InputError(f"val is held out of train and must lie in 0{top}, not {self.val}.")


def rng(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose])


def deal(
    pool: Pool, split: SplitName, clients: int, sizes: Sizes, seed: int, *, classes_per_client: int, concentration: float
) -> list[Part]:
    """The partition of this name."""
    if clients < 1:
        raise InputError(f"there must be at least one client, not {clients}.")
    if not 0 < concentration < np.inf:
        raise InputError(f"concentration must be positive and finite, not {concentration}.")
    ways: dict[str, Callable[[], list[Part]]] = {
        "classes": lambda: by_class(pool, clients, classes_per_client, sizes, seed),
        "dirichlet": lambda: by_dirichlet(pool, clients, concentration, sizes, seed),
        "iid": lambda: by_share(pool, [1.0] * clients, sizes, seed),
        "quantity": lambda: by_share(pool, list(rng(seed, 5).dirichlet([concentration] * clients)), sizes, seed),
        "domain": lambda: by_domain(pool, clients, sizes, seed),
    }
    if split not in ways:
        raise InputError(f"split must be {' or '.join(ways)}, not {split!r}.")
    return ways[split]()


def deal_classes(clients: int, classes: int, each: int, seed: int) -> list[list[int]]:
    """Choose `each` different classes per client, with every class at nearly the same number of clients."""
    if clients < 1:
        raise InputError(f"there must be at least one client, not {clients}.")
    if not 1 <= each <= classes:
        raise InputError(f"classes_per_client must lie in 1 to {classes} (the classes there are), not {each}.")
    draw = rng(seed, 1)
    holders = np.zeros(classes)
    hands: list[list[int]] = []
    for _ in range(clients):
        hand = np.argsort(holders + draw.random(classes) / 2)[:each]  # fewest holders first, ties at random
        holders[hand] += 1
        hands.append(sorted(int(c) for c in hand))
    return hands


def by_class(pool: Pool, clients: int, classes_per_client: int, sizes: Sizes, seed: int) -> list[Part]:
    """The paper's partition: `classes_per_client` classes each, sizes spread evenly over a client's classes."""
    return by_hands(pool, deal_classes(clients, pool.classes, classes_per_client, seed), sizes, seed)


def by_hands(pool: Pool, hands: Sequence[Sequence[int]], sizes: Sizes, seed: int) -> list[Part]:
    """Given the classes of each client, spread sizes evenly over them; the first classes take the remainder."""
    holders = [[i for i, hand in enumerate(hands) if c in hand] for c in range(pool.classes)]
    if pool.test is not None:
        there = set(np.unique(pool.y[~pool.test]).tolist())
        for c in (c for c in range(pool.classes) if holders[c] and c not in there):
            raise DataError(
                f"class {_name(pool.class_names, c)} has no samples to train on; give it some, or leave its test samples out."
            )

    def wanted(size: int | None, c: int) -> dict[int, int | None]:
        return {i: None if size is None else _portion(size, hands[i], c) for i in holders[c]}

    taken = [
        _hand_out(pool, c, wanted(sizes.train, c), wanted(sizes.test, c), _turns(hands), seed) for c in range(pool.classes)
    ]
    parts = []
    for i, hand in enumerate(hands):
        train, test = ([taken[c][part][i] for c in hand] for part in ("train", "test"))
        parts.append(_hold_out(_in_turn(train), np.concatenate(test), sizes.val, i))
    return parts


def by_dirichlet(pool: Pool, clients: int, concentration: float, sizes: Sizes, seed: int, tries: int = 100) -> list[Part]:
    """Spread each class over clients by proportions from Dirichlet(concentration), the same for training and test.

    A given size is the mean over clients: every client takes the same share of its own portion. A draw that leaves a client
    without data is repeated; after `tries` draws this is an error.
    """
    for attempt in range(tries):
        shares = rng(seed, 4, attempt).dirichlet([concentration] * clients, size=pool.classes)
        portions: dict[str, list[list[Indices]]] = {"train": [[] for _ in range(clients)], "test": [[] for _ in range(clients)]}
        for c in range(pool.classes):
            for part, rows in _class_rows(pool, c, seed).items():
                ends = np.floor(np.cumsum(shares[c]) * len(rows) + 1e-9).astype(int)
                for i, mine in enumerate(np.split(rows, ends[:-1])):
                    portions[part][i].append(mine)
        if all(sum(map(len, mine)) > 0 for part in portions.values() for mine in part):
            break
    else:
        raise DataError(
            f"Dirichlet({concentration}) left a client of {clients} without data in each of {tries} draws; "
            "raise concentration or take fewer clients."
        )
    taken = {}
    for part, size in (("train", sizes.train), ("test", sizes.test)):
        there = sum(len(rows) for mine in portions[part] for rows in mine)
        share = 1.0 if size is None else min(1.0, size * clients / there)
        mixed = [rng(seed, 7, i).permutation(np.concatenate(mine)) for i, mine in enumerate(portions[part])]
        taken[part] = [rows[: max(1, int(share * len(rows) + 1e-9))] for rows in mixed]
    return [_hold_out(a, b, sizes.val, i) for i, (a, b) in enumerate(zip(taken["train"], taken["test"], strict=True))]


def by_share(pool: Pool, shares: Sequence[float], sizes: Sizes, seed: int) -> list[Part]:
    """The same class mix for every client; sizes proportional to the shares, with at least one sample per part."""
    clients = len(shares)
    whole = np.array(shares) / sum(shares)
    order = rng(seed, 2).permutation(len(pool.y))
    official = pool.test is not None
    test_rows = order[pool.test[order]] if pool.test is not None else order[: _tenth(len(order), sizes.test, clients)]
    train_rows = order[~pool.test[order]] if pool.test is not None else order[len(test_rows) :]
    parts = []
    for rows, size, what in ((train_rows, sizes.train, "train"), (test_rows, sizes.test if official else None, "test")):
        least = 1 + (sizes.val if what == "train" else 0)  # what every client gets before the rest is divided by share
        if len(rows) < least * clients:
            raise DataError(f"{len(rows)} samples to {what} on are too few for {clients} clients; take fewer clients.")
        room = len(rows) if size is None else min(len(rows), max(size, least) * clients)
        most, counts = (least + np.floor(whole * (n - least * clients) + 1e-9).astype(int) for n in (len(rows), room))
        parts.append([rows[e - m : e][:n] for e, m, n in zip(np.cumsum(most), most, counts, strict=True)])
    return [_hold_out(train, test, sizes.val, i) for i, (train, test) in enumerate(zip(*parts, strict=True))]


def by_domain(
    pool: Pool, clients: int, sizes: Sizes, seed: int, tests: Sequence[int] | None = None, first: int = 0
) -> list[Part]:
    """One client a domain, with all of its classes; `tests` may give each domain's test size.

    first: the number of the first domain, where these are not all there are: each is drawn by its number.
    """
    if pool.domain is None:
        raise InputError("this data has no domains; use another split.")
    domains = int(pool.domain.max()) + 1
    if clients != domains:
        names = f" ({', '.join(pool.domain_names)})" if pool.domain_names else ""
        raise InputError(
            f"there are {domains} domains{names} and one client takes one, so clients must be {domains}, not {clients}; "
            f"give --clients {domains}, or another --split."
        )
    if tests is not None and sizes.test is None and len(tests) != domains:
        raise DataError(f"this set's test sizes are for {len(tests)} domains, but there are {domains}; give test.")
    parts = []
    for d in range(domains):
        rows = rng(seed, 2, first + d).permutation(np.flatnonzero(pool.domain == d))
        if pool.test is not None:
            test, train = rows[pool.test[rows]], rows[~pool.test[rows]]
            test = test if sizes.test is None else test[: sizes.test]
        else:
            count = tests[d] if tests is not None and sizes.test is None else _tenth(len(rows), sizes.test, 1)
            test, train = rows[:count], rows[count:]
        if sizes.train is not None and len(train) < sizes.train:
            raise DataError(f"domain {_name(pool.domain_names, d)} has {len(train)} samples to train on, not {sizes.train}.")
        parts.append(_hold_out(train[: sizes.train], test, sizes.val, d))
    return parts


def by_index(
    train: Sequence[Sequence[int]], test: Sequence[Sequence[int]], val: Sequence[Sequence[int]] | None = None
) -> list[Part]:
    """Explicit sample numbers, one list per client."""
    if len(train) != len(test) or (val is not None and len(val) != len(train)):
        raise InputError(f"there are {len(train)} training lists but {len(test)} test lists.")
    none: Sequence[Sequence[int]] = [[]] * len(train)
    rows = zip(train, test, val or none, strict=True)
    return [Part(*(np.asarray(r, dtype=np.int64) for r in client)) for client in rows]


def _class_rows(pool: Pool, c: int, seed: int, reserve: int | None = None, least: int = 1) -> dict[str, Indices]:
    """The shuffled rows of a class to test and to train on.

    Without an official test set, `reserve` rows are set aside, or a tenth of them and no fewer than `least`.
    """
    rows = rng(seed, 2, c).permutation(np.flatnonzero(pool.y == c))
    if pool.test is not None:
        return {"test": rows[pool.test[rows]], "train": rows[~pool.test[rows]]}
    aside = max(least, _tenth(len(rows), None, 1)) if reserve is None else reserve
    return {"test": rows[:aside], "train": rows[aside:]}


def _hand_out(
    pool: Pool, c: int, train: dict[int, int | None], test: dict[int, int | None], turns: list[int], seed: int
) -> dict[str, dict[int, Indices]]:
    """Give each client of a class its number of samples, one after another; None: an even share of all, at least one."""
    owner = np.array([i for i in test for _ in range(turns[i])], dtype=np.int64)  # of a sample, as the class goes round
    asked = [_rounds(n, turns[i]) for i, n in test.items() if n is not None]
    there = _class_rows(pool, c, seed, max(asked) * len(owner) if asked else None, len(owner))
    whole = sum(map(len, there.values()))
    taken: dict[str, dict[int, Indices]] = {}
    for part, quota in {"train": train, "test": test}.items():
        rows = there[part]
        if None in quota.values() and len(rows) < len(owner) and (part == "train" or pool.test is None):
            how = "" if pool.test is not None else "lower test, " if asked else "give test, "
            raise DataError(
                f"class {_name(pool.class_names, c)} has {len(rows)} of its {whole} samples to {part} on, too few for its "
                f"{len(quota)} clients; {how}take fewer clients or lower classes_per_client."
            )
        most = max((len(rows) // len(owner) if n is None else _rounds(n, turns[i]) for i, n in quota.items()), default=0)
        if most * len(owner) > len(rows):
            raise DataError(
                f"class {c} has {len(rows)} of its {whole} samples to {part} on, but its {len(quota)} clients ask for "
                f"{most * len(owner)}; lower train, test or clients, or raise classes_per_client."
            )
        goes_to = np.resize(owner, len(rows))
        taken[part] = {i: rows[goes_to == i][: most * turns[i] if n is None else n] for i, n in quota.items()}
    return taken


def _turns(hands: Sequence[Sequence[int]]) -> list[int]:
    """The samples of a class that each client takes per turn: two if it has half as many classes as the client with most."""
    longest = max(map(len, hands))
    return [-(-longest // len(hand)) for hand in hands]


def _rounds(count: int, turns: int) -> int:
    """The number of turns until a client that takes `turns` samples per turn has `count`."""
    return -(-count // turns)


def _hold_out(train: Indices, test: Indices, val: int, client: int) -> Part:
    """Hold out the first samples, which are there for every training size."""
    if val and val >= len(train):
        raise DataError(f"client {client} has {len(train)} samples to train on; val={val} would leave none.")
    return Part(train[val:], test, train[:val])


def _in_turn(parts: list[Indices]) -> Indices:
    """Interleave the classes, so that every prefix has them as evenly as possible."""
    place = np.concatenate([np.arange(len(p)) for p in parts])
    return np.concatenate(parts)[np.argsort(place, kind="stable")]


def _tenth(there: int, asked: int | None, clients: int) -> int:
    """Rows to set aside for testing where there is no official test set."""
    return max(1, there // 10) if asked is None else min(asked * clients, there)


def _portion(total: int, hand: Sequence[int], c: int) -> int:
    """A client's samples of one class when `total` are spread evenly over its classes."""
    return total // len(hand) + (hand.index(c) < total % len(hand))


def _name(names: tuple[str, ...], i: int) -> str:
    return names[i] if i < len(names) else str(i)
