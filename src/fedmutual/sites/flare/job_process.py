"""The main module of a job's process: `python -m fedmutual.sites.flare.job_process PARENT MODULE ARGUMENTS`.

PARENT is the id of the parent process. The job's process ends with the parent process, and runs MODULE of FLARE as the main
module. FLARE's check of the parent does not end a job in the middle of its work, or one whose reports to the parent fail.
"""

import runpy
import sys

from fedmutual.parent_process import end_with_parent

if __name__ == "__main__":
    _, parent, *sys.argv = sys.argv
    end_with_parent(int(parent))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
