import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a user's module into the folder that the command runs in -> its name.

    The module is forgotten afterwards; `sys.modules` itself stays, for a copy in its place is not what imports look into,
    and a library imported for the first time meanwhile would find its own parts half made.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"own_data_{tmp_path.name}".replace("-", "_")

    def write(source: str) -> str:
        head = "import numpy as np\nimport torch\nfrom torch.utils.data import *\n"
        (tmp_path / f"{name}.py").write_text(head + dedent(source), encoding="utf-8")
        return name

    yield write
    sys.modules.pop(name, None)
