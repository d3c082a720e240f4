"""What an import costs: which of the large packages are imported with which part of fedmutual."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

STEPS = """
import json, sys

LARGE = ("torch", "torch._dynamo", "scipy.stats", "sklearn", "torchvision", "matplotlib", "pandas", "ray", "nvflare")
LARGE += ("fedmutual_papers",)
imported = {}

def note(step):
    imported[step] = [name for name in LARGE if name in sys.modules]

import fedmutual
note("import fedmutual")
from fedmutual.cli import main
note("the command line")
fedmutual.load_config, fedmutual.Run, fedmutual.run
note("load_config, Run, run")
[getattr(fedmutual, name) for name in fedmutual.__all__]
note("all names")
print(json.dumps(imported))
"""


def test_large_packages_are_imported_when_they_are_needed():
    """Less is always right. One process takes the steps one after the other, so that each has what the last one had."""
    output = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True).stdout
    imported = {step: set(names) for step, names in json.loads(output).items()}
    assert imported["import fedmutual"] == set()
    assert imported["the command line"] == set()
    assert imported["load_config, Run, run"] <= {"torch"}
    assert imported["all names"] <= {"torch", "scipy.stats", "pandas"}
