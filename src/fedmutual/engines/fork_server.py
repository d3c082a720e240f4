"""The first import of the process that forks workers: the later imports take seconds, and the parent process may end."""

import os

from fedmutual.parent_process import end_with_parent

end_with_parent(os.getppid())
