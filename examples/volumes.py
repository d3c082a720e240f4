"""Volumes of 16^3 voxels in NIfTI files, at three clinics: who is ill, and which voxels are the lesion?

A 3D ResNet of MONAI learns the first, MONAI's U-Net the second, from files and from arrays.
Run: pip install "fedmutual[medical,monai]"; python examples/volumes.py
"""

import tempfile
from pathlib import Path

import nibabel
import numpy as np

import fedmutual
from fedmutual import Site

home = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)


def make_brain(is_ill: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the voxels of a brain, and 1 for each voxel of its lesion, both [16, 16, 16]."""
    mask = np.zeros((16, 16, 16), np.uint8)
    if is_ill:
        x, y, z = rng.integers(0, 9, 3)
        mask[x : x + 7, y : y + 7, z : z + 7] = 1
    return (rng.normal(100, 20, mask.shape) + 80 * mask).astype(np.float32), mask


def save(voxels: np.ndarray, path: Path) -> None:
    """Write a NIfTI file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)


brains = [make_brain(is_ill=k % 2 == 1) for k in range(36)]
for k, (voxels, mask) in enumerate(brains):
    clinic = ("north", "south", "west")[k % 3]
    save(voxels, home / "patients" / clinic / ("well", "ill")[mask.max()] / f"{k}.nii.gz")
    save(voxels, home / "lesions" / clinic / "images" / f"{k}.nii.gz")
    save(mask, home / "lesions" / clinic / "masks" / f"{k}.nii.gz")

CONFIG = """
name = "{name}"
rounds = 3
data = {{ name = "folder", root = '{root}', mean = "federated", std = "federated" }}
partition = {{ kind = "domains" }} # each folder is a client
model = {{ shared = "{network}" }}
algorithm = {{ name = "fedavg" }}
training = {{ task = "{task}", local_epochs = 2, batch_size = 4 }}
optimizer = {{ name = "adam", lr = 0.003 }}
engine = {{ name = "inprocess" }} # training is so short that starting worker processes would take longer
"""


def train(name: str, network: str, task: str) -> fedmutual.Run:
    """Train on the files in home/name."""
    path = home / f"{name}.toml"
    path.write_text(CONFIG.format(name=name, root=home / name, network=network, task=task))
    return fedmutual.run(fedmutual.load_config(path), out=home / f"{name}-run")


patients = train("patients", "monai:resnet10", "classification")
lesions = train("lesions", "monai:UNet", "segmentation")
print(patients, lesions, sep="\n")

voxels, masks = np.stack([b[0] for b in brains])[:, None], np.stack([b[1] for b in brains])
sites = {clinic: Site(train=((voxels[k::3] - 100) / 40, masks[k::3])) for k, clinic in enumerate(("north", "south", "west"))}
arrays = fedmutual.federate(
    sites,
    "fedavg",
    shared="monai:UNet",
    task="segmentation",
    rounds=4,
    local_epochs=2,
    batch_size=4,
    optimizer="adam",
    lr=0.003,
)
print(arrays)
