"""End this process when its parent process has ended, for whatever reason: SIGKILL, a crash, a closed terminal.

Each process that fedmutual starts calls `end_with_parent` before any other work, and so does each actor of Ray.
Linux could send a signal instead (PR_SET_PDEATHSIG), but sends the signal as soon as the thread that started the process
ends, and NVIDIA FLARE starts jobs in threads of its own.

`python -m fedmutual.parent_process PARENT MODULE ARGUMENTS` runs MODULE as the main module of such a process.
"""

import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time

_INTERVAL = 0.5  # seconds between two looks at the parent process


def end_with_parent(parent: int | None = None) -> None:
    """Start a thread that ends this process when the parent process has ended, even in the middle of its work.

    parent: the id of the parent process, which may have ended before this call; None: this process was started by
    `multiprocessing`, which knows the parent process.
    """
    threading.Thread(target=_wait_and_end, args=(parent,), daemon=True, name="parent process").start()


def _wait_and_end(parent: int | None) -> None:
    if parent is not None:
        while _is_parent(parent):
            time.sleep(_INTERVAL)
    else:
        starter = multiprocessing.parent_process()
        if starter is None:
            return  # this is the main process
        starter.join()
    if (
        hasattr(os, "killpg") and os.getpgrp() == os.getpid()
    ):  # a job leads its group: end all processes that the job started, too
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _is_parent(process: int) -> bool:
    """Return whether a process is the parent of this process and has not ended."""
    if sys.platform == "win32":  # where `getppid` is still the id of a process that has ended
        is_alive: bool = importlib.import_module("psutil").pid_exists(process)  # comes with FLARE
        return is_alive
    return os.getppid() == process


if __name__ == "__main__":
    _, process_id, *sys.argv = sys.argv
    end_with_parent(int(process_id))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
