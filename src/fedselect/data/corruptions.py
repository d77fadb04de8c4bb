"""The image corruptions of CIFAR10-C, made from any RGB images (Hendrycks & Dietterich, ICLR 2019).

Fifteen standard types and four extra ones at severities 1 to 5, with the parameters published for 32x32. For other sizes
whatever is counted in pixels grows with the shorter side: radii and widths of blurs, shifts, and the grain of snow,
spatter, frost and elastic fields (drawn on a grid with 32 on the shorter side, then enlarged). Noise stays per pixel;
pixelate keeps its ratio and JPEG its quality.

What differs from the published arrays: random numbers are hashed from (seed, image id, type, severity), so an image comes
out alike in any batch; frost textures are made by rule, since the published photographs are not ours to ship; motion blur,
affine warps and edge finding are written here and not taken from ImageMagick and OpenCV. As published, values are cut
down to whole levels, and glass blur's "swap" copies one pixel over the other.

60,000 images of 32x32 take less than a minute of two cores for every type.
"""

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError, unknown
from fedselect.data.corruptions_layers import frost_textures, plasma, rims
from fedselect.data.corruptions_parts import (
    Draws,
    Floats,
    bilinear,
    correlate,
    disk,
    enlarge,
    fold,
    gaussian,
    motion,
    whole,
    zoomed,
)

Pixels = NDArray[np.uint8]
Made = NDArray[np.uint8] | Floats  # levels from 0 to 255, not yet cut to whole ones

_CHUNK = 1 << 20  # values worked on at once by a thread
_SMALLEST = 8  # pixels on the shorter side


def _scale(x: Pixels) -> float:
    """How many times larger the images are than those the parameters were published for."""
    return float(min(x.shape[1:3]) / 32)


def _grid(x: Pixels) -> tuple[int, int]:
    """The grid on which random fields are drawn: 32 on the shorter side."""
    h, w = x.shape[1:3]
    return round(h / _scale(x)), round(w / _scale(x))


def _levels(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32, copy=False)


def gaussian_noise(x: Pixels, draws: Draws, sigma: float) -> Made:
    return x + draws.normal("noise", *x.shape[1:]) * np.float32(255 * sigma)


def shot_noise(x: Pixels, draws: Draws, rate: float) -> Made:
    return draws.poisson("noise", x, rate).astype(np.float32) * np.float32(255 / rate)


def impulse_noise(x: Pixels, draws: Draws, share: float) -> Made:
    bits = draws.bits("noise", *x.shape[1:])
    edge = round(share / 2 * 2**32)
    out = x.copy()
    out[bits < np.uint32(edge)] = 0
    out[bits >= np.uint32(2**32 - edge)] = 255
    return out


def speckle_noise(x: Pixels, draws: Draws, sigma: float) -> Made:
    return x * (1 + draws.normal("noise", *x.shape[1:]) * np.float32(sigma))


def gaussian_blur(x: Pixels, draws: Draws, sigma: float) -> Made:
    return gaussian(x, sigma * _scale(x))


def defocus_blur(x: Pixels, draws: Draws, radius: float, alias: float) -> Made:
    s = _scale(x)
    return correlate(x, disk(radius * s, alias * s, int(np.ceil(s))))


def glass_blur(x: Pixels, draws: Draws, sigma: float, reach: float, times: float) -> Made:
    """Every pixel off the border takes the place of one within reach up and to the left (reach 1; else all around)."""
    (n, h, w), s = x.shape[:3], _scale(x)
    d = max(1, round(reach * s))
    pixels = whole(gaussian(x, sigma * s)).reshape(n * h * w, 3)
    place = np.arange(n * h * w).reshape(n, h, w)
    inner = (slice(None), slice(d + 1, h - d + 1), slice(d + 1, w - d + 1))
    for i in range(int(times)):
        taken = place.copy()
        shape = taken[inner].shape[1:]
        down, right = (draws.below(f"{way}/{i}", 2 * d, *shape) - d for way in ("down", "right"))
        taken[inner] += down * w + right
        pixels = pixels[taken.ravel()]
    return gaussian(pixels.reshape(x.shape), sigma * s)


def motion_blur(x: Pixels, draws: Draws, radius: float, sigma: float) -> Made:
    s = _scale(x)
    return np.rint(motion(x, draws.between("angle", -45, 45), radius * s, sigma * s))


def zoom_blur(x: Pixels, draws: Draws, most: float) -> Made:
    factors = [1 + k / 100 for k in range(round((most - 1) * 100) + 1)]
    return (x + zoomed(x, factors)) / np.float32(len(factors) + 1)


def snow(x: Pixels, draws: Draws, *how: float) -> Made:
    mean, sigma, zoom, least, radius, width, kept = how
    (h, w), s = x.shape[1:3], _scale(x)
    layer = np.float32(mean) + np.float32(sigma) * draws.normal("flakes", *_grid(x))
    layer = enlarge(zoomed(layer, (zoom,)), h, w)
    layer[layer < least] = 0
    flakes = motion(whole(layer * 255), draws.between("angle", -135, -45), radius * s, width * s)
    flakes = np.rint(flakes)[..., None]
    light = x.astype(np.float32)
    grey = (light @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
    pale = np.maximum(light, grey * np.float32(1.5) + np.float32(127.5))
    return _levels(np.float32(kept) * light + np.float32(1 - kept) * pale + flakes + flakes[:, ::-1, ::-1])


def frost(x: Pixels, draws: Draws, kept: float, ice: float) -> Made:
    """Blend with a random crop of one of five frost textures."""
    (h, w), grid = x.shape[1:3], _grid(x)
    textures = frost_textures()
    count, size = textures.shape[:2]
    rows = draws.below("row", size - min(grid[0], size) + 1)[:, None, None] + np.arange(grid[0])[:, None]
    cols = draws.below("column", size - min(grid[1], size) + 1)[:, None, None] + np.arange(grid[1])
    which = draws.below("texture", count)[:, None, None]
    crops = textures[which, rows % size, cols % size].astype(np.float32)
    if grid != (h, w):
        crops = np.stack([enlarge(np.ascontiguousarray(crops[..., c]), h, w) for c in range(3)], axis=-1)
    return _levels(np.float32(kept) * x + np.float32(ice) * crops)


def fog(x: Pixels, draws: Draws, weight: float, decay: float) -> Made:
    top = x.max(axis=(1, 2, 3), keepdims=True).astype(np.float32)
    mist = plasma(draws, x.shape[1], x.shape[2], decay)[..., None] * np.float32(255 * weight)
    return _levels((x + mist) * (top / (top + np.float32(255 * weight))))


def brightness(x: Pixels, draws: Draws, more: float) -> Made:
    """V of HSV plus `more`: a colour is scaled as its largest channel is; black becomes grey."""
    light = x.astype(np.float32)
    value = light.max(axis=-1, keepdims=True)
    raised = np.minimum(value + np.float32(255 * more), 255)
    return _levels(np.where(value > 0, light * (raised / np.maximum(value, 1)), raised))


def saturate(x: Pixels, draws: Draws, factor: float, more: float) -> Made:
    """S of HSV times `factor` plus `more`: each channel's distance from the largest is scaled; grey has red's hue."""
    light = x.astype(np.float32)
    value = light.max(axis=-1, keepdims=True)
    span = value - light.min(axis=-1, keepdims=True)
    wanted = value * np.clip(span / np.maximum(value, 1) * np.float32(factor) + np.float32(more), 0, 1)
    below = np.where(span > 0, (value - light) / np.maximum(span, 1), np.array([0, 1, 1], np.float32))
    return _levels(value - below * wanted)


def contrast(x: Pixels, draws: Draws, factor: float) -> Made:
    mean = x.sum(axis=(1, 2), keepdims=True, dtype=np.int64) / (x.shape[1] * x.shape[2])
    return _levels(x * np.float32(factor) + (mean * (1 - factor)).astype(np.float32))


def elastic_transform(x: Pixels, draws: Draws, alpha: float, sigma: float, jitter: float) -> Made:
    """A random affine map of three points about the middle, then a smooth random displacement."""
    n, h, w = x.shape[:3]
    side = min(h, w)
    middle, third = np.array([w // 2, h // 2]), side // 3
    points = middle + third * np.array([[1, 1], [1, -1], [-1, -1]])  # as (x, y)
    moved = points + draws.between("points", -jitter * side, jitter * side, 3, 2).astype(np.float64)
    back = np.linalg.solve(np.concatenate([moved, np.ones((n, 3, 1))], axis=2), np.broadcast_to(points, (n, 3, 2)) + 0.0)
    rows, cols = np.mgrid[:h, :w].astype(np.float32)
    a = back.astype(np.float32)[:, :, :, None, None]
    out = bilinear(
        x.astype(np.float32), a[:, 0, 1] * cols + a[:, 1, 1] * rows + a[:, 2, 1],
        a[:, 0, 0] * cols + a[:, 1, 0] * rows + a[:, 2, 0], repeat_edge=False,
    )  # fmt: skip
    if alpha == 0:
        return out
    down, right = (
        enlarge(gaussian(draws.between(way, -1, 1, *_grid(x)), 32 * sigma, "reflect", 3.0), h, w) * np.float32(alpha * side)
        for way in ("down", "right")
    )
    return bilinear(out, rows + down, cols + right, repeat_edge=True)


def pixelate(x: Pixels, draws: Draws, scale: float) -> Made:
    from PIL import Image

    (h, w), box = x.shape[1:3], Image.Resampling.BOX
    small = (int(w * scale), int(h * scale))
    return np.stack([np.asarray(Image.fromarray(one).resize(small, box).resize((w, h), box)) for one in x])


def jpeg_compression(x: Pixels, draws: Draws, quality: float) -> Made:
    from PIL import Image

    def through(one: Pixels) -> Pixels:
        file = io.BytesIO()
        Image.fromarray(one).save(file, "JPEG", quality=int(quality))
        return np.asarray(Image.open(file))

    return np.stack([through(one) for one in x])


def spatter(x: Pixels, draws: Draws, *how: float) -> Made:
    """Drops of water with a lit rim, or specks of mud."""
    mean, sigma, blur, least, strength, mud = how
    layer = np.float32(mean) + np.float32(sigma) * draws.normal("liquid", *_grid(x))
    layer = enlarge(gaussian(layer, blur), *x.shape[1:3])
    layer[layer < least] = 0
    if mud:
        cover = gaussian((layer > least).astype(np.float32), strength * _scale(x))[..., None]
        cover[cover < 0.8] = 0
        return x * (1 - cover) + np.array([63, 42, 20], np.float32) * cover
    drops = whole(layer * 255)
    shine = drops * rims(drops, _scale(x))
    shine *= np.float32(strength) / np.maximum(shine.max(axis=(1, 2), keepdims=True), 1)
    return x + shine[..., None] * np.array([175, 238, 238], np.float32)


# the published parameters for 32x32, severities 1 to 5, in the order of each function's arguments
PARAMETERS: dict[str, tuple[tuple[float, ...], ...]] = {
    "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
    "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
    "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((1.06,), (1.11,), (1.15,), (1.20,), (1.25,)),  # where np.arange(1, 1.06, 0.01), (1, 1.11, 0.01), ... end
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
    "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
    "elastic_transform": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
    "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
    "speckle_noise": ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,)),
    "gaussian_blur": ((0.4,), (0.6,), (0.7,), (0.8,), (1,)),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
}

# each takes (pixels, draws, *parameters) and is called through `corrupt`
CORRUPTIONS: dict[str, Callable[..., Made]] = {
    f.__name__: f
    for f in (
        gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur, snow, frost, fog,
        brightness, contrast, elastic_transform, pixelate, jpeg_compression,
        speckle_noise, gaussian_blur, spatter, saturate,
    )
}  # fmt: skip
STANDARD: tuple[str, ...] = tuple(CORRUPTIONS)[:15]


def corrupt(x: NDArray[Any], name: str, severity: int, seed: int, ids: NDArray[np.integer[Any]]) -> Pixels:
    """RGB images (N, height, width, 3) in uint8, corrupted.

    What becomes of an image depends on (seed, its id, name, severity) and its pixels, not on the others or their order.
    """
    if name not in CORRUPTIONS:
        raise unknown("corruption", name, CORRUPTIONS)
    if isinstance(severity, bool) or severity not in (1, 2, 3, 4, 5):
        raise InputError(f"{name}: severity must be a whole number from 1 to 5, not {severity!r}.")
    if x.ndim != 4 or x.shape[-1] != 3 or x.dtype != np.uint8:
        raise DataError(f"{name}: images must be RGB in uint8 (N, height, width, 3), not {x.dtype} {x.shape}.")
    if min(x.shape[1:3]) < _SMALLEST:
        raise DataError(f"{name}: images must be at least {_SMALLEST} pixels high and wide, not {x.shape[1]}x{x.shape[2]}.")
    if ids.shape != (len(x),) or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"{name}: one whole number per image is needed as its id, ({len(x)},), not {ids.dtype} {ids.shape}.")
    keys = fold(np.zeros(len(x), np.uint64), seed, name, severity, ids.astype(np.int64).view(np.uint64))
    out = np.empty(x.shape, np.uint8)

    def work(part: slice) -> None:
        made = CORRUPTIONS[name](np.ascontiguousarray(x[part]), Draws(keys[part]), *PARAMETERS[name][severity - 1])
        out[part] = made if made.dtype == np.uint8 else whole(made)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(work, _parts(len(x), x[0].size if len(x) else 1)):
            pass
    return out


def _parts(count: int, size: int) -> Iterator[slice]:
    step = max(1, _CHUNK // size)
    yield from (slice(i, min(i + step, count)) for i in range(0, count, step))
