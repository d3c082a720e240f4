"""Save the state of a run: a file of the server, a file of each client, and `checkpoint.json`, which names the saved round.

The files of a new round, `server/round-7.safetensors` and `clients/<id>/round-7.safetensors`, are written beside the files
of the last saved round. Replacing `checkpoint.json` then makes the new files the state of the run, and the older files
are removed. If the process is killed at any moment, all files of the round in `checkpoint.json` are complete.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmutual.algorithms.peers import get_members
from fedmutual.core import Client, Message
from fedmutual.errors import RunError
from fedmutual.events import Event, RoundDone, Started
from fedmutual.files import OTHER_FOLDER
from fedmutual.optimizers import COMMON
from fedmutual.rundir import best
from fedmutual.rundir.file_names import (
    CHECKPOINT,
    LEDGER,
    METRICS,
    PRETRAINED,
    client_folder,
    list_client_folders,
    server_folder,
)
from fedmutual.rundir.record_files import is_scored_on_resume, read_record, rewind, sync_logs, write_record
from fedmutual.rundir.schema import Saved
from fedmutual.stepping import laid_as
from fedmutual.tensor_files import read_tensors, write_tensors

_NUMBER = " number"  # ends the name of a plain number in an optimiser's state


class Checkpoints:
    """Observer: saves the state every `every` rounds, and after the last round."""

    def __init__(
        self,
        folder: Path,
        every: int,
        run: str,
        seconds: float = 0.0,
        keep: best.BestRule | None = None,
        generations: int = 1,
    ) -> None:
        """seconds: spent on the run before. generations: how many saved states are kept, including the last one."""
        self._folder, self._every, self._run, self._keep, self._generations = folder, every, run, keep, generations
        self._clients: tuple[str, ...] = ()
        self._spent, self._since = seconds, time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds spent on the run, without the time between stop and resume."""
        return self._spent + time.monotonic() - self._since

    def __call__(self, event: Event) -> None:
        """Save the state if the round is due.

        Raises:
            RunError: a file is damaged or cannot be written.
            WorkerLost: a worker with clients died.
        """
        if isinstance(event, Started):
            self._clients = event.clients
        elif isinstance(event, RoundDone) and (event.round % self._every == 0 or event.round == event.rounds):
            self._save(event)

    def _save(self, event: RoundDone) -> None:
        name, about = make_file_name(event.round), {"format": "1", "run": self._run, "round": str(event.round)}
        write_tensors(server_folder(self._folder) / name, event.server, about)
        places = {i: (client_folder(self._folder, i) / name, about) for i in self._clients}
        for _ in event.visit(save_client, places, reads=True) if event.visit is not None else ():
            pass  # a real site saves its state itself
        sync_logs(self._folder)
        write_checkpoint(self._folder, Saved(run=self._run, round=event.round, seconds=round(self.seconds, 3)))
        remove_other_states(self._folder, event.round, self._generations)
        if self._keep is not None:
            best.settle_best_files(self._folder, event.round, event.rounds, self._keep.every)


def remove_other_states(folder: Path, round: int | None, generations: int = 1) -> None:
    """Remove the state files of rounds other than the saved round, and part files.

    generations: how many states are kept, up to the saved round.
    """
    kept_files = set() if round is None else {make_file_name(r) for r in range(round - generations + 1, round + 1)}
    for state_folder in (folder, server_folder(folder), folder / PRETRAINED, *list_client_folders(folder)):
        for file in (*state_folder.glob("round-*.safetensors"), *state_folder.glob(".*.part")):
            if file.name not in kept_files:
                file.unlink(missing_ok=True)


def make_file_name(round: int) -> str:
    """Return the name of the state files of a round."""
    return f"round-{round}.safetensors"


def save_client(client: Client, path: Path, about: Mapping[str, str]) -> None:
    """Write the state of a client: personal net, the tensors of the meme that are not shared, optimisers, and memory.

    Raises:
        RunError: the file cannot be written.
    """
    write_tensors(path, collect_client_state(client), about)


def load_client(client: Client, path: Path, run: str, round: int) -> None:
    """Restore the state of a client from a file.

    Raises:
        RunError: the file is missing or damaged, lacks the number of noised steps, or belongs to another run, round, network
            or optimiser. Nothing was restored.
    """
    state = read_state(path, run, round)
    beside = ("optimizer.", "memory.", "recipe.", "privacy.")  # all other tensors are of networks
    wanted = {k: v for k, v in collect_client_state(client).items() if not k.startswith(beside)}
    net_tensors = {k: v for k, v in state.items() if not k.startswith(beside)}
    shapes = [{k: v.shape for k, v in tensors.items()} for tensors in (wanted, net_tensors)]
    if shapes[0] != shapes[1]:
        raise RunError(f"{path}: holds another network than client {client.id!r} has by the configuration")
    if not _has_fitting_optimizers(client, state):
        raise RunError(
            f"{path}: holds an optimiser state that does not fit the networks of client {client.id!r}; restore the file, or "
            "start a new run in another folder"
        )
    if client.privacy is not None and not _is_count(state.get("privacy.steps")):
        raise RunError(
            f"{path}: has no valid number of noised steps of client {client.id!r}, so epsilon is unknown; restore the "
            "file, or start a new run in another folder"
        )
    restore_client(client, state)


def _is_count(tensor: Tensor | None) -> bool:
    """Return whether a tensor is a whole number of at least 0."""
    return tensor is not None and tensor.dtype == torch.int64 and tensor.shape == () and tensor.item() >= 0


def _has_fitting_optimizers(client: Client, state: Message) -> bool:
    """Return whether each optimiser state has the shapes of the optimiser's parameters, and equal slots for all of them."""
    for net, optimizer in client.optimizers.items():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        shapes = {str(number): p.shape for number, p in enumerate(params)}
        actual = {tuple(k.split(".", 1)): v.shape for k, v in _select_under(state, f"optimizer.{net}.").items()}
        numbers, names = ({key[part] for key in actual} for part in (0, -1))
        if type(optimizer) not in COMMON:  # of any shapes and slots
            if not numbers <= shapes.keys():
                return False
        elif actual != {(i, name): () if name == "step" else shapes.get(i) for i in numbers for name in names}:
            return False
    return True


def restore_client(client: Client, state: Message) -> None:
    """Restore the state of a client from the tensors of `collect_client_state`."""
    with torch.no_grad():
        for name, net in client.nets.items():
            net.load_state_dict(net.state_dict() | _select_under(state, f"{name}."))
    for name, optimizer in client.optimizers.items():
        slots: dict[int, dict[str, Any]] = {}
        for key, value in _select_under(state, f"optimizer.{name}.").items():
            slot, _, what = key.partition(".")
            slots.setdefault(int(slot), {})[what.removesuffix(_NUMBER)] = value.item() if what.endswith(_NUMBER) else value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
        for p, values in optimizer.state.items():
            values |= {k: laid_as(p, v) for k, v in values.items() if isinstance(v, Tensor) and v.shape == p.shape}
    device = next((p.device for net in client.nets.values() for p in net.parameters()), None)
    client.memory = {k: v.to(device, copy=True) for k, v in _select_under(state, "memory.").items()}
    client.recipe_state = {
        k: v.to("cpu" if not v.dim() else device, copy=True) for k, v in _select_under(state, "recipe.").items()
    }
    if client.privacy is not None:
        client.privacy.steps = int(state["privacy.steps"])


def read_state(path: Path, run: str, round: int, first: Message | None = None) -> Message:
    """Return the tensors of a state file of this run and round.

    first: the state before round 1. Its names come first in the result and in its order, because a file has another order,
        and the rows of peers are in the order of the state.

    Raises:
        RunError: the file is missing or damaged, belongs to another run or round, or lacks a tensor of `first`.
    """
    tensors, about = read_tensors(path)
    if about.get("run") != run or about.get("round") != str(round):
        raise RunError(f"{path}: belongs to another run, configuration or round; {OTHER_FOLDER}")
    missing = [k for k, v in (first or {}).items() if k not in tensors or tensors[k].shape != v.shape]
    if missing:
        raise RunError(f"{path}: was written by another version of fedmutual: it lacks {missing[0]!r}; {OTHER_FOLDER}")
    return {k: tensors[k] for k in first or {}} | tensors


def read_shared_state(folder: Path) -> Message:
    """Return the shared tensors of a run after its last saved round.

    A tensor with a space in its name is not a network's: the server remembers it, as a velocity (docs/own-algorithm.md).

    Raises:
        RunError: the folder holds no run with a saved round, or the algorithm shares no model.
    """
    saved = read_checkpoint(folder)
    if saved is None:
        raise RunError(f"{folder}: there is no run with a saved round in this folder")
    state = read_server_state(folder, saved)
    shared = {name: tensor for name, tensor in state.items() if " " not in name}
    if not shared or get_members(state):  # the state of a relay says which peer has which public rows
        raise RunError(f"{folder}: its algorithm shares no model; name the folder of a run of fml or fedavg")
    return shared


def read_checkpoint(folder: Path) -> Saved | None:
    """Return the content of checkpoint.json; None before the first save.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / CHECKPOINT
    return read_record(path, Saved) if path.exists() else None


def write_checkpoint(folder: Path, saved: Saved) -> None:
    """Make a round, whose files are complete, the saved round. Raises RunError if the file cannot be written."""
    write_record(folder / CHECKPOINT, saved)


def remove_checkpoint(folder: Path) -> None:
    """Make the run one without a saved round."""
    (folder / CHECKPOINT).unlink(missing_ok=True)


def read_server_state(folder: Path, saved: Saved, first: Message | None = None) -> Message:
    """Return the server's state of the saved round; `first` as `read_state`.

    Raises:
        RunError: as `read_state`.
    """
    return read_state(server_folder(folder) / make_file_name(saved.round), saved.run, saved.round, first)


def restore_server(
    folder: Path, run: str, first: Message, rounds: int, every: int, clients: Iterable[str] = (), generations: int = 1
) -> tuple[Message, Saved | None]:
    """Restore logs and state files to the last saved round; return the server's state and the saved round.

    Nothing saved: `first`, the state before round 1, and None.

    rounds, every: how many rounds the run has, and after how many it is evaluated. clients: those whose folders have logs.
    generations: how many saved states are kept, including the last one.

    Raises:
        RunError: the checkpoint belongs to another run, or a file is damaged or cannot be written.
    """
    saved = read_checkpoint(folder)
    if saved is not None and saved.run != run:
        raise RunError(f"{folder}: its checkpoint belongs to another run; {OTHER_FOLDER}")
    last = saved.round if saved else None
    remove_other_states(folder, last, generations)
    for home in (folder, *(client_folder(folder, i) for i in clients)):
        rewind(home / METRICS, lambda round: is_scored_on_resume(round, last, every, rounds))
    rewind(folder / LEDGER, lambda round: last is not None and round <= last)
    return (first, None) if saved is None else (read_server_state(folder, saved, first), saved)


def collect_client_state(client: Client, in_phase: bool = False) -> Message:
    """Return the state of a client that lasts from round to round, by name.

    Names: "<net>.<tensor>", "optimizer.<net>.<parameter number>.<slot>", "memory.<name>",
    "recipe.<name>", and "privacy.steps".

    in_phase: return also the shared tensors of the meme and its optimiser's state, which last from step to step.
    """
    state: Message = {}
    for name, net in client.nets.items():
        crosses = client.shared if name == "meme" and not client.proxy and not in_phase else ()
        state |= {f"{name}.{k}": v for k, v in net.state_dict().items() if k not in crosses}
    for name, optimizer in client.optimizers.items():
        for slot, values in optimizer.state_dict()["state"].items() if name != "meme" or in_phase else ():
            state |= {f"optimizer.{name}.{slot}.{k}": v for k, v in values.items() if isinstance(v, Tensor)}
            numbers = {k: torch.tensor(v) for k, v in values.items() if isinstance(v, int | float)}
            state |= {f"optimizer.{name}.{slot}.{k}{_NUMBER}": v for k, v in numbers.items()}
    if client.privacy is not None:
        state["privacy.steps"] = torch.tensor(client.privacy.steps)
    return (
        state
        | {f"memory.{k}": v for k, v in client.memory.items()}
        | {f"recipe.{k}": v for k, v in client.recipe_state.items()}
    )


def _select_under(state: Message, prefix: str) -> Message:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
