"""What the files of a run folder hold, and a federation of real sites that writes some."""

import shutil

import torch
from safetensors.torch import load_file

from numerics_golden import machine
from outside import samples
from outside.internals import run_sites

SITES = ("north", "south")


def federate(folder):
    """Run the sample's federation of real sites in this process, or go on with it."""
    place = folder / samples.SITES
    files = {name: place / name / "site.toml" for name in SITES}
    run_sites(place / "federation.toml", files, place / "server" / "wards")


def forget(folder):
    """Remove what the participants of the sample's federation keep."""
    shutil.rmtree(folder / samples.SITES / "server")
    for name in SITES:
        shutil.rmtree(folder / samples.SITES / name / "state")


def change(path, before, after):
    """Replace a text that occurs once in a file."""
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), encoding="utf-8")


def tensors(folder):
    """All tensors below a folder: file and name -> tensor."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{path.relative_to(folder).as_posix()} {k}": v for path in files for k, v in load_file(path).items()}


def under(prefix, state):
    """The tensors below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def assert_equal(actual, expected):
    """Equal names and values."""
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


def assert_same(sample, actual, expected):
    """Equal where the sample was written on a machine like this one, else equal but for what becomes of rounding.

    Rounding may switch a unit of ReLU on or off, and then all weights of its step differ: so the networks and optimisers of
    each file are compared as wholes, by the norm of their difference.
    """
    if samples.read_machines()[sample] == machine():
        assert_equal(actual, expected)
        return
    assert actual.keys() == expected.keys()
    wholes = {}
    for name in actual:
        wholes.setdefault(name.partition(".safetensors ")[0] + name.partition(" ")[2].partition(".")[0], []).append(name)
    for whole, names in wholes.items():
        ours, theirs = (torch.cat([state[name].double().flatten() for name in names]) for state in (actual, expected))
        assert (ours - theirs).norm() <= 0.1 * theirs.norm(), whole
