"""Tasks by name: the targets, losses and scores of a client."""

from collections.abc import Callable
from difflib import get_close_matches

from fedmutual.core import Task
from fedmutual.errors import ConfigError
from fedmutual.losses import Classification, MultiLabel, Regression, Segmentation
from fedmutual.user_code import plugins

TASKS: dict[str, Callable[[], Task]] = {
    "classification": Classification,
    "regression": Regression,
    "multilabel": MultiLabel,
    "segmentation": Segmentation,
}
_MEMBERS = ("fit", "mutual", "score", "tells", "outputs")


def make_task(name: str, key: str = "training.task") -> Task:
    """Return the task of this name, or the user's "module:Task", a class that is called without arguments.

    key: the configuration key that names the task, for messages.

    Raises:
        ConfigError: the task does not exist, cannot be imported or made, or lacks a member that `fedmutual.core.Task`
            requires.
    """
    if name in TASKS:
        return TASKS[name]()
    if ":" not in name:
        near = get_close_matches(name, TASKS, 1)
        fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(TASKS)}, and your own as 'module:Task'"
        raise ConfigError(f"key {key!r}: there is no task {name!r}; {fix}")
    kind = plugins.load(name, key)
    try:
        task: Task = kind()
    except Exception as problem:  # a user's class may fail in any way
        raise ConfigError(f"key {key!r}: {name!r} cannot be made: {type(problem).__name__}: {problem}") from None
    lacking = [member for member in _MEMBERS if not hasattr(task, member)]
    if lacking:
        raise ConfigError(f"key {key!r}: {name!r} is no task, because it lacks {lacking[0]!r}; see fedmutual.core.Task")
    return task
