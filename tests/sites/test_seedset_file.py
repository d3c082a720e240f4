"""A part of the public seed set that came damaged, or is something else: one sentence that names the file and the fix."""

import io
import json
import pickle
import shutil
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from fedmutual.errors import DataError, UserError
from fedmutual.sites import contract as contracts
from fedmutual.sites.site_settings import build_site, read_site_file
from wards import CLASSES, arrays, refused, rewritten

pytestmark = pytest.mark.sites


def about(**scaling):
    made = {"divisor": 255.0, "mean": [0.3], "std": [0.4], "size": None} | scaling
    return np.array(json.dumps({"format": 1, "site": "south", "scaling": made}))


ANEW = "have site 'south' write its part of the public seed set again"
OTHER = "it is not what `fedmutual data give` wrote ("
FILES = {  # what becomes of it
    "missing": (lambda p: p.unlink(), "there is no such file; have site 'south' send its part of the public seed set"),
    "cut short": (lambda p: p.write_bytes(p.read_bytes()[:-100]), OTHER),
    "empty": (lambda p: p.write_bytes(b""), OTHER),
    "a pickle": (lambda p: p.write_bytes(pickle.dumps({"x": 1})), OTHER),
    "one array": (lambda p: shutil.copy(_alone(p.with_suffix(".npy")), p), OTHER),
    "something else": (lambda p: np.savez(p, z=np.zeros(3)), f"{OTHER}it has the arrays 'z.npy')"),
    "another site's": (lambda p: shutil.copy(p.with_name("west.npz"), p), f"{OTHER}it is of format 1 and of site 'west')"),
}
CONTENTS = {  # which arrays of it are others
    "objects": ({"x": np.array([{}])}, f"{OTHER}'x.npy' is of object"),
    "another header": ({"about": np.array("{}")}, OTHER),
    "no divisor": ({"about": about(divisor=0.0)}, "its scaling has a wrong divisor: input should be greater than 0"),
    "other images": ({"x": np.zeros((84, 1, 9, 9), np.uint8)}, "its examples have the shape [1, 9, 9], and [1, 8, 8] is"),
    "features": ({"x": np.zeros((84, 1), np.float32)}, "its examples have the shape [1], and [1, 8, 8] is wanted"),
    "no images": ({"x": np.zeros(84)}, f"its examples are float64 of the shape [84], and no images or features; {ANEW}"),
    "nothing": ({"x": np.zeros((0, 1, 8, 8), np.uint8), "y": np.zeros(0, int)}, "of the shape [0, 1, 8, 8], and no images"),
    "other classes": ({"classes": np.array(CLASSES[::-1])}, "its labels are of the classes '9', '8', '7'"),
    "other scaling": (
        {"about": about(mean=[0.5])},
        "scaled by data.mean and data.std [[0.5], [0.4]], and [[0.3], [0.4]] are",
    ),
    "other channels": ({"about": about(mean=[0.5] * 3)}, "it has 3 means and 1 deviations for 1 channels or features"),
    "resized": ({"about": about(size=[16, 16])}, "its examples have the shape [1, 16, 16], and [1, 8, 8] is wanted"),
    "no size": ({"about": about(size=[0, 8])}, "its scaling has a wrong size.0: input should be greater than 0"),
    "no labels": (
        {"y": None},
        "it has no labels, which this algorithm needs; have site 'south' write its part again",
    ),
    "labels short": ({"y": np.zeros(83, int)}, f"its labels are not 84 numbers of 10 classes; {ANEW}"),
    "labels beyond": ({"y": np.full(84, 10)}, f"its labels are not 84 numbers of 10 classes; {ANEW}"),
}


def _alone(path):
    np.save(path, np.zeros(3))
    return path


@pytest.mark.parametrize("case", [*FILES, *CONTENTS])
def test_a_part_that_cannot_be_used(case, ward):
    path = ward / "public" / "south.npz"
    if case in FILES:
        spoil, reason = FILES[case]
        spoil(path)
    else:
        changes, reason = CONTENTS[case]
        rewritten(path, **changes)
    assert refused(ward, reason).startswith(str(path))
    with pytest.raises(DataError, match=r"south.npz"):
        contracts.read_submitted_contract(ward / "federation.toml")


def compressed(path):
    """64 MB of zeros in 64 kB."""
    np.savez_compressed(path, **arrays(path) | {"x": np.zeros((10**6, 1, 8, 8), np.uint8)})


def stating(shape, name="x.npy"):
    """An array whose header states another shape than there are bytes for."""

    def spoil(path):
        members = {m: file.read(m) for file in [zipfile.ZipFile(path)] for m in file.namelist()}
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(path, "w") as file:
            for member, content in members.items():
                file.writestr(member, head.getvalue() if member == name else content)

    return spoil


def oversized(path):
    """The directory of the archive states that a member has 4 GB."""
    content, end = bytearray(path.read_bytes()), b"PK\x01\x02"
    at = content.index(end)
    content[at + 20 : at + 28] = b"\xfe\xff\xff\xff" * 2  # sizes packed and unpacked
    path.write_bytes(content)


def twice(path):
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("x.npy", file.read("x.npy"))


def wordy(path):
    rewritten(path, classes=np.array(["a"] * 5 * 10**6))


def alone(path):
    """No archive, but one array that states a tebibyte."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (2**40,)})


def hidden(path):
    """A bomb behind an array without a header."""
    np.savez_compressed(path, x=np.zeros(10**7, np.uint8))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("about.npy", b"")


BOMBS = {
    "alone": (alone, OTHER),
    "hidden": (hidden, f"{OTHER}'x.npy' is compressed"),
    "behind a broken one": (lambda p: stating((1,), "about.npy")(p), f"{OTHER}'about.npy' is of uint8 and of shape (1,)"),
    "another name": (lambda p: np.savez_compressed(p, z=np.zeros(10**7, np.uint8)), f"{OTHER}it has the arrays 'z.npy')"),
    "compressed": (compressed, f"{OTHER}'x.npy' is compressed"),
    "a tebibyte": (stating((2**40, 1, 1, 1)), "of shape (1099511627776, 1, 1, 1), and has 0 bytes"),
    "beyond all": (stating((2**80,)), f"{OTHER}'x.npy' is of uint8 and of shape (1208925819614629174706176,)"),
    "text": (wordy, "'classes.npy' is of <U1 and of shape (5000000,), and has 20,000,000 bytes"),
    "directory": (oversized, "states 4,294,967,294 bytes in a file of "),
    "twice": (twice, f"{OTHER}it has the arrays 'x.npy', 'classes.npy'"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_part_that_would_unpack_to_more_than_its_size_is_not_unpacked(case, ward):
    spoil, reason = BOMBS[case]
    path = ward / "public" / "south.npz"
    spoil(path)
    tracemalloc.start()
    try:
        message = refused(ward, reason)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message.startswith(str(path))
    assert message.endswith(ANEW)
    assert most < 3 * path.stat().st_size + 2**24


def test_numbers_that_are_not_finite_are_seen_where_they_are_scaled(ward):
    path = ward / "public" / "south.npz"
    rewritten(path, x=np.full((84, 1, 8, 8), np.nan, np.float32))
    refused(ward, f"row 0 of {path} holds NaN or infinite values")


def test_no_damage_passes(seeded_wards, tmp_path):
    """Bits of the file that turn, and files cut short: an error that names it, or what was given, to the byte."""
    folder, _ = seeded_wards
    ward = shutil.copytree(folder, tmp_path / "ward")
    agreed, path = contracts.read_submitted_contract(folder / "federation.toml"), ward / "public" / "south.npz"
    content, rng, named, unchanged = path.read_bytes(), np.random.default_rng(0), 0, 0
    for _ in range(60):
        spoilt = bytearray(content)
        spoilt[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(spoilt if rng.random() < 0.8 else content[: rng.integers(len(content))])
        try:
            runtime = build_site(agreed, read_site_file(ward / "north" / "site.toml"))
        except UserError as problem:
            named += str(problem).startswith(str(path))
        else:
            unchanged += runtime.data.public.digest == agreed.public["digest"]
    assert named > 40
    assert named + unchanged == 60
