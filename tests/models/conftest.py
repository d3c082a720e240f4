import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a user's module into the folder that the command runs in -> its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"own_{tmp_path.name}".replace("-", "_")

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text("import torch\nfrom torch import nn\n" + dedent(source), encoding="utf-8")
        return name

    yield write
    sys.modules.pop(name, None)  # `sys.modules` itself stays: a copy in its place is not what imports look into
