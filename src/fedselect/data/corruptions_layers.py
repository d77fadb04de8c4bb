"""What image corruptions lay over an image: fog, frost and the relief of drops, as stacks of fields."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedselect.data.corruptions_parts import Draws, Floats, Keys, correlate, edges, fold, whole


def plasma(draws: Draws, h: int, w: int, decay: float) -> Floats:
    """Clouds in [0, 1] by diamonds and squares on a torus; a level's swing is the square of 100 / decay^level."""
    size = 1 << (max(h, w) - 1).bit_length()
    field = np.zeros((len(draws.keys), size, size), np.float32)
    step, swing = size, 100.0
    while step >= 2:
        half = step // 2

        def level(total: Floats, which: str, step: int = step, swing: float = swing) -> Floats:
            return total * np.float32(0.25) + draws.between(f"{which}/{step}", -(swing**2), swing**2, *total.shape[1:])

        corners = field[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        middles = level(pairs + np.roll(pairs, -1, axis=2), "middle")
        field[:, half::step, half::step] = middles
        across = corners + np.roll(corners, -1, axis=2) + middles + np.roll(middles, 1, axis=1)
        along = corners + np.roll(corners, -1, axis=1) + middles + np.roll(middles, 1, axis=2)
        field[:, ::step, half::step] = level(across, "across")
        field[:, half::step, ::step] = level(along, "along")
        step, swing = half, swing / decay
    field -= field.min(axis=(1, 2), keepdims=True)
    field /= field.max(axis=(1, 2), keepdims=True)
    return field[:, :h, :w]


def _noise(key: Keys, y: NDArray[Any], x: NDArray[Any]) -> NDArray[np.float64]:
    """Smooth noise in [0, 1): random numbers at whole coordinates, interpolated between them."""
    i, j = np.floor(y), np.floor(x)
    fy, fx = (f * f * (3 - 2 * f) for f in (y - i, x - j))

    def corner(di: int, dj: int) -> NDArray[np.float64]:
        hashed = fold(key, (i + di).astype(np.int64).view(np.uint64), (j + dj).astype(np.int64).view(np.uint64))
        return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53

    out: NDArray[np.float64] = (corner(0, 0) * (1 - fx) + corner(0, 1) * fx) * (1 - fy)
    out += (corner(1, 0) * (1 - fx) + corner(1, 1) * fx) * fy
    return out


_ICE = (  # the colours of five windows: where ice is thin, and where it is thick
    ((20, 105, 145), (205, 215, 215)),
    ((150, 153, 165), (250, 252, 255)),
    ((135, 145, 165), (245, 250, 255)),
    ((85, 100, 117), (235, 243, 250)),
    ((40, 50, 68), (235, 240, 245)),
)


@lru_cache(maxsize=1)
def frost_textures(size: int = 160) -> NDArray[np.uint8]:
    """Five frosted windows (5, size, size, 3): always the same images, made by rule and not photographs.

    Patches of ice from fractal noise; in each cell of a random mosaic, bright needles along one direction and its
    branches at 60 degrees (noise stretched along them, of which only the ridges are kept). Tones and contrasts were set
    by the mean, spread and gradient of the photographs that the published code uses.
    """
    y, x = np.mgrid[:size, :size].astype(np.float64)
    out = np.empty((len(_ICE), size, size, 3), np.uint8)
    for k, colours in enumerate(_ICE):
        key = fold(np.zeros(1, np.uint64), "frost", k)
        draws = Draws(key)
        patches = sum(_noise(fold(key, f"patch {o}"), y * 2**o / 40, x * 2**o / 40) / 2**o for o in range(5)) / 1.9375
        cover = np.clip((patches - 0.3) / 0.4, 0, 1)
        wobble = [6 * _noise(fold(key, f"wobble {a}"), y / 9, x / 9) for a in "yx"]
        centres = draws.uniform("centres", 2, 60)[0].astype(np.float64) * size
        cell = ((y + wobble[0])[..., None] - centres[0]) ** 2 + ((x + wobble[1])[..., None] - centres[1]) ** 2
        theta = (np.pi * draws.uniform("directions", 60)[0].astype(np.float64))[cell.argmin(-1)]
        needles = np.zeros((size, size))
        for branch, strength in ((0, 1.0), (1, 0.7), (2, 0.6)):
            c, s = np.cos(theta + branch * np.pi / 3), np.sin(theta + branch * np.pi / 3)
            ridge = 1 - np.abs(2 * _noise(fold(key, f"needle {branch}"), (s * x - c * y) / 1.6, (c * x + s * y) / 9) - 1)
            needles = np.maximum(needles, strength * ridge**4)
        ice = np.clip(0.05 + 0.33 * cover + (0.3 + 0.4 * cover) * needles, 0, 1)[..., None]
        thin, thick = np.array(colours)
        out[k] = np.rint(thin + (thick - thin) * ice)
    return out


def rims(drops: NDArray[np.uint8], scale: float) -> Floats:
    """Relief of drops lit from one corner: the distance from their outlines, equalised, embossed and smoothed."""
    from scipy.ndimage import distance_transform_edt  # type: ignore[import-untyped,unused-ignore]

    n, h, w = drops.shape
    off = np.concatenate([~_outlines(drops), np.zeros((1, h, w), bool)])  # the last: so that there is always an outline
    far = distance_transform_edt(off, sampling=(1e4, 1, 1))[:n].astype(np.float32)
    box = np.full((3, 3), 1 / 9)
    levels = whole(correlate(np.minimum(far, min(20 * scale, 255)), box))
    counts = np.bincount((np.arange(n)[:, None] * 256 + levels.reshape(n, -1)).ravel(), minlength=256 * n).reshape(n, 256)
    lowest = levels.min(axis=(1, 2)).astype(np.intp)[:, None]
    first = np.take_along_axis(counts, lowest, 1)
    table = np.rint((np.cumsum(counts, axis=1) - first) * (255 / np.maximum(h * w - first, 1)))
    table = np.where(first == h * w, lowest, table).astype(np.uint8)
    even = np.take_along_axis(table, levels.reshape(n, -1).astype(np.intp), 1).reshape(n, h, w)
    emboss = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    return np.rint(correlate(np.clip(correlate(even, emboss), 0, 255), box))


def _outlines(drops: NDArray[np.uint8], low: int = 50, high: int = 150) -> NDArray[np.bool_]:
    """Canny's edges: the crests of the gradient above `low` that hang together with one above `high`."""
    from scipy.ndimage import binary_propagation

    h, w = drops.shape[1:]
    p = edges(drops.astype(np.int32), 1)
    rows = p[:, :-2] + 2 * p[:, 1:-1] + p[:, 2:]
    cols = p[..., :-2] + 2 * p[..., 1:-1] + p[..., 2:]
    gx, gy = rows[..., 2:] - rows[..., :-2], cols[:, 2:] - cols[:, :-2]
    size = np.abs(gx) + np.abs(gy)
    around = np.pad(size, [(0, 0), (1, 1), (1, 1)])

    def at(i: int, j: int) -> NDArray[np.int32]:
        return around[:, 1 + i : 1 + i + h, 1 + j : 1 + j + w]

    flat = np.abs(gy) < np.tan(np.pi / 8) * np.abs(gx)
    steep = np.abs(gy) > np.tan(3 * np.pi / 8) * np.abs(gx)
    same = (gx < 0) == (gy < 0)
    crest = np.select(
        [flat, steep, same],
        [
            (size > at(0, -1)) & (size >= at(0, 1)),
            (size > at(-1, 0)) & (size >= at(1, 0)),
            (size > at(-1, -1)) & (size > at(1, 1)),
        ],
        (size > at(-1, 1)) & (size > at(1, -1)),
    )
    joined: NDArray[np.bool_] = binary_propagation(crest & (size > high), np.ones((1, 3, 3)), crest & (size > low))
    return joined
