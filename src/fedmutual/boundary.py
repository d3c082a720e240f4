"""The privacy boundary: the only function through which a client's reply leaves, and the checks that refuse a reply.

Every engine sends `release(...)` of a reply and nothing else. The boundary does not know the algorithm: it compares the
reply with the phase's declaration and with the data that must never leave.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmutual.calling import list_tensors
from fedmutual.core import PREVIOUS, Client, Data, Message, Spec

LEAST = 16  # elements; of fewer, equal bytes prove nothing
FEWEST, DISTINCT = 4, 4  # but of a row that has so many elements, and so many different values, not all whole, they do
OWN = ("private", "holdout", "validation", "test.own")  # the rows that are a client's

# by the bytes of a row, or of one of its inputs: the first eight bytes of each identifying row, each value once
_rows: "WeakKeyDictionary[Data, dict[int, NDArray[np.uint64]]]" = WeakKeyDictionary()
_digests: "WeakKeyDictionary[Data, frozenset[bytes]]" = WeakKeyDictionary()


class Refused(RuntimeError):
    """A reply held something that must not leave its client. No part of the reply was sent."""

    def __init__(self, client: str, tensor: str, why: str) -> None:
        super().__init__(client, tensor, why)
        self.client, self.tensor, self.why = client, tensor, why

    def __str__(self) -> str:
        return f"client {self.client!r} must not send {self.tensor!r}: {self.why}"


def release(
    reply: Message, declared: Spec, client: Client, inbox: Message, warn: Callable[[Refused], None] | None = None
) -> Message:
    """Return a checked copy of the reply in main memory.

    reply: as `Phase.end` returns it, not copied, so that a tensor can be identified by its storage.
    declared: all that the phase may send: name -> dtype, shape.
    inbox: the message that the client received; a tensor that returns unchanged reveals nothing and passes.
    warn: called with the refusal if the reply holds private values; the reply is returned all the same. None: the refusal is
        raised. For a site whose inbox another party chose: a visible refusal would confirm a guess of a private value.

    Raises:
        Refused: a name, dtype or shape is not declared, or a declared name is missing. Without `warn` also: a tensor of 16
            or more elements that are not all equal has the bytes of a tensor of the personal net, of the unshared part of
            the meme, of an optimiser or of the memory; or a tensor holds a row of the client's data, of 16 or more elements
            that are not all equal, or of 4 or more with at least 4 different values that are not all whole numbers. A
            meme's tensor that is permitted to equal the personal net's (`Client.boundary_exempt`) passes by its storage,
            whatever its bytes.
        DataError: a row of the client's data cannot be read for the comparison.
    """
    check_declared(reply, declared, client.id)
    problem = _find_private_values(reply, client, inbox)
    if problem is not None:
        if warn is None:
            raise problem
        warn(problem)
    return {k: v.detach().to("cpu", copy=True).contiguous() for k, v in reply.items()}


def _find_private_values(reply: Message, client: Client, inbox: Message) -> Refused | None:
    """Return the refusal of the first tensor that holds private values, as `release` raises it; None if there is none."""
    private: dict[int, list[tuple[str, Tensor]]] = {}
    for tensor_name, tensor in _list_private_tensors(client) if reply else ():
        private.setdefault(_view_bytes(tensor), []).append((tensor_name, tensor))
    for name, tensor in reply.items():
        if tensor.numel() < FEWEST or is_constant(tensor) or (name in inbox and _has_equal_bytes(tensor, inbox[name])):
            continue
        equal_size = (
            private.get(_view_bytes(tensor), []) if tensor.numel() >= LEAST and not _is_exempt(name, tensor, client) else []
        )
        for tensor_name, private_tensor in equal_size:
            if _has_equal_bytes(tensor, private_tensor):
                return Refused(client.id, name, f"its bytes are those of {tensor_name}")
        row = _find_private_row(tensor, client, inbox.get(name))
        if row is not None:
            return Refused(client.id, name, f"it holds a row of the client's {row} data")
    return None


def release_metrics(values: Mapping[str, Any], declared: Collection[str], client: str, width: int = 0) -> dict[str, Any]:
    """Return a checked copy of losses and scores, the second channel. A value that is not finite becomes None.

    values: name -> a number, None, or a list of exactly `width` of those (one for each class).

    Raises:
        Refused: a name is not declared, or a value has another type.
    """
    released: dict[str, Any] = {}
    for name, value in values.items():
        if name not in declared:
            raise Refused(client, name, f"its phase or task declares only the names {', '.join(declared) or 'nothing'}")
        listed = value if isinstance(value, list) and len(value) == width else [value]
        if not all(v is None or type(v) in (int, float) for v in listed):
            raise Refused(client, name, f"a score is a number, None, or a list of one a class, not {type(value).__name__}")
        finite = [v if v is None or math.isfinite(v) else None for v in listed]  # a log cannot hold NaN
        released[name] = finite if isinstance(value, list) else finite[0]
    return released


def is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal; the bytes of such a tensor identify nothing."""
    return tensor.numel() == 0 or bool((tensor == tensor.flatten()[0]).all())


def check_declared(reply: Message, declared: Spec, client: str) -> None:
    """Raise Refused unless the reply holds exactly the declared tensors, or nothing."""
    for name, tensor in reply.items():
        if name not in declared:
            raise Refused(client, name, f"the phase declares only {', '.join(sorted(declared)) or 'that nothing leaves'}")
        dtype, shape = declared[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise Refused(client, name, f"declared as {dtype} {tuple(shape)}, found {tensor.dtype} {tuple(tensor.shape)}")
    missing = sorted(declared.keys() - reply.keys()) if reply else []
    if missing:
        raise Refused(client, missing[0], "it is declared, but missing; a reply holds all declared tensors, or none")


def _is_exempt(name: str, tensor: Tensor, client: Client) -> bool:
    if name not in client.boundary_exempt:
        return False
    meme_tensor = client.nets["meme"].state_dict()[name]
    return bool(tensor.untyped_storage().data_ptr() == meme_tensor.untyped_storage().data_ptr())


def _list_private_tensors(client: Client) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of everything that must not leave the client."""
    for net, module in client.nets.items():
        for key, tensor in module.state_dict().items():
            if net != "meme" or key not in client.shared:
                yield f"{key!r} of its {net} net", tensor
    for net, optimizer in client.optimizers.items():
        for p, state in optimizer.state.items():
            for key, tensor in state.items():
                # ASGD begins with an average that is the parameter itself
                if isinstance(tensor, Tensor) and not (net == "meme" and _has_equal_bytes(p, tensor)):
                    yield f"{key!r} of its {net} optimiser", tensor
    for key, tensor in client.memory.items():
        # a client that has stopped sends its last reply again (`Recipe.patience`)
        if not ("stopped" in client.recipe_state and key.startswith(PREVIOUS)):
            yield f"{key!r} of its memory", tensor


def _view_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _has_equal_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b.to(a.device))


def _find_private_row(tensor: Tensor, client: Client, sent: Tensor | None) -> str | None:
    """Return the name of the client's data that hold a row equal to a row-sized piece of the tensor; None if none does.

    sent: the tensor that the client received under this name. A piece that returns unchanged reveals nothing,
    whereas a refusal would confirm the sender's guess of a row.
    """
    sent = sent if sent is not None and _view_bytes(sent) == _view_bytes(tensor) else None
    cut = dict[int, tuple[NDArray[np.uint8], NDArray[np.uint64]]]()  # by size: most kinds of data have rows of one
    for kind in (kind for kind in OWN if kind in client.data):
        data = client.data[kind]
        data = getattr(data, "source", data)  # private rows may be guarded (privacy.sampling)
        for size, first_words in _find_identifying_rows(data).items():
            if not len(first_words) or _view_bytes(tensor) % size:
                continue
            if size not in cut:
                pieces = _split_bytes(tensor, size)
                pieces = pieces if sent is None else pieces[(pieces != _split_bytes(sent, size)).any(1)]
                cut[size] = pieces, _read_first_words(pieces)
            pieces, theirs = cut[size]
            similar = pieces[np.isin(theirs, first_words)]
            if len(similar) and not _digest_identifying_rows(data).isdisjoint(_digest_pieces(similar)):
                return kind
    return None


def _find_identifying_rows(data: Data) -> dict[int, NDArray[np.uint64]]:
    """Return the entry of a data set in `_rows`, computed once for each data set."""
    if data not in _rows:
        first_words = dict[int, list[NDArray[np.uint64]]]()
        for rows in _list_identifying_rows(data):
            first_words.setdefault(rows.shape[1], []).append(_read_first_words(rows))
        _rows[data] = {size: np.unique(np.concatenate(words)) for size, words in first_words.items()}
    return _rows[data]


def _digest_identifying_rows(data: Data) -> frozenset[bytes]:
    """Return the digests of a data set's identifying rows, computed once, when a message first begins as a row."""
    if data not in _digests:
        _digests[data] = frozenset(digest for part in _list_identifying_rows(data) for digest in _digest_pieces(part))
    return _digests[data]


def _list_identifying_rows(data: Data) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a data set's identifying rows, [N, bytes of a row] at a time; of several inputs each."""
    for batch in data.rows(torch.split(torch.arange(len(data)), 1024)) if len(data) else ():
        for x in list_tensors(batch[0]):
            identifying = _is_identifying(x.reshape(len(x), -1)).cpu().numpy()
            yield _split_bytes(x, x[0].numel() * x.element_size())[identifying]


def _is_identifying(x: Tensor) -> Tensor:
    """Return for each row of x [N, F] whether equal bytes identify it; short rows of few values, and of counts, do not."""
    if x.shape[1] >= LEAST:
        return (x != x[:, :1]).any(1)
    if x.shape[1] < FEWEST or not x.is_floating_point():
        return torch.zeros(len(x), dtype=torch.bool)
    ordered = x.sort(1).values
    different = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + 1
    return (different >= DISTINCT) & (x != x.round()).any(1)


def _split_bytes(tensor: Tensor, size: int) -> NDArray[np.uint8]:
    """Return the bytes of a tensor in pieces of `size` bytes [N, size]."""
    pieces: NDArray[np.uint8] = (
        tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().reshape(-1, size)
    )
    return pieces


def _read_first_words(pieces: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the first eight bytes of each piece as one number [N]."""
    first = np.zeros((len(pieces), 8), np.uint8)
    first[:, : pieces.shape[1]] = pieces[:, :8]
    return first.view(np.uint64)[:, 0]


def _digest_pieces(pieces: NDArray[np.uint8]) -> Iterator[bytes]:
    return (hashlib.blake2b(piece.tobytes(), digest_size=16).digest() for piece in pieces)
