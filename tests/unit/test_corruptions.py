"""The corruptions of CIFAR10-C: keyed by image, published in strength, and equal to plain code where that is short."""

import colorsys
import io
import math
import warnings

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from fedselect.core.errors import DataError, InputError
from fedselect.data import corruptions
from fedselect.data.corruptions import CORRUPTIONS, PARAMETERS, STANDARD, corrupt
from fedselect.data.corruptions_layers import plasma
from fedselect.data.corruptions_parts import Draws, bilinear, fold, motion, zoomed

SEVERITIES = (1, 2, 3, 4, 5)
PLAIN = {  # no randomness in them
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur", "saturate",
}  # fmt: skip
# the severities among which distance from the original need not grow, and why the published parameters make it so
NOT_MONOTONE = {
    "glass_blur": "the shuffle is the same at 1, 2, 3 and at 4, 5; the wider blur within each smooths it away",
    "frost": "from 3 on the picture itself is dimmed, which offsets the brighter ice",
    "elastic_transform": "the affine jitter shrinks from 1 to 5, while the fine displacement grows",
    "motion_blur": "3 and 4 have one sigma, and the longer reach of 4 holds almost no weight",
    "spatter": "1 to 3 are water, 4 and 5 are mud",
    "saturate": "1 and 2 take colour away, 3 to 5 add it",
}


def patches(size=32, step=64):
    """Pieces of scikit-learn's two photographs, scaled down."""
    out = []
    for name in ("china.jpg", "flower.jpg"):
        picture = load_sample_image(name)
        for i in range(0, picture.shape[0] - 128, step):
            for j in range(0, picture.shape[1] - 128, step):
                out.append(np.asarray(Image.fromarray(picture[i : i + 128, j : j + 128]).resize((size, size))))
    return np.stack(out)


X = patches()
IDS = np.arange(len(X)) * 7 + 3


def distance(a, b):
    return np.sqrt(((a.astype(float) - b) ** 2).mean())


def flat(value, n=40):
    return np.full((n, 32, 32, 3), value, np.uint8), np.arange(n)


def test_nineteen_names_of_which_fifteen_are_standard():
    assert len(CORRUPTIONS) == 19
    assert set(PARAMETERS) == set(CORRUPTIONS)
    assert set(CORRUPTIONS) - set(STANDARD) == {"speckle_noise", "gaussian_blur", "spatter", "saturate"}
    assert all(len(rows) == 5 for rows in PARAMETERS.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(32, 32), (9, 8), (40, 56)])
def test_shape_type_and_input_untouched(name, shape):
    x = np.stack([np.asarray(Image.fromarray(one).resize(shape[::-1])) for one in X[:3]])
    before = x.copy()
    for severity in SEVERITIES:
        got = corrupt(x, name, severity, 0, IDS[:3])
        assert (got.shape, got.dtype) == (x.shape, np.uint8)
        assert (got != x).any() or min(shape) < 32  # blurs scaled down to a small image may be none
    assert (x == before).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("severity", [1, 5])
def test_an_image_comes_out_alike_in_any_batch_and_order(name, severity):
    whole = corrupt(X, name, severity, 5, IDS)
    some = np.random.default_rng(0).permutation(len(X))[:11]
    assert (corrupt(X[some], name, severity, 5, IDS[some]) == whole[some]).all()
    assert (corrupt(X[4:5], name, severity, 5, IDS[4:5]) == whole[4:5]).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seed_and_id_matter_exactly_where_there_is_randomness(name):
    x = np.repeat(X[:1], 2, axis=0)
    a, b = corrupt(x, name, 5, 0, np.array([0, 1]))
    (c,) = corrupt(x[:1], name, 5, 1, np.array([0]))
    assert ((a == b).all() and (a == c).all()) == (name in PLAIN)
    if name not in PLAIN:
        assert (a != b).any()
        assert (a != c).any()


def test_images_do_not_depend_on_chunks(monkeypatch):
    whole = corrupt(X, "snow", 3, 0, IDS)
    monkeypatch.setattr("fedselect.data.corruptions._CHUNK", 5 * 3072)
    assert (corrupt(X, "snow", 3, 0, IDS) == whole).all()


def test_no_images():
    assert corrupt(X[:0], "fog", 1, 0, IDS[:0]).shape == (0, 32, 32, 3)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_is_monotone_in_distance(name):
    far = [distance(corrupt(X, name, s, 0, IDS), X) for s in SEVERITIES]
    assert all(0.5 < f < 100 for f in far)
    if name not in NOT_MONOTONE:
        assert far == sorted(far)


def test_severity_is_monotone_within_the_exceptions():
    far = {n: [distance(corrupt(X, n, s, 0, IDS), X) for s in SEVERITIES] for n in NOT_MONOTONE}
    assert far["glass_blur"][0] > far["glass_blur"][2] < far["glass_blur"][4]
    assert far["elastic_transform"] == sorted(far["elastic_transform"], reverse=True)
    assert far["motion_blur"][:3] == sorted(far["motion_blur"][:3])
    assert far["frost"][:3] == sorted(far["frost"][:3])
    assert far["spatter"][:3] == sorted(far["spatter"][:3])
    assert far["spatter"][3] < far["spatter"][4]
    assert far["saturate"][0] < far["saturate"][1]
    assert far["saturate"][2:] == sorted(far["saturate"][2:])


# --- noise: statistics within four standard errors; a value is cut down to a whole level, which takes 0.5 off the mean
# and adds 1/12 to the variance


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_noise_has_its_mean_and_sigma(severity):
    x, ids = flat(128)
    got = corrupt(x, "gaussian_noise", severity, 0, ids).astype(float)
    sigma = math.sqrt((255 * PARAMETERS["gaussian_noise"][severity - 1][0]) ** 2 + 1 / 12)
    assert abs(got.mean() - 127.5) < 4 * sigma / math.sqrt(x.size)
    assert abs(got.std() - sigma) < 4 * sigma / math.sqrt(2 * x.size)


def test_speckle_noise_grows_with_the_pixel():
    for value in (40, 120):
        x, ids = flat(value)
        got = corrupt(x, "speckle_noise", 2, 0, ids).astype(float)
        sigma = math.sqrt((value * 0.1) ** 2 + 1 / 12)
        assert abs(got.std() - sigma) < 4 * sigma / math.sqrt(2 * x.size)


@pytest.mark.parametrize(("rate", "severity"), [(500, 1), (100, 3), (50, 5)])
def test_poisson_counts_have_mean_and_variance_of_the_rate(rate, severity):
    x, ids = flat(90)
    draws = Draws(fold(np.zeros(len(x), np.uint64), "test", ids.astype(np.uint64)))
    counts, expected = draws.poisson("noise", x, rate), 90 / 255 * rate
    assert abs(counts.mean() - expected) < 4 * math.sqrt(expected / x.size)
    assert abs(counts.var() / expected - 1) < 4 * math.sqrt((2 + 1 / expected) / x.size)
    got = corrupt(x, "shot_noise", severity, 0, ids)
    possible = np.floor(np.arange(0, rate + 1) * (255 / rate) + 1e-3)
    assert np.isin(got, possible).all()
    assert abs(got.mean() + (0.5 if rate > 255 else 0.45) - 90) < 0.5  # cut down by at most one level
    assert (corrupt(flat(0)[0], "shot_noise", severity, 0, ids) == 0).all()


def test_poisson_counts_follow_the_distribution():
    x, ids = flat(51)
    draws = Draws(fold(np.zeros(len(x), np.uint64), "test", ids.astype(np.uint64)))
    seen = np.bincount(draws.poisson("noise", x, 50.0).ravel(), minlength=40)[:40] / x.size
    expected = np.array([math.exp(-10) * 10**k / math.factorial(k) for k in range(40)])
    assert (np.abs(seen - expected) <= 4.5 * np.sqrt(expected / x.size) + 1e-5).all()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_has_its_share_of_salt_and_of_pepper(severity):
    x, ids = flat(128)
    got = corrupt(x, "impulse_noise", severity, 0, ids)
    half = PARAMETERS["impulse_noise"][severity - 1][0] / 2
    for level in (0, 255):
        assert abs((got == level).mean() - half) < 4 * math.sqrt(half / x.size)
    assert np.isin(got, (0, 128, 255)).all()


def test_normals_are_normal_and_uncorrelated():
    z = Draws(fold(np.arange(200, dtype=np.uint64), "test")).normal("z", 999).astype(float)
    n = z.size
    for power, expected, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):  # moments and variances of z^power
        assert abs((z**power).mean() - expected) < 4 * math.sqrt(spread / n)
    for a, b in ((z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[:, 500:], z[:, :499])):  # images, neighbours, pairs made together
        assert abs((a * b).mean()) < 4 / math.sqrt(a.size)


# --- colour, codec, blur and warp: equal to plain code


def plain_hsv(pixel, change):
    h, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in pixel))
    return [math.floor(255 * c + 1e-3) for c in colorsys.hsv_to_rgb(*change(h, s, v))]


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_and_saturation_pixel_by_pixel(severity):
    x = np.random.default_rng(severity).integers(0, 256, (1, 8, 8, 3), dtype=np.uint8)
    x[0, 0, :3] = [[0, 0, 0], [255, 255, 255], [77, 77, 77]]
    (more,), (factor, shift) = PARAMETERS["brightness"][severity - 1], PARAMETERS["saturate"][severity - 1]
    brighter, richer = (corrupt(x, n, severity, 0, np.array([0])).reshape(-1, 3) for n in ("brightness", "saturate"))
    for pixel, a, b in zip(x.reshape(-1, 3), brighter, richer, strict=True):
        assert a.tolist() == plain_hsv(pixel, lambda h, s, v: (h, s, min(v + more, 1)))
        assert b.tolist() == plain_hsv(pixel, lambda h, s, v: (h, min(s * factor + shift, 1), v))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_is_about_the_mean_of_each_channel(severity):
    (c,) = PARAMETERS["contrast"][severity - 1]
    expected = [np.floor((x - x.mean((0, 1))) * c + x.mean((0, 1)) + 1e-3) for x in X[:9].astype(float)]
    off = corrupt(X[:9], "contrast", severity, 0, IDS[:9]) != np.stack(expected)
    assert off.mean() < 1e-3  # float32 at a whole level


@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_and_jpeg_are_pillows(severity):
    side = int(32 * PARAMETERS["pixelate"][severity - 1][0])
    for one, got, packed in zip(
        X[:5], *(corrupt(X[:5], n, severity, 0, IDS[:5]) for n in ("pixelate", "jpeg_compression")), strict=True
    ):
        picture = Image.fromarray(one)
        small = picture.resize((side, side), Image.Resampling.BOX)
        assert (got == np.asarray(small.resize((32, 32), Image.Resampling.BOX))).all()
        file = io.BytesIO()
        picture.save(file, format="JPEG", quality=PARAMETERS["jpeg_compression"][severity - 1][0])
        assert (packed == np.asarray(Image.open(file))).all()


def test_motion_blur_of_one_image_is_a_weighted_line():
    radius, sigma, degrees = 3, 1.5, np.array([30.0, -40.0], np.float32)
    got = motion(X[:2], degrees, radius, sigma)
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    for n, y, x in ((0, 0, 0), (0, 15, 30), (1, 31, 31), (1, 9, 20)):
        angle, total = math.radians(float(degrees[n])), np.zeros(3)
        for i, weight in enumerate(weights):
            row, col = y + math.ceil(i * math.sin(angle) - 0.5), x + math.ceil(i * math.cos(angle) - 0.5)
            total += weight / sum(weights) * X[n, min(max(row, 0), 31), min(max(col, 0), 31)]
        assert got[n, y, x] == pytest.approx(total, abs=1e-3)


def test_zoom_blur_keeps_a_flat_image_and_blurs_outwards():
    x, ids = flat(100, 1)
    assert (corrupt(x, "zoom_blur", 5, 0, ids) == 100).all()
    change = np.abs(corrupt(X, "zoom_blur", 3, 0, IDS).astype(float) - X).mean((0, 3))
    assert change[12:20, 12:20].mean() < change[:4].mean()


def test_zoom_blur_has_the_published_factors(monkeypatch):
    """np.arange(1, end, 0.01): by rounding, the ends 1.06 and 1.11 are in it and the others are not."""
    seen = []
    monkeypatch.setattr(corruptions, "zoomed", lambda x, factors: seen.append(factors) or zoomed(x, factors))
    for severity in SEVERITIES:
        corrupt(X[:1], "zoom_blur", severity, 0, IDS[:1])
    assert [len(factors) for factors in seen] == [7, 12, 16, 21, 26]
    for factors, end in zip(seen, (1.06, 1.11, 1.16, 1.21, 1.26), strict=True):
        assert factors == pytest.approx(np.arange(1, end, 0.01))


@pytest.mark.parametrize(
    "name", ["defocus_blur", "gaussian_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform"]
)
def test_moving_or_mixing_pixels_keeps_a_flat_image(name):
    x, ids = flat(77, 2)
    for severity in SEVERITIES:
        assert (corrupt(x, name, severity, 0, ids) == 77).all()


def test_glass_blur_without_blur_takes_each_pixel_from_up_and_left():
    got = corrupt(X[:4], "glass_blur", 1, 0, IDS[:4])  # sigma 0.05: the blur is none
    assert (got[:, :2] == X[:4, :2]).all()
    assert (got[:, :, :2] == X[:4, :, :2]).all()
    near = [X[:4, 2 - i : 32 - i, 2 - j : 32 - j] for i in (0, 1) for j in (0, 1)]
    assert np.any([(got[:, 2:, 2:] == one).all(-1) for one in near], axis=0).all()


@pytest.mark.parametrize("repeat_edge", [True, False])
def test_bilinear_matches_scipy(repeat_edge):
    from scipy.ndimage import map_coordinates

    rng, x = np.random.default_rng(0), X[:2].astype(np.float32)
    rows, cols = rng.uniform(-20, 50, (2, 2, 32, 32)).astype(np.float32)
    got = bilinear(x, rows, cols, repeat_edge)
    for n in range(2):
        for c in range(3):
            expected = map_coordinates(x[n, ..., c], (rows[n], cols[n]), order=1, mode="reflect" if repeat_edge else "mirror")
            assert got[n, ..., c] == pytest.approx(expected, abs=2e-2)


def test_snow_and_frost_lay_light_over_the_dark():
    x, ids = flat(10)
    for name in ("snow", "frost"):
        light = [corrupt(x, name, s, 0, ids).mean() for s in (1, 5)]
        assert 10 < light[0] < light[1], name


def test_fog_keeps_within_the_brightest_pixel_and_flattens():
    got = corrupt(X, "fog", 5, 0, IDS)
    assert (got.max((1, 2, 3)) <= X.max((1, 2, 3))).all()
    assert got.astype(float).std((1, 2)).mean() < X.astype(float).std((1, 2)).mean()


def test_spatter_is_water_then_mud():
    x, ids = flat(128)
    water = corrupt(x, "spatter", 3, 0, ids).astype(int) - 128
    assert water.min() == 0
    assert (water.sum((0, 1, 2))[1:] > water.sum((0, 1, 2))[0]).all()  # turquoise: less red
    mud = corrupt(x, "spatter", 5, 0, ids).astype(int) - 128
    assert mud.max() == 0
    assert mud.sum((0, 1, 2)).tolist() == sorted(mud.sum((0, 1, 2)), reverse=True)  # brown: least blue


def test_against_imagecorruptions():
    """The library that carries the published code with ImageNet's parameters: its parts, given ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        published = pytest.importorskip("imagecorruptions.corruptions", exc_type=ImportError)
    for degrees in (-44.0, -10.0, 0.0, 31.0):
        ours = motion(X[:1], np.array([degrees], np.float32), 9, 2.5)[0]
        theirs = published._motion_blur(X[0].astype(np.float32), radius=9, sigma=2.5, angle=degrees)
        assert ours == pytest.approx(theirs, abs=1e-2)
    clouds = plasma(Draws(fold(np.arange(400, dtype=np.uint64), "test")), 32, 32, 2.0)
    np.random.seed(0)
    theirs = np.stack([published.plasma_fractal(mapsize=32, wibbledecay=2.0) for _ in range(400)])
    for statistic in (lambda c: c.mean((1, 2)), lambda c: c.std((1, 2)), lambda c: np.abs(np.diff(c, axis=1)).mean((1, 2))):
        a, b = statistic(clouds), statistic(theirs)
        assert abs(a.mean() - b.mean()) < 4 * math.hypot(a.std(), b.std()) / math.sqrt(400)


# --- bad input


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"name": "gausian_noise"}, InputError, "did you mean 'gaussian_noise'"),
        ({"severity": 0}, InputError, "from 1 to 5, not 0"),
        ({"severity": 6}, InputError, "from 1 to 5, not 6"),
        ({"severity": 2.5}, InputError, "from 1 to 5, not 2.5"),
        ({"severity": True}, InputError, "from 1 to 5, not True"),
        ({"x": X[:2].astype(np.float32)}, DataError, "not float32"),
        ({"x": X[:2, ..., :1]}, DataError, r"RGB .* not uint8 \(2, 32, 32, 1\)"),
        ({"x": X[0]}, DataError, "not uint8"),
        ({"x": X[:2, :5]}, DataError, "at least 8 pixels .* not 5x32"),
        ({"ids": IDS[:3]}, DataError, "one whole number per image"),
        ({"ids": np.array([0.0, 1.0])}, DataError, "not float64"),
    ],
)
def test_bad_input_is_named(change, error, said):
    with pytest.raises(error, match=said):
        corrupt(**({"x": X[:2], "name": "fog", "severity": 1, "seed": 0, "ids": IDS[:2]} | change))
