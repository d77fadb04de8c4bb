"""Data with clients of its own, on tiny files in their original formats, and on the real ones where they are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

import fedselect as fs
from fedselect.data.audiomnist import picture
from fedselect.data.audiomnist import read as speakers
from fedselect.data.har import COLUMNS, windows
from fedselect.data.har import read as movements
from fedselect.data.heart import HOSPITALS, features
from fedselect.data.heart import read as patients
from fedselect.data.natural import Recorded, divide, evenly
from fedselect.data.partition import Sizes, rng
from fedselect.runs.config import Config
from fedselect.simulate import Simulation

SHARED = Path(__file__).parents[3] / "shared" / "data"
real = pytest.mark.skipif(not (SHARED / "heart.npz").exists(), reason="needs the recordings of the development data")


@pytest.fixture(autouse=True)
def _nothing_else_is_found(monkeypatch):
    monkeypatch.delenv("FEDSELECT_DATA", raising=False)


def pairs(client):
    return [part for part in (client.train, client.val, client.test) if part is not None]


# --- who trains, validates and tests on what


def recorded(clients=3, recordings=8, each=6, key=()):
    """Rows numbered 0, 1, ... as their own inputs; every recording has classes 0, 1, 2 in turn."""
    n = clients * recordings * each
    rows = np.arange(n)
    names = tuple(f"c{i}" for i in range(clients))
    client, recording = rows // (recordings * each), rows // each % recordings
    return Recorded(rows.astype(np.float32)[:, None], rows % 3, client, recording, names, ("a", "b", "c"), key)


def test_a_recording_is_in_one_part_alone():
    data = recorded()
    for part in divide(data, Sizes(None, None, 7), seed=0):
        found = [set(data.recording[rows].tolist()) for rows in (part.train, part.test, part.val)]
        assert [len(f) for f in found] == [4, 2, 2]  # of 8: a quarter to test, two of 6 rows to hold out 7
        assert len(set.union(*found)) == 8
        assert len(part.val) == 7


def test_the_last_recordings_are_for_testing_when_asked():
    data = recorded()
    for part in divide(data, Sizes(None, None), seed=3, later=True):
        assert set(data.recording[part.test]) == {6, 7}


def test_clients_with_one_key_divide_alike():
    data = recorded(key=(5, 5, 6))
    tests = [set(data.recording[p.test].tolist()) for p in divide(data, Sizes(None, None), seed=1)]
    assert tests[0] == tests[1]


def test_sizes_and_the_seed():
    data = recorded()
    small, large, other = (divide(data, Sizes(n, 5), s) for n, s in ((6, 0), (12, 0), (6, 1)))
    for a, b in zip(small, large, strict=True):
        assert np.array_equal(a.test, b.test)
        assert np.array_equal(a.train, b.train[:6])
        assert sorted(data.y[a.train]) == [0, 0, 1, 1, 2, 2]
    assert not np.array_equal(small[0].train, other[0].train)
    assert len(divide(data, Sizes(1000, 1000), 0)[0].train) == 36  # all there is


def test_any_beginning_has_the_classes_in_proportion():
    y = np.repeat([0, 1], [30, 10])
    order = evenly(y, rng(0, 1))
    assert sorted(order) == list(range(40))
    for n in (4, 8, 20):
        assert (y[order[:n]] == 1).sum() == n // 4


def test_what_cannot_be_divided_says_why():
    with pytest.raises(fs.DataError, match="client c0 has one recording; give it another"):
        divide(recorded(recordings=1), Sizes(None, None), 0)
    with pytest.raises(fs.DataError, match="client c0 has 36 samples to train on; val=31 would leave none"):
        divide(recorded(), Sizes(None, None, 31), 0)
    with pytest.raises(fs.InputError, match="clients must lie in 1 to 3, not 4"):
        recorded().first(4)


# --- AudioMNIST


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Two speakers, two digits as tones of 400 and 2000 Hz, four repetitions that grow longer."""
    place = tmp_path_factory.mktemp("spoken") / "AudioMNIST"
    for speaker in (1, 2):
        folder = place / "data" / f"{speaker:02d}"
        folder.mkdir(parents=True)
        for digit, tone in enumerate((400, 2000)):
            for repetition in range(4):
                time = np.arange(24_000 + 1000 * repetition) / 48_000
                sound = (500 * speaker * np.sin(2 * np.pi * tone * time)).astype(np.int16)
                wavfile.write(folder / f"{digit}_{speaker:02d}_{repetition}.wav", 48_000, sound)
    return place


def test_speakers_from_wav_files(spoken):
    data = fs.load("audiomnist", data_dir=str(spoken.parent))
    assert [c.name for c in data.clients] == ["01", "02"]
    assert (data.shape, data.classes) == ((1, 32, 32), 10)
    for client in data.clients:
        assert (len(client.train[1]), len(client.test[1])) == (6, 2)  # repetition 3 of both digits is for testing
        for x, y in pairs(client):
            assert x.dtype == torch.uint8
            assert (x.amax((1, 2, 3)) == 255).all()
            loudest = x[:, 0].float().mean(1).argmax(1)  # pitch, low to high
            # on the mel scale 400 Hz is at (509 - 98) / (2120 - 98) of the 33 steps from 60 to 3900 Hz, 2000 Hz at 0.70
            assert ((loudest - torch.where(y == 0, 6, 22)).abs() <= 1).all()


def test_loudness_does_not_change_a_picture(spoken, tmp_path):
    file = spoken / "data" / "01" / "1_01_2.wav"
    wavfile.write(tmp_path / "loud.wav", 48_000, 8 * wavfile.read(file)[1])
    assert np.array_equal(picture(file), picture(tmp_path / "loud.wav"))


def test_sound_that_cannot_be_used_says_why(tmp_path):
    file = tmp_path / "a.wav"
    for rate, sound, said in (
        (8000, np.ones(9000, np.int16), "must have one channel of 48000 Hz"),
        (48_000, np.zeros(9000, np.int16), "is silent or shorter"),
        (48_000, np.ones(900, np.int16), "is silent or shorter"),
    ):
        wavfile.write(file, rate, sound)
        with pytest.raises(fs.DataError, match=said):
            picture(file)
    file.write_bytes(b"no sound")
    with pytest.raises(fs.DataError, match="cannot be read as sound"):
        picture(file)


# --- SP-SW HAR


def write_execution(folder, person, execution, device, runs=(("SEATED", 130), ("WALKING", 400), ("TURNING", 90))):
    """A recording at 100 Hz in which x_acc is the row's number times 9.80665, and the others are constant."""
    labels = [label for label, count in runs for _ in range(count)]
    lines = [",".join(COLUMNS)]
    lines += [f"{i * 9.80665},1,2,{execution},{person},5,{1000 + 10 * i},{label}" for i, label in enumerate(labels)]
    folder = folder / "DATA" / f"s{person:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"s{person:02d}_{execution:02d}_s{device}.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """Two people with phone and watch, five executions each."""
    place = tmp_path_factory.mktemp("moved") / "sp-sw-har-dataset"
    for person in (1, 2):
        for execution in range(1, 6):
            for device in "pw":
                write_execution(place, person, execution, device)
    return place


def test_windows_of_a_recording(moved):
    x, y = windows(moved / "DATA" / "s01" / "s01_01_sp.csv")
    # at 50 Hz: 65 rows seated, 200 walking, 45 turning. Windows begin at 0, 25, ...; the one at 25 has 40 seated rows of 50,
    # exactly 0.8 and so not more, that at 50 has 35 walking; those from 75 to 215 walk; at 225 it is 40, at 250 turning has 35
    assert y.tolist() == [0] + [4] * 6
    starts = [0, 75, 100, 125, 150, 175, 200]
    assert x[:, 0, 0].tolist() == pytest.approx([2 * 9.80665 * s for s in starts], rel=1e-6)
    assert x[1, 0].tolist() == pytest.approx([2 * 9.80665 * (75 + i) for i in range(50)], rel=1e-6)


def test_devices_or_people_are_clients(moved):
    data = fs.load("har", data_dir=str(moved))
    assert [c.name for c in data.clients] == ["01 phone", "01 watch", "02 phone", "02 watch"]
    assert data.class_names == ("seated", "sitting down", "standing up", "turning", "walking")
    assert [len(c.train[1]) + len(c.test[1]) for c in data.clients] == [35] * 4
    people = fs.load("har", data_dir=str(moved), per="person", clients=1)
    assert [(c.name, len(c.train[1]) + len(c.test[1])) for c in people.clients] == [("01", 70)]
    assert data.clients[0].train[0][0, 1, 0] == pytest.approx(1 / 9.80665)  # in g
    with pytest.raises(fs.InputError, match="per is device or person, not 'house'"):
        fs.load("har", data_dir=str(moved), per="house")


@pytest.mark.parametrize("per", ["device", "person"])
def test_windows_that_overlap_are_in_one_part(moved, per):
    """The fourth channel says the execution, the fifth the person: both devices of a person are divided alike."""
    data = fs.load("har", data_dir=str(moved), per=per, val=8)
    held: dict[int, list[set]] = {}
    for client in data.clients:
        found = [{(float(r[3, 0]), float(r[4, 0])) for r in x} for x, _ in pairs(client)]
        assert sum(map(len, found)) == len(set.union(*found))
        assert len(client.val[1]) == 8
        held.setdefault(int(client.test[0][0, 4, 0]), []).append(found[2])
    assert all(tests.count(tests[0]) == len(tests) for tests in held.values())


def test_a_recording_that_is_none_of_these_is_named(tmp_path):
    write_execution(tmp_path, 1, 1, "p", (("FLYING", 200),))
    with pytest.raises(fs.DataError, match=r"s01_01_sp\.csv has the label 'FLYING'; labels are SEATED"):
        fs.load("har", data_dir=str(tmp_path))
    (tmp_path / "DATA" / "s01" / "s01_01_sp.csv").write_text("a,b\n1,2\n")
    with pytest.raises(fs.DataError, match=r"must begin with the line x_acc,y_acc"):
        fs.load("har", data_dir=str(tmp_path))


# --- heart disease

TOP = ",".join(f"X{i}" for i in range(1, 15)) + "\n"


def patient(draw, i, missing):
    row = [40 + i, i % 2, 1 + i % 4, 120 + i, draw.integers(100, 300), 0, i % 3, 150, 0, 1.5, missing, missing, missing, i % 5]
    return ",".join(map(str, row)) + "\n"


@pytest.fixture
def hospitals(tmp_path):
    """Cleveland and Hungary as UCI has them, the others as copies do: a line of names, and -9 for what is missing."""
    draw = np.random.default_rng(0)
    for name, top, missing in zip(HOSPITALS, ("", "", TOP, TOP), ("?", "?", "-9", "-9.0"), strict=True):
        rows = "".join(patient(draw, i, missing) for i in range(20))
        (tmp_path / f"processed.{name}.data").write_text(top + rows)
    return tmp_path


def test_four_hospitals_from_either_kind_of_file(hospitals):
    raw = patients(hospitals)
    assert np.bincount(raw.client).tolist() == [20] * 4
    assert np.isnan(raw.x).sum(0).tolist() == [0] * 10 + [80] * 3
    assert raw.y[:6].tolist() == [0, 1, 1, 1, 1, 0]  # any diagnosis but 0
    data = fs.load("heart", data_dir=str(hospitals), val=3)
    assert [(c.name, len(c.train[1]), len(c.val[1]), len(c.test[1])) for c in data.clients] == [
        (name, 12, 3, 5) for name in HOSPITALS
    ]
    train = torch.cat([c.train[0] for c in data.clients])
    assert train.shape[1] == 9 + 9 + 4 + 3 + 3 + 3
    age = train[:, 0]
    assert age.mean().item() == pytest.approx(0, abs=1e-5)
    assert age.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert train[:, 18:22].sum(1).tolist() == [1.0] * len(train)  # one kind of chest pain each
    assert (train[:, 25:] == 0).all()  # slope and thal are missing everywhere
    assert (train[:, 17] == 1).all()  # and so is ca, which is marked


def test_only_training_rows_count_for_what_is_filled_in(hospitals):
    clean = patients(hospitals)
    parts = divide(clean, Sizes(None, None, 3), 0)
    known = np.concatenate([p.train for p in parts])
    poisoned = clean.x.copy()
    for part in parts:
        poisoned[part.test], poisoned[part.val] = 1e6, -1e6
    assert np.array_equal(features(clean.x, known)[known], features(poisoned, known)[known])


def test_a_line_that_is_no_patient_is_shown(hospitals):
    file = hospitals / "processed.va.data"
    file.write_text(file.read_text() + "1,2,3\n")
    with pytest.raises(fs.DataError, match=r"processed\.va\.data: '1,2,3' is not 13 numbers and a diagnosis"):
        patients(hospitals)
    file.unlink()
    with pytest.raises(fs.DataError, match=r"processed\.va\.data cannot be read .*; place the files of all of cleveland, hung"):
        patients(hospitals)


# --- prepared files, and the command line


def test_a_prepared_file_that_is_damaged_says_so(tmp_path):
    np.savez(tmp_path / "heart.npz", x=np.zeros((3, 13)), y=np.zeros(3))
    with pytest.raises(fs.DataError, match=r"heart\.npz lacks client; save it with x, y, client"):
        patients(tmp_path)
    np.savez(tmp_path / "heart.npz", x=np.zeros((3, 13)), y=np.zeros(3), client=np.zeros(2))
    with pytest.raises(fs.DataError, match="must have a row a sample, not 3, 3, 2"):
        patients(tmp_path)
    (tmp_path / "heart.npz").write_bytes(b"no")
    with pytest.raises(fs.DataError, match="is truncated or no npz file"):
        patients(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [("audiomnist", "soerenab/AudioMNIST"), ("har", "GeoTecINIT/sp-sw-har-dataset"), ("heart", "archive.ics.uci.edu")],
)
def test_data_that_is_not_there_says_where_to_get_it(name, said, tmp_path):
    with pytest.raises(fs.DataError, match=rf"the data is missing: place .*; get it from https://.*{said}"):
        fs.load(name, data_dir=str(tmp_path))


def test_the_command_line_shows_and_trains(cli, spoken, moved, hospitals, tmp_path):
    assert "all 10" not in cli("data", "show", "audiomnist", "--data-dir", spoken).out  # two of ten digits
    assert "01 phone" in cli("data", "show", "har", "--data-dir", moved).out
    for name, place in (("audiomnist", spoken), ("har", moved), ("heart", hospitals)):
        how = ("--data", name, "--data-dir", place, "--method", "fedavg", "--rounds", 1, "-q")
        assert cli("run", *how, "--out", tmp_path / name).code == 0


@pytest.mark.parametrize(("name", "model"), [("audiomnist", "small_cnn"), ("har", "conv1d"), ("heart", "mlp")])
def test_each_has_a_model_that_suits(name, model):
    assert Config.from_dict({"data": {"name": name}}, "test").model["name"] == model


def test_the_network_for_signals_is_the_same_client_by_client_and_stacked(moved):
    data = fs.load("har", data_dir=str(moved), train=20)
    results = []
    for chunk in (1, 4):
        sim = Simulation(fs.FedSelect(lr=0.05), fs.models.conv1d(data, width=4), data, seed=0, chunk=chunk)
        sim.step()
        results.append(sim.models(range(4), "local"))
        assert not sim.fitted.slow
    assert all(v.equal(results[1][n]) for n, v in results[0].items())


# --- the real data


@real
def test_real_speakers():
    data = fs.load("audiomnist", data_dir=str(SHARED), train=None)
    assert len(data.clients) == 60
    assert {len(c.train[1]) + len(c.test[1]) for c in data.clients} == {250}
    assert {tuple(torch.bincount(c.test[1]).tolist()) for c in data.clients} == {(6,) * 10}


@real
def test_real_recordings_give_the_prepared_pictures():
    prepared, wav = speakers(SHARED), speakers(SHARED / "raw" / "audiomnist")
    assert len(wav.y) == 8
    for i in range(len(wav.y)):
        same = (prepared.client == wav.client[i]) & (prepared.y == wav.y[i]) & (prepared.recording == wav.recording[i])
        assert np.array_equal(prepared.x[same][0], wav.x[i])


@real
def test_real_movements():
    for per, clients in (("person", 23), ("device", 46)):
        data = movements(SHARED, per)
        assert (len(data.names), len(data.y)) == (clients, 6289)
    assert (np.bincount(movements(SHARED, "person").client).min(), np.bincount(movements(SHARED, "person").client).max()) == (
        174,
        360,
    )
    for part in divide(data, Sizes(None, None, 20), 0):
        halves = [
            {half.tobytes() for row in data.x[rows] for half in (row[:, :25], row[:, 25:])}
            for rows in (part.train, part.val, part.test)
        ]
        assert sum(map(len, halves)) == len(set.union(*halves))  # windows begin every 25 values: neighbours share a half
    csv = movements(SHARED / "raw" / "spsw")
    for i, name in enumerate(csv.names):
        rows = (data.client == data.names.index(name)) & (data.recording == 1)
        assert np.array_equal(data.y[rows], csv.y[csv.client == i])
        assert np.allclose(data.x[rows], csv.x[csv.client == i], rtol=1e-3, atol=1e-4)  # prepared in half precision


@real
def test_real_patients():
    data, files = patients(SHARED), patients(SHARED / "raw" / "heart")
    assert np.bincount(data.client).tolist() == [303, 294, 123, 200]
    # 74.5% of VA's: published as 75
    assert [round(100 * data.y[data.client == c].mean(), 1) for c in range(4)] == [45.9, 36.1, 93.5, 74.5]
    assert np.array_equal(data.x, files.x, equal_nan=True)
    assert np.array_equal(data.y, files.y)
