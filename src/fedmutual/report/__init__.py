"""A page, a table and a verdict from run folders. Reads them only; never trains.

The modules are imported when they are first used, so that a run does not wait for matplotlib and pandas.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fedmutual.rundir.recorded_run import find_runs, read_runs

if TYPE_CHECKING:
    from fedmutual.report.adaptation import summarise_adaptation, write_adaptation
    from fedmutual.report.html import write_report
    from fedmutual.report.terminal import list_comparisons, make_cost_table, make_headline_tables
    from fedmutual.report.verdicts import find_answers

__all__ = [
    "find_answers",
    "find_runs",
    "list_comparisons",
    "make_cost_table",
    "make_headline_tables",
    "read_runs",
    "summarise_adaptation",
    "write_adaptation",
    "write_report",
]

_HOMES = {
    "find_answers": "verdicts",
    "list_comparisons": "terminal",
    "make_cost_table": "terminal",
    "make_headline_tables": "terminal",
    "summarise_adaptation": "adaptation",
    "write_adaptation": "adaptation",
    "write_report": "html",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedmutual.report' has no attribute {name!r}")
    return getattr(import_module(f"fedmutual.report.{_HOMES[name]}"), name)
