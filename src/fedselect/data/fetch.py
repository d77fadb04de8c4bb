"""Downloads that resume, are checked, and get their final name only when complete."""

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedselect.core.errors import DataError, InputError, unknown
from fedselect.core.files import disk, held
from fedselect.core.options import named
from fedselect.data.places import ORIGINS, Progress, places


@dataclass(frozen=True)
class Remote:
    """A published file."""

    url: str
    md5: str
    size: str
    name: str = ""  # if the name in the address is not clear enough

    @property
    def file(self) -> str:
        return self.name or self.url.rsplit("/", 1)[1]


MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"  # a mirror of the files that yann.lecun.com no longer hands out
REMOTE: dict[str, Remote | tuple[Remote, ...]] = {
    "mnist": (
        Remote(f"{MNIST}/train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", "10 MB"),
        Remote(f"{MNIST}/train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", "29 kB"),
        Remote(f"{MNIST}/t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", "2 MB"),
        Remote(f"{MNIST}/t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", "5 kB"),
    ),
    "emnist": Remote(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", "562 MB", "emnist.zip"
    ),
    "cifar10": Remote("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "170 MB"),
    "cifar100": Remote(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "169 MB"
    ),
    "cifar10c": Remote("https://zenodo.org/records/2535967/files/CIFAR-10-C.tar", "56bf5dcef84df0e2308c6dcbcbbd8499", "2.9 GB"),
}
BY_HAND = {
    "miniimagenet": "miniimagenet.parquet with miniimagenet_classes.json, or a folder mini-imagenet with images, train.csv and "
    "test.csv (its images are ImageNet's, from image-net.org)",
    "officehome": "the unpacked folder OfficeHomeDataset_10072016 (from hemanthdv.org/officeHomeDataset.html)",
    "femnist": "the folder femnist with data/train and data/test, which data/femnist/preprocess.sh -s niid --sf 0.1 -k 64 "
    f"-t sample makes in a copy of {ORIGINS['femnist']}",
    "audiomnist": f"the folder AudioMNIST with data/01/0_01_0.wav and so on from {ORIGINS['audiomnist']}",
    "har": f"the folder sp-sw-har-dataset with DATA/s01/s01_01_sp.csv and so on from {ORIGINS['har']}",
    "heart": "processed.cleveland.data, processed.hungarian.data, processed.switzerland.data and processed.va.data "
    f"from {ORIGINS['heart']}",
}
CHUNK = 1 << 20
TIMEOUT_S = 30.0
PAUSE_S = 1.0
TRIES = 5  # consecutive tries without a new byte


def fetch(name: str, data_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Download a data set to the data folder and return its file, or its folder if several; existing ones are only checked."""
    folder, name = places(data_dir)[0], named(name, {**REMOTE, **BY_HAND})
    if name == "digits":
        raise InputError("digits come with scikit-learn: there is nothing to fetch.")
    if name in BY_HAND:
        raise InputError(f"{name} must be downloaded by hand; place in {folder}: {BY_HAND[name]}.")
    if name not in REMOTE:
        raise unknown("data to fetch called", name, [*REMOTE, *BY_HAND])
    remote = REMOTE[name]
    if isinstance(remote, Remote):
        return _fetch(folder / remote.file, remote, progress)
    for one in remote:
        _fetch(folder / name / one.file, one, progress)
    return folder / name


def _fetch(final: Path, remote: Remote, progress: Progress | None) -> Path:
    with disk(final):
        final.parent.mkdir(parents=True, exist_ok=True)
    with held(final.with_name(f".{final.name}.lock")):
        if final.exists():
            _verify_present(final, remote)
        else:
            _download(final, remote, progress)
    return final


def _verify_present(final: Path, remote: Remote) -> None:
    found = _md5(final)
    if found != remote.md5:
        raise DataError(f"{final} is damaged: its md5 is {found}, not {remote.md5}; delete it, then fetch again.")


def _download(final: Path, remote: Remote, progress: Progress | None) -> None:
    part = final.with_name(final.name + ".part")
    resumed = part.exists() and part.stat().st_size > 0
    _until_whole(part, remote, final, progress)
    found = _md5(part)
    if found != remote.md5 and resumed:  # the old part may belong to another file: start again
        part.unlink()
        _until_whole(part, remote, final, progress)
        found = _md5(part)
    if found != remote.md5:
        part.unlink()
        raise DataError(
            f"what {remote.url} sent is not the published file (its md5 is {found}, not {remote.md5}); "
            f"try again, or place {remote.file} in {final.parent} yourself."
        )
    with disk(final):
        os.replace(part, final)


def _until_whole(part: Path, remote: Remote, final: Path, progress: Progress | None) -> None:
    """Request the rest until the file is complete; give up if several requests in a row bring nothing."""
    idle, most = 0, _size(part)
    while True:
        try:
            if _request(part, remote.url, progress):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as e:
            e.close()
            if e.code < 500 and e.code != 429:
                raise _by_hand(remote, final, f"{e.code} {e.reason}") from None
            reason = f"{e.code} {e.reason}"
        except urllib.error.URLError as e:
            if not isinstance(e.reason, TimeoutError | ConnectionResetError):  # offline or refused: asking again is no use
                raise _by_hand(remote, final, str(e.reason)) from None
            reason = str(e.reason)
        except (OSError, http.client.HTTPException) as e:
            reason = str(e) or type(e).__name__
        idle = 0 if _size(part) > most else idle + 1
        most = max(most, _size(part))
        if idle == TRIES:
            kept = (
                f"; the {_size(part):,} bytes that came are kept and fetching again goes on from there" if _size(part) else ""
            )
            raise _by_hand(remote, final, reason + kept)
        time.sleep(PAUSE_S)


def _by_hand(remote: Remote, final: Path, reason: str) -> DataError:
    return DataError(
        f"{remote.file} ({remote.size}) could not be fetched ({reason}); download {remote.url} elsewhere "
        f"and place it in {final.parent}."
    )


def _request(part: Path, url: str, progress: Progress | None) -> bool:
    """Request the missing bytes once; return whether the file is now complete."""
    have = _size(part)
    headers = {"User-Agent": "fedselect"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as e:
        if e.code != 416:
            raise
        e.close()
        if _total(e.headers.get("Content-Range")) == have:
            return True
        part.unlink()  # longer than the file: it is not a piece of it
        return False
    with response:
        if response.status == 206 and not str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-"):
            part.unlink()
            return False
        if response.status != 206:  # the server ignores the range and sends the whole file
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        done = _append(part, have, response.read, lambda n: progress(n, total) if progress else None)
    return total is None or done == total


def _append(part: Path, have: int, read: Callable[[int], bytes], report: Callable[[int], None]) -> int:
    """Append what arrives after the first `have` bytes. Read and write errors are distinguished."""
    with disk(part):
        file = part.open("r+b" if have else "wb")
    with file:
        file.seek(have)
        report(have)
        while chunk := read(CHUNK):
            with disk(part):
                file.write(chunk)
            have += len(chunk)
            report(have)
        with disk(part):
            file.flush()
            os.fsync(file.fileno())
    return have


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _total(content_range: str | None) -> int | None:
    found = re.fullmatch(r"bytes \*/(\d+)", content_range or "")
    return int(found[1]) if found else None


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
