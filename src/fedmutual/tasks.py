"""Tasks by name: the targets, losses and scores of a client."""

import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fedmutual.calling import has_gradient
from fedmutual.core import Task, format_tensor, get_target_kind
from fedmutual.errors import AlgorithmError, ConfigError, format_error, format_line, suggest_name
from fedmutual.losses import BuiltIn, Classification, Cox, MultiLabel, Ordinal, Regression, Segmentation, Survival
from fedmutual.metric import KINDS
from fedmutual.user_code import plugins

TASKS: dict[str, Callable[[], BuiltIn]] = {
    "classification": Classification,
    "regression": Regression,
    "multilabel": MultiLabel,
    "segmentation": Segmentation,
    "ordinal": Ordinal,
    "survival": Survival,
    "cox": Cox,
}
_MEMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {  # of a user's task: what each must be
    **dict.fromkeys(("fit", "mutual", "score"), ("a method", callable)),
    "tells": ("a tuple of the names of its scores", lambda v: isinstance(v, Collection) and not isinstance(v, str)),
    "outputs": ("the number of outputs, or None", lambda v: v is None or type(v) is int),
}


def make_task(name: str, key: str = "training.task", outputs: Sequence[str] = ()) -> Task:
    """Return the task of this name, or the user's "module:Task", a class that is called without arguments.

    key: the configuration key that names the task, for messages. outputs: the names of the outputs, if the data are known.

    Raises:
        ConfigError: the task does not exist, cannot be imported or made, or lacks a member that `fedmutual.core.Task`
            requires, or has a member of another kind.
    """
    if name in TASKS:
        built_in: Any = TASKS[name]()
        named: Task = built_in.with_outputs(outputs) if outputs else built_in
        return named
    if ":" not in name:
        fix = suggest_name(name, TASKS, f"there are {', '.join(TASKS)}, and your own as 'module:Task'")
        raise ConfigError(f"key {key!r}: there is no task {name!r}; {fix}")
    kind = plugins.load(name, key)
    try:
        task: Task = kind()
    except Exception as problem:  # a user's class may fail in any way
        raise ConfigError(f"key {key!r}: {name!r} cannot be made: {type(problem).__name__}: {problem}") from None
    for member, (wanted, is_wanted) in _MEMBERS.items():
        if not hasattr(task, member):
            raise ConfigError(f"key {key!r}: {name!r} is no task, because it lacks {member!r}; see fedmutual.core.Task")
        if not is_wanted(getattr(task, member)):
            raise ConfigError(f"key {key!r}: {member!r} of the task {name!r} must be {wanted}")
    return UserTask(task)


def compute_answers(task: Task, outputs: Tensor) -> Tensor:
    """Return what a network says to users by its outputs [B, C, ...], of the same shape, as float64.

    The member `answer` of a task; without the member, probabilities of classes or labels, or numbers.
    """
    if hasattr(task, "answer"):
        answers: Tensor = task.answer(outputs.double())
        return answers
    value, outputs = KINDS[get_target_kind(task)].value, outputs.double()
    if value == "number":
        return outputs
    return outputs.sigmoid() if value == "label" else outputs.softmax(1)


def try_losses(task: Task, outputs: Tensor, targets: Tensor) -> None:
    """Compute the losses of the user's own task once, for outputs [B, ...] with a gradient and targets [B, ...] of its data.

    Raises:
        AlgorithmError: a loss cannot be used, or torch warns of outputs and targets of different shapes.
    """
    if isinstance(task, UserTask):
        half = torch.tensor(0.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")
            task.fit(outputs, targets)
            task.mutual(outputs, outputs.clone(), targets, half, half, 1.0)


class UserTask:
    """A task that the user wrote. An error in a method or a wrong result is one sentence with the class."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __getattr__(self, member: str) -> Any:
        """Return a member that this class does not define, such as `outputs` and `tells`, from the task."""
        if member == "task":  # while the object is unpickled
            raise AttributeError(member)
        return getattr(self.task, member)

    def __repr__(self) -> str:
        return repr(self.task)

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return `fit` of the task. Raises AlgorithmError if the result is no loss."""
        loss = self._call("fit", output, target)
        self._check_losses("fit", (loss,), (output,))
        return loss  # type: ignore[no-any-return]

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return `mutual` of the task. Raises AlgorithmError if the result is not two losses."""
        losses = self._call("mutual", personal, meme, target, alpha, beta, temperature)
        if not isinstance(losses, tuple | list) or len(losses) != 2:
            self._refuse("mutual", losses, "two losses, of the personal network and of the meme")
        self._check_losses("mutual", losses, (personal, meme))
        return losses[0], losses[1]

    def score(self, output: Tensor, target: Tensor) -> Mapping[str, Any]:
        """Return `score` of the task. Raises AlgorithmError if the result is not name -> number."""
        values = self._call("score", output, target)
        if not isinstance(values, Mapping):
            self._refuse("score", values, "a dictionary, name -> number")
        for name, value in values.items():
            if not all(v is None or type(v) in (int, float) for v in (value if isinstance(value, list) else [value])):
                self._refuse("score", value, "a number, None, or a list with a number for each class", f" for {name!r}")
        return values

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.task, method)(*arguments)
        except Exception as problem:  # a user's code may fail in any way
            line = format_line(problem, type(self.task).__module__)
            trace = "".join(traceback.format_exception(problem))
            raise AlgorithmError(f"{self._describe(method)} raised {format_error(problem)}{line}", trace) from problem

    def _check_losses(self, method: str, losses: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """Raise AlgorithmError unless the losses are real numbers [], at least one of which has a gradient."""
        for loss in losses:
            if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
                self._refuse(method, loss, "a loss as a tensor [] of floating point, a mean over the batch")
        if any(map(has_gradient, outputs)) and not any(map(has_gradient, losses)):
            self._refuse(method, losses[0], "a loss that is computed from the outputs", " without a gradient")

    def _refuse(self, method: str, value: object, wanted: str, about: str = "") -> NoReturn:
        kind = f"a tensor ({format_tensor(value)})" if isinstance(value, Tensor) else type(value).__name__
        raise AlgorithmError(f"{self._describe(method)} returned {kind}{about}; return {wanted}")

    def _describe(self, method: str) -> str:
        kind = type(self.task)
        return f"{method} of your task {kind.__module__}:{kind.__qualname__}"
