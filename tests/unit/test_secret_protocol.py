"""The protocol without a network: whoever is lost at whatever stage, the sum comes out to the bit, and nothing else does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedselect as fs
from fedselect.secret import keys, pads, protocol
from fedselect.secret.protocol import Cohort, Member, Opening, pad_key
from fedselect.secret.shamir import SHARE

SECRETS = [bytes([i + 1]) * 32 for i in range(80)]


def cohort(clients, round=1):
    return Cohort({"run": "r", "round": round}, {i: keys.public(SECRETS[i]).hex() for i in clients})


def lines(clients, size=50, dtype="<u4"):
    draw = np.random.default_rng(0)
    return {i: draw.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), size, dtype=dtype) for i in clients}


def masked(listed, clients, size=50, dtype="<u4"):
    """What these clients send: their lines under pads, and sealed shares."""
    sent, sealed = {}, {}
    for i, line in lines(clients, size, dtype).items():
        member = Member(listed, i, SECRETS[i])
        sent[i] = line.copy()
        member.mask(sent[i])
        sealed[i] = member.bundles()
    return sent, sealed


def opened(listed, survivors, openers, sealed):
    opening = Opening(listed, survivors)
    for w in openers:
        found = Member(listed, w, SECRETS[w]).open(survivors, {u: b[w] for u, b in sealed.items() if w in b})
        opening.take(w, list(found), b"".join(s for shares in found.values() for s in shares))
    return opening


def unmasked(listed, survivors, openers):
    sent, sealed = masked(listed, survivors)
    opening = opened(listed, survivors, openers, sealed)
    assert opening.short() == []
    total = sum(sent.values())
    opening.unmask(total)
    return total


@settings(max_examples=25)
@given(st.integers(3, 10), st.data())
def test_the_sum_over_survivors_comes_out_to_the_bit(n, data):
    """Some never send, some send and never open: as long as more than two thirds do both."""
    ids = data.draw(st.permutations(range(30)))[:n]
    listed = cohort(ids)
    survivors = sorted(ids[: data.draw(st.integers(listed.least, n))])
    openers = data.draw(st.permutations(survivors))[: data.draw(st.integers(listed.threshold, len(survivors)))]
    plain = lines(survivors)
    assert (unmasked(listed, survivors, openers) == sum(plain.values())).all()


def test_a_large_cohort_has_neighbours_and_survives_losses(monkeypatch):
    monkeypatch.setattr(protocol, "NEIGHBOURS", 8)
    listed = cohort(range(24))
    assert (listed.complete, listed.threshold, cohort(range(9)).complete) == (False, 5, True)
    for i in range(24):
        assert len(listed.neighbours(i)) == 8
        assert all(i in listed.neighbours(v) for v in listed.neighbours(i))
    survivors = [i for i in range(24) if i % 8]
    assert (unmasked(listed, survivors, survivors[::-1][:19]) == sum(lines(survivors).values())).all()


def test_two_gaps_on_the_circle_would_give_two_sums_and_are_refused(monkeypatch):
    """26 clients with 8 neighbors each; 4 next to each other are lost, and 4 at another place: 5 clients are cut off."""
    monkeypatch.setattr(protocol, "NEIGHBOURS", 8)
    monkeypatch.setattr(protocol, "CUT", 1)
    listed = cohort(range(26))
    part, gaps = listed.circle[4:9], {*listed.circle[:4], *listed.circle[9:13]}
    survivors = [i for i in range(26) if i not in gaps]
    assert len(survivors) == listed.least
    sent, sealed = masked(listed, survivors)
    opening, total = opened(listed, survivors, survivors, sealed), sum(sent[i] for i in part)
    opening.survivors = part
    opening.unmask(total)
    assert (total == sum(lines(survivors)[i] for i in part)).all()  # without the check
    assert not listed.joins(survivors)
    for gap in (listed.circle[:4], listed.circle[9:13]):  # one gap is as bad: who colludes may be the other
        assert not listed.joins(set(range(26)) - set(gap))
        assert listed.joins(set(range(26)) - set(gap[1:]))
    monkeypatch.setattr(protocol, "CUT", 3)
    assert not listed.joins(set(range(26)) - set(listed.circle[-1:] + listed.circle[:1]))
    assert listed.joins(set(range(26)) - set(listed.circle[:24:4]))


def test_a_large_cohort_bears_that_a_third_is_lost_by_chance():
    """Binomial: fewer than 8 of 32 with probability 4e-7 each; of the 20,000 stretches here 0.008 are expected."""
    draw = np.random.default_rng(0)
    for n in (66, 300, 1000):
        listed = Cohort({"run": "r"}, {i: f"{i:064x}" for i in range(n)})
        for _ in range(20):
            assert listed.joins(draw.permutation(n)[: listed.least].tolist())
        assert listed.joins(range(n))
        assert not listed.joins(set(range(n)) - set(listed.circle[5:30]))


def test_wide_rings_too():
    listed = cohort(range(4))
    sent, sealed = masked(listed, range(4), dtype="<u8")
    total = sum(sent.values())
    opened(listed, range(4), range(4), sealed).unmask(total)
    assert (total == sum(lines(range(4), dtype="<u8").values())).all()


def test_with_a_share_less_than_needed_nothing_comes_out():
    listed = cohort(range(6))
    _, sealed = masked(listed, range(6))
    assert listed.threshold == 5
    assert opened(listed, range(6), range(4), sealed).short() == list(range(6))


def test_a_client_never_opens_both_kinds_of_share():
    """Of who survived its own pad and pads with the lost; of who is lost nothing of its own, and no pad between survivors."""
    listed, survivors = cohort(range(7)), [0, 1, 2, 3, 4]
    _, sealed = masked(listed, range(7))
    found = Member(listed, 2, SECRETS[2]).open(survivors, {u: b[2] for u, b in sealed.items() if u != 2})
    assert list(found) == survivors
    whole = {u: Member(listed, u, SECRETS[u])._shares(2) for u in range(7)}
    for u, shares in found.items():
        lost = [k for k, v in enumerate(listed.neighbours(u), 1) if v in (5, 6)]
        assert shares == [whole[u][0], *(whole[u][k] for k in lost)]
    said = b"".join(s for shares in found.values() for s in shares)
    hidden = [whole[u][k] for u in survivors for k, v in enumerate(listed.neighbours(u), 1) if v in survivors]
    assert not any(share in said for share in [*hidden, whole[5][0], whole[6][0]])


def test_a_late_line_stays_hidden_though_its_pads_with_others_are_open():
    """Its own pad is not: that is what it is for."""
    listed, survivors = cohort(range(4)), [0, 1, 2]
    sent, sealed = masked(listed, range(4))
    opening = opened(listed, survivors, survivors, sealed)
    total = sum(sent[i] for i in survivors)
    opening.unmask(total)
    plain = lines(range(4))
    assert (total == sum(plain[i] for i in survivors)).all()
    late, member = sent[3].copy(), Member(listed, 3, SECRETS[3])
    for v in survivors:
        pads.add(late, pad_key(member._pair(v)), 1)  # 3 is the larger number, so it took them away
    assert not (late == plain[3]).any()
    pads.add(late, pad_key(member._own), -1)
    assert (late == plain[3]).all()


def test_two_rounds_and_two_lists_differ_everywhere():
    one, size = cohort(range(5)), 4000
    first, again = masked(one, range(5), size), masked(one, range(5), size)
    assert all((first[0][i] == again[0][i]).all() for i in range(5))
    assert first[1] == again[1]
    for other in (cohort(range(5), round=2), cohort(range(6))):
        sent, sealed = masked(other, range(5), size)
        for i in range(5):
            assert np.count_nonzero(sent[i] == first[0][i]) <= 2  # by chance one in a million
            assert not {sealed[i][v] for v in range(5) if v != i} & set(first[1][i].values())


def test_pads_leave_nothing_to_see():
    """A line of zeros comes out with every byte as often as any other (chi-square far within what chance gives)."""
    listed = cohort(range(3))
    line = np.zeros(200_000, dtype="<u4")
    Member(listed, 0, SECRETS[0]).mask(line)
    counts = np.bincount(line.view(np.uint8), minlength=256)
    expected = line.nbytes / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 400  # 255 expected, 22.6 the standard deviation


def test_bundles_that_were_changed_or_swapped_are_left_out():
    listed = cohort(range(4))
    _, sealed = masked(listed, range(4))
    mine = {u: b[0] for u, b in sealed.items() if u != 0}
    changed = {**mine, 1: mine[1][:-1] + bytes([mine[1][-1] ^ 1]), 2: mine[3]}
    assert list(Member(listed, 0, SECRETS[0]).open(range(4), changed)) == [0, 3]


def test_shares_that_were_not_asked_for_are_refused():
    listed = cohort(range(5))
    opening = Opening(listed, [0, 1, 2, 3])
    with pytest.raises(fs.DataError, match="not asked for"):
        opening.take(0, [0, 4], bytes(4 * SHARE))
    with pytest.raises(fs.DataError, match="64 bytes, expected 128"):
        opening.take(0, [0, 1], bytes(2 * SHARE))


def test_false_shares_are_seen():
    listed = cohort(range(3))
    sent, sealed = masked(listed, range(3))
    opening = opened(listed, range(3), range(2), sealed)
    opening.take(2, [0, 1, 2], b"\x01" * 3 * SHARE)
    with pytest.raises(fs.DataError, match="do not belong together"):
        opening.unmask(sum(sent.values()))
