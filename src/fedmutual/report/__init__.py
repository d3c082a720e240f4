"""A page, a table and a verdict from run folders. Reads them only; never trains."""

from fedmutual.report.adaptation import adapted, write_adaptation
from fedmutual.report.html import write_report
from fedmutual.report.runs import find_runs, read_runs
from fedmutual.report.terminal import headline
from fedmutual.report.verdicts import verdict

__all__ = ["adapted", "find_runs", "headline", "read_runs", "verdict", "write_adaptation", "write_report"]
