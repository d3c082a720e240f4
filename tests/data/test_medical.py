"""DICOM, NIfTI, deep images, masks and labels in files, compared with the numbers that were written."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

import fedmutual
from fedmutual import data
from fedmutual.data import images, medical
from fedmutual.errors import BadRows
from own_data import config, image, refused

Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)
SEGMENTATION: Any = {"task": "segmentation", "batch_size": 2}


def write_dicom(path: Path, stored: Array, kind: str = "MONOCHROME2", bits: int = 12, **more: Any) -> Path:
    """Write stored values [H, W], [F, H, W] or, of colours, [H, W, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = CTImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    colours = stored.shape[-1] == 3
    file.Rows, file.Columns = stored.shape[:2] if colours else stored.shape[-2:]
    file.SamplesPerPixel, file.PhotometricInterpretation = (3, "RGB") if colours else (1, kind)
    file.BitsStored, file.HighBit, file.BitsAllocated = bits, bits - 1, 8 * stored.dtype.itemsize
    file.PixelRepresentation = int(stored.dtype.kind == "i")
    if colours:
        file.PlanarConfiguration = 0
    elif stored.ndim == 3:
        file.NumberOfFrames = len(stored)
    for name, value in more.items():
        setattr(file, name, value)
    file.PixelData = stored.tobytes()
    file.save_as(path, enforce_file_format=True)
    return path


def write_nifti(path: Path, values: Array, affine: Array | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine), path)
    return path


def write_deep(path: Path, values: Array) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def folder(root: Path, **more: Any) -> dict[str, Any]:
    return {"name": "folder", "root": str(root), **more}


STORED = np.arange(12, dtype=np.uint16).reshape(3, 4) * 100
SLOPE = {"RescaleSlope": 2, "RescaleIntercept": -1024}


@pytest.mark.parametrize(
    ("stored", "kind", "more", "read"),
    [
        (STORED, "MONOCHROME2", {}, STORED[None]),
        (STORED, "MONOCHROME2", SLOPE, STORED[None] * 2.0 - 1024),
        (STORED, "MONOCHROME1", {}, 4095.0 - STORED[None]),
        (STORED, "MONOCHROME1", SLOPE, (4095.0 - STORED[None]) * 2 - 1024),
        (STORED.astype(np.int16) - 500, "MONOCHROME1", {}, 499.0 - STORED[None]),
        (np.stack([STORED, STORED + 1]), "MONOCHROME2", {}, np.stack([STORED, STORED + 1])[None]),
        (np.stack([STORED // 5] * 3, 2).astype(np.uint8), "RGB", {}, np.stack([STORED // 5] * 3)),
    ],
)
def test_dicom_is_read_in_its_unit(tmp_path: Path, stored: Array, kind: str, more: dict[str, Any], read: Array) -> None:
    bits = 8 if stored.dtype == np.uint8 else 12 if stored.dtype == np.uint16 else 16
    x = images.read_file(write_dicom(tmp_path / "IM.0001", stored, kind, bits, **more), None)
    assert np.array_equal(x, read)
    assert x.dtype == (np.uint8 if kind == "RGB" else np.float32)


def test_nifti_axes_are_those_of_ras(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)  # x, y, z
    expected = values.transpose(2, 1, 0)[None]
    assert np.array_equal(images.read_file(write_nifti(tmp_path / "a.nii.gz", values), None), expected)
    turned = write_nifti(tmp_path / "b.nii", values[::-1, ::-1], np.diag([-1.0, -1, 3, 1]))
    assert np.array_equal(images.read_file(turned, None), expected)
    volumes = images.read_file(write_nifti(tmp_path / "c.nii", np.stack([values, values + 100], 3)), None)
    assert np.array_equal(volumes, np.concatenate([expected, expected + 100]))
    assert images.read_file(write_nifti(tmp_path / "d.nii", values[..., 0]), None).shape == (1, 3, 2)
    about, notes = images.describe_files([tmp_path / "a.nii.gz", turned])
    assert about["formats"] == {"NIfTI": 2}
    assert about["conversions"] == {"turned from LPS to RAS": 1}
    assert about["spacings"] == {"1 x 1 x 1": 1, "3 x 1 x 1": 1}
    assert "2 spacings" in notes[0]


AXIAL = [1, 0, 0, 0, 1, 0]


def write_series(folder: Path, first: float = 0, count: int = 3, **more: Any) -> Path:
    """Write slices of 3 x 4 whose names, numbers and positions have other orders; slice k, from below, holds first + k."""
    for k in range(count):
        place: dict[str, Any] = {"InstanceNumber": count - k, "ImagePositionPatient": [0, 0, 5 * k]}
        place |= {"ImageOrientationPatient": AXIAL, "SeriesInstanceUID": "1.2"} | more
        write_dicom(folder / f"{(3 * k + 1) % 7}.dcm", np.full((3, 4), first + k, np.uint16), **place)
    return folder


def test_slices_of_a_series_are_a_volume(tmp_path: Path) -> None:
    for label, first in (("ill", 10), ("well", 0)):
        for patient in range(6):
            write_series(tmp_path / "rows" / label / f"p{patient}", first)
    read = folder(tmp_path / "rows", slices=True)
    federation = data.load(config(data=read))
    x = federation.clients["0"].private.store.x  # type: ignore[union-attr]
    assert x.shape[1:] == (1, 3, 3, 4)
    assert {tuple(one[0, :, 0, 0].tolist()) for one in x} == {(0, 1, 2), (10, 11, 12)}
    assert federation.partition["read"]["formats"] == {"DICOM slices": 12}
    assert federation.partition["read"]["sizes"] == {"3 x 3 x 4": 12}
    assert not any("not read" in note for note in federation.notes)
    run = fedmutual.run(config(data=read, model={"shared": "mlp"}, rounds=1, split={"test": 0.2}), tmp_path / "run")
    assert fedmutual.predict(run.folder, tmp_path / "rows" / "ill" / "p0")[0].label in ("ill", "well")
    assert run.score(tmp_path / "rows").values["examples"] == 12
    write_series(tmp_path / "rows" / "ill" / "p0", count=4)
    refused("p1 is 3 x 3 x 4 voxels and", "p0 is 4 x 3 x 4", data=read)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"ImagePositionPatient": None}, ""),
        ({"ImagePositionPatient": None, "InstanceNumber": 1}, "a slice has no ImagePositionPatient or InstanceNumber"),
        ({"ImagePositionPatient": [0, 0, 1]}, "or has that of another slice"),
    ],
)
def test_slices_are_ordered_by_number_where_they_have_no_place(tmp_path: Path, more: dict[str, Any], fault: str) -> None:
    series = write_series(tmp_path / "p", **more)
    if fault:
        with pytest.raises(BadRows, match=fault):
            images.read_file(series, None)
    else:
        assert images.read_file(series, None)[0, :, 0, 0].tolist() == [2, 1, 0]


def test_a_missing_slice_is_named_and_a_localizer_refused(tmp_path: Path) -> None:
    for label in "ab":
        for patient in range(6):
            write_series(tmp_path / label / f"p{patient}", count=4)
    (tmp_path / "a" / "p1" / "0.dcm").unlink()  # the third of four slices
    read = folder(tmp_path, slices=True, size=[4, 3, 4])
    remarks = [note for note in data.load(config(data=read)).notes if "uneven" in note]
    assert remarks == [
        f"slices have uneven distances in 1 volume ({tmp_path / 'a' / 'p1'}: 5 to 10 mm, for example); slices may be "
        "missing, and the volumes are not resampled to even distances"
    ]
    series = write_series(tmp_path / "c", PixelSpacing=[0.5, 0.7])
    assert medical.describe_volume(series)["spacings"] == "5 x 0.5 x 0.7"
    write_dicom(series / "9.dcm", STORED, ImagePositionPatient=[3, 0, 0], ImageOrientationPatient=[0, 1, 0, 0, 0, -1])
    with pytest.raises(BadRows, match="its slices have different orientations, so they are no volume"):
        images.read_file(series, None)


def test_complex_numbers_are_refused(tmp_path: Path) -> None:
    path = write_nifti(tmp_path / "a.nii", np.ones((2, 3, 4), np.complex64))
    with pytest.raises(BadRows, match="it holds complex numbers"):
        images.read_file(path, None)


def test_a_folder_of_two_series_is_refused(tmp_path: Path) -> None:
    for label in "ab":
        for patient in range(6):
            write_series(tmp_path / label / f"p{patient}")
    write_dicom(tmp_path / "a" / "p0" / "9.dcm", STORED, SeriesInstanceUID="1.3")
    refused("p0: has 4 DICOM slices and 2 series; with data.slices = true, give each", data=folder(tmp_path, slices=True))
    (tmp_path / "a" / "p0" / "9.dcm").unlink()
    image(tmp_path / "a" / "p1" / "9.png")
    refused("p1: has 3 DICOM slices and other images", data=folder(tmp_path, slices=True))


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_deep_images_are_divided_by_data_max(tmp_path: Path, ending: str) -> None:
    values = RNG.integers(0, 1000, (2, 6, 5, 4)).astype(np.uint16)
    for label, of_class in zip("ab", values, strict=True):
        for k, pixels in enumerate(of_class):
            write_deep(tmp_path / label / f"{k}.{ending}", pixels)
    federation = data.load(config(data=folder(tmp_path, max=1000)))
    store = federation.clients["0"].private.store
    assert np.allclose(store.x.numpy()[:, 0], values.reshape(-1, 5, 4) / 1000)  # type: ignore[union-attr]
    assert federation.partition["read"]["sizes"] == {"5 x 4": 12}
    refused("set data.max to the greatest value", "4095 for 12 bits", data=folder(tmp_path))
    refused("holds the value", "data.max is 500", data=folder(tmp_path, max=500))
    image(tmp_path / "a" / "9.png", mode="L", size=(5, 4))
    refused("9.png is 5 x 4 of uint8", data=folder(tmp_path, max=1000))


def test_files_of_a_missing_extra_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medical, "is_installed", lambda ending: False)
    for label in "ab":
        for k in range(8):
            image(tmp_path / label / f"{k}.png")
        write_dicom(tmp_path / label / "9.dcm", STORED)
    notes = data.load(config(data=folder(tmp_path))).notes
    assert any("2 .dcm files: pip install 'fedmutual[medical]'" in note for note in notes)
    with pytest.raises(BadRows, match=r"reading \.dcm needs the package pydicom: pip install 'fedmutual\[medical\]'"):
        images.read_file(tmp_path / "a" / "9.dcm", None)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for name in ("a.dcm", "a.nii.gz"):
        (tmp_path / name).write_bytes(b"data")
        with pytest.raises(BadRows, match=rf"{name} cannot be read as \.\w+.* fix or remove it"):
            images.read_file(tmp_path / name, None)


@pytest.mark.parametrize(
    ("picture", "mask"),
    [
        (Image.fromarray(np.array([[0, 2], [1, 0]], np.uint8)), [[0, 2], [1, 0]]),
        (Image.fromarray(np.array([[0, 2], [1, 0]], np.uint8)).convert("P"), [[0, 2], [1, 0]]),
        (Image.fromarray(np.array([[0, 1], [1, 0]], bool)), [[0, 1], [1, 0]]),
        (Image.fromarray(np.array([[0, 300], [1, 0]], np.uint16)), [[0, 300], [1, 0]]),
        (Image.fromarray(np.array([[0, 2], [1, 0]], np.uint8)).convert("RGB"), [[0, 2], [1, 0]]),
    ],
)
def test_masks_are_whole_numbers(tmp_path: Path, picture: Image.Image, mask: list[list[int]]) -> None:
    picture.save(tmp_path / "a.png")
    assert images.read_mask(tmp_path / "a.png", None).tolist() == mask
    assert images.read_mask(tmp_path / "a.png", (4, 4)).tolist() == np.repeat(np.repeat(mask, 2, 0), 2, 1).tolist()


def write_pairs(root: Path) -> list[Array]:
    """Write images, and masks of 0 and 255 of equal name, and return the masks."""
    masks = [np.where(RNG.random((4, 4)) > 0.5, 255, 0).astype(np.uint8) for _ in range(6)]
    for k, mask in enumerate(masks):
        image(root / "images" / f"{k}.jpg", mode="L", size=(4, 4))
        write_deep(root / "masks" / f"{k}.png", mask)
    return masks


def test_images_have_the_masks_of_their_names(tmp_path: Path) -> None:
    masks = write_pairs(tmp_path)
    about = {"labels": {"0": "rest", "255": "lesion"}, "classes": ["rest", "lesion"]}
    for size, shape in (({}, (1, 4, 4)), ({"size": [2, 2]}, (1, 2, 2))):
        prepared = data.prepare(config(data=folder(tmp_path, **about, **size), training=SEGMENTATION))[""]
        assert prepared.space.shape == shape
        assert size or np.array_equal(prepared.targets, np.stack(masks) // 255)
    (tmp_path / "masks" / "5.png").unlink()
    refused("5.jpg: there is no file of this name", data=folder(tmp_path, **about), training=SEGMENTATION)


def test_metadata_has_labels_of_files(tmp_path: Path) -> None:
    for k in range(6):
        image(tmp_path / f"{k % 2}" / f"{k}.png", k)
    rows = [f"{k % 2}/{k}.png,{k % 2},{k // 3},{k / 2}" for k in reversed(range(6))]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,cough,fever,weight", *rows]))
    about, task = folder(tmp_path, label=["cough", "fever"]), {"task": "multilabel", "batch_size": 2}
    prepared = data.prepare(config(data=about, training=task))[""]
    assert prepared.targets.tolist() == [[0, 0], [0, 0], [0, 1], [1, 0], [1, 1], [1, 1]]
    weights = data.prepare(config(data=folder(tmp_path, label="weight"), training=task | {"task": "regression"}))[""]
    assert weights.targets.tolist() == [0, 1, 2, 0.5, 1.5, 2.5]
    for label, labels in (("fever", "001011"), ("diagnosis", "000111")):  # of metadata.csv, and of the folders
        source = data.prepare(config(data=folder(tmp_path, label=label)))[""].source
        assert "".join(map(str, source.train.labels)) == labels
    image(tmp_path / "1" / "7.png")
    refused("no row names the file 1/7.png (1 of 7 files)", data=about, training=task)


@pytest.mark.run
@pytest.mark.parametrize("kind", ["dicom", "nifti", "masks"])
def test_predict_and_score_read_files_as_training_does(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "data"
    about, training, network = {"mean": [500], "std": [300]}, {"local_epochs": 1, "batch_size": 4}, "mlp"
    if kind == "masks":
        write_pairs(root)
        about, network = {"labels": {"0": "rest", "255": "lesion"}}, "unet"
        training |= {"task": "segmentation"}
    for label in "ab" if kind != "masks" else ():
        for k in range(10):
            values = RNG.integers(0, 1000, (4, 4, 4)).astype(np.int16)
            if kind == "dicom":
                write_dicom(root / label / f"{k}.dcm", values[0].astype(np.uint16), "MONOCHROME1", bits=10)
            else:
                write_nifti(root / label / f"{k}.nii.gz", values)
    experiment = config(
        name=kind, rounds=1, data=folder(root, **about), training=training, model={"shared": network}, split={"test": 0.3}
    )
    trained = fedmutual.run(experiment, tmp_path / "run")
    file = next(f for f in sorted(root.rglob("*")) if f.is_file())
    (answer,) = fedmutual.predict(tmp_path / "run", file)
    score = trained.score(root)
    assert answer.kind == ("masks" if kind == "masks" else "classes")
    assert score.metric is not None
    assert score.training_rows


def test_a_plane_is_not_said_to_be_turned(tmp_path: Path) -> None:
    plane = nibabel.Nifti1Image(np.arange(6, dtype=np.float32).reshape(3, 2), np.diag([-1.0, 1, 1, 1]))
    nibabel.save(plane, tmp_path / "a.nii")
    assert medical.read_volume(tmp_path / "a.nii").tolist() == [[[0, 2, 4], [1, 3, 5]]]
    assert medical.describe_volume(tmp_path / "a.nii")["conversions"] == ""
