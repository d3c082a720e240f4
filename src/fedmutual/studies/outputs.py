"""From the outputs of a network to answers, by the kind of targets that the network learned."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedmutual.metric import TargetKind


@dataclass(frozen=True)
class AnswerForm:
    """How a network's outputs become answers, for one kind of targets. `description` says what an answer is, for users."""

    name: str  # of the output of an exported program
    description: str
    compute: Callable[[Tensor], Tensor]  # a network's outputs -> answers of the same shape, float64


_DISTRIBUTION = AnswerForm("probabilities", "the probability of each class", lambda outputs: outputs.double().softmax(1))

ANSWER_FORMS: dict[TargetKind, AnswerForm] = {
    "classes": _DISTRIBUTION,
    "numbers": AnswerForm("numbers", "the predicted number, in the unit of the targets", lambda outputs: outputs.double()),
    "labels": AnswerForm("probabilities", "the probability of each label", lambda outputs: outputs.double().sigmoid()),
    "masks": _DISTRIBUTION,
}
"""Classes [B, C], numbers [B, outputs], labels [B, L], and of each pixel the classes [B, C, H, W]."""
