"""Who may import whom, read from the source: an algorithm stays a short file that knows no engine."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "fedmutual"
EXTRAS = ("tensorboard", "mlflow", "wandb", "ray", "nvflare", "flwr")


class Import(NamedTuple):
    file: str  # below src/fedmutual, with slashes
    name: str  # dotted, down to the imported name
    lazy: bool  # inside a function

    @property
    def top(self) -> str:
        """The package, and of fedmutual the part of it: torch, fedmutual.core."""
        parts = self.name.split(".")
        return ".".join(parts[: 2 if parts[0] == "fedmutual" else 1])


def imports(file: str, source: str) -> Iterator[Import]:
    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            yield from (Import(file, alias.name, lazy) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are written out from fedmutual on"
            yield from (Import(file, f"{node.module}.{alias.name}", lazy) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy)

    return visit(ast.parse(source), False)


@cache
def list_all_imports() -> list[Import]:
    """Return the imports of all files. They are not read when tests are collected."""
    return [
        one_import
        for path in sorted(SOURCE.rglob("*.py"))
        for one_import in imports(path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8"))
    ]


def of_algorithms(one_import: Import) -> bool:
    """They import the core, what they compute with, each other, torch and the standard library."""
    parts = ("calling", "core", "optimizers", "losses", "gradients", "aggregation", "batches", "algorithms")
    ours = {f"fedmutual.{part}" for part in parts}
    allowed = one_import.top in ours | {"torch"} or one_import.top in sys.stdlib_module_names
    return allowed or not one_import.file.startswith("algorithms/")


def of_user_code(one_import: Import) -> bool:
    """Of fedmutual it imports errors, files and itself, because every other room may load a user's code."""
    allowed = {f"fedmutual.{part}" for part in ("errors", "files", "user_code")}
    inside = one_import.file.startswith("user_code/") and one_import.name.startswith("fedmutual")
    return not inside or one_import.top in allowed


def of_engines(one_import: Import) -> bool:
    """They know no algorithm: what an engine needs to know, a phase tells by `fedmutual.core`."""
    return not one_import.file.startswith("engines/") or one_import.top != "fedmutual.algorithms"


def of_core(one_import: Import) -> bool:
    """It imports torch, the types of settings and roles, and the standard library; how a client steps, the core too."""
    allowed = {
        "core.py": {"torch", "fedmutual.calling", "fedmutual.metric", "fedmutual.role", "fedmutual.settings"},
        "stepping.py": {"torch", "fedmutual.calling", "fedmutual.core", "fedmutual.optimizers"},
    }.get(one_import.file)
    return allowed is None or one_import.top in allowed | sys.stdlib_module_names


def of_cli(one_import: Import) -> bool:
    """Nothing imports it but itself and ``python -m fedmutual``."""
    return one_import.top != "fedmutual.cli" or one_import.file.startswith("cli/") or one_import.file == "__main__.py"


def of_report(one_import: Import) -> bool:
    """Reports and results read run folders: they import what reads them, errors, keys and roles, nothing to train with."""
    foreign = one_import.top in ("torch", "torchvision", "sklearn") or one_import.top.startswith("fedmutual")
    lower = {f"fedmutual.{part}" for part in ("results", "report", "metric", "rundir", "files", "errors", "role", "config")}
    return not foreign or one_import.top in lower or not one_import.file.startswith(("results/", "report/"))


def of_papers(one_import: Import) -> bool:
    """The papers' experiments are a distribution of their own, which imports fedmutual."""
    return one_import.top != "fedmutual_papers"


def of_extras(one_import: Import) -> bool:
    """Who did not install an extra does not notice: it is imported in a function, when asked for."""
    third_party = not one_import.name.startswith("fedmutual.")
    return (
        one_import.lazy
        or _carried(one_import.file)
        or not (third_party and any(part in EXTRAS for part in one_import.name.split(".")))
    )


def of_carried(one_import: Import) -> bool:
    """What NVIDIA FLARE or Flower carries to its processes is imported there, and by nobody who may not have it."""
    parts = one_import.name.removeprefix("fedmutual.").split(".")
    return not any(_carried("/".join(parts[: n + 1]) + ".py") for n in range(len(parts))) or _carried(one_import.file)


def _carried(file: str) -> bool:
    names = ("controller", "access_control", "executor", "stock", "watch")
    return file in ["sites/flower.py", *(f"sites/flare/{name}.py" for name in names)]


ROOMS = (  # from the lowest to the highest: a module imports its own room and lower rooms
    ("calling", "errors", "parent_process", "numerics", "role", "settings", "metric"),
    ("core", "optimizers"),
    ("files", "scores", "cpu"),
    ("tensor_files",),
    ("events", "losses", "gradients", "aggregation", "batches", "boundary", "user_code", "in_memory"),
    ("tasks", "fitting", "stepping"),
    ("algorithms",),
    ("config",),
    ("models",),
    ("rundir",),
    ("data",),
    ("privacy",),
    ("federation",),
    ("engines",),
    ("results",),
    ("report",),
    ("studies",),
    ("sites",),
    ("demo",),
    ("cli",),
)
RANKS = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


def of_rooms(one_import: Import) -> bool:
    """Nothing imports upward, in a function neither. What `fedmutual` exports may be imported from it above the studies."""
    importing, (first, *rest) = one_import.file.split("/")[0].removesuffix(".py"), one_import.name.split(".")
    if first != "fedmutual" or importing in ("__init__", "__main__") or rest[:1] == [importing]:
        return True
    imported = rest[0] if rest and rest[0] in RANKS else "studies"  # a name of the package itself
    return RANKS[imported] < RANKS[importing]


RULES = [of_rooms, of_user_code, of_algorithms, of_engines, of_core, of_cli, of_report, of_papers, of_extras, of_carried]


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule) -> None:
    all_imports = list_all_imports()
    assert {one_import.file for one_import in all_imports} > {"core.py", "algorithms/fml.py", "cli/app.py", "report/html.py"}
    assert [one_import for one_import in all_imports if not rule(one_import)] == []


def test_no_two_files_import_each_other() -> None:
    files = {one_import.file for one_import in list_all_imports()}
    found = set()
    for one_import in list_all_imports():
        parts = one_import.name.removeprefix("fedmutual.").split(".")
        found |= {(one_import.file, file) for n in (-1, None) if (file := "/".join(parts[:n]) + ".py") in files}
    mutual = {pair for pair in found if pair[0] < pair[1] and pair[::-1] in found}
    assert mutual == set()


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_is_declared_in_one_place(extra: str) -> None:
    files = {f.file for f in list_all_imports() if not f.name.startswith("fedmutual.") and extra in f.name.split(".")}
    assert len({Path(f).parent if extra == "nvflare" else f for f in files}) <= 1


@pytest.mark.parametrize("file", sorted((SOURCE.parents[1] / "benchmarks").glob("*.py")), ids=lambda file: file.stem)
def test_a_name_that_a_benchmark_imports_exists(file: Path) -> None:
    """No test runs the benchmarks: they take long. A function's imports are looked up, too."""
    tests = SOURCE.parents[1] / "tests"
    beside = {path.stem: path for folder in (tests, file.parent) for path in folder.glob("*.py")}
    missing = []
    for module, name in (i.name.rsplit(".", 1) for i in imports(file.name, file.read_text()) if "." in i.name):
        if module in beside and name not in list_top_names(beside[module]):
            missing.append(f"{module}.{name}")
        if module.startswith("fedmutual") and not has_name(module, name):
            missing.append(f"{module}.{name}")
    assert missing == []


@cache
def list_top_names(file: Path) -> set[str]:
    """Return the names that a file defines outside of functions and classes."""
    names = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom | ast.With | ast.Try):
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            names |= {
                a.asname or a.name for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names
            }
    return names


def has_name(module: str, name: str) -> bool:
    """Return whether a module has a name, or is a package with a module of this name."""
    package = importlib.import_module(module)
    return hasattr(package, name) or (
        hasattr(package, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    )


@pytest.mark.parametrize(
    ("rule", "file", "source"),
    [
        (of_rooms, "federation/build.py", "from fedmutual.engines import base"),
        (of_rooms, "data/rows.py", "def f():\n    from fedmutual.results.scale import percent"),
        (of_rooms, "losses.py", "import fedmutual.aggregation"),
        (of_rooms, "engines/base.py", "from fedmutual import run"),
        (of_algorithms, "algorithms/fml.py", "from fedmutual.engines import base"),
        (of_algorithms, "algorithms/fml.py", "from fedmutual import core, data"),
        (of_algorithms, "algorithms/fml.py", "import numpy as np"),
        (of_algorithms, "algorithms/fml.py", "import fedmutual"),
        (of_user_code, "user_code/plugins.py", "from fedmutual.scores import Scores"),
        (of_engines, "engines/processes.py", "from fedmutual.algorithms.local import LocalEpochs"),
        (of_engines, "engines/stack.py", "from fedmutual import algorithms"),
        (of_core, "core.py", "def f():\n    import fedmutual.losses"),
        (of_core, "core.py", "import numpy"),
        (of_core, "core.py", "from fedmutual import stepping"),
        (of_core, "stepping.py", "from fedmutual.engines import base"),
        (of_cli, "studies/run.py", "if True:\n    from fedmutual.cli.terminal import out"),
        (of_cli, "studies/run.py", "from fedmutual import cli"),
        (of_report, "report/html.py", "from fedmutual.engines.loop import federate"),
        (of_report, "report/html.py", "from fedmutual import run"),
        (of_report, "report/html.py", "import torch"),
        (of_papers, "cli/app.py", "def f():\n    from fedmutual_papers.experiment_files import find_home"),
        (of_extras, "rundir/tensorboard.py", "from torch.utils.tensorboard import SummaryWriter"),
        (of_extras, "engines/ray.py", "class A:\n    import ray"),
        (of_extras, "sites/flare/kits.py", "import nvflare"),
        (of_carried, "sites/flare/workspace.py", "from fedmutual.sites.flare.watch import Watch"),
    ],
)
def test_a_breach_is_seen(rule, file: str, source: str) -> None:
    assert not all(rule(one_import) for one_import in imports(file, source))
