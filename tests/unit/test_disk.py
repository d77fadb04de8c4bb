"""Many clients: rows and samples in files, and records of those that took part. The numbers are those of a run in memory."""

import errno
import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import fedselect as fs
from fedselect.core import random
from fedselect.core.errors import InputError, RunError
from fedselect.simulate import Simulation
from fedselect.simulate.records import ID, MANY, whole, wrong

CLIENTS = 9


@pytest.fixture(scope="module")
def data():
    return fs.load("digits", clients=CLIENTS, classes_per_client=3, train=20, test=10, seed=0)


def simulation(data, rows="disk", method="fedper", **how):
    return Simulation(method, fs.models.mlp(data, hidden=8), data, seed=1, **{"rows": rows, "chunk": 4, "fraction": 0.3, **how})


def rounds(sim, count=4):
    return [{k: v for k, v in sim.step().items() if k != "seconds"} for _ in range(count)]


def assert_same(a, b):
    """Models of all clients, and masks, to the bit."""
    everybody = list(range(CLIENTS))
    for one, other in ((a.models(everybody, view="merged"), b.models(everybody, view="merged")), (a.masks(), b.masks())):
        assert all(torch.equal(v, other[n]) for n, v in one.items())


# ---- the store in a run


@pytest.mark.parametrize("how", [
    {},
    {"fraction": 0.5, "late": (4, 3), "eval_fraction": 0.4},
    {"fraction": 1.0, "eval_every": 2, "chunk": 3},
    {"chunk": CLIENTS},
], ids=["some sit out", "late and some evaluated", "all train", "one chunk"])  # fmt: skip
@pytest.mark.parametrize("method", ["fedper", "fedselect", "fedavg", "scaffold", "apfl", "fedbn"])
def test_a_run_on_disk_is_the_run_in_memory(data, method, how):
    """Also for clients that are evaluated before they first train: on disk they have no row yet."""
    packed, disk = (simulation(data, rows, method, **how) for rows in ("personal", "disk"))
    assert rounds(packed) == rounds(disk)
    assert_same(packed, disk)


def test_masks_that_differ_by_client_are_the_same_on_disk(data):
    method = fs.FedSelect(limit=0.5, rate=0.4)
    packed, disk = (simulation(data, rows, method) for rows in ("personal", "disk"))
    assert rounds(packed, 6) == rounds(disk, 6)
    assert len({int(sum(m[i].sum() for m in disk.masks().values())) for i in range(CLIENTS)}) > 1
    assert_same(packed, disk)


def test_saved_and_pickled_runs_go_on_as_they_were(data, tmp_path):
    first = simulation(data, method="fedselect")
    rounds(first)
    first.save(tmp_path)
    copy, resumed = pickle.loads(pickle.dumps(first)), simulation(data, method="fedselect")
    assert resumed.resume(tmp_path)
    expected = rounds(first)
    for other in (copy, resumed):
        assert rounds(other) == expected
        assert_same(first, other)


def test_a_checkpoint_has_only_clients_that_trained(data, tmp_path):
    sim = simulation(data)
    rounds(sim, 1)
    sim.save(tmp_path)
    rows = (tmp_path / "000001" / "rows.bin").stat().st_size
    assert int(sim.store.joined.sum()) == 3
    assert rows == sum(sim.store._head + sim.store._size(sim.store._read_head(i)) for i in sim.store.joined.nonzero())


def test_a_checkpoint_with_a_damaged_row_is_not_used(data, tmp_path):
    sim = simulation(data)
    for _ in range(2):
        rounds(sim, 1)
        sim.save(tmp_path)
    path = tmp_path / "000002" / "rows.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    again = simulation(data)
    with pytest.warns(UserWarning, match=r"rows.bin is damaged; using the checkpoint before it, of round 1"):
        assert again.resume(tmp_path)
    assert again.round == 1


@pytest.mark.parametrize("at", [17, 40, -3], ids=["its number", "its entries", "its values"])
def test_a_damaged_row_is_named_and_not_used(data, at, tmp_path):
    sim = simulation(data)
    rounds(sim, 2)
    store = sim.store
    client = int(store.joined.nonzero()[-1])
    size = store._head + store._size(store._read_head(client))
    place = client * store._place + (at % size)
    (byte,) = os.pread(store._file, 1, place)
    os.pwrite(store._file, bytes([byte ^ 1]), place)
    with pytest.raises(RunError, match=rf"the stored row of client {client} is damaged .* set TMPDIR"):
        sim.models([client], view="merged")
    with pytest.raises(RunError, match=f"client {client} is damaged"):
        sim.save(tmp_path)
    assert not list(tmp_path.glob("0*"))


def test_a_row_that_is_gone_is_damaged(data):
    sim = simulation(data)
    rounds(sim, 2)
    os.truncate(sim.store._file, 0)
    with pytest.raises(RunError, match="is damaged"):
        sim.models(sim.store.joined.nonzero()[0], view="merged")


def test_the_file_has_no_name_and_goes_with_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sim = simulation(data)
    rounds(sim, 2)
    assert not list(tmp_path.iterdir())
    link = f"/proc/self/fd/{sim.store._file}"
    assert Path(os.readlink(link)).parent == tmp_path
    del sim
    gc.collect()
    assert not os.path.exists(link) or Path(os.readlink(link)).parent != tmp_path


def test_a_full_disk_is_said(data, monkeypatch):
    sim = simulation(data)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match=r"the disk is full: .* free some space, then resume"):
        sim.step()


def test_a_file_system_without_large_files_is_said(data, monkeypatch):
    def refuses(*args):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "truncate", refuses)
    with pytest.raises(RunError, match=rf"allows no sparse file of .* TB for {CLIENTS} clients .* or use fewer clients"):
        simulation(data)


def test_rows_that_are_written_and_read_in_pieces(data, monkeypatch):
    """The system may write or read less than it is asked for."""
    expected, real = rounds(simulation(data)), (os.pwrite, os.preadv)
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: real[0](file, content[:100], at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: real[1](file, [parts[0][:100]], at))
    assert rounds(simulation(data)) == expected


def test_what_needs_whole_rows_is_refused_on_disk(data):
    with pytest.raises(InputError, match="or rows=all"):
        simulation(fs.load("digits", clients=3, train=20, val=5, seed=0), keep="best")
    sim = simulation(data)
    sim.step()
    with pytest.raises(InputError, match="use view='merged' or rows=all"):
        sim.models([0], view="local")


# ---- samples in a file


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    client = rng.permutation(np.repeat(np.arange(40), 12))
    return rng.random((480, 6), np.float32), rng.integers(0, 4, 480), client


@pytest.mark.parametrize("mode", ["r", "c"])
@pytest.mark.parametrize("how", [{}, {"test_share": 0.2, "val_share": 0.1}, {"test_share": 0.0}], ids=["test", "val", "train"])
def test_a_mapped_array_gives_the_same_federation(arrays, how, mode, tmp_path):
    x, y, client = arrays
    np.save(tmp_path / "x.npy", x)
    inside = fs.Federation.from_arrays(x, y, client, seed=3, **how)
    outside = fs.Federation.from_arrays(np.load(tmp_path / "x.npy", mmap_mode=mode), y, client, seed=3, **how)
    assert repr(outside) == repr(inside)
    assert outside._repr_html_() == inside._repr_html_()
    assert outside.names == inside.names
    for part in ("train", "test", "val"):
        assert outside.samples(part) == inside.samples(part)
        assert outside.has(part) == inside.has(part)
        for a, b in zip(inside.clients, outside.clients, strict=True):
            one, other = getattr(a, part), getattr(b, part)
            assert (one is None) == (other is None)
            assert one is None or (torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]))
    models = [fs.models.mlp(d, hidden=4) for d in (inside, outside)]
    found = [
        rounds(Simulation("fedper", m, d, fraction=0.2, rows="personal"))
        for m, d in zip(models, (inside, outside), strict=True)
    ]
    assert found[0] == found[1]


def test_a_mapped_array_divided_by_a_column_and_validated(arrays, tmp_path):
    x, y, client = arrays
    split = np.array(["train", "Train", "test", "val"])[np.arange(len(y)) % 4]
    np.save(tmp_path / "x.npy", x)
    inside, outside = (
        fs.Federation.from_arrays(v, y, client.astype(str), split=split)
        for v in (x, np.load(tmp_path / "x.npy", mmap_mode="r"))
    )
    complete = all(inside.samples("val"))
    for d in (inside, outside):
        if not complete:
            with pytest.raises(fs.DataError, match="has no validation data"):
                d.on_validation()
            continue
        assert [len(c.test[1]) for c in d.on_validation().clients] == inside.samples("val")
    assert [len(c.train[1]) for c in inside.clients] == [len(c.train[1]) for c in outside.clients]


def test_a_part_of_a_mapped_array(arrays, tmp_path):
    x, y, client = arrays
    np.save(tmp_path / "x.npy", x)
    some = slice(100, 300)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")[some]
    inside, outside = (fs.Federation.from_arrays(v, y[some], client[some], test_share=0) for v in (x[some], mapped))
    for a, b in zip(inside.clients, outside.clients, strict=True):
        assert torch.equal(a.train[0], b.train[0])


def test_writing_to_a_client_leaves_the_file_alone(arrays, tmp_path):
    x, y, client = arrays
    np.save(tmp_path / "x.npy", x)
    outside = fs.Federation.from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"), y, client)
    outside.clients.x.zero_()
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)


def test_damage_in_a_mapped_array_names_the_client(arrays, tmp_path):
    x, y, client = arrays
    x[77] = np.nan
    np.save(tmp_path / "x.npy", x)
    said = []
    for v in (x, np.load(tmp_path / "x.npy", mmap_mode="r")):
        with pytest.raises(fs.DataError, match=f"client {client[77]} has NaN or Inf in its") as e:
            fs.Federation.from_arrays(v, y, client)
        said.append(str(e.value))
    assert said[0] == said[1]


def test_runs_on_a_mapped_array_are_not_joined_in_memory(arrays, tmp_path):
    """`compare` batches runs by concatenating their data, which would read the file."""
    x, y, client = arrays
    np.save(tmp_path / "x.npy", x)
    how = {"model": "mlp", "rounds": 2, "seeds": [0, 1]}
    inside, outside = (
        fs.compare({"a": fs.FedAvg()}, data=fs.Federation.from_arrays(v, y, client), **how)
        for v in (x, np.load(tmp_path / "x.npy", mmap_mode="r"))
    )
    assert {k: r.accuracy for k, r in inside.items()} == {k: r.accuracy for k, r in outside.items()}


# ---- some are evaluated, some are listed


def test_the_clients_that_are_evaluated_are_drawn_anew_by_the_seed(data):
    def seen(**how):
        return [[i for i, a in enumerate(r["clients"]["accuracy"]) if a is not None] for r in rounds(simulation(data, **how))]

    found = seen(eval_fraction=0.4)
    assert {len(ids) for ids in found} == {4}  # 0.4 of 9
    assert len({tuple(ids) for ids in found}) > 1
    assert found == seen(eval_fraction=0.4, method="fedavg", rows="all", chunk=9)
    assert seen(eval_fraction=0.01) != seen(eval_fraction=0.4)
    assert {len(ids) for ids in seen(eval_fraction=0.01)} == {1}


def test_an_evaluated_client_has_the_numbers_of_a_full_evaluation(data):
    for some, full in zip(rounds(simulation(data, eval_fraction=0.4)), rounds(simulation(data)), strict=True):
        pairs = [(a, b) for a, b in zip(some["clients"]["accuracy"], full["clients"]["accuracy"], strict=True) if a is not None]
        assert len(pairs) == 4
        assert all(a == b for a, b in pairs)
        assert some["accuracy"] == pytest.approx(sum(a for a, _ in pairs) / 4, abs=1e-6)
        assert some["clients"]["train_loss"] == full["clients"]["train_loss"]


@pytest.mark.parametrize("how", [{"keep": "best"}, {"keep": "own"}])
def test_rounds_are_not_chosen_by_other_clients_each_time(how):
    data = fs.load("digits", clients=3, train=20, val=5, seed=0)
    with pytest.raises(InputError, match=f"keep={how['keep']} and patience compare rounds over all clients"):
        simulation(data, "all", eval_fraction=0.5, **how)
    with pytest.raises(InputError, match="tune compares settings over all clients"):
        fs.tune(["local"], model="mlp", data=data, rounds=2, eval_fraction=0.5)


@pytest.mark.parametrize("wrong", [0, 1.5, -0.1])
def test_a_share_that_is_none_is_refused(data, wrong):
    with pytest.raises(InputError, match="eval_fraction is the share of clients that are evaluated"):
        simulation(data, eval_fraction=wrong)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """More clients than a record lists, of four samples each, in a file."""
    rng, count = np.random.default_rng(0), MANY + 200
    path = tmp_path_factory.mktemp("crowd") / "x.npy"
    np.save(path, rng.random((4 * count, 6), np.float32))
    return fs.Federation.from_arrays(
        np.load(path, mmap_mode="r"), rng.integers(0, 3, 4 * count), np.repeat(np.arange(count), 4)
    )


def test_a_record_of_many_lists_those_that_took_part(crowd, tmp_path):
    how = {"rounds": 3, "fraction": 0.01, "eval_fraction": 0.02, "rows": "disk"}
    result = fs.run(fs.FedPer(view="merged"), model="mlp", data=crowd, **how)
    for record in result.history:
        lists = record["clients"]
        assert lists[ID] == sorted(set(lists[ID]))
        assert 24 <= len(lists[ID]) <= 36  # 12 train, 24 are evaluated
        assert sum(v is not None for v in lists["train_loss"]) == 12
        assert sum(v is not None for v in lists["accuracy"]) == 24
        assert record["of"] == len(crowd.clients)
        full = whole(record)
        assert {len(v) for v in full.values()} == {len(crowd.clients)}
        assert [full["accuracy"][i] for i in lists[ID]] == lists["accuracy"]
        assert sum(v is not None for v in full["accuracy"]) == 24
        assert not wrong(record, record["round"], result.simulation.metrics)
        assert "number of clients" in wrong({**record, "of": None}, record["round"], result.simulation.metrics)
        assert wrong({**record, "clients": {**lists, ID: lists[ID][1:]}}, record["round"], result.simulation.metrics)
    assert len(result.clients) == len(crowd.clients)
    assert result.over_clients().defined == 24
    assert f"24 of {len(crowd.clients)} clients evaluated" in repr(result)
    frame = result.to_dataframe()
    assert len(frame) == sum(len(r["clients"][ID]) for r in result.history)
    assert frame["name"].tolist() == frame["client"].astype(str).tolist()
    result.save(tmp_path / "saved")
    again = fs.load_result(tmp_path / "saved")
    assert again.history == result.history
    assert repr(again) == repr(result)
    result.report(tmp_path / "page.html")


def test_a_full_evaluation_of_many_lists_all(crowd):
    (record,) = rounds(simulation(crowd, chunk=500, fraction=0.01), 1)
    assert ID not in record["clients"]
    assert len(record["clients"]["accuracy"]) == len(crowd.clients)


@pytest.mark.parametrize(("clients", "count"), [(1, 1), (7, 3), (500, 20)])
def test_drawing_without_sorting_all_is_drawing_by_sorting_all(clients, count):
    ids = torch.arange(clients) * 3
    for turn in range(20):
        rank = random.client_keys(5, ids, turn, "cohort").argsort(stable=True)
        assert torch.equal(random.choose(5, ids, count, turn, "cohort"), ids[rank[:count]].sort().values)


# ---- memory

GROWTH = """
import sys
import numpy as np
import fedselect as fs

folder, clients = sys.argv[1], int(sys.argv[2])
x = np.lib.format.open_memmap(f"{folder}/{clients}.npy", "w+", np.uint8, (4 * clients, 1, 4, 4))
x[:] = 0
x.flush()
mapped = np.load(f"{folder}/{clients}.npy", mmap_mode="r")
data = fs.Federation.from_arrays(mapped, np.arange(4 * clients) % 2, np.repeat(np.arange(clients), 4))
share = 20 / clients
sim = fs.Simulation("fedper", fs.models.mlp(data, hidden=16), data, fraction=share, eval_fraction=share, rows="disk", chunk=20)
for _ in range(3):
    sim.step()
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(lines["RssAnon"].split()[0]) * 1024, sim.store.nbytes)
"""


def test_memory_and_disk_hardly_grow_with_clients(fork, tmp_path):
    """One `ClientData` alone takes more than a kilobyte, and a row in memory at least half a page of 512 bytes."""
    few, many = 10_000, 210_000
    found = []
    for clients in (few, many):
        process = fork(GROWTH, tmp_path, clients)
        said = process.communicate()
        assert process.returncode == 0, said
        found.append([int(v) for v in said[0].split()])
    (memory, disk), (more_memory, more_disk) = found
    assert (more_memory - memory) / (many - few) < 800
    assert more_disk <= 60 * (4096 * 3)  # at most sixty clients trained, in places that may touch three blocks each
    assert disk > 0
