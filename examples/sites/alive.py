"""Exit with 0 while a site or a server works with a state folder: `alive.py FOLDER`, for the checks of containers."""

import fcntl
import sys

with open(f"{sys.argv[1]}/.lock", "rb") as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(0)
sys.exit("no process works with this state folder")
