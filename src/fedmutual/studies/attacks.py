"""The attacks of an audit: membership inference, and the imprint attack of a dishonest server.

Membership inference scores rows, and measures how well the scores distinguish training rows from held-out rows. The imprint
attack sends a shared model whose first layer's units each react to few rows, and reads these rows out of the meme that comes
back (Fowl et al. 2022, https://arxiv.org/abs/2110.13057).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor, nn

from fedmutual.boundary import Refused
from fedmutual.calling import list_tensors
from fedmutual.core import At, Client, Data, Diverged, Message, Phase
from fedmutual.data.federation import Federation
from fedmutual.data.rows import Rows
from fedmutual.engines.base import participate
from fedmutual.federation.evaluation import ROWS, forward_in_parts
from fedmutual.report.audit import Imprint

Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Pools = Mapping[str, tuple[Rows, int]]
"""Client -> (all its rows for training or evaluation, training rows first; the number of training rows)."""
FEWEST = 4  # rows of each kind that a measurement needs
REACH = 3.0  # standard deviations above the mean at which a unit reacts
CLOSE = 0.03  # of the range of the inputs: a row whose every number is read within it counts as read
_STILL = 1e-6  # a bias that moved less belongs to a unit that no row reached

FirstLayer = tuple[str, str]
"""The names of the first layer's tensors in the state of a network: weight [units, F] and bias [units]."""


def make_pools(federation: Federation) -> Pools:
    """Return the rows of each client; a held-out row that two clients share is in the first client's alone.

    A row that a client of the same store trains on is no held-out row of another client.
    """
    taken: dict[int, set[int]] = {}  # by store
    stores = {i: id(shares.validation.store) for i, shares in federation.clients.items()}
    for i, shares in federation.clients.items():
        taken.setdefault(stores[i], set()).update(shares.private.index.tolist())
    pools = {}
    for i, shares in federation.clients.items():
        seen = taken[stores[i]]
        parts = [rows.index for rows in (shares.validation, shares.holdout) if rows is not None]
        held_out = [row for row in np.unique(np.concatenate(parts)).tolist() if row not in seen]
        seen.update(held_out)
        index = np.concatenate([shares.private.index, np.asarray(held_out, dtype=np.int64)])
        pools[i] = shares.private.with_index(index), len(shares.private)
    return pools


def is_member(pools: Pools) -> Mask:
    """Return whether the run was trained on each row of these pools [N], one pool after the other."""
    return np.concatenate([np.arange(len(rows)) < members for rows, members in pools.values()])


@torch.inference_mode()
def compute_confidence(net: nn.Module, pools: Pools, device: torch.device) -> tuple[Scores, Scores, Scores]:
    """Return how sure a network in eval mode is of the rows of these pools: larger numbers for surer answers.

    The scores, each [N]: minus the cross-entropy of the true class (Yeom et al. 2018, https://arxiv.org/abs/1709.01604); the
    logarithm of the largest probability; the logarithm of the odds of the true class (Carlini et al. 2022,
    https://arxiv.org/abs/2112.03570).
    """
    parts = []
    for rows, _ in pools.values():
        for x, y in rows.to(device).rows(torch.split(torch.arange(len(rows)), ROWS)):
            log_p = forward_in_parts(net, x).double().log_softmax(1)
            true = log_p.gather(1, y[:, None])[:, 0]
            parts.append((true, log_p.amax(1), true - log_p.scatter(1, y[:, None], -torch.inf).logsumexp(1)))
    loss, answers, margin = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return loss, answers, margin


def measure_strength(members: Scores, others: Scores, level: float, rng: np.random.Generator) -> dict[str, float]:
    """Return how well a score distinguishes members from others: `advantage`, `low`, `high`, `auc`, `auc_low`, `auc_high`.

    members [M], others [N]: scores, larger for rows that look like members; at least `FEWEST` of each. level: of each of the
    two intervals, for example 0.95. The advantage is the share of true positives minus the share of false positives: 0 for
    guessing, 1 for a perfect attack. A random half of the rows chooses the threshold, and the other half measures the
    advantage (Yeom et al. 2018, https://arxiv.org/abs/1709.01604). Its interval joins those of Clopper and Pearson (1934)
    for both shares.
    """
    halves = [np.array_split(rng.permutation(scores), 2) for scores in (members, others)]
    threshold = choose_threshold(halves[0][0], halves[1][0])
    counts = [(int((half[1] > threshold).sum()), len(half[1])) for half in halves]
    share = 1 - (1 - level) / 2  # both intervals hold together
    hits, alarms = (stats.binomtest(k, n).proportion_ci(share, method="exact") for k, n in counts)
    advantage = counts[0][0] / counts[0][1] - counts[1][0] / counts[1][1]
    auc, auc_low, auc_high = measure_auc(members, others, level)
    return {
        "advantage": advantage,
        "low": float(hits.low) - float(alarms.high),
        "high": float(hits.high) - float(alarms.low),
        "auc": auc,
        "auc_low": auc_low,
        "auc_high": auc_high,
    }


def choose_threshold(members: Scores, others: Scores) -> float:
    """Return the threshold with the largest difference between the shares of members and of others above it.

    The threshold is one of the scores of `members` [M] and `others` [N], or -inf.
    """
    candidates = np.unique(np.concatenate([[-np.inf], members, others]))
    above = [1 - np.searchsorted(np.sort(s), candidates, side="right") / len(s) for s in (members, others)]
    return float(candidates[int(np.argmax(above[0] - above[1]))])


def measure_auc(members: Scores, others: Scores, level: float) -> tuple[float, float, float]:
    """Return (area under the ROC curve, low, high), all in [0, 1]; 0.5 for guessing.

    members [M], others [N]: scores, at least two of each. level: of the interval, for example 0.95. The variance is that of
    DeLong et al. 1988 (https://doi.org/10.2307/2531595). It is 0 where all members are above all others, or below, or where
    all scores are equal; then the interval is that of Clopper and Pearson (1934) for min(M, N) independent pairs.
    """
    ranks = stats.rankdata(np.concatenate([members, others]))
    placed = (ranks[: len(members)] - stats.rankdata(members)) / len(others)  # the share of others below each member
    passed = 1 - (ranks[len(members) :] - stats.rankdata(others)) / len(members)  # of members above each other row
    auc = float(placed.mean())
    error = float(np.sqrt(placed.var(ddof=1) / len(members) + passed.var(ddof=1) / len(others)))
    if not error:
        pairs = min(len(members), len(others))
        low, high = stats.binomtest(round(auc * pairs), pairs).proportion_ci(level, method="exact")
        return auc, float(low), float(high)
    reach = float(stats.norm.ppf(0.5 + level / 2)) * error
    return auc, max(0.0, auc - reach), min(1.0, auc + reach)


def draw_splits(pools: Pools, number: int, rng: np.random.Generator) -> list[dict[str, npt.NDArray[np.int64]]]:
    """Return, for each shadow run, client -> the sorted positions [members], in the client's pool, of rows to train on.

    The left-out rows are consecutive blocks of one random order. The numbers of times that two rows are left out differ by
    at most one.
    """
    orders = {client: rng.permutation(len(rows)) for client, (rows, _) in pools.items()}
    splits = []
    for k in range(number):
        left_out = {client: len(rows) - members for client, (rows, members) in pools.items()}
        splits.append({i: np.sort(np.roll(orders[i], -k * count)[count:]) for i, count in left_out.items()})
    return splits


def score_against_shadows(observed: Scores, shadows: Scores, trained: Mask) -> Scores:
    """Return the logarithm of the likelihood ratio of each row [n]: that the model was trained on it, to that it was not.

    observed [n]: the confidence of the audited model. shadows [S, n]: of the shadow runs. trained [S, n]: whether the
    shadow run was trained on the row. NaN for rows without shadow runs of both kinds. Normal distributions with one variance
    for all rows, as Carlini et al. 2022 (https://arxiv.org/abs/2112.03570) advise where shadow runs are few.
    """
    terms: list[Any] = []
    for mask in (trained, ~trained):
        counts = mask.sum(0)
        with np.errstate(invalid="ignore"):
            centre = np.where(mask, shadows, 0).sum(0) / counts  # NaN where no shadow run is of this kind
        residuals = np.where(mask, shadows - centre, 0)[:, counts > 1]
        freedom = int((counts[counts > 1] - 1).sum())
        variance = max(float((residuals**2).sum()) / freedom, 1e-12) if freedom else 1.0
        terms.append(-((observed - centre) ** 2) / (2 * variance) - 0.5 * np.log(variance))
    ratio: Scores = terms[0] - terms[1]
    return ratio


def attack_by_imprint(
    client: Client, phase: Phase, at: At, server: Message, net: nn.Module, private: Data, held_out: Data
) -> Imprint:
    """Send a crafted model to a client, read training rows out of the reply, and return the number of these rows.

    The attack is that of Fowl et al. 2022 (https://arxiv.org/abs/2110.13057), with random directions as weights.

    client: is changed. server: the state that the client expects. net: the shared network. private: the client's training
    rows. held_out: rows that nobody trains on, in place of data that the server knows; a match with these is a coincidence.

    Raises:
        AlgorithmError: the user's phase raises an error.
        DataError: a row cannot be read.
    """
    training = _read_rows(private)
    first = _find_first_layer(net, training.shape[1])
    records = coincidences = 0
    skipped = None
    if first is None:
        skipped = "the first layer of the shared network is not a linear layer over the whole input"
    elif not {*first} <= server.keys():
        skipped = "the first layer of the shared network stays with the client"
    else:
        known = _read_rows(held_out)
        crafted = _craft_state(server, net, first, known)
        try:
            reply = participate(client, phase, dict(crafted), phase.leaves(server), at).message
        except Refused:
            skipped = "the privacy boundary refused the answer"
        except Diverged:
            skipped = "the crafted model made the client's training diverge"
        else:
            if {*first} <= reply.keys():
                seen, scale = _read_out(reply, crafted, first), CLOSE * float(known.max() - known.min())
                records, coincidences = (_count_matches(rows, seen, scale) for rows in (training, known))
            else:
                skipped = "the first layer of the shared network does not leave the client"
    return Imprint(client=client.id, rows=len(training), records=records, coincidences=coincidences, skipped=skipped)


def _find_first_layer(net: nn.Module, features: int) -> FirstLayer | None:
    """Return the first layer with parameters; None if it is not a linear layer with bias over a row of so many features."""
    for name, module in net.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        if isinstance(module, nn.Linear) and module.in_features == features and module.bias is not None:
            prefix = f"{name}." if name else ""
            return f"{prefix}weight", f"{prefix}bias"
        return None
    return None


def _craft_state(server: Message, net: nn.Module, first: FirstLayer, known: Tensor) -> Message:
    """Return the server's state with a first layer that reacts to few rows, and later layers that pass the signal on.

    known [n, F]: rows like the client's.
    """
    rng = torch.Generator().manual_seed(5)
    crafted = {k: v.detach().cpu().clone() for k, v in server.items()}
    directions = torch.randn(crafted[first[0]].shape, generator=rng)
    projected = known @ directions.double().T
    crafted |= {first[0]: directions, first[1]: -(projected.mean(0) + REACH * projected.std(0)).float()}
    for name, module in net.named_modules():
        weight, bias = f"{name}.weight", f"{name}.bias"
        if not isinstance(module, nn.Linear) or weight == first[0] or weight not in crafted:
            continue
        outputs, inputs = crafted[weight].shape
        is_square = outputs == inputs
        crafted[weight] = torch.eye(outputs) if is_square else torch.randn(outputs, inputs, generator=rng) * 0.2
        if bias in crafted:
            crafted[bias] = torch.zeros(outputs)
    return crafted


def _read_out(reply: Message, crafted: Message, first: FirstLayer) -> Tensor:
    """Return the row that each unit reconstructs [R, F], float64, for the R units whose bias changed.

    A reconstructed row is the change of the unit's weights divided by the change of the unit's bias.
    """
    weights, biases = (reply[name].detach().cpu().double() for name in first)
    sent_weights, sent_biases = (crafted[name].double() for name in first)
    decay = (weights / sent_weights).flatten().nanmedian()  # weight decay alone moves units that no row reached
    moved_weights, moved_biases = weights - decay * sent_weights, biases - decay * sent_biases
    reacted = moved_biases.abs() > _STILL
    return moved_weights[reacted] / moved_biases[reacted, None]


def _count_matches(rows: Tensor, seen: Tensor, scale: float) -> int:
    """Return how many of the rows [n, F] equal a vector of `seen` [m, F], each number within `scale`.

    A vector counts for the nearest row only.
    """
    matched: set[int] = set()
    for vector in seen:
        errors = (rows - vector).abs().amax(1)
        if float(errors.min()) < scale:
            matched.add(int(errors.argmin()))
    return len(matched)


def _read_rows(rows: Data) -> Tensor:
    """Return all rows without augmentation [n, F], float64 on the CPU."""
    batches = (list_tensors(batch[0]) for batch in rows.rows(torch.split(torch.arange(len(rows)), 1024)))
    return torch.cat([torch.cat([x.reshape(len(x), -1) for x in one], 1) for one in batches]).double().cpu()
