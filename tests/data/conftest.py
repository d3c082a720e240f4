import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a user's module into the folder that the command runs in -> its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})

    def write(source: str) -> str:
        name = f"own_data_{tmp_path.name}".replace("-", "_")
        head = "import numpy as np\nimport torch\nfrom torch.utils.data import *\n"
        (tmp_path / f"{name}.py").write_text(head + dedent(source), encoding="utf-8")
        return name

    return write
