"""The program `fedmutual`, also as `python -m fedmutual`."""

import atexit
import os
import sys


def run() -> None:
    """Run the command line in this process and end the process without the interpreter's teardown.

    The teardown of torch's modules takes up to 1.5 s of a core's time and frees what the operating system frees anyway.
    Exit handlers of other modules still run, and threads that are not daemons are waited for.
    """
    codes: list[int] = []
    atexit.register(_end, os.getpid(), codes)  # before other modules register handlers: the first is called last
    from fedmutual.cli import main

    try:
        main()
        codes.append(0)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            codes.append(end.code or 0)
        raise


def _end(process: int, codes: list[int]) -> None:
    """End the process with its exit code; without one, as after a traceback, the interpreter ends as usual.

    process: the id of the process that registered this; a fork of it ends as usual.
    """
    if not codes or os.getpid() != process:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as without a console on Windows
                stream.flush()
    except (OSError, ValueError):  # a closed pipe: the interpreter has an exit code for it
        return
    os._exit(codes[0])


if __name__ == "__main__":
    run()
