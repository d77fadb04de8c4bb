"""What the image corruptions are made of: random numbers by image, filters and warps.

Arrays are stacks of images, (n, height, width) or (n, height, width, 3). No result depends on which images share a stack.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Keys = NDArray[np.uint64]

_GOLDEN, _MIX1, _MIX2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(z: Keys) -> Keys:
    """splitmix64's finaliser, in place."""
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        z ^= z >> np.uint64(shift)
        z *= factor
    z ^= z >> np.uint64(31)
    return z


def _number(part: int | str) -> np.uint64:
    if isinstance(part, int):
        return np.uint64(part & 0xFFFFFFFFFFFFFFFF)
    return np.uint64(int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little"))


def fold(keys: Keys, *parts: int | str | Keys) -> Keys:
    """New keys from keys and what distinguishes them."""
    for part in parts:
        keys = _mix(_mix(keys + _GOLDEN) ^ (_number(part) if isinstance(part, int | str) else part))
    return keys


class Draws:
    """Random numbers for n images, each from its own key and by purpose: never by call order or place in the stack."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def bits(self, purpose: str, *shape: int) -> NDArray[np.uint32]:
        """Hashed uint32 (n, *shape)."""
        count = math.prod(shape)
        steps = np.arange(1, (count + 1) // 2 + 1, dtype=np.uint64) * _GOLDEN
        words = _mix(fold(self.keys, purpose)[:, None] + steps).astype("<u8", copy=False).view("<u4")
        return words[:, :count].reshape(len(self.keys), *shape)

    def uniform(self, purpose: str, *shape: int) -> Floats:
        """Float32 (n, *shape) in [0, 1)."""
        return (self.bits(purpose, *shape) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)

    def between(self, purpose: str, low: float, high: float, *shape: int) -> Floats:
        return self.uniform(purpose, *shape) * np.float32(high - low) + np.float32(low)

    def below(self, purpose: str, limit: int, *shape: int) -> NDArray[np.intp]:
        """Whole numbers from 0 to limit - 1."""
        return (self.bits(purpose, *shape).astype(np.uint64) * np.uint64(limit) >> np.uint64(32)).astype(np.intp)

    def normal(self, purpose: str, *shape: int) -> Floats:
        """Standard normal float32 (n, *shape), by Box and Muller."""
        count = math.prod(shape)
        half = (count + 1) // 2
        u = self.bits(purpose, 2, half).astype(np.float32)
        radius = np.sqrt(np.log((u[:, 0] + np.float32(0.5)) * np.float32(2.0**-32)) * np.float32(-2))
        angle = u[:, 1] * np.float32(2 * np.pi * 2.0**-32)
        out = np.empty((len(u), 2, half), np.float32)
        np.multiply(radius, np.cos(angle), out=out[:, 0])
        np.multiply(radius, np.sin(angle), out=out[:, 1])
        return out.reshape(len(u), 2 * half)[:, :count].reshape(len(u), *shape)

    def poisson(self, purpose: str, x: NDArray[np.uint8], rate: float) -> NDArray[np.int32]:
        """For each pixel a Poisson count of mean x / 255 * rate, by inverting the distribution function."""
        cdf, guide = _poisson_table(rate)
        bits = self.bits(purpose, *x.shape[1:])
        u = (bits.ravel() + 0.5) * 2.0**-32
        row = x.ravel().astype(np.intp)
        counts: NDArray[np.int32] = guide[row, (bits >> np.uint32(20)).ravel()]
        todo = np.flatnonzero(cdf[row, counts] < u)
        while len(todo):
            counts[todo] += 1
            todo = todo[cdf[row[todo], counts[todo]] < u[todo]]
        return counts.reshape(x.shape)


@lru_cache(maxsize=8)
def _poisson_table(rate: float) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """P(count <= k) for every pixel value, and the least k that can be the answer for u in [b, b + 1) / 4096."""
    from scipy.special import pdtr  # type: ignore[import-untyped,unused-ignore]

    most = int(rate + 12 * math.sqrt(rate) + 20)
    cdf = np.asarray(pdtr(np.arange(most + 1)[None, :], np.arange(256)[:, None] / 255 * rate), np.float64)
    cdf[:, -1] = 1.0
    starts = np.arange(4096) / 4096
    guide = np.stack([np.searchsorted(row, starts) for row in cdf]).astype(np.int32)
    return cdf, guide


def whole(levels: NDArray[Any]) -> NDArray[np.uint8]:
    """Cut down to whole levels, with room for what float32 loses."""
    cut: NDArray[np.uint8] = np.clip(levels + np.float32(1e-3), 0, 255).astype(np.uint8)
    return cut


def gaussian(x: NDArray[Any], sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Floats:
    """Gaussian blur of every image and channel."""
    from scipy.ndimage import gaussian_filter  # type: ignore[import-untyped,unused-ignore]

    along = (0.0, sigma, sigma, 0.0)[: x.ndim]
    blurred: Floats = gaussian_filter(x, along, mode=mode, truncate=truncate, output=np.float32)
    return blurred


def edges(x: NDArray[Any], by: int, mode: Literal["edge", "reflect"] = "edge") -> NDArray[Any]:
    """Images with a border of `by` pixels: the edge repeated, or reflected about the edge pixel."""
    return np.pad(x, [(0, 0), (by, by), (by, by), (0, 0)][: x.ndim], mode=mode)


def correlate(x: NDArray[Any], kernel: NDArray[Any]) -> Floats:
    """Correlation with one odd square kernel, borders reflected about the edge pixel."""
    by, (h, w) = len(kernel) // 2, x.shape[1:3]
    padded = edges(x.astype(np.float32), by, "reflect")
    out = np.zeros(x.shape, np.float32)
    for i, j in zip(*np.nonzero(kernel), strict=True):
        out += np.float32(kernel[i, j]) * padded[:, i : i + h, j : j + w]
    return out


@lru_cache(maxsize=32)
def disk(radius: float, alias: float, reach: int) -> NDArray[np.float64]:
    """A disk of total 1 whose rim a small Gaussian of (2 reach + 1)² pixels softens."""
    half = max(1, math.floor(radius)) + reach
    line = np.arange(-half, half + 1)
    flat = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float64)
    soft = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * alias**2))
    soft /= soft.sum()
    for axis in (0, 1):
        flat = np.apply_along_axis(np.convolve, axis, flat, soft, "same")
    kernel: NDArray[np.float64] = flat / flat.sum()
    return kernel


def motion(x: NDArray[Any], degrees: Floats, radius: float, sigma: float) -> Floats:
    """Blur each image along its own direction with half a Gaussian, borders repeated.

    Images are put in order of their angle, so that those which a tap shifts alike lie side by side.
    """
    order = np.argsort(degrees, kind="stable")
    angle = np.deg2rad(degrees[order].astype(np.float64))
    taps = 2 * math.ceil(radius) + 1
    weights = np.exp(-(np.arange(taps) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    h, w = x.shape[1:3]
    padded = edges(x[order].astype(np.float32), taps)
    out = np.zeros(x.shape, np.float32)
    for i, weight in enumerate(weights):
        down = taps + np.ceil(i * np.sin(angle) - 0.5).astype(int)
        right = taps + np.ceil(i * np.cos(angle) - 0.5).astype(int)
        starts = np.flatnonzero(np.diff(down, prepend=-1) | np.diff(right, prepend=-1))
        for a, b in zip(starts, [*starts[1:], len(x)], strict=True):
            out[a:b] += np.float32(weight) * padded[a:b, down[a] : down[a] + h, right[a] : right[a] + w]
    back = np.empty_like(out)
    back[order] = out
    return back


def _stretch(size: int, out: int) -> NDArray[np.float32]:
    """The matrix (out, size) that interpolates `size` points at `out` places, first on first and last on last."""
    place = np.arange(out) * ((size - 1) / max(out - 1, 1))
    low = np.minimum(place.astype(int), max(size - 2, 0))
    matrix = np.zeros((out, size), np.float32)
    matrix[np.arange(out), low] = 1 - (place - low)
    matrix[np.arange(out), np.minimum(low + 1, size - 1)] += (place - low).astype(np.float32)
    return matrix


def enlarge(fields: Floats, h: int, w: int) -> Floats:
    """Fields (n, a, b) interpolated to (n, h, w)."""
    if fields.shape[1:] == (h, w):
        return fields
    return np.asarray(_stretch(fields.shape[1], h) @ fields @ _stretch(fields.shape[2], w).T, np.float32)


def _zoom(size: int, factor: float) -> NDArray[np.float32]:
    """The matrix (size, size) that zooms into the middle of a line by a factor of 1 or more."""
    kept = math.ceil(size / factor)
    wide = max(round(kept * factor), size)
    top, trim = (size - kept) // 2, (wide - size) // 2
    matrix = np.zeros((size, size), np.float32)
    matrix[:, top : top + kept] = _stretch(kept, wide)[trim : trim + size]
    return matrix


@lru_cache(maxsize=8)
def _zooms(h: int, w: int, factors: tuple[float, ...]) -> Any:
    """Sum of zooms as one sparse matrix over the pixels of an image."""
    from scipy.sparse import csr_array, kron  # type: ignore[import-untyped,unused-ignore]

    total = csr_array((h * w, h * w), dtype=np.float32)
    for z in factors:
        total = total + kron(csr_array(_zoom(h, z)), csr_array(_zoom(w, z)), format="csr")
    return total


def zoomed(x: NDArray[Any], factors: Sequence[float]) -> Floats:
    """Sum of the images zoomed by each factor."""
    n, h, w = x.shape[:3]
    pixels = x.reshape(n, h * w, -1).transpose(1, 0, 2).reshape(h * w, -1).astype(np.float32)
    out: Floats = np.asarray(_zooms(h, w, tuple(factors)) @ pixels, np.float32)
    return np.ascontiguousarray(out.reshape(h * w, n, -1).transpose(1, 0, 2)).reshape(x.shape)


def _fold_back(at: NDArray[np.intp], size: int, repeat_edge: bool) -> NDArray[np.intp]:
    """Places outside 0..size-1 reflected to the inside, the edge pixel met twice or once."""
    last = 2 * size - (1 if repeat_edge else 2)
    at = at % (last + repeat_edge)
    return np.minimum(at, last - at)


def bilinear(x: Floats, rows: Floats, cols: Floats, repeat_edge: bool) -> Floats:
    """Images (n, h, w, 3) read at places (n, h, w), interpolated and reflected at the borders."""
    n, h, w = x.shape[:3]
    pixels = x.reshape(n * h * w, -1)
    first = (np.arange(n, dtype=np.intp) * (h * w))[:, None, None]
    top, left = np.floor(rows), np.floor(cols)
    fy, fx = (rows - top)[..., None], (cols - left)[..., None]
    i, j = top.astype(np.intp), left.astype(np.intp)
    ys = [first + w * _fold_back(i + k, h, repeat_edge) for k in (0, 1)]
    xs = [_fold_back(j + k, w, repeat_edge) for k in (0, 1)]
    upper, lower = (
        pixels.take(y + xs[0], axis=0) * (1 - fx) + pixels.take(y + xs[1], axis=0) * fx for y in ys
    )  # each (n, h, w, 3)
    mixed: Floats = upper * (1 - fy) + lower * fy
    return mixed
