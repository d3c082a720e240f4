"""The return to an earlier state after a round that failed although enough sites answered.

Where most sites diverged, the shared model that the server sent was unusable: the server goes back to an earlier model, and
leaves out for good the sites with outlying updates in the undone rounds. A federation ends after `SETBACKS` such rounds;
otherwise it could begin again without end.
"""

from collections.abc import Collection
from pathlib import Path

from fedmutual.errors import RunError
from fedmutual.rundir.checkpoint import make_file_name, read_checkpoint, remove_checkpoint, write_checkpoint
from fedmutual.rundir.file_names import server_folder
from fedmutual.rundir.schema import Saved
from fedmutual.sites.attempts import Attempts
from fedmutual.sites.conduct import Conduct
from fedmutual.sites.screening import Limits

GENERATIONS = 3  # saved states that the server keeps, the last one too
SETBACKS = 3  # the last one ends the federation


def check_setbacks(conduct: Conduct, folder: Path) -> None:
    """Raise RunError if so many rounds failed that the federation must end."""
    if conduct.setbacks >= SETBACKS:
        raise RunError(
            f"{folder}: {SETBACKS} rounds failed although enough sites answered, as log.txt says; begin a "
            "federation of another name, with a smaller optimizer.lr if training diverged, or with server.aggregate = "
            "'median' if a site's messages may be hostile"
        )


def go_back(folder: Path, diverged: bool, conduct: Conduct, attempts: Attempts, limits: Limits) -> list[str]:
    """Prepare another attempt, and return one sentence for each action. diverged: whether most sites diverged.

    The first time the server goes back by one saved round, later to the oldest that it keeps.

    Raises:
        RunError: no attempt that sites accept is left; or a file is damaged or cannot be written.
    """
    saved = read_checkpoint(folder)
    if not diverged or saved is None:
        conduct.count_setback()
        attempts.raise_number()
        return ["the round is begun again"]
    target = _find_target(folder, saved.round, conduct.setbacks == 0)
    undone = range(target, saved.round)
    suspects = conduct.find_suspects(undone, limits.update)
    out = {
        i: f"its update was unusually large in round {round + 1}, after which most sites diverged"
        for i, round in suspects.items()
    }
    conduct.leave_out(out)
    conduct.count_setback(undone)
    attempts.raise_number()
    _commit(folder, saved, target)
    return [_describe(target, undone), *(f"site {i!r} is left out for good: {why}" for i, why in sorted(out.items()))]


def _find_target(folder: Path, last: int, first_time: bool) -> int:
    """Return the number of finished rounds to go back to; `last` where no earlier state is saved."""
    earlier = range(max(last - GENERATIONS + 1, 0), last)
    saved_rounds = [r for r in earlier if r == 0 or _make_state_path(folder, r).exists()]
    return (max(saved_rounds) if first_time else min(saved_rounds)) if saved_rounds else last


def _commit(folder: Path, saved: Saved, round: int) -> None:
    """Make an earlier state the federation's. Before round 1 nothing is saved, unless the algorithm has a start."""
    if _make_state_path(folder, round).exists():
        write_checkpoint(folder, saved.model_copy(update={"round": round}))
    else:
        remove_checkpoint(folder)


def _make_state_path(folder: Path, round: int) -> Path:
    return server_folder(folder) / make_file_name(round)


def _describe(target: int, undone: Collection[int]) -> str:
    if not undone:
        return "there is no earlier shared model to go back to, and the round is begun again"
    model = f"the shared model after round {target}" if target else "the first shared model"
    return f"the federation goes back to {model}; rounds undone: {len(undone)}"
