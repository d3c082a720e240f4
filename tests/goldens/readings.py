"""What fedmutual says about the run folders of the goldens: it reads them, and trains nothing."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd

import fedmutual
from goldens.make import FOLDERS, write_experiments
from goldens.page_text import read_page

Cli = Callable[..., tuple[int, str, str]]
Outputs = dict[str, str]
"""Name of a file below outputs/FOLDER -> its content."""

READINGS = (
    "demo",
    "own-method",
    "tuned",
    "adaptation",
    "audit",
    "regression",
    "multilabel",
    "masks",
    "domains",
    "sites/server/wards",
    "sites/ash/wards",
    "masked-sites/server/wards",
    "masked-sites/ash/wards",
)
"""The folders that `fedmutual report` is given."""
AUDITS = ("audit/memorised", "audit/private")
RESUMED = {
    "sweep": "sweep methods.toml --set algorithm.alpha=0.3,0.6 --set optimizer.lr=0.005,0.05 --seeds 2 --jobs 1",
    "tuned": "compare methods.toml --methods fml,fedavg,independent --seeds 2 --tune 3 --jobs 1",
}
"""Folder -> the command that made it; with --resume it finds every run finished, and judges them again."""


def report(cli: Cli, folder: str, out: Path) -> Outputs:
    """Everything that a report of a folder shows: terminal, page, CSV files, and the objects of Python's users."""
    code, terminal, err = cli("report", folder, "-o", out / "page.html")
    assert code == 0, err
    page, files = read_page((out / "page.html").read_text(encoding="utf-8"))
    outputs = {"terminal.txt": terminal, "page.txt": page, "tables.csv": files}
    runs = _read_runs(Path(folder))
    if folder != "adaptation":
        outputs["terminal.txt"] += _print_costs(Path(folder))
    outputs["python.txt"] = "\n".join(map(repr, [*runs.values(), fedmutual.Comparison(runs)]))
    outputs["python.csv"] = _summarise_history(fedmutual.Comparison(runs).history())
    return {name: _fix(text, out) for name, text in outputs.items()}


def show_audit(cli: Cli, folder: str, out: Path, monkeypatch) -> Outputs:
    """What `fedmutual audit` shows of the results in a folder, instead of an attack."""
    from fedmutual.report.audit import Audit

    results = (Path(folder) / "audit.json").read_text(encoding="utf-8")
    monkeypatch.setattr("fedmutual.studies.audit.audit", lambda *_: Audit.model_validate_json(results))
    code, terminal, err = cli("audit", folder, "--out", out)
    assert code == 0, err
    page, _ = read_page((out / "audit.html").read_text(encoding="utf-8"))
    return {"terminal.txt": _fix(terminal, out), "page.txt": _fix(page, out)}


def resume(cli: Cli, folder: str, out: Path, monkeypatch) -> Outputs:
    """What the command that made a folder shows if it is given again."""
    shutil.copytree(FOLDERS / folder, out / folder)
    write_experiments(out)
    monkeypatch.chdir(out)
    code, terminal, err = cli(*RESUMED[folder].split(), "--out", folder, "--resume")
    assert code == 0, err
    outputs = {"terminal.txt": terminal}
    if (out / folder / "sweep.json").exists():
        outputs["sweep.json"] = (out / folder / "sweep.json").read_text(encoding="utf-8")
    if (out / folder / "report.html").exists():
        outputs["page.txt"], outputs["tables.csv"] = read_page((out / folder / "report.html").read_text(encoding="utf-8"))
    return {name: _fix(text, out) for name, text in outputs.items()}


def _print_costs(folder: Path) -> str:
    """The table of costs, which `compare` and `demo` print below the table of scores."""
    from fedmutual.cli.terminal import out
    from fedmutual.report.terminal import make_cost_table
    from fedmutual.results.comparison import make_comparisons
    from fedmutual.results.frame import find_runs, read_runs

    with out.capture() as capture:
        out.print(make_cost_table(make_comparisons(read_runs(find_runs(folder)))))
    return capture.get()


def _read_runs(folder: Path) -> dict[tuple[str, int], fedmutual.Run]:
    """(Folder of the seeds, seed) -> run, of every finished run below a folder."""
    runs = (fedmutual.Run(path.parent) for path in sorted(folder.rglob("summary.json")) if "trials" not in path.parts)
    return {(run.folder.parent.as_posix(), run.config.seed): run for run in runs}


def _summarise_history(history: pd.DataFrame) -> str:
    """Each score of the last round, the mean over clients and seeds, as CSV."""
    last = history[history["round"] == history.groupby(["method", "seed"])["round"].transform("max")]
    groups = last.groupby(["method", "model", "data", "metric"], sort=True)["value"]
    return groups.agg(["count", "mean"]).to_csv(float_format="%.9g", lineterminator="\n")


def _fix(text: str, out: Path) -> str:
    """Replace what depends on the version, the machine and the last bits of a sum; lines end without blanks."""
    text = text.replace(str(out) + os.sep, "OUT/").replace(str(out), "OUT")
    text = re.sub(rf"fedmutual {re.escape(fedmutual.__version__)}", "fedmutual VERSION", text)
    text = re.sub(r"-?\d+\.\d{10,}(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
