"""What the answer of a site may disclose: no word depends on private rows, except as the algorithm declares.

The server chooses the inbox of an order. If a site reported that its boundary refused the reply, that its training diverged
or that its network raised an error, the server could choose an inbox for which the report depends on one row. So the answer
of a failed phase has the form of every answer, and a private value in a reply is a warning to the operator alone. A private
value is an error only where no other party chose the inbox: at the start of the site, in `check_first_replies`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fedmutual.algorithms.fedavg import N_K
from fedmutual.boundary import Refused, release
from fedmutual.core import At, Client, Disagreed, Message, Phase, Spec, Unusable
from fedmutual.engines.base import Reply, participate
from fedmutual.engines.loop import receive_usable
from fedmutual.errors import AlgorithmError, RunError, UserError, format_error
from fedmutual.federation.experiment import Experiment
from fedmutual.files import is_disk_full
from fedmutual.losses import find_known
from fedmutual.privacy.budget import BudgetExceeded
from fedmutual.scores import LEAST_ROWS, is_disclosed
from fedmutual.stepping import run_one_step

DISK_FULL = "it is paused, because its disk is full"
_FAILED = "it could not do its part; its operator reads why"
Say = Callable[[str], None]


def may_depend_on_rows(problem: Exception) -> bool:
    """Return whether the occurrence of an error may depend on private rows.

    Errors of files, of the budget and of public rows do not depend on them. Any other error may, for example an error of a
    site's own network.
    """
    return isinstance(problem, AlgorithmError) or not isinstance(problem, UserError | OSError | Disagreed | Unusable)


def describe_failure(problem: Exception) -> str:
    """Return the sentence about an error for the operator."""
    is_explained = isinstance(problem, UserError) or type(problem).__module__.partition(".")[0] == "fedmutual"
    return str(problem) if is_explained else format_error(problem)


def describe_failure_outside(problem: Exception) -> str:
    """Return the sentence about an error that may leave the site: without data, paths and contents of the site's files."""
    if isinstance(problem, Disagreed):
        return problem.what
    if is_disk_full(problem):
        return DISK_FULL
    return "its privacy budget is spent" if isinstance(problem, BudgetExceeded) else _FAILED


def answer_phase(
    make_client: Callable[[], Client],
    phase: Phase,
    inbox: Message,
    declared: Spec,
    at: At,
    is_hidden: bool,
    say: Say,
) -> tuple[Client, Reply]:
    """Run a phase, and return (the client to save, the reply).

    If the phase fails, the client is as before the phase, and the reply has the form of every reply. With masks or noise
    the tensors return as the site received them, so the update is zero. Otherwise each number is NaN: the server does not
    use the reply.

    make_client: returns the client before the phase, at each call. is_hidden: whether masks or noise cover the reply. say:
    gets the lines for the operator. Raises Exception where an error that does not depend on private rows
    (`may_depend_on_rows`).
    """

    def warn(problem: Refused) -> None:
        say(
            f"WARNING: {problem}; it was sent, because a refusal would confirm a value that the server guessed; if nobody "
            "guessed it, the algorithm has an error: stop this site"
        )

    client = make_client()
    try:
        reply = participate(client, phase, inbox, declared, at, warn)
        if all(torch.isfinite(t).all() for t in reply.message.values()):
            return client, reply
        why = "its reply holds numbers that are not finite"
    except Exception as problem:
        if not may_depend_on_rows(problem):
            raise
        why = describe_failure(problem)
    client = make_client()
    message = _make_untrained_reply(declared, inbox, len(client.data["private"]))
    if not is_hidden:
        message = {k: torch.full_like(t, torch.nan) if t.is_floating_point() else t for k, t in message.items()}
    sent = "without training" if is_hidden else "of numbers that are not finite"
    say(f"{why}; the phase is undone, and a reply {sent} is sent: only this site knows why")
    return client, Reply(message, {})


def _make_untrained_reply(declared: Spec, inbox: Message, rows: int) -> Message:
    """Return a reply that no private value has an effect on: the tensors of the inbox, n_k, and zeros."""
    returned = {k: v for k, v in inbox.items() if declared.get(k) == (v.dtype, tuple(v.shape))}
    zeros = {k: torch.zeros(shape, dtype=dtype) for k, (dtype, shape) in declared.items() if k not in returned}
    return zeros | returned | ({N_K: torch.tensor(rows)} if N_K in declared else {})


def check_first_replies(experiment: Experiment, site: str, sites: Sequence[str], source: Path) -> None:
    """Run each phase of the start and of the first round for one step, and check its reply. Nothing is sent or saved.

    The models are the site's own, so an error discloses nothing to other parties. The server's part of a phase gets the
    reply of this site alone; if it needs more replies, later phases are not checked.

    source: the site's file, for the error. Raises RunError where a reply holds a private row or a private tensor, or a phase
    raised an error.
    """
    algorithm, config = experiment.algorithm, experiment.config
    client, state = experiment.build_client(site), experiment.make_server_state(sites)
    for round, phases in ((-1, algorithm.start), (0, algorithm.phases)):
        for number, phase in enumerate(phases):
            at, declared = At(config.seed, round, config.rounds, number), phase.leaves(state)
            try:
                inbox = phase.send(state, site, at)
                reply = release(run_one_step(phase, client, inbox, at), declared, client, inbox)
            except Exception as problem:
                raise RunError(
                    f"{source}: the site does not take part, because a trial of the algorithm failed: "
                    f"{describe_failure(problem)}"
                ) from problem
            try:
                state = receive_usable(phase, state, {site: reply} if reply else {}, at, lambda sender, why: None)
            except Exception:  # of any type: the algorithm may be the user's own
                return


def describe_disclosure(experiment: Experiment, site: str, trains_alone: bool) -> str:
    """Return sentences on what a site tells of its rows besides messages: by `share.metrics`, and by early stopping.

    trains_alone: whether the site also trains its personal network alone (`sites.baseline`).
    """
    text = _describe_metrics(experiment, site)
    if trains_alone:
        text += " The site also trains its personal network alone (sites.baseline); of it nothing else is sent."
    if experiment.make_recipe(site).patience is not None:
        text += " The round in which it stops by its validation rows (training.patience) can be seen in its messages."
    return text


def _describe_metrics(experiment: Experiment, site: str) -> str:
    metrics = experiment.config.disclosure(site)
    if metrics == "all":
        return "All its losses and scores are sent: from these, the operator of the server can compute validation examples."
    if metrics == "none" or "accuracy" not in experiment.make_task(site).tells:
        return "Its losses and scores are not sent."
    rows = experiment.load_rows(site)
    counts = dict.fromkeys((spec.rows for spec in experiment.list_evaluations(site)), 0)  # kind of rows -> with a label
    for kind in counts:
        for _, y in rows[kind].rows(torch.split(torch.arange(len(rows[kind])), 1024)):  # images may be many
            counts[kind] += int(find_known(y).sum())
    sent = [kind for kind, count in counts.items() if is_disclosed(metrics, count)]
    if not sent:
        return f"Its losses and scores are not sent: it has fewer than {LEAST_ROWS} {' or '.join(counts)} rows with a label."
    return f"Accuracies to 1 %, of its {' and '.join(sent)} rows, are sent once a round; other scores and losses are not."
