"""Tables from files: read alike from every format, divided as asked, standardised and filled in by training rows alone."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedselect as fs
from fedselect.core.errors import DataError, InputError
from fedselect.core.options import options
from fedselect.data.columns import Schema
from fedselect.data.division import Division
from fedselect.data.fitting import fit, merge
from fedselect.data.frame import Frame
from fedselect.data.frame_files import read_frame
from fedselect.data.tables import Columns, by_client, federate
from fedselect.network.plan import Shape
from fedselect.tasks import suited

SITES = ("east", "north", "south")


def people(count=60, seed=0, site=0):
    """Columns of one client: numbers with gaps, names, an id, a date, and an outcome that depends on the numbers."""
    draw = np.random.default_rng([seed, site])
    age = draw.normal(50 + 5 * site, 10, count).round(1)
    dose = draw.integers(1, 4, count)
    outcome = np.where(age + 5 * dose + draw.normal(0, 5, count) > 60 + 5 * site, "ill", "well")
    level = [None if draw.random() < 0.2 else float(v) for v in draw.normal(1e6, 3, count).round(3)]
    smoker = [None if draw.random() < 0.1 else str(v) for v in draw.choice(["no", "yes", "once"], count)]
    dates = [f"2024-{1 + i // 28:02d}-{1 + i % 28:02d}" for i in draw.permutation(count)]
    ids = [f"p{site}{i}" for i in range(count)]
    return {"id": ids, "age": list(age), "dose": list(map(int, dose)), "level": level, "smoker": smoker, "date": dates,
            "outcome": list(map(str, outcome))}  # fmt: skip


def together():
    """All clients in one table with a column that says whose a row is, in mixed order."""
    tables = [people(site=i) for i in range(3)]
    rows = [{**{k: v[r] for k, v in t.items()}, "site": SITES[i]} for i, t in enumerate(tables) for r in range(60)]
    order = np.random.default_rng(1).permutation(len(rows))
    return {k: [rows[i][k] for i in order] for k in rows[0]}


def write_csv(path, columns, between=","):
    lines = [
        between.join(columns),
        *(between.join("" if v is None else str(v) for v in row) for row in zip(*columns.values(), strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def csv(tmp_path):
    return write_csv(tmp_path / "people.csv", together())


OPTIONS = {"client": "site", "target": "outcome", "drop": "id,date"}


def load(path, **options):
    return fs.load("table", path=str(path), **{**OPTIONS, **options})


def same(a, b):
    assert [c.name for c in a.clients] == [c.name for c in b.clients]
    for mine, other in zip(a.clients, b.clients, strict=True):
        for part in ("train", "val", "test"):
            for x, y in zip(getattr(mine, part) or (), getattr(other, part) or (), strict=True):
                assert torch.equal(x, y)


# ---- files


def as_arrow(columns):
    return pa.table({k: pa.array(v) for k, v in columns.items()})


def write_saved(folder, table, names=None):
    """A folder as `datasets` saves one: a stream of Arrow's, and what its columns mean."""
    folder.mkdir(parents=True)
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    features = {"outcome": {"names": names, "_type": "ClassLabel"}} if names else {}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def write_npz(path, columns):
    numbers = np.array([[np.nan if v is None else v for v in columns[n]] for n in ("age", "dose", "level")]).T
    rest = {k: np.array(["" if v is None else v for v in columns[k]]) for k in ("smoker", "outcome", "site")}
    np.savez(path, x=numbers, columns=np.array(["age", "dose", "level"]), about=np.array(["made", "up"]), **rest)
    return path


@pytest.mark.parametrize("form", ["tsv", "semicolons", "parquet", "feather", "arrow", "npz", "datasets", "pandas"])
def test_every_format_gives_the_same_federation(tmp_path, csv, form):
    columns = together()
    wanted, options = load(csv), {}
    match form:
        case "tsv":
            path = write_csv(tmp_path / "t.tsv", columns, "\t")
        case "semicolons":
            path = write_csv(tmp_path / "t.csv", columns, ";")
        case "parquet":
            pa.parquet.write_table(as_arrow(columns), path := tmp_path / "t.parquet")
        case "feather":
            pa.feather.write_feather(as_arrow(columns), path := tmp_path / "t.feather")
        case "arrow":
            path = write_saved(tmp_path / "one", as_arrow(columns)) / "data-00000-of-00001.arrow"
        case "npz":
            path, options = write_npz(tmp_path / "t.npz", columns), {"drop": None}
        case "datasets":
            numbered = {**columns, "outcome": [("well", "ill").index(v) for v in columns["outcome"]]}
            path = write_saved(tmp_path / "saved", as_arrow(numbered), ["well", "ill"])
        case "pandas":
            pandas = pytest.importorskip("pandas")
            frames = by_client(Frame.of(pandas.DataFrame(columns)), "site")
            same(federate(frames, columns=Columns(target="outcome", drop="id,date")), wanted)
            return
    found = load(path, **options)
    if form == "npz":  # its columns stand in another order
        names, wants = (d.clients[0].schema.inputs for d in (found, wanted))
        order = [names.index(n) for n in wants]
        assert torch.equal(found.clients[1].train[0][:, order], wanted.clients[1].train[0])
    else:
        same(found, wanted)


def test_a_saved_dict_of_datasets_says_which_rows_are_for_testing(tmp_path):
    folder, table = tmp_path / "saved", as_arrow(together())
    for name, rows in {"train": slice(0, 100), "validation": slice(100, 140), "test": slice(140, 180)}.items():
        write_saved(folder / name, table.take(pa.array(range(180)[rows])))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation", "test"]}))
    data = load(folder)
    sizes = [sum(len(getattr(c, part)[1]) for c in data.clients) for part in ("train", "val", "test")]
    assert sizes == [100, 40, 40]
    assert data.clients[0].schema.division.split_column == "split"
    other = load(folder, drop="id", time="date")  # asked for another division, it still keeps its own out of the inputs
    assert other.clients[0].schema.inputs == data.clients[0].schema.inputs


def test_a_folder_has_one_file_for_each_client_and_is_the_same_federation(tmp_path, csv):
    (tmp_path / "sites").mkdir()
    columns = together()
    for site in SITES:
        mine = [i for i, s in enumerate(columns["site"]) if s == site]
        table = {k: [v[i] for i in mine] for k, v in columns.items() if k != "site"}
        if site == "south":
            pa.parquet.write_table(as_arrow(table), tmp_path / "sites" / "south.parquet")
        else:
            write_csv(tmp_path / "sites" / f"{site}.csv", table)
    found = load(tmp_path / "sites", client=None)
    assert [c.name for c in found.clients] == list(SITES)
    same(found, load(csv))


# ---- inputs


def test_inputs_are_those_of_scikit_learn():
    """Means, deviations and names of all clients' training rows together, by sklearn's own steps."""
    frames = by_client(Frame.of(together()), "site")
    division = Division(seed=3)
    data = federate(frames, columns=Columns(target="outcome", drop="id,date"), division=division)
    parts = {who: division.parts(frame, who) for who, frame in frames.items()}
    numbers, names = {}, {}
    for who, frame in frames.items():
        numbers[who] = np.stack([frame.numbers(n) for n in ("age", "dose", "level")], 1)
        names[who] = np.array([v.as_py() for v in frame.columns["smoker"]], object)[:, None]
    pooled = np.concatenate([numbers[who][parts[who].train] for who in frames])
    scaler = StandardScaler().fit(pooled)
    filler = SimpleImputer(strategy="mean", add_indicator=True).fit(pooled)
    known = np.concatenate([names[who][parts[who].train] for who in frames])
    coder = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(known[known != None].reshape(-1, 1))  # noqa: E711
    for client in data.clients:
        for part in ("train", "test"):
            rows = getattr(parts[client.name], part)
            filled = filler.transform(numbers[client.name][rows])
            wanted = np.concatenate(
                [scaler.transform(filled[:, :3]), filled[:, 3:], coder.transform(names[client.name][rows])], 1
            )
            assert client.schema.inputs == (
                "age",
                "dose",
                "level",
                "level missing",
                *(f"smoker={c}" for c in ("no", "once", "yes")),
            )
            np.testing.assert_allclose(getattr(client, part)[0].numpy(), wanted, atol=1e-5)


def test_merged_statistics_are_those_of_all_rows_in_any_order():
    """Against one pass over all values in float64; at a mean of 1e9 sums of squares would lose the variance of about 1."""
    draw = np.random.default_rng(0)
    values = {f"c{i}": 1e9 + i + draw.normal(size=20 + 7 * i) for i in range(5)}
    schemas = {
        who: fit(
            Frame.of({"v": v, "y": ["a", "b"] * (len(v) // 2) + ["a"] * (len(v) % 2)}),
            np.arange(len(v)),
            ["v"],
            ["y"],
            division=Division(),
        )
        for who, v in values.items()
    }
    merged = merge(schemas).columns[0]
    pooled = np.concatenate(list(values.values()))
    assert merged.count == len(pooled)
    assert merged.mean == pytest.approx(pooled.mean(), rel=1e-15)
    assert merged.variance == pytest.approx(pooled.var(), rel=1e-6)
    assert merge(dict(reversed(schemas.items()))) == merge(schemas)


def test_only_training_rows_count(csv, tmp_path):
    columns = together()
    frame = by_client(Frame.of(columns), "site")["east"]
    tested = Division().parts(frame, "east").test
    changed = dict(columns)
    at = int(frame.rows[tested[0]])
    changed["age"] = [*columns["age"][:at], 1e5, *columns["age"][at + 1 :]]
    other = load(write_csv(tmp_path / "other.csv", changed))
    assert other.clients[0].schema == load(csv).clients[0].schema
    assert other.clients[0].test[0].abs().max() > 1000


def test_each_client_may_have_a_scale_of_its_own():
    columns = together()
    columns["level"] = [None if s == "east" else v for s, v in zip(columns["site"], columns["level"], strict=True)]
    data = federate(by_client(Frame.of(columns), "site"), columns=Columns(target="outcome", drop="id,date", scale="client"))
    east, north, _ = data.clients
    for client in data.clients:
        age = client.train[0][:, 0].double()
        assert float(age.mean()) == pytest.approx(0, abs=1e-6)
        assert float(age.var(correction=0)) == pytest.approx(1, abs=1e-5)
    assert east.schema != north.schema
    assert east.train[0][:, 2].count_nonzero() == 0  # it has no level, so none has a scale there
    assert east.train[0][:, 3].all()
    assert (
        east.schema.features({**{k: v[:2] for k, v in columns.items()}, "level": [1e6, 1e6]})[:, 2:4].tolist() == [[0, 1]] * 2
    )
    assert north.train[0][:, 2].count_nonzero() > 0


def test_a_name_of_no_training_row_counts_as_missing_and_is_said():
    table = people()
    schema = fit(Frame.of(table), np.arange(50), ["smoker"], ["outcome"], division=Division())
    with pytest.warns(UserWarning, match=r"column smoker is 'pipe' in 2 row\(s\) but in no training row"):
        x = schema.features({"smoker": ["pipe", "no", None, "pipe"]})
    assert x.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("column", "options", "inputs"),
    [
        (["1", "2", "2.0", "", "NaN", "null"], {}, ("v", "v missing")),
        (["1", "-9", "-9.0", "3", "?", "4"], {"missing": ("-9",)}, ("v", "v missing")),
        ([1, -9, 2, 3, 4, 5], {"missing": ("-9",)}, ("v", "v missing")),
        (["01", "1", "1.0", "02", "3", "3"], {"categories": ["v"]}, ("v=01", "v=1", "v=02", "v=3")),
        ([1.0, 2.0, None, 1.0, 3.5, 1.0], {"categories": ["v"]}, ("v=1", "v=2", "v=3.5")),
        ([True, False, None, True, True, True], {}, ("v=False", "v=True")),
        (["b", " a", "a ", "10", "10", "b"], {"categories": ["v"]}, ("v=10", "v=a", "v=b")),
    ],
)
def test_what_a_column_holds(column, options, inputs):
    told = {k: v for k, v in options.items() if k == "categories"}
    frame = Frame.of({"v": column, "y": ["a", "b"] * 3}, missing=options.get("missing", ()))
    schema = fit(frame, np.arange(6), ["v"], ["y"], division=Division(), **told)
    assert schema.inputs == inputs


@pytest.mark.parametrize(
    ("columns", "target", "targets", "classes", "shape"),
    [
        ({"y": ["b", "a", "b"]}, "y", "auto", ("a", "b"), (3,)),
        ({"y": [10, 2, 10]}, "y", "auto", ("2", "10"), (3,)),
        ({"y": ["10", "2", "10"]}, "y", "auto", ("2", "10"), (3,)),
        ({"y": [True, False, True]}, "y", "auto", ("False", "True"), (3,)),
        ({"y": [1.5, 2.0, 3.0]}, "y", "auto", (), (3,)),
        ({"y": ["1.0", "2", "3"]}, "y", "auto", (), (3,)),
        ({"y": [1.0, 2.0, 1.0]}, "y", "classes", ("1", "2"), (3,)),
        ({"y": [10, 2, 10]}, "y", "numbers", (), (3,)),
        ({"y": [1, 0, 1], "z": [0.5, 1, 2]}, "y,z", "auto", (), (3, 2)),
    ],
)
def test_targets_are_classes_or_numbers(columns, target, targets, classes, shape):
    frame = Frame.of({"x": [1, 2, 3], **columns})
    schema = fit(frame, np.arange(3), ["x"], target.split(","), targets=targets, division=Division())
    y = schema.targets(frame)
    assert schema.classes == classes
    assert tuple(y.shape) == shape
    assert y.dtype == (torch.int64 if classes else torch.float32)
    if classes:
        assert [classes[i] for i in y] == [str(v).removesuffix(".0") for v in columns["y"]]
    else:
        assert y.reshape(3, -1).tolist() == [[float(v) for v in row] for row in zip(*columns.values(), strict=True)]


# ---- divisions


def parts_of(division, count=40, client="a", **columns):
    frame = Frame.of({"x": list(range(count)), **columns})
    part = division.parts(frame, client)
    rows = np.concatenate([part.train, part.val, part.test])
    assert sorted(rows) == list(range(count))  # each row once
    return part


def test_by_share():
    part = parts_of(Division(test_share=0.3, val_share=0.2, seed=1))
    assert [len(p) for p in (part.train, part.val, part.test)] == [20, 8, 12]
    assert parts_of(Division(test_share=0.3, seed=1), client="b").test.tolist() == part.test.tolist()  # whoever it is
    assert parts_of(Division(test_share=0.3, seed=2)).test.tolist() != part.test.tolist()
    assert [len(p) for p in (parts_of(Division(), count=2).train, parts_of(Division(), count=2).test)] == [1, 1]


@pytest.mark.parametrize("kind", ["dates", "times", "numbers", "timestamps"])
def test_by_time_the_last_rows_are_for_testing(kind):
    days = np.random.default_rng(0).permutation(40)
    texts = [f"2024-{1 + d // 28:02d}-{1 + d % 28:02d}" for d in days]
    column = {
        "dates": texts,
        "times": [f"{t} 10:30" for t in texts],
        "numbers": [str(d / 2) for d in days],
        "timestamps": np.array(texts, "datetime64[ns]"),
    }[kind]
    part = parts_of(Division(time="at", val_share=0.1), at=column)
    assert days[part.train].max() < days[part.val].min()
    assert days[part.val].max() < days[part.test].min()
    assert len(part.test) == 10


def test_by_group_none_is_divided():
    patients = np.random.default_rng(0).integers(0, 12, 40)
    part = parts_of(Division(group="patient", val_share=0.2, seed=5), patient=patients)
    held = [set(patients[p]) for p in (part.train, part.val, part.test)]
    assert [len(h) for h in held] == [7, 2, 3]
    assert len(set.union(*held)) == 12


def test_by_a_column_that_says_it():
    said = ["train", "Test", "validation", "train"] * 10
    part = parts_of(Division(split_column="part"), part=said)
    assert (len(part.train), len(part.test), len(part.val)) == (20, 10, 10)
    assert {said[i] for i in part.test} == {"Test"}


def test_the_column_that_rows_are_divided_by_is_no_input(csv):
    data = load(csv, drop="id", time="date")
    assert data.clients[0].schema.inputs == load(csv).clients[0].schema.inputs
    assert data.clients[0].val is None
    assert load(csv, val_share=0.1).clients[0].val is not None


def test_the_page_on_tables_has_every_option_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()
    rows = [[c.strip() for c in line.split("|")[1:3]] for line in page.splitlines() if line.startswith("| `--")]
    documented = {}
    for flags, defaults in rows:
        documented |= dict(zip(re.findall(r"`--([a-z-]+)`", flags), defaults.split(", "), strict=True))
    known = {n.replace("_", "-"): o for n, o in options(fs.DATA["table"]).items() if n != "path"}
    assert documented.keys() == known.keys()
    for name, option in known.items():
        assert option.parse(documented[name]) == option.default, name


# ---- what cannot be used


def with_cell(name, row, value):
    columns = together()
    columns[name] = [value if i == row else v for i, v in enumerate(columns[name])]
    return columns


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        (together(), {"target": "outcom"}, "there is no column 'outcom'; did you mean 'outcome'"),
        (together(), {"client": "hospital"}, "there is no column 'hospital'"),
        (together(), {"drop": "id,dat"}, "there is no column 'dat'; did you mean 'date'"),
        (together(), {"target": None}, r"name the column to predict: --target COLUMN; .* has id, age, dose"),
        (together(), {"client": None}, "is one table; name its column of clients with --client"),
        (together(), {"drop": None}, "column id has 45 different names in 45 training rows; leave it out with --drop id"),
        (with_cell("age", 16, "old"), {}, "column age has numbers and, in row 17, 'old'; correct it, or .* --missing 'old'"),
        (with_cell("age", 16, "inf"), {}, "column age is not finite in row 17"),
        (with_cell("outcome", 4, None), {}, "rows have no outcome, the first is row 5; fill it in or remove"),
        (with_cell("site", 8, None), {}, "row 9 has no site; say which client it is of"),
        (with_cell("site", 8, "west"), {}, r"client west is too small, with 1 row\(s\)"),
        ({**together(), "empty": [None] * 180}, {}, "column empty has no value in any training row; leave it out: --drop"),
        (together(), {"time": "smoker", "drop": "id"}, "has no smoker; fill it in"),
        (with_cell("date", 4, "31.3.24"), {"time": "date", "drop": "id"}, "holds '31.3.24' in row 5; write times as 2024"),
        (together(), {"split_column": "smoker"}, "smoker says .* it must say train, val or test"),
        (together(), {"time": "date", "group": "id"}, "by time, group or split_column, not by date and id together"),
        (together(), {"test_share": 0.7, "val_share": 0.4}, "and leave rows to train on"),
        (together(), {"target": "age,outcome"}, "column outcome is to hold numbers, and row . has '(ill|well)'"),
        (together(), {"target": "age,dose", "targets": "classes"}, "several targets, which are numbers"),
        (together(), {"drop": "id,date,age,dose,level,smoker"}, "no column except outcome is left to train on"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_says_why(tmp_path, columns, options, said):
    with pytest.raises((DataError, InputError), match=said):
        load(write_csv(tmp_path / "people.csv", columns), **options)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", "is empty; its first line names the columns"),
        ("a.csv", b"x,y\n", "has no rows"),
        ("a.csv", b"1,2\n3,4\n", "has numbers in its first line"),
        ("a.csv", b",x,y\n0,1,a\n", "has a column without a name"),
        ("a.csv", b"x,x,y\n0,1,a\n", "has two columns 'x'"),
        ("a.csv", b"x,y\n0,1,2\n", "cannot be read as a table .*Expected 2 columns, got 3"),
        ("a.csv", "x,ü\n0,1\n".encode("latin-1"), "is not UTF-8"),
        ("a.parquet", b"nothing", "cannot be read as a table"),
        ("a.arrow", b"nothing", "cannot be read as a table"),
        ("a.npz", b"nothing", "is truncated or no npz file"),
        ("a.xlsx", b"nothing", r"give a file ending in .csv, .tsv, .parquet, .arrow, .feather or .npz"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, InputError), match=f"{name}.*{said}"):
        read_frame(tmp_path / name)


def test_files_of_a_folder_that_do_not_go_together(tmp_path):
    for i, site in enumerate(SITES):
        write_csv(tmp_path / f"{site}.csv", {k: v for k, v in people(site=i).items() if (site, k) != ("south", "dose")})
    options = {"client": None}
    with pytest.raises(
        DataError, match="client south lacks the column 'dose' that client east has; add it, or leave it out: --drop"
    ):
        load(tmp_path, **options)
    assert load(tmp_path, client=None, drop="id,date,dose").shape == (6,)
    write_csv(tmp_path / "south.csv", {**people(site=2), "dose": ["low"] * 60})
    with pytest.raises(
        DataError, match=r"column dose holds numbers at client north and names at client south; .*--categories dose"
    ):
        load(tmp_path, **options)
    write_csv(tmp_path / "south.tsv", people(site=2), "\t")
    with pytest.raises(DataError, match="holds two tables named 'south'"):
        load(tmp_path, **options)
    with pytest.raises(InputError, match="each file is one client; leave --client out"):
        load(tmp_path)


def test_many_whole_numbers_must_be_said_to_be_classes_or_numbers():
    frame = Frame.of({"x": [0.5] * 300, "y": list(range(300))})
    with pytest.raises(DataError, match=r"y has 300 different values; .*--targets numbers"):
        fit(frame, np.arange(300), ["x"], ["y"], division=Division())


# ---- schemas


def test_a_schema_comes_back_from_its_file(csv, tmp_path):
    data = load(csv)
    schema = data.clients[0].schema
    schema.write(tmp_path / "schema.json")
    assert Schema.read(tmp_path / "schema.json") == schema
    same(
        fs.load("table", path=str(csv), client="site", schema=str(tmp_path / "schema.json"), seed=9), data
    )  # rows are divided as before


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("columns"),
        lambda s: s["columns"][0].update(kind="colour"),
        lambda s: s["columns"][0].update(variance=-1.0),
        lambda s: s["columns"][0].update(mean=float("nan")),
        lambda s: s["columns"][0].update(more=1),
        lambda s: s["columns"][0].update(name="outcome"),
        lambda s: s.update(classes=[1, 2]),
        lambda s: s.update(scale="none"),
        lambda s: s["division"].update(time=3),
        lambda s: s["division"].update(test_share=2.0),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(csv, tmp_path, damage):
    said = json.loads(json.dumps(load(csv).clients[0].schema.to_json()))
    damage(said)
    (tmp_path / "schema.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"schema\.json"):
        Schema.read(tmp_path / "schema.json")


def test_options_that_a_schema_settles_may_not_say_otherwise(csv, tmp_path):
    load(csv).clients[0].schema.write(tmp_path / "schema.json")
    options = {"path": str(csv), "client": "site", "schema": str(tmp_path / "schema.json")}
    fs.load("table", **options, target="outcome")
    for option in ({"target": "age"}, {"scale": "client"}, {"drop": "id"}, {"test_share": 0.5}):
        with pytest.raises(InputError, match=f"leave --{next(iter(option)).replace('_', '-')} out"):
            fs.load("table", **options, **option)


def test_schemas_of_other_options_are_not_merged():
    one = fit(Frame.of(people()), np.arange(40), ["age"], ["outcome"], division=Division())
    with pytest.raises(DataError, match="client a has seed 0, client b 1; make both schemas with the same options"):
        merge({"a": one, "b": dataclasses.replace(one, division=Division(seed=1))})
    numbers = fit(Frame.of(people()), np.arange(40), ["age"], ["level"], division=Division())
    with pytest.raises(DataError, match="client a has the target outcome as classes, client b level as numbers"):
        merge({"a": one, "b": numbers})


def findings(cough, fever):
    return Frame.of({"age": [30, 40, 50, 60, 70, 80], "cough": cough, "fever": fever})


def test_several_targets_of_0_and_1_are_labels():
    both, mixed = findings([0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 1]), findings([0, 1, 1, 0, 1, 0], [37, 38, 39, 37, 38, 39])
    columns = Columns(target="cough,fever")
    data = federate({"a": both, "b": both}, columns=columns)
    schema = data.clients[0].schema
    assert schema.labels
    assert suited(data) == Shape.of(data).task == Shape.of_table(schema).task == "multilabel"
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    other = federate({"a": both, "b": mixed}, columns=columns).clients[0].schema  # where one client has numbers, all have
    assert not other.labels
    assert Shape.of_table(other).task == "regression"
    assert "labels" not in other.to_json()  # as files of older versions, which are read too
    assert not federate({"a": both}, columns=dataclasses.replace(columns, targets="numbers")).clients[0].schema.labels
    with pytest.raises(DataError, match="fever is 37 in row 1, but the schema has 0 or 1; correct it"):
        schema.targets(mixed)
