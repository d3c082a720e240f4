"""A client's phase in two parts: one worker takes the first steps, another worker takes the rest, with the same bits."""

from typing import NamedTuple

import torch

from fedmutual.core import At, Client, Message, Phase, Spec
from fedmutual.cpu import compute_on_cpu
from fedmutual.engines.base import Reply, participate, release_reply
from fedmutual.engines.user_errors import raise_user_errors
from fedmutual.rundir.checkpoint import collect_client_state, restore_client
from fedmutual.stepping import Progress, steps, with_client_settings, work


class Handover(NamedTuple):
    """All that another worker needs to continue a client's phase: the client's state, and the progress of the phase."""

    state: Message  # of the client
    progress: Progress


@compute_on_cpu()
def begin_phase(
    client: Client, phase: Phase, inbox: Message, declared: Spec, at: At, share: float = 1.0
) -> Handover | Reply:
    """Take the first steps of a phase, about this share of them, and return what another worker needs for the rest.

    Return the reply if the share is 1, or if the phase cannot be handed over. share: in (0, 1].

    Raises:
        Diverged, Refused, AlgorithmError: as `participate`.
    """
    count = with_client_settings(phase, client).count_steps(client)
    if share == 1.0 or count is None or not _can_hand_over(client):
        return participate(client, phase, inbox, declared, at)
    with raise_user_errors(phase, client.id):
        stepping = steps(phase, client, inbox, at)
        for _ in range(max(1, round(share * count))):
            try:
                progress = next(stepping)
            except StopIteration as end:
                message, train = end.value
                return release_reply(client, phase, message, train, inbox, declared)
        stepping.close()
        progress.stream = torch.get_rng_state()
        return Handover(collect_client_state(client, in_phase=True), progress)


@compute_on_cpu()
def end_phase(client: Client, phase: Phase, inbox: Message, declared: Spec, at: At, handover: Handover) -> Reply:
    """Take the other steps of a phase that another worker began; return the reply.

    Raises:
        Diverged, Refused, AlgorithmError: as `participate`.
    """
    with raise_user_errors(phase, client.id):
        restore_client(client, handover.state)
        message, train = work(phase, client, inbox, at, handover.progress)
        return release_reply(client, phase, message, train, inbox, declared)


def _can_hand_over(client: Client) -> bool:
    """Return whether another process can continue with this client: no noise is drawn for privacy, and dropout is drawn on
    the CPU."""
    return client.privacy is None and all(p.device.type == "cpu" for net in client.nets.values() for p in net.parameters())
