"""The main module of a job's process: `python -m fedmutual.sites.flare.job_process PARENT MODULE ARGUMENTS`.

PARENT is the id of the parent process. The process watches the parent process, and runs MODULE of FLARE as the main module.
FLARE's own watch does not end a job that is at work, or whose report to the parent process fails again and again.
"""

import runpy
import sys

from fedmutual.parent_process import end_with_parent

if __name__ == "__main__":
    _, parent, *sys.argv = sys.argv
    end_with_parent(int(parent))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
