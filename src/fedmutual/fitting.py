"""Tasks with another loss on targets: weights of classes, label smoothing, the focal loss, or a loss of the user's own."""

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmutual.calling import has_gradient, is_transformed
from fedmutual.core import Data, Task, get_target_kind
from fedmutual.errors import AlgorithmError, ConfigError, format_error, format_line
from fedmutual.losses import BuiltIn, average_known, find_known
from fedmutual.user_code import plugins

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output [B, ...], target [B, ...]) -> the loss [], a mean over the batch."""

BALANCED = "balanced"
KEYS = ("class_weights", "label_smoothing", "focal", "loss")  # of [training]


@dataclass(frozen=True)
class Fitted:
    """A task whose `fit` is another loss; `mutual` has that loss in place of the task's own, with the same weight.

    Each row counts alike, also with `class_weights`: the loss is the mean over rows (of masks over pixels) of w_y times the
    row's loss, so that it is the mean of the losses of single rows, as differential privacy needs. Rows without a label
    (class -1, NaN) count as 0.

    Focal loss: Lin et al., 2017, https://arxiv.org/abs/1708.02002, eq. 4. Label smoothing: Szegedy et al., 2016,
    https://arxiv.org/abs/1512.00567, section 7.
    """

    task: Task
    class_weights: tuple[float, ...] | None = None  # of each class; of several labels: of the presence of each
    label_smoothing: float = 0.0  # s: the target is 1 - s, and s is spread over all classes
    focal: float = 0.0  # gamma: the loss of a row is multiplied by (1 - p_y)^gamma
    loss: str | None = None  # "module:loss", in place of the loss of the task
    call: Loss | None = field(default=None, repr=False, compare=False)  # what `loss` names

    def __getattr__(self, member: str) -> Any:
        """Return a member that this class does not define, such as `outputs`, `tells` and `score`, from the task."""
        if member == "task":  # while the object is unpickled
            raise AttributeError(member)
        return getattr(self.task, member)

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss [] over the batch. Raises AlgorithmError if the user's own loss fails or returns no loss."""
        if self.call is not None:
            return _call_loss(self.call, str(self.loss), output, target)
        is_label = get_target_kind(self.task) == "labels"
        return (self._fit_labels if is_label else self._fit_classes)(output, target)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return `mutual` of the task, with `fit` in place of its loss on targets: that is its alpha and beta part."""
        if isinstance(self.task, BuiltIn):  # without alpha, only the divergence is left
            of_personal, of_meme = self.task.mutual(personal, meme, target, alpha * 0, beta * 0, temperature)
            return (
                alpha * self.fit(personal, target) + (1 - alpha) * of_personal,
                beta * self.fit(meme, target) + (1 - beta) * of_meme,
            )
        of_personal, of_meme = self.task.mutual(personal, meme, target, alpha, beta, temperature)
        return (
            of_personal + alpha * (self.fit(personal, target) - self.task.fit(personal, target)),
            of_meme + beta * (self.fit(meme, target) - self.task.fit(meme, target)),
        )

    def _fit_classes(self, output: Tensor, target: Tensor) -> Tensor:
        y = target.clamp(min=0)
        losses = F.cross_entropy(output, y, reduction="none", label_smoothing=self.label_smoothing)
        if self.focal:
            losses = losses * (-(-F.cross_entropy(output, y, reduction="none")).expm1()).clamp(min=0) ** self.focal
        if self.class_weights is not None:
            losses = losses * torch.tensor(self.class_weights, dtype=losses.dtype, device=losses.device)[y]
        return average_known(losses, find_known(target))

    def _fit_labels(self, output: Tensor, target: Tensor) -> Tensor:
        y = target.nan_to_num()
        smooth = y * (1 - self.label_smoothing) + self.label_smoothing / 2
        weights = self.class_weights
        presence = None if weights is None else torch.tensor(weights, dtype=output.dtype, device=output.device)
        losses = F.binary_cross_entropy_with_logits(output, smooth, reduction="none", pos_weight=presence)
        if self.focal:
            p = output.sigmoid()
            losses = losses * (y + p - 2 * y * p) ** self.focal  # 1 - p of what is true
        return average_known(losses, find_known(target))


def _call_loss(loss: Loss, name: str, output: Tensor, target: Tensor) -> Tensor:
    try:
        value = loss(output, target)
    except Exception as problem:  # a user's code may fail in any way
        line = format_line(problem, type(loss).__module__)
        trace = "".join(traceback.format_exception(problem))
        raise AlgorithmError(f"key 'training.loss': {name!r} raised {format_error(problem)}{line}", trace) from problem
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        kind = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise AlgorithmError(f"key 'training.loss': {name!r} returned {kind}; return a tensor [], a mean over the batch")
    if has_gradient(output) and not has_gradient(value) and (is_transformed(output) or value != 0):  # 0: skips this batch
        fix = "compute it from the outputs, without .item(), argmax or numpy"
        raise AlgorithmError(f"key 'training.loss': {name!r} returned a tensor without a gradient; {fix}")
    return value


def load_loss(name: str) -> Loss:
    """Return the user's loss "module:loss": a function, or an instance of a class, which is called without arguments.

    Raises:
        ConfigError: the loss cannot be imported or made, or cannot be called.
    """
    if ":" not in name:
        raise ConfigError(
            f"key 'training.loss': {name!r} names no code; write 'module:loss', as 'torch.nn:CrossEntropyLoss'"
        )
    loss = plugins.load(name, "training.loss")
    try:
        loss = loss() if inspect.isclass(loss) else loss
    except Exception as problem:  # a user's class may fail in any way
        raise ConfigError(f"key 'training.loss': {name!r} cannot be made: {format_error(problem)}") from None
    if not callable(loss):
        raise ConfigError(f"key 'training.loss': {name!r} is {type(loss).__name__}; name a function of (output, target)")
    return loss  # type: ignore[no-any-return]


def count_weights(rows: Data, outputs: int, of_labels: bool) -> tuple[float, ...]:
    """Return the weight of each class that makes all classes of these rows count alike; their mean over the rows is 1.

    A class without rows has the weight 0. of_labels: of several labels, absent / present rows of each label.
    """
    targets = torch.cat([batch[1].cpu() for batch in rows.rows(torch.split(torch.arange(len(rows)), 512))])
    if of_labels:
        present, absent = (targets == 1).sum(0), (targets == 0).sum(0)
        return tuple((absent / present.clamp(min=1)).tolist())
    counts = torch.bincount(targets[targets >= 0].flatten(), minlength=outputs).double()
    return tuple((counts.sum() / (counts.count_nonzero() * counts.clamp(min=1)) * (counts > 0)).tolist())
