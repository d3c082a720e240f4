"""The first import of the process that forks workers: its other imports take seconds, and its parent may end meanwhile."""

import os

from fedmutual.parent_process import end_with_parent

end_with_parent(os.getppid())
