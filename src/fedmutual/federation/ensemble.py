"""The ensemble of a client's personal network and the shared network: a weighted mean of their probabilities.

Near FedAPEN: Qin, Deng, Zhao & Yan, FedAPEN: Personalized Cross-silo Federated Learning with Adaptability to Statistical
Heterogeneity, KDD 2023, https://doi.org/10.1145/3580305.3599344, which learns the weight on training rows in every round.
Here hold-out rows choose each client's weight whenever models are scored; training does not use the ensemble, and nothing
is sent.
"""

import torch
from torch import Tensor, nn

ENSEMBLE = "ensemble"  # what the model is called, beside "personal" and "global"
WEIGHT = "ensemble.weight"  # of a client's memory: the personal network's weight, float64 []
_WEIGHTS = 20  # the weights are 0, 1/20, ..., 1


class Ensemble(nn.Module):
    """w p_personal + (1 - w) p_shared, as log-probabilities [B, C]: their softmax is the mixture.

    Source: near FedAPEN, Qin et al., 2023, https://doi.org/10.1145/3580305.3599344; here w is chosen on hold-out rows.
    """

    def __init__(self, personal: nn.Module, shared: nn.Module, weight: float) -> None:
        """weight: w, of the personal network, 0 to 1."""
        super().__init__()
        self.personal, self.shared, self.weight = personal, shared, weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-probabilities [B, C] for inputs x [B, ...]."""
        return mix_log_probabilities(self.personal(x).log_softmax(1), self.shared(x).log_softmax(1), self.weight)


def mix_log_probabilities(personal: Tensor, shared: Tensor, weight: float) -> Tensor:
    """Return log(w p + (1 - w) q) [B, C] from the log-probabilities log p and log q [B, C]."""
    log_weights = torch.tensor([weight, 1 - weight], dtype=personal.dtype, device=personal.device).log()
    return torch.logaddexp(personal + log_weights[0], shared + log_weights[1])


def choose_weight(personal: Tensor, shared: Tensor, target: Tensor) -> float:
    """Return the personal network's weight in [0, 1], a multiple of 1/20, with the smallest mean negative log-likelihood.

    Of equally good weights, the nearest to 1/2 is returned.

    personal, shared: logits [N, C] on rows that no network was trained on; target: their classes int64 [N].
    """
    p, q = (logits.double().log_softmax(1).gather(1, target[:, None]).squeeze(1) for logits in (personal, shared))
    weights = [k / _WEIGHTS for k in range(_WEIGHTS + 1)]
    losses = {w: -mix_log_probabilities(p[:, None], q[:, None], w).mean().item() for w in weights}
    return min(weights, key=lambda w: (losses[w], abs(w - 0.5), w))
