"""The first import of the process that forks workers: its other imports take seconds, and its parent may end meanwhile.

A parent that ends before this import is not watched, because `os.getppid` then returns the id of another process. The
process then ends after its imports, when `multiprocessing` finds the pipe to the parent closed.
"""

import os

from fedmutual.parent_process import end_with_parent

end_with_parent(os.getppid())
