"""The image sets by name: a reader, the paper's partition, and options that all sets share."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import InputError, unknown
from fedselect.core.options import build
from fedselect.data import cifar, folders, miniimagenet, mnist
from fedselect.data.corruptions import CORRUPTIONS, STANDARD, corrupt
from fedselect.data.dealt import Change, federate, pool_of
from fedselect.data.federation import Federation
from fedselect.data.images import Images
from fedselect.data.partition import Sizes, SplitName, by_domain, rng
from fedselect.data.shifts import deal_for, differ, parse

DOMAINS = 4  # clients that get the images of domains in another way than one a domain, where no number is given
OFFICEHOME_TESTS = (265, 456, 470, 465)  # the paper's, domain by domain
SHARED_OPTIONS: dict[str, tuple[Any, Any]] = {
    "clients": (int, 10),
    "split": (SplitName, "classes"),
    "classes_per_client": (int, 2),
    "concentration": (float, 0.5),
    "train": (int | None, 100),
    "test": (int | None, 200),
    "val": (int, 0),
    "shift": (str, "labels"),
    "augment": (Literal["none", "crop-flip"], "none"),
}
READER_OPTIONS = ("path", "data_dir", "size", "skip_unreadable", "subset", "classes")
Reader = Callable[..., Images]
Changer = Callable[[Images, int, int, dict[str, Any]], tuple[Change, tuple[str, ...]]]
"""(images, seed, clients, options) -> what happens to each client's images, and the clients' names, which say it."""


def image_set(
    read: Reader, about: str, change: Changer | None = None, domain_tests: Sequence[int] | None = None, **defaults: Any
) -> Callable[..., Federation]:
    """A named set: its reader's own options, those of every set with the given defaults, and what happens to images.

    `domain_tests` are the test sizes of its domains where none is given.
    """
    known = inspect.signature(read, eval_str=True).parameters
    own = {n: (known[n].annotation, None if n == "path" else known[n].default) for n in READER_OPTIONS if n in known}
    extra = {n: v for n, v in defaults.items() if n not in SHARED_OPTIONS}
    table = {n: (kind, defaults.get(n, default)) for n, (kind, default) in SHARED_OPTIONS.items()}
    table |= {n: (kind | None, None) for n, (kind, default) in table.items() if default is None}
    table |= {n: (type(v), v) for n, v in extra.items()} | {n: (_plain(kind), default) for n, (kind, default) in own.items()}

    def make(seed: int = 0, **given: Any) -> Federation:
        options = {**{n: default for n, (_, default) in table.items()}, **given}
        if "path" in own and not options["path"]:
            raise InputError("give the path of the images: --data folder:PATH or --data domains:PATH (in Python: path=...).")
        kinds, sizes = parse(options["shift"]), Sizes(options["train"], options["test"], options["val"])
        images = read(**{n: _path(n, options[n]) for n in own})
        if options["clients"] is None:
            options["clients"] = len(images.domain_names) if options["split"] == "domain" else DOMAINS
        if options["split"] == "domain" and "motley" not in kinds:
            parts = by_domain(pool_of(images), options["clients"], sizes, seed, domain_tests)
        else:
            how = {name: options[name] for name in ("classes_per_client", "concentration")}
            parts = deal_for(kinds, pool_of(images), options["split"], options["clients"], sizes, seed, **how)
        names = images.domain_names if options["split"] == "domain" else ()
        changing = None
        if change is not None:
            changing, names = change(images, seed, len(parts), options)
        return differ(federate(images, parts, names, options["augment"], changing), kinds, seed)

    seed = inspect.Parameter("seed", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=int)
    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=k) for n, (k, d) in table.items()] + [seed]
    )
    make.__annotations__ = {n: kind for n, (kind, _) in table.items()} | {"seed": int, "return": Federation}
    make.__doc__ = about
    return make


def one_domain(
    number: int,
    seed: int,
    *,
    path: str,
    size: int,
    skip_unreadable: bool = False,
    train: int | None = None,
    test: int | None = None,
    val: int = 0,
    augment: str = "none",
) -> Federation:
    """One client's class folders, divided into training and test images as `domains` divides its folder of this number."""
    images = folders.image_folder(Path(path), size, skip_unreadable)
    alone = replace(images, domain=np.zeros(len(images.y), np.int64), domain_names=(images.name,))
    parts = by_domain(pool_of(alone), 1, Sizes(train, test, val), seed, first=number)
    return federate(alone, parts, alone.domain_names, augment)


def deal_images(images: Images, *, seed: int = 0, **options: Any) -> Federation:
    """Partition your own images among clients.

    Args:
        images: The images, for example from `fs.from_datasets`.
        seed: Decides the partition.
        options: clients, split, train, test and the others that `fedselect data list` shows.

    Returns:
        The clients with their data.
    """
    return build("data", images.name, {images.name: image_set(lambda: images, "")}, {**options, "seed": seed})


def corrupted(images: Images, seed: int, clients: int, options: dict[str, Any]) -> tuple[Change, tuple[str, ...]]:
    """CIFAR10-C: one corruption per client, drawn from the fifteen or named, on both training and test images.

    With published=yes test images come from the published arrays, which have no training images.
    """
    name, severity = options["corruption"], options["severity"]
    if name != "random" and name not in CORRUPTIONS:
        raise unknown("corruption", name, (*CORRUPTIONS, "random"))
    if not 1 <= severity <= 5:
        raise InputError(f"severity must be from 1 to 5, not {severity}.")
    kinds = [STANDARD[k] for k in rng(seed, 6).integers(0, len(STANDARD), clients)] if name == "random" else [name] * clients

    arrays = None
    if options["published"]:
        if images.test is None or int(images.test.sum()) != 10_000:
            raise InputError("published=yes needs CIFAR-10 with its whole official test set of 10,000 images.")
        arrays = cifar.cifar10c_published(_path("data_dir", options["data_dir"]), images.y[images.test])

    def change(client: int, x: NDArray[np.uint8], ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        if arrays is not None and images.test is not None and len(ids) and images.test[ids].all():
            order = np.cumsum(images.test) - 1  # an image's number within the official test set
            return np.asarray(arrays(kinds[client], severity)[order[ids]])
        return corrupt(x, kinds[client], severity, seed, ids)

    return change, tuple(f"{i} {kind.replace('_', ' ')}" for i, kind in enumerate(kinds))


def _plain(kind: Any) -> Any:
    """A path is given as text."""
    return str | None if kind in (Path, Path | None) else kind


def _path(name: str, value: Any) -> Any:
    return Path(value).expanduser() if name in ("data_dir", "path") and value is not None else value


IMAGE_SETS: dict[str, Callable[..., Federation]] = {
    "mnist": image_set(mnist.mnist, "MNIST, handwritten digits, 28x28."),
    "emnist": image_set(
        mnist.emnist,
        "EMNIST, handwritten digits and letters, 28x28; of its six parts the balanced one, with 47 classes.",
        classes_per_client=5,
    ),
    "cifar10": image_set(
        cifar.cifar10, "CIFAR-10, 32x32; partitioned as in the paper: ten clients, two classes and 100 images each."
    ),
    "cifar10c": image_set(
        cifar.cifar10,
        "CIFAR-10 with one random corruption per client on training and test images: the paper's CIFAR10-C.",
        corrupted,
        corruption="random",
        severity=5,
        published=False,
    ),
    "cifar100": image_set(cifar.cifar100, "CIFAR-100, 32x32.", classes_per_client=10),
    "miniimagenet": image_set(
        miniimagenet.miniimagenet,
        "Mini-ImageNet, 84x84, 100 classes; partitioned as in the paper: twenty clients, ten classes each.",
        clients=20,
        classes_per_client=10,
        train=500,  # 100 of a class's 500 images, between its two clients: the paper's 20%
        test=None,
    ),
    "officehome": image_set(
        folders.officehome,
        "OfficeHome, 65 classes; one client per domain.",
        domain_tests=OFFICEHOME_TESTS,
        clients=4,
        split="domain",
        train=None,
        test=None,
    ),
    "domains": image_set(
        folders.domains,
        "Your own domain/class folders, or PACS and Office-31: --data domains:PATH; one client per domain.",
        clients=None,
        split="domain",
        train=None,
        test=None,
    ),
    "folder": image_set(folders.image_folder, "Your own class folders of images: --data folder:PATH.", train=None, test=None),
}
