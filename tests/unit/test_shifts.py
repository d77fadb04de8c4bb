"""Clients that differ in a known way, against slow and obvious references."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.data.partition import Pool, Sizes, by_hands, deal_classes, rng
from fedselect.data.shifts import KINDS, MOTLEY, parse
from fedselect.runs.config import Config
from fedselect.runs.rundir import identity

K, EACH = 5, 60
PARTS = ("train", "val", "test")


def images(channels=3, height=6, width=6):
    """Random pictures, no two alike, so that each is known again."""
    x = np.random.default_rng(0).integers(0, 256, (K * EACH, height, width, channels)).astype(np.uint8)
    y = np.random.default_rng(1).permutation(np.repeat(np.arange(K), EACH))
    return fs.Images("fake", x, y, tuple("abcde"))


def dealt(shift="labels", channels=3, height=6, width=6, **how):
    return fs.deal_images(
        images(channels, height, width), shift=shift, **{"clients": 8, "train": 10, "test": 5, "val": 3, **how}
    )


def vectors(shape=(4,), dtype=torch.float32, clients=3, targets=None):
    """Clients with inputs that are not pictures."""
    draw = torch.Generator().manual_seed(0)

    def part(count):
        x = (100 * torch.randn(count, *shape, generator=draw)).to(dtype)
        return x, torch.arange(count) % 3 if targets is None else targets(count)

    return fs.Federation([fs.ClientData(part(40), part(20), part(10)) for _ in range(clients)], name="table")


def same(a, b):
    """Whether two federations have the same samples, to the bit."""
    pairs = [(getattr(c, p), getattr(d, p)) for c, d in zip(a.clients, b.clients, strict=True) for p in PARTS]
    return all(torch.equal(v, w) and v.dtype == w.dtype for mine, theirs in pairs for v, w in zip(mine, theirs, strict=True))


# ---- nothing changes where nothing is asked


def as_ever(labels, clients, each, train, test, val, seed):
    """By class as it was before clients could have hands of different length: sample numbers (train, val, test)."""
    hands = deal_classes(clients, int(labels.max()) + 1, each, seed)
    got = [([], []) for _ in range(clients)]
    for c in range(int(labels.max()) + 1):
        rows = rng(seed, 2, c).permutation(np.flatnonzero(labels == c))
        holders = [i for i in range(clients) if c in hands[i]]
        parts = [[n // each + (hands[i].index(c) < n % each) for i in holders] for n in (train, test)]
        aside = max(parts[1], default=0) * len(holders)
        for which, there in ((0, rows[aside:]), (1, rows[:aside])):
            for at, i in enumerate(holders):
                got[i][which].append(there[at :: len(holders)][: parts[which][at]].tolist())
    out = []
    for mine, tests in got:
        turn = [rows[k] for k in range(train) for rows in mine if k < len(rows)]
        out.append((turn[val:], turn[:val], [r for rows in tests for r in rows]))
    return out


@pytest.mark.parametrize("seed", [0, 3])
def test_digits_are_dealt_as_ever_by_default(seed):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    data = fs.load("digits", clients=7, classes_per_client=3, train=20, test=25, val=4, seed=seed)
    for i, (client, rows) in enumerate(zip(data.clients, as_ever(y, 7, 3, 20, 25, 4, seed), strict=True)):
        assert (client.name, client.shift) == (str(i), {})
        for part, mine in zip(PARTS, rows, strict=True):
            assert getattr(client, part)[0].flatten(1).mul(16).tolist() == x[mine].tolist()
            assert getattr(client, part)[1].tolist() == y[mine].tolist()


@pytest.mark.parametrize("seed", [0, 3])
def test_images_are_dealt_as_ever_by_default(seed):
    mine, data = images(), fs.deal_images(images(), clients=4, train=9, test=7, val=2, seed=seed)
    for i, (client, rows) in enumerate(zip(data.clients, as_ever(mine.y, 4, 2, 9, 7, 2, seed), strict=True)):
        assert (client.name, client.shift) == (str(i), {})
        for part, numbers in zip(PARTS, rows, strict=True):
            assert getattr(client, part)[0].permute(0, 2, 3, 1).tolist() == mine.x[numbers].tolist()
            assert getattr(client, part)[1].tolist() == mine.y[numbers].tolist()


def test_the_default_is_labels_and_stays_out_of_the_identity_of_a_run():
    plain = Config.from_dict({"data": {"name": "digits"}}, "test")
    assert plain.data["shift"] == "labels"
    older = plain.to_json()
    del older["data"]["shift"]
    assert identity(Config.from_dict(older, "older")) == identity(plain)
    others = [identity(Config.from_dict({"data": {"name": "digits", "shift": s}}, "test")) for s in ("none", "motley")]
    assert len({identity(plain), *others}) == 3
    first = {k: v for k, v in plain.data.items() if k != "shift"}
    from fedselect.simulate.checkpoint import as_first_written

    assert as_first_written(plain.to_json())["data"] == first


# ---- dealing


@pytest.mark.parametrize("shift", ["none", "meaning", "groups", "camera", "permuted"])
def test_without_labels_everybody_gets_all_classes_alike_whatever_the_split(shift):
    alike = fs.load("digits", split="iid", seed=2)
    for split in ("classes", "dirichlet", "iid"):
        data = fs.load("digits", split=split, shift=shift, seed=2)
        if shift == "none":
            assert same(data, alike)
            assert [c.name for c in data.clients] == [c.name for c in alike.clients]
        assert [len(c.train[1]) for c in data.clients] == [len(c.train[1]) for c in alike.clients]
        assert all(len(data.labels(i)) >= 6 for i in range(10))  # 20 draws of ten classes; by classes there would be five


@pytest.mark.parametrize("split", ["classes", "dirichlet"])
def test_with_labels_the_split_decides(split):
    plain, data = (dealt(shift, split=split, clients=4, concentration=5.0) for shift in ("labels", "labels+camera"))
    for a, b in zip(plain.clients, data.clients, strict=True):
        assert torch.equal(a.train[1], b.train[1])
        assert not torch.equal(a.train[0], b.train[0])
    assert data.clients[2].name == "2 labels camera"


def test_domains_stay_domains():
    domain = np.arange(K * EACH) % 3
    mine = images()
    mine = fs.Images("fake", mine.x, mine.y, mine.class_names, domain=domain, domain_names=("art", "photo", "sketch"))
    how = {"split": "domain", "clients": 3, "train": 10, "test": 5}
    plain, data = fs.deal_images(mine, **how), fs.deal_images(mine, shift="camera", **how)
    assert [c.name for c in data.clients] == ["art camera", "photo camera", "sketch camera"]
    assert all(torch.equal(a.train[1], b.train[1]) for a, b in zip(plain.clients, data.clients, strict=True))
    with pytest.raises(fs.InputError, match="motley decides itself who gets which classes; add --split classes"):
        fs.deal_images(mine, shift="motley", **how)


@given(st.integers(4, 60))
def test_motley_is_in_fixed_shares_with_everybody_there(clients):
    from fedselect.data.shifts import _motley

    kinds = [kind for (kind,) in _motley(clients)]
    assert kinds == sorted(kinds, key=list(MOTLEY).index)
    counts, shares = Counter(kinds), {"none": 0.2, "meaning": 0.3, "camera": 0.3, "labels": 0.2}
    assert all(counts[kind] >= 1 and abs(counts[kind] - share * clients) <= 1 for kind, share in shares.items())


def test_a_motley_federation_of_ten():
    data = fs.load("digits", shift="motley", classes_per_client=2, test=50)
    kinds = ["none"] * 2 + ["meaning"] * 3 + ["camera"] * 3 + ["labels"] * 2
    assert [c.name for c in data.clients] == [f"{i} {kind}" for i, kind in enumerate(kinds)]
    assert [list(c.shift) for c in data.clients] == [[kind] for kind in kinds]
    assert [len(data.labels(i)) for i in range(10)] == [10] * 8 + [2] * 2
    for client in data.clients:
        assert [len(getattr(client, part)[1]) for part in PARTS] == [20, 5, 50]


def test_in_a_motley_federation_each_client_differs_as_its_name_says():
    """Every picture is looked up in the pool, where only what a camera changed is not found."""
    data, mine = dealt("motley", clients=10), images()
    picked = {p.tobytes(): n for n, p in enumerate(mine.x)}
    for client in data.clients:
        kind = client.name.split()[1]
        for part in PARTS:
            x, y = getattr(client, part)
            rows = [picked.get(v.tobytes()) for v in x.permute(0, 2, 3, 1).contiguous().numpy()]
            if kind == "camera":
                assert rows == [None] * len(rows)
            else:
                assert None not in rows
                named = client.shift["meaning"].split()[2:] if kind == "meaning" else range(K)
                assert y.tolist() == [int(named[c]) for c in mine.y[rows]]


@given(st.data())
def test_by_hands_gives_what_was_asked_and_no_sample_twice(data):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 80))
    hand = st.permutations(range(4)).flatmap(lambda p: st.integers(1, 4).map(lambda n: p[:n]))
    hands = data.draw(st.lists(hand, min_size=1, max_size=4))
    train, test = data.draw(st.integers(2, 8)), data.draw(st.integers(1, 4))
    val = data.draw(st.integers(0, train - 1))
    parts = by_hands(Pool(labels), hands, Sizes(train, test, val), 0)
    given_out = np.concatenate([rows for p in parts for rows in (p.train, p.val, p.test)])
    assert len(set(given_out.tolist())) == len(given_out)
    for p, mine in zip(parts, hands, strict=True):
        assert (len(p.train), len(p.val), len(p.test)) == (train - val, val, test)
        for rows, size in ((np.concatenate([p.train, p.val]), train), (p.test, test)):
            counts = Counter(labels[rows].tolist())
            assert set(counts) <= set(mine)
            assert sorted(counts[c] for c in mine) == sorted(
                size // len(mine) + (k < size % len(mine)) for k in range(len(mine))
            )
    more = by_hands(Pool(labels), hands, Sizes(train + 4, test, 0), 0)
    for small, large in zip(parts, more, strict=True):
        assert small.test.tolist() == large.test.tolist()
        assert {*small.train.tolist(), *small.val.tolist()} < set(large.train.tolist())


def test_motley_gives_all_there_is_where_no_size_is_given():
    data = dealt("motley", train=None, test=None, val=0)
    sizes = [len(c.train[1]) for c in data.clients]
    assert min(sizes) > 15  # 240 samples or a little more to train on, for eight
    assert max(sizes) <= 2 * min(sizes)


# ---- labels


@pytest.mark.parametrize("shift", ["meaning", "meaning+camera"])
def test_meaning_is_a_permutation_of_the_clients_own_for_all_of_its_samples(shift):
    plain, data = dealt("none", train=None, test=None), dealt(shift, train=None, test=None)
    found = []
    for a, b in zip(plain.clients, data.clients, strict=True):
        pairs = {
            pair for part in PARTS for pair in zip(getattr(a, part)[1].tolist(), getattr(b, part)[1].tolist(), strict=True)
        }
        assert sorted(old for old, _ in pairs) == sorted(new for _, new in pairs) == list(range(K))
        found.append(tuple(sorted(pairs)))
        assert b.shift["meaning"] == "labels become " + " ".join(str(new) for _, new in sorted(pairs))
    assert len(set(found)) > 4
    if shift == "meaning":
        assert all(torch.equal(a.train[0], b.train[0]) for a, b in zip(plain.clients, data.clients, strict=True))


@pytest.mark.parametrize(("clients", "first"), [(8, 4), (5, 3)])
def test_in_the_second_group_labels_are_reversed(clients, first):
    plain, data = dealt("none", clients=clients), dealt("groups", clients=clients)
    for i, (a, b) in enumerate(zip(plain.clients, data.clients, strict=True)):
        assert b.name == f"{i} group {1 if i < first else 2}"
        for part in PARTS:
            x, y = getattr(a, part)
            assert torch.equal(getattr(b, part)[0], x)
            assert torch.equal(getattr(b, part)[1], y if i < first else K - 1 - y)


# ---- inputs


def camera_by_hand(picture, words, gains):
    """One uint8 picture (channels, height, width), pixel by pixel, as the words of a camera say."""
    turned, *colours, gamma = words.split(", ")
    quarters = int(turned.removeprefix("turned ").removesuffix("°")) // 90
    light = np.rot90(picture / 255, quarters, (1, 2))
    if colours and colours[0].startswith("channels"):
        light = light[[int(c) for c in colours[0].split()[1:]]]
    light = light ** float(gamma.removeprefix("gamma ")) * gains[:, None, None]
    return 1 - light if colours == ["inverted"] else light


@pytest.mark.parametrize("channels", [1, 3])
def test_a_camera_does_what_its_words_say_to_all_of_a_clients_pictures(channels):
    plain, data = dealt("none", channels), dealt("camera", channels)
    for a, b in zip(plain.clients, data.clients, strict=True):
        pairs = [(x, y) for p in PARTS for x, y in zip(getattr(a, p)[0].numpy(), getattr(b, p)[0].numpy(), strict=True)]
        ungained = np.stack([camera_by_hand(x, b.shift["camera"], np.ones(channels)) for x, _ in pairs])
        seen = np.stack([y for _, y in pairs]) / 255
        # one gain for each channel, the same in training, validation and test: words round gamma, so 0.01 is near
        gains = np.ones(channels) if channels == 1 else seen.max((0, 2, 3)) / ungained.max((0, 2, 3))
        assert np.all((gains > 0.49) & (gains < 1.01))
        assert np.abs(seen - ungained * gains[:, None, None]).max() < 0.02


def test_cameras_turn_as_evenly_as_can_be_and_no_two_are_alike():
    words = [c.shift["camera"] for c in dealt("camera").clients]
    assert sorted(Counter(w.split(",")[0] for w in words).values()) == [2, 2, 2, 2]
    assert len(set(words)) == len(words)
    oblong = [c.shift["camera"].split(",")[0] for c in dealt("camera", height=4).clients]
    assert Counter(oblong) == {"turned 0°": 4, "turned 180°": 4}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_a_camera_keeps_shape_and_type_and_is_decided_by_seed_and_client(dtype):
    """The same pictures for every client; some clients have fewer samples and there may be fewer clients."""
    whole = torch.randint(0, 256, (300, 3, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    x, y = (whole if dtype == torch.uint8 else (whole / 255).to(dtype)), torch.arange(300) % 3
    kept = x.clone()

    def made(clients, count, seed=0):
        data = fs.Federation([fs.ClientData((x[:count], y[:count]), (x[:2], y[:2])) for _ in range(clients)])
        return fs.shifted(data, "camera", seed=seed)

    large, small, other = made(5, 300), made(3, 10), made(5, 300, seed=1)
    assert torch.equal(x, kept)  # what was given stays as it is
    for a, b in zip(large.clients[:3], small.clients, strict=True):
        assert (a.train[0].shape, a.train[0].dtype) == (x.shape, dtype)
        assert torch.equal(a.train[0][:10], b.train[0])
        assert torch.equal(a.train[0][:2], a.test[0])
        assert a.val is None
    assert not any(torch.equal(a.train[0], b.train[0]) for a, b in zip(large.clients, other.clients, strict=True))
    pictures = [c.train[0] for c in large.clients]
    assert not any(torch.equal(a, b) for i, a in enumerate(pictures) for b in pictures[:i])
    assert all(v.min() >= 0 and v.max() <= (255 if dtype == torch.uint8 else 1) for v in pictures)


def test_float_and_uint8_pictures_see_the_same_camera():
    raw = torch.randint(0, 256, (20, 3, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y = torch.arange(20) % 3
    a, b = (fs.shifted(fs.Federation([fs.ClientData((x, y), (x, y))] * 3), "camera", seed=4) for x in (raw, raw.float() / 255))
    for one, two in zip(a.clients, b.clients, strict=True):
        assert (one.train[0].float() / 255 - two.train[0]).abs().max() <= 0.5 / 255 + 1e-6


def test_permuted_pixels_are_one_order_for_all_pictures_and_channels():
    plain, data = dealt("none"), dealt("permuted")
    orders = []
    for a, b in zip(plain.clients, data.clients, strict=True):
        columns = [getattr(a, p)[0].flatten(2).flatten(0, 1) for p in PARTS]
        seen = [getattr(b, p)[0].flatten(2).flatten(0, 1) for p in PARTS]
        old, new = torch.cat(columns).T.tolist(), torch.cat(seen).T.tolist()
        orders.append(tuple(old.index(column) for column in new))
        assert sorted(orders[-1]) == list(range(36))
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("shape", [(4,), (4, 7)])
def test_permuted_features_or_channels(shape):
    plain, data = vectors(shape), fs.shifted(vectors(shape), "permuted")
    for a, b in zip(plain.clients, data.clients, strict=True):
        old, new = (torch.cat([getattr(c, p)[0] for p in PARTS]).transpose(0, 1).tolist() for c in (a, b))
        assert sorted(old.index(row) for row in new) == [0, 1, 2, 3]
    assert list(data.clients[0].shift.values()) == [f"own order of the {'features' if len(shape) == 1 else 'channels'}"]


@pytest.mark.parametrize("shape", [(4,), (4, 7)])
def test_scaled_is_one_gain_and_one_offset_for_each_feature(shape):
    plain, data = vectors(shape), fs.shifted(vectors(shape), "scaled")
    gains = []
    for a, b in zip(plain.clients, data.clients, strict=True):
        old, new = (torch.cat([getattr(c, p)[0] for p in PARTS]).double() for c in (a, b))
        for f in range(4):
            gain, offset = np.polyfit(old[:, f].flatten(), new[:, f].flatten(), 1)
            assert 0.49 < gain < 2.01
            assert abs(offset) < 130  # the features' standard deviation is about 100
            assert np.allclose(gain * old[:, f] + offset, new[:, f], atol=1e-3)
            gains.append(round(gain, 6))
    assert len(set(gains)) == len(gains)


def test_noisy_adds_noise_of_the_level_that_it_says_which_is_new_for_every_sample():
    plain, data = vectors((50,)), fs.shifted(vectors((50,)), "noisy")
    levels = []
    for a, b in zip(plain.clients, data.clients, strict=True):
        levels.append(float(b.shift["noisy"].split()[2]))
        for part in PARTS:
            noise = (getattr(b, part)[0] - getattr(a, part)[0]) / 100
            assert abs(float(noise.std()) - levels[-1]) < 0.1
            assert not torch.allclose(noise[0], noise[1])
        assert not torch.allclose(b.train[0][:10] - a.train[0][:10], b.val[0] - a.val[0])
    assert len(set(levels)) == 3
    assert same(data, fs.shifted(vectors((50,)), "noisy"))


def test_noise_fits_the_feature_it_is_added_to_whatever_else_is_done():
    plain = vectors((4,), clients=2)
    for client in plain.clients:
        for part in PARTS:
            getattr(client, part)[0][:, 0] *= 1e-6  # a feature that noise of another would drown
    both, alone = (fs.shifted(plain, shift).clients for shift in ("permuted+noisy", "permuted"))
    for a, b in zip(both, alone, strict=True):
        small = int(b.train[0].std(0).argmin())
        assert a.train[0][:, small].abs().max() < 0.01


def test_kinds_combine_in_any_order_and_one_after_the_other():
    plain = dealt("none")
    both = fs.shifted(plain, "camera+meaning", seed=5)
    assert same(both, fs.shifted(plain, "meaning+camera", seed=5))
    assert same(both, fs.shifted(fs.shifted(plain, "camera", seed=5), "meaning", seed=5))
    assert same(both, dealt("camera+meaning", seed=5)) == same(plain, dealt("none", seed=5))
    assert both.clients[4].name == "4 meaning camera"
    assert list(both.clients[4].shift) == ["meaning", "camera"]


@pytest.mark.parametrize("shift", ["camera", "meaning", "camera+meaning", "motley"])
def test_pictures_lie_in_one_pool_still(shift):
    data = dealt(shift)
    for part in PARTS:
        split = data.split(part, torch.float32)
        assert split.x.data_ptr() == getattr(data.clients[0], part)[0].data_ptr()
    scored = data.on_validation()
    assert scored.clients[0].shift == data.clients[0].shift


# ---- what is refused


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        ("kamera", "there is no kind of shift 'kamera'; did you mean 'camera'"),
        ("", "there is no kind of shift ''; known: camera, groups, labels, meaning, motley, noisy, none, permuted, scaled"),
        ("none+camera", r"none combines with no other kind; give --shift none, or leave it out of none\+camera"),
        ("labels+motley", r"motley combines with no other kind; give --shift motley, or leave it out of labels\+motley"),
        ("groups+meaning", "groups and meaning both change what labels mean; give one of them"),
        ("scaled", "scaled is for vectors and series, not images; use --shift camera or permuted"),
        ("noisy", "noisy is for vectors and series, not images; use --shift camera or permuted"),
    ],
)
def test_kinds_that_do_not_go_are_refused(shift, said):
    with pytest.raises(fs.InputError, match=said):
        fs.load("digits", shift=shift)


def test_too_few_clients_are_refused():
    with pytest.raises(fs.InputError, match="motley needs at least 4 clients, not 3; raise clients"):
        fs.load("digits", shift="motley", clients=3)
    with pytest.raises(fs.InputError, match="groups needs at least 2 clients, not 1; raise clients, or use meaning"):
        fs.load("digits", shift="groups", clients=1)


@pytest.mark.parametrize("kind", ["none", "labels", "motley"])
def test_dealing_is_not_for_data_that_is_dealt_already(digits, kind):
    with pytest.raises(
        fs.InputError, match=rf'{kind} decides which client gets which samples.*fs.load\("digits", shift="{kind}"\)'
    ):
        fs.shifted(digits, kind)


def test_what_does_not_suit_the_inputs_is_refused():
    with pytest.raises(fs.InputError, match=r"camera is for images .* shape \(4,\); use --shift scaled, permuted or noisy"):
        fs.shifted(vectors(), "camera")
    with pytest.raises(fs.InputError, match=r"scaled needs inputs that are floats, not torch\.int64; use --shift permuted"):
        fs.shifted(vectors(dtype=torch.int64), "scaled")
    with pytest.raises(fs.InputError, match="permuted needs inputs of at least two features or channels; use scaled or noisy"):
        fs.shifted(vectors(shape=(1, 9)), "permuted")
    for kind in ("meaning", "groups"):
        with pytest.raises(fs.InputError, match=f"{kind} changes class labels, which table does not have"):
            fs.shifted(vectors(targets=torch.zeros), kind)


def test_every_kind_has_a_row_in_the_docs():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert all(f"| `{kind}` |" in page for kind in (*KINDS, "motley"))
    assert parse("camera+camera") == ("camera",)


# ---- on the command line


def test_a_motley_run_from_the_command_line(cli, tmp_path):
    said = cli("run", "--data", "digits", "--shift", "motley", "--rounds", 2, "-q", "--out", tmp_path / "a")
    assert said.code == 0, said
    clients = json.loads((tmp_path / "a" / "federation.json").read_text())["clients"]
    assert [c["name"] for c in clients[:3]] == ["0 none", "1 none", "2 meaning"]
    config = tmp_path / "a" / "config.json"
    assert json.loads(config.read_text())["data"]["shift"] == "motley"
    assert cli("run", "--config", config, "-q", "--out", tmp_path / "b").code == 0
    assert (tmp_path / "a" / "summary.json").exists()
    assert [(tmp_path / d / "federation.json").read_text() for d in "ab"] == [
        (tmp_path / "a" / "federation.json").read_text()
    ] * 2


def test_none_on_the_command_line_is_a_kind(cli, tmp_path):
    assert cli("run", "--shift", "none", "--rounds", 1, "-q", "--out", tmp_path / "a").code == 0
    assert json.loads((tmp_path / "a" / "config.json").read_text())["data"]["shift"] == "none"


def test_data_show_says_how_each_client_differs(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said = cli("data", "show", "digits", "--shift", "motley").out
    for words in ("shift", "0 none", "no difference", "labels become", "turned 90°", "9 labels", "own classes"):
        assert words in said
    assert "shift" not in cli("data", "show", "digits").out
    assert "there is no kind of shift 'tilted'" in cli("data", "show", "digits", "--shift", "tilted").sentence()
