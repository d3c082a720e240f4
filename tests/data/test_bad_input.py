"""Each mistake in the files of a user is reported in one sentence, which names the file or the key and the fix."""

import gzip
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.sparse import csr_array
from torch.nested import nested_tensor

from fedmutual import data
from fedmutual.data.convert import view_array
from fedmutual.data.objects import make_memory_source
from fedmutual.errors import DataError
from own_data import config, folder, image, npz, refused

X = np.arange(24, dtype=np.float32).reshape(12, 2)
Y = np.array([0, 1] * 6)
BLACK = np.zeros((12, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar", "there is no data set 'cifar'; did you mean 'cifar10'?"),
        ("nowhere", "there are digits, mnist,"),
        ("folder", "data.name = 'folder' needs the key 'data.root'"),
        ("npz", "data.name = 'npz' needs the key 'data.root'"),
    ],
)
def test_names(name: str, words: str) -> None:
    refused(words, data={"name": name})


@pytest.mark.parametrize(("key", "value"), [("test", "x.npz"), ("group_by", "patient")])
def test_keys_without_effect(key: str, value: str) -> None:
    refused(f"key 'data.{key}' has no effect with data.name = 'digits'; remove it", data={"name": "digits", key: value})


def test_data_label_is_refused_for_arrays(tmp_path: Path) -> None:
    about = npz(tmp_path / "a.npz", x=X, y=Y, severity=1 - Y) | {"label": "severity"}
    refused("key 'data.label' has no effect with data.name = 'npz'; remove it", data=about)


def test_arrays_of_a_client_ignore_the_column_of_labels_of_the_others(tmp_path: Path) -> None:
    pd.DataFrame({"x": X[:, 0], "ill": Y}).to_csv(tmp_path / "a.csv", index=False)
    clients = {
        "a": {"name": "csv", "root": str(tmp_path / "a.csv")},
        "b": npz(tmp_path / "b.npz", x=X[:, :1], y=Y.astype(str)),
    }
    tables: dict[str, Any] = {"data": {"label": "ill"}, "clients": {i: {"data": about} for i, about in clients.items()}}
    assert [*data.load(config(partition={}, **tables)).clients] == ["a", "b"]
    tables["clients"]["b"]["data"]["label"] = "ill"
    refused("client 'b': key 'data.label' has no effect with data.name = 'npz'; remove it", partition={}, **tables)


def test_arrays_that_are_not_read_are_named(tmp_path: Path) -> None:
    read = {"x": X, "y": Y, "x_test": X, "y_test": Y, "domain": Y, "classes": ["a", "b"], "classes_test": ["a", "b"]}
    rows = npz(tmp_path / "a.npz", **read, y_val=Y, patient=Y)
    remarks = data.load(config(data=rows)).notes
    assert [n for n in remarks if "not read" in n] == [f"{tmp_path / 'a.npz'}: arrays 'y_val', 'patient' are not read"]


def test_bytes_of_arrays_are_text(tmp_path: Path) -> None:
    names = np.array([name.encode() for name in ["männlich", "weiblich"]])
    patients = np.array([f"ä{k}".encode() for k in range(12)])
    arrays = {"x": X, "y": Y, "classes": names, "patient": patients, "domain": patients}
    federation = data.load(config(data=npz(tmp_path / "a.npz", **arrays) | {"group_by": "patient"}))
    assert federation.space.classes == ("männlich", "weiblich")
    latin = npz(tmp_path / "b.npz", **arrays | {"patient": np.array(["männlich".encode("latin-1")] * 12)})
    refused("array 'patient' holds bytes that are not UTF-8 text; decode them", data=latin | {"group_by": "patient"})


@pytest.mark.parametrize("name", ["folder", "npz", "csv"])
def test_missing_files(name: str, tmp_path: Path) -> None:
    refused(f"{tmp_path / 'none'}: there is no such", "key 'data.root'", data={"name": name, "root": str(tmp_path / "none")})


def test_arrays_that_would_be_unpickled(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    objects = np.array([Malicious(ran)] * 12, dtype=object)
    for arrays in ({"x": objects, "y": Y}, {"x": X, "y": objects}):
        refused("holds Python objects, which are refused", data=npz(tmp_path / "a.npz", **arrays))
    (tmp_path / "p.npz").write_bytes(pickle.dumps(Malicious(ran)))
    refused("it is a pickle, and pickles are never loaded", data={"name": "npz", "root": str(tmp_path / "p.npz")})
    np.save(tmp_path / "o.npy", objects, allow_pickle=True)
    refused("pickles are never loaded", data={"name": "npz", "root": str(tmp_path / "o.npy")})
    assert not ran.exists()


def test_a_text_file_is_not_called_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_text("x,y\n1,2\n")
    refused("is not an npz file of arrays (its first bytes", data={"name": "npz", "root": str(tmp_path / "t.npz")})


class Malicious:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    ("arrays", "more", "words"),
    [
        ({"x": X}, {}, "there is no array 'y'; it has 'x'"),
        ({"x": X, "y": Y, "x_test": X}, {}, "there is no array 'y_test'"),
        ({"x": X[:, 0], "y": Y}, {}, "array 'x' has the shape [12]; if each row is one number, give x[:, None]; tables are"),
        ({"x": X.astype(str), "y": Y}, {}, "array 'x' holds str"),
        ({"x": X[:0], "y": Y[:0]}, {}, "array 'x' has no rows"),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, {}, "training examples are float32 [2] and test examples"),
        (
            {"x": X.astype(np.uint8), "y": Y, "x_test": X, "y_test": Y},
            {},
            "are uint8 [2] and test examples float32 [2]; make",
        ),
        ({"x": X, "y": np.full(12, 2**64 - 1, np.uint64)}, {}, "its label 18446744073709551615 is out of range"),
        ({"x": X, "y": Y}, {"group_by": "patient"}, "data.group_by needs an array 'patient'; it has 'x', 'y'"),
        ({"x": X, "y": Y, "patient": Y[:3]}, {"group_by": "patient"}, "array 'patient' has the shape [3]"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y}, {"test": "t.npz"}, "already has test rows in 'x_test'"),
        ({"x": np.where(X == 6, np.nan, X), "y": Y}, {}, "row 3 of 'x' in PATH holds NaN or infinite values"),
        ({"x": np.where(X > 5, np.inf, X), "y": Y}, {}, "row 4 of 'x' in PATH holds NaN or infinite values; fix or"),
        ({"x": np.where(X > 5, np.inf, X), "y": Y}, {}, "; and 6 more"),
        ({"x": X, "y": Y}, {"mean": [0.5]}, "'data.mean' and 'data.std' must be set together"),
        ({"x": X, "y": Y}, {"mean": [0.5], "std": [1.0]}, "key 'data.mean' has 1 values, and the examples have 2 features"),
        ({"x": X, "y": Y}, {"mean": [0.5, 1], "std": [1.0, 1, 1]}, "key 'data.std' has 3 values"),
        ({"x": BLACK, "y": Y}, {"mean": [120.0], "std": [70.0]}, "for inputs from 0 to 1 (these inputs are divided by 255"),
        ({"x": BLACK, "y": Y}, {"mean": [0.5], "std": [70.0]}, "the first mean is 0.5 and the first std 70;"),
        ({"x": BLACK, "y": Y}, {"mean": [-0.1], "std": [0.3]}, "the first mean is -0.1 and the first std 0.3; divide"),
        ({"x": X, "y": Y}, {"size": [4, 4]}, "key 'data.size' is for images"),
        ({"x": X, "y": Y}, {"augment": "crop-flip"}, "key 'data.augment' is for images"),
        ({"x": np.zeros((12, 4, 4)), "y": Y}, {"size": [4]}, "key 'data.size' is [height, width] in pixels, not [4]"),
    ],
)
def test_arrays(tmp_path: Path, arrays: dict[str, Any], more: dict[str, Any], words: str) -> None:
    path = tmp_path / "a.npz"
    refused(words.replace("PATH", str(path)), data=npz(path, **arrays) | more)


def test_files_that_are_not_npz_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    refused("holds a single array", data={"name": "npz", "root": str(tmp_path / "a.npy")})
    complete_file = tmp_path / "whole.npz"
    npz(complete_file, x=X, y=Y)
    (tmp_path / "half.npz").write_bytes(complete_file.read_bytes()[:200])
    refused("half.npz: is not an npz file of arrays", data={"name": "npz", "root": str(tmp_path / "half.npz")})
    refused("is not an npz file of arrays", data={"name": "npz", "root": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("", {}, "cannot be read as CSV"),
        ("a,label\n", {}, "the table has no rows"),
        ("a,b\n1,2\n", {}, "there is no column 'label', which data.label names; it has 'a', 'b'"),
        ("a,label\n1,x\n2,y\n", {"group_by": "site"}, "there is no column 'site', which data.group_by names"),
        ("label\nx\ny\n", {}, "there is no feature column"),
        ("a,sex,label\n1,0,x\n2,f,y\n", {}, "column 'sex' holds 'f' in line 3, but features must be numbers; encode"),
        ("a,b,label\n1,0,x\n2,,y\n3,,y\n", {}, "column 'b' is missing, NaN or infinite in line 3 (2 of 3 rows)"),
        ("a,b,label\n1,0,x\n2,inf,y\n", {}, "column 'b' is missing, NaN or infinite in line 3"),
        ("a,label\n1,x\n2,\n", {}, "the label in line 3 is missing"),
        ("a,label\n1,x\n2,y\n,NA\n", {}, "column 'a' is missing, NaN or infinite in line 4 (1 of 3 rows)"),
        ("a,label\n1,0\n2,1.5\n", {}, "the label in line 3 is 1.5, but labels must be whole numbers or names"),
        ("a,label\n1,0\n2,-1\n", {}, "line 3 of PATH: its label -1 is out of range"),
        # Lines as an editor counts them: blank ones, and those inside of quotes, count too.
        ("a,label\n\n1,x\n  \n2,y\n3,\n", {}, "the label in line 6 is missing"),
        ('note,a,label\n1,1,"x\ny\nz"\n2,,x\n', {}, "column 'a' is missing, NaN or infinite in line 5"),
        ('"a\nb",c,label\n1,1,x\n2,?,x\n', {}, "column 'c' holds '?' in line 4"),
        ("a,label\r\n1,x\r\n\r\n2,\r\n", {}, "the label in line 4 is missing"),
        ("\ufeffa,label\n1,x\n2,\n", {}, "the label in line 3 is missing"),
        ('a,label\n1,x\n2,"x\n"\n3,"\n"\n', {}, "the label in line 5 is missing"),
        ('a,label\n1,0\n2,"1\n', {}, "cannot be read as CSV"),
    ],
)
def test_tables(tmp_path: Path, text: str, more: dict[str, Any], words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    refused(words.replace("PATH", str(path)), data={"name": "csv", "root": str(path)} | more)


@pytest.mark.parametrize(
    ("ending", "call"),
    [("xlsx", "read_excel({!r})"), ("dta", "read_stata({!r})"), ("jsonl", "read_json({!r}, lines=True)")],
)
def test_tables_of_other_programs(tmp_path: Path, ending: str, call: str) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_bytes(b"PK\x03\x04\xff")
    fix = f"pandas.{call.format(str(path))}.to_csv('{path.with_suffix('.csv')}'"
    refused(f"is neither a CSV nor a Parquet file; save it as one: {fix}", data={"name": "csv", "root": str(path)})


def test_a_compressed_table_with_a_missing_label_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,label\n1,x\n2,\n"))
    refused("the label in row 2 (without the header) is missing", data={"name": "csv", "root": str(path)})


def test_a_test_table_of_other_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,label\n1,0,x\n2,3,y\n")
    (tmp_path / "t.csv").write_text("a,c,label\n1,0,x\n2,3,y\n")
    about = {"name": "csv", "root": str(tmp_path / "a.csv"), "test": str(tmp_path / "t.csv")}
    refused("t.csv: its features differ from those of the training file in 'b', 'c'", data=about)


def test_an_image_of_another_size(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 4, "dog": 4})
    large_image = image(tmp_path / "dog" / "07.png", size=(9, 5))
    refused(f"{large_image} is 9 x 5 pixels", "is 6 x 5; resize all with data.size = [6, 5]", data=about)
    assert data.load(config(data=about | {"size": [6, 5]})).space.shape == (3, 6, 5)


def test_unreadable_images_are_all_named(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 4, "dog": 4})
    (tmp_path / "cat" / "00b.png").write_bytes(b"no image at all")
    content = image(tmp_path / "dog" / "02.png", size=(90, 90)).read_bytes()
    (tmp_path / "dog" / "02.png").write_bytes(content[:60])
    refused("00b.png cannot be read as an image", "; fix or remove it; ", "02.png cannot be", data=about)
    (tmp_path / "cat" / "00.png").write_bytes(b"the first one")
    refused("00.png cannot be read as an image", data=about)


def test_images_of_other_kinds(tmp_path: Path) -> None:
    gray = folder(tmp_path / "gray", {"cat": 3, "dog": 3}, mode="L")
    image(tmp_path / "gray" / "dog" / "09.png")
    refused("09.png is in colour and", "00.png is gray; convert one or the other", data=gray)
    colour = folder(tmp_path / "colour", {"cat": 3, "dog": 3})
    gray_image = image(tmp_path / "colour" / "cat" / "00.png", mode="L")
    refused(f"01.png is in colour and {gray_image} is gray; convert one or the other", data=colour)
    deep = folder(tmp_path / "deep", {"cat": 3, "dog": 3}, mode="L")
    Image.new("I;16", (5, 6), 1000).save(tmp_path / "deep" / "dog" / "09.png")
    refused("09.png has more than 8 bits a channel, and values are never cut", data=deep)


def test_folders_without_images_or_classes(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 3, "dog": 3})
    (tmp_path / "eel").mkdir()
    refused(f"{tmp_path / 'eel'}: the folder of class 'eel' holds no images", data=about)
    refused(f"{tmp_path / 'cat'}: has no folder of a class", data=about | {"root": str(tmp_path / "cat")})
    refused("partition.kind = 'domains'", data=about | {"root": str(tmp_path.parent)})


def test_metadata_that_miss_something(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 2, "dog": 2}) | {"group_by": "patient"}
    metadata = tmp_path / "metadata.csv"
    refused(f"{metadata}: there is no such file; data.group_by needs it", data=about)
    sentence = "data.label and data.group_by need it, with the columns file_name, label, patient"
    refused(sentence, data=about, training={"task": "regression"})
    metadata.write_text("file_name,site\ncat/00.png,p\n")
    refused("there is no column 'patient', which data.group_by names; it has 'file_name', 'site'", data=about)
    metadata.write_text("file_name,patient\ncat/00.png,p\ncat/01.png,\n")
    refused("no row names the file dog/00.png (2 of 4 files); add a row", data=about)
    metadata.write_text("file_name,patient\ncat/00.png,p\ncat/01.png,\ndog/00.png,q\ndog/01.png,q\n")
    refused("cat/01.png: its group (data.group_by = 'patient') is missing (1 of 4 rows); fill in the groups", data=about)
    metadata.write_text("file_name,patient\ncat/00.png,p\ncat/01.png,p\ndog/00.png,q\ndog/01.png,q\ncat\\00.png,r\n")
    refused(f"{metadata}: line 2 and line 6 both name the file cat/00.png; remove one", data=about)


DATASET = """
class make(Dataset):
    targets = {0}
    def __len__(self): return 10
    def __getitem__(self, i):
        if i in {1}: raise OSError("disk on fire")
        return torch.ones({2}), i % 5
"""
LABELS = "[i % 5 for i in range(10)]"
FACTORIES = [
    ("", "has no 'make'"),
    ("make = TensorDataset(torch.ones(3, 2), torch.ones(3))", "cannot be made (TypeError"),
    ("def make(): return 3", "returned int, and a torch Dataset, a (train, test) pair"),
    ("def make(): return 1, 2, 3", "returned tuple of int, int, int"),
    ("def make(): raise FileNotFoundError('no cube.h5')", "cannot be made (FileNotFoundError: no cube.h5); name"),
    ("def make(path): return 3", "cannot be made (TypeError"),
    (
        "class make(IterableDataset):\n    def __iter__(self): return iter([])",
        "NAME can only be iterated; use a Dataset with",
    ),
    ("def make(): return TensorDataset(torch.ones(0, 2), torch.ones(0))", "has no examples"),
    ("def make(): return TensorDataset(torch.ones(6, 2))", "labels cannot be read from its items"),
    ("def make(): return [[1, 2], 3], [0, 1]", "returned values that are no arrays"),
    ("def make(): return {'a': torch.ones(6, 2)}", "there is no array 'x'; it has 'a'"),
    (
        DATASET.format(LABELS, "[7]", "3 if i == 4 else 2"),
        "example 4 of NAME is float32 [3], but the first is float32 [2]; let",
    ),
    (DATASET.format(LABELS, "[7]", "2"), "example 7 of NAME cannot be read (OSError: disk on fire)"),
    (DATASET.format(LABELS, "range(10)", "2"), "example 0 of NAME cannot be read (OSError: disk on fire)"),
    (
        DATASET.format("torch.arange(10)", "[]", "2"),
        "NAME: example 5 has the label 0, and the dataset's attribute 'targets'",
    ),
]


@pytest.mark.parametrize(("source", "words"), FACTORIES)
def test_factories(source: str, words: str, module: Callable[[str], str]) -> None:
    name = f"{module(source)}:make"
    refused(words.replace("NAME", name), data={"name": name})


def test_a_factory_that_is_not_there(module: Callable[[str], str]) -> None:
    module("")
    refused("key 'data.name': there is no module 'nowhere'", data={"name": "nowhere:make"})


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_found_only_while_reading(tmp_path: Path, workers: int) -> None:
    """Of data that are not kept in memory a bad row is named when it is read."""
    x = np.where(X == 6, np.nan, X)
    federation = data.load(
        config(
            data=npz(tmp_path / "a.npz", x=x, y=Y, x_test=X, y_test=Y) | {"resident": False, "workers": workers},
            partition={"clients": 1},
        )
    )
    rows = federation.clients["0"].private
    with pytest.raises(DataError, match=r"^row 3 of 'x' in .*a.npz holds NaN or infinite values; fix or remove it$"):
        list(rows.rows(torch.arange(len(rows)).split(5)))
    pictures = folder(tmp_path / "f", {"cat": 4, "dog": 4}) | {"resident": False, "workers": workers}
    (tmp_path / "f" / "dog" / "02.png").write_bytes(b"no image")
    rows = data.load(config(data=pictures, partition={"clients": 1})).pool_clients().private
    with pytest.raises(DataError, match=r"^\S*02.png cannot be read as an image"):
        list(rows.rows([torch.arange(len(rows))]))


@pytest.mark.parametrize("group", [None, "pid"])
def test_rows_with_more_fields_than_the_header_are_refused_not_shifted(tmp_path: Path, group: str | None) -> None:
    """A decimal comma makes one field two; pandas alone would take the first column as an index and shift the others."""
    path = tmp_path / "a.csv"
    path.write_text("pid,hb,age,label\n" + "".join(f"{i},14,{i % 9},28,{'sick' if i % 2 else 'well'}\n" for i in range(60)))
    given = {"name": "csv", "root": str(path)} | ({"group_by": group} if group else {})
    with pytest.raises(DataError, match=r"a\.csv: a row has more fields than the header.*decimal comma"):
        data.load(config(data=given))


DAYS = np.array(["2020-01-01", "2020-01-03"] * 6, "datetime64[s]")
TABLE = pd.DataFrame({"a": X[:, 0], "label": Y})
RAGGED = [torch.ones(2 + k % 3, 2) for k in range(12)]


def days(x: Any) -> Any:
    return (x - np.datetime64("2000-01-01")) / np.timedelta64(1, "D")


def encode(table: pd.DataFrame) -> pd.DataFrame:
    return pd.get_dummies(table, dtype=float)


@pytest.mark.parametrize(
    ("x", "words", "fix"),
    [
        (
            X.astype(object),
            "holds object values; examples must be numbers: give x.astype('float64')",
            lambda x: x.astype(float),
        ),
        (X.astype(str), "give x.astype('float64')", lambda x: x.astype("float64")),
        (
            np.array([["f", 1], ["m", 2]] * 6, object),
            "pandas.get_dummies(pandas.DataFrame(x)",
            lambda x: encode(pd.DataFrame(x)),
        ),
        (csr_array(X), "give x.toarray()", lambda x: x.toarray()),
        (torch.tensor(X).to_sparse(), "give x.to_dense()", lambda x: x.to_dense()),
        (np.rec.fromarrays(X.T, names="a,b"), "give pandas.DataFrame(x)", pd.DataFrame),
        (DAYS[:, None], "(x - numpy.datetime64('2000-01-01')) / numpy.timedelta64(1, 'D')", days),
        (DAYS[:, None] - DAYS[0], "x / numpy.timedelta64(1, 'D')", lambda x: x / np.timedelta64(1, "D")),
        (X + 1j, "numpy.real(x) and numpy.imag(x)", lambda x: np.concatenate([np.real(x), np.imag(x)], 1)),
        (np.ma.masked_equal(X, 3), "x.filled(NUMBER)", lambda x: x.filled(0)),
        ([np.ma.masked_equal(one.numpy(), 1) for one in RAGGED], "x.filled(NUMBER)", lambda x: [one.filled(0) for one in x]),
        ([np.ones((2 + row, 3 + row)) for row in range(12)], "give rows of one shape", lambda x: [one[:2, :3] for one in x]),
        (TABLE.assign(c=pd.Categorical(["u", "v"] * 6)), "of 'c' give each category a column", encode),
        (
            TABLE.assign(c=["u", "v"] * 6, when=DAYS),
            "of 'when' count days",
            lambda t: encode(t.assign(when=days(t["when"]))),
        ),
        (
            TABLE.assign(n=[Decimal(1)] * 12),
            "of 'n' give x.astype('float64')",
            lambda t: t.assign(n=t["n"].astype("float64")),
        ),
    ],
)
def test_objects_that_are_no_numbers_are_refused_with_a_fix_that_works(
    x: Any, words: str, fix: Callable[[Any], Any]
) -> None:
    for rows in (x, fix(x)):
        has_label = isinstance(rows, pd.DataFrame) and "label" in rows
        with pytest.raises(DataError) if rows is x else nullcontext() as problem:
            make_memory_source(rows if has_label else (rows, Y), None, "label" if has_label else None, "site 'A'")
        assert problem is None or (words in str(problem.value) and "\n" not in str(problem.value))


@pytest.mark.parametrize(
    "rows",
    [
        *(nested_tensor(RAGGED, layout=layout, requires_grad=True) for layout in (torch.strided, torch.jagged)),
        [one.bfloat16() for one in RAGGED],
    ],
)
def test_nested_and_other_tensors_are_series(rows: Any) -> None:
    tensors, listed = (make_memory_source((x, Y), None, None, "a").train.x for x in (rows, RAGGED))
    assert tensors.digest() == listed.digest()


def test_a_mapped_file_is_read_without_a_warning_and_without_a_copy(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rows = view_array(mapped)
    finally:
        torch.set_warn_always(False)
    assert not told
    assert rows.data_ptr() == mapped.ctypes.data


@pytest.mark.parametrize("kind", ["npz", "factory", "datasets"])
def test_a_class_number_of_two_names_is_refused(kind: str, tmp_path: Path, module: Callable[[str], str]) -> None:
    x, y, names = np.ones((6, 2), np.float32), np.arange(6) % 2, (["ill", "well"], ["well", "ill"])
    if kind == "npz":
        first, second = (npz(tmp_path / f"{k}.npz", x=x, y=y, classes=np.array(of)) for k, of in enumerate(names))
        about = first | {"test": second["root"]}
    elif kind == "datasets":
        saved = pytest.importorskip("datasets")
        rows = saved.Dataset.from_dict({"x": x.tolist(), "label": y})
        splits = [rows.cast_column("label", saved.ClassLabel(names=of)) for of in names]
        saved.DatasetDict(dict(zip(("train", "test"), splits, strict=True))).save_to_disk(tmp_path / "saved")
        about = {"name": "datasets", "root": str(tmp_path / "saved")}
    else:
        source = """
        class Rows(TensorDataset):
            def __init__(self, classes):
                super().__init__(torch.ones(6, 2), torch.arange(6) % 2)
                self.classes = classes
        def make(): return Rows(["ill", "well"]), Rows(["well", "ill"])
        """
        about = {"name": f"{module(source)}:make"}
    refused("class 0 is 'ill' in the training data and 'well' in the test data; give each class one number", data=about)


@pytest.mark.parametrize("kind", ["csv", "npz", "factory"])
def test_rows_without_a_group_are_not_one_group(kind: str, tmp_path: Path, module: Callable[[str], str]) -> None:
    x, y, patients = np.arange(8.0).reshape(4, 2), np.arange(4) % 2, [1.0, np.nan, 2.0, np.nan]
    if kind == "csv":
        pd.DataFrame({"a": x[:, 0], "patient": patients, "label": y}).to_csv(tmp_path / "rows.csv", index=False)
        about = {"name": "csv", "root": str(tmp_path / "rows.csv")}
    elif kind == "npz":
        about = npz(tmp_path / "rows.npz", x=x, y=y, patient=np.array(patients))
    else:
        source = """
        class make(TensorDataset):
            patient = ["p", None, "q", None]
            def __init__(self): super().__init__(torch.ones(4, 2), torch.arange(4) % 2)
        """
        about = {"name": f"{module(source)}:make"}
    refused("its group (data.group_by = 'patient') is missing (2 of 4 rows)", data=about | {"group_by": "patient"})


def test_columns_that_only_the_test_rows_have_are_named() -> None:
    train = pd.DataFrame({"a": X[:, 0], "y": Y})
    source = make_memory_source(train, train.assign(stage="II", b=1.0), "y", "site 'A'")
    remark = "test of site 'A': columns 'stage', 'b' are not in the training rows, so they are no features"
    assert source.columns == ("a",)
    assert remark in source.notes
