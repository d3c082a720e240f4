"""Chest images of 16 bits in DICOM files, with several findings, of which some are blank or uncertain, at three hospitals.

Run: pip install "fedmutual[medical]"; python examples/chest.py
"""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import DigitalXRayImageStorageForPresentation, ExplicitVRLittleEndian, generate_uid

import fedmutual

home = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
FINDINGS = ["effusion", "mass", "large_heart"]


def save(densities: np.ndarray, path: Path) -> None:
    """Write a 16-bit DICOM file whose stored values are (density + 1000) / 0.5."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = DigitalXRayImageStorageForPresentation, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    file.Rows, file.Columns = densities.shape
    file.SamplesPerPixel, file.PixelRepresentation, file.PhotometricInterpretation = 1, 0, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit = 16, 16, 15
    file.RescaleSlope, file.RescaleIntercept = 0.5, -1000
    file.PixelData = ((densities + 1000) / 0.5).astype(np.uint16).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)


for hospital in ("north", "south", "west"):
    rows = []
    for k in range(120):
        effusion, mass, large_heart = truth = rng.integers(0, 2, 3)
        image = rng.normal(0, 100, (28, 28))
        image[22:, :] += 400 * effusion
        image[4:9, 5:10] += 400 * mass
        image[12:20, 10 : 14 + 8 * large_heart] += 400
        save(image.clip(-1000, 30000), home / hospital / f"study{k // 10}" / f"IM{k:04}.dcm")
        cells = [rng.choice([str(value), "", "-1"], p=[0.8, 0.15, 0.05]) for value in truth]  # blank; -1: uncertain
        rows.append(
            {"file_name": f"study{k // 10}/IM{k:04}.dcm", "patient": k // 2, **dict(zip(FINDINGS, cells, strict=True))}
        )
    pd.DataFrame(rows).to_csv(home / hospital / "metadata.csv", index=False)

(home / "chest.toml").write_text(f"""
name = "chest"
rounds = 5
model = {{ shared = "cnn1" }}
training = {{ task = "multilabel", local_epochs = 2, batch_size = 16 }}
optimizer = {{ name = "adam", lr = 0.003 }}

[data]
name = "folder"
label = {FINDINGS}
group_by = "patient"
unlabelled = true # a blank cell's only target is the output of the other network
uncertain = "ignore" # -1 is treated as blank
mean = "federated"
std = "federated"

[clients]
north = {{ data = {{ root = '{home}/north' }} }}
south = {{ data = {{ root = '{home}/south' }} }}
west = {{ data = {{ root = '{home}/west' }} }}
""")
run = fedmutual.run(fedmutual.load_config(home / "chest.toml"), out=home / "run")
scores = run.history()
last = scores[(scores["round"] == scores["round"].max()) & (scores["metric"] == "auroc")]
print(last[["model", "client", "data", "value"]])
(answer,) = fedmutual.predict(home / "run", home / "north" / "study0" / "IM0000.dcm", client="north")
print({finding: round(probability, 2) for finding, probability in answer.ranked})
