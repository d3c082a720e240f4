"""The rows that a client trains on, and the rows that each of its nets is scored on."""

from collections.abc import Iterable

from fedmutual.core import Algorithm
from fedmutual.data.federation import Federation, Shares
from fedmutual.data.rows import ChainedRows, Rows, merge_rows
from fedmutual.ensemble import ENSEMBLE
from fedmutual.evaluation import COPY, EvalSpec

View = Rows | ChainedRows
KINDS = ("validation", "holdout")  # a client's own rows that are no training rows
ACROSS = ("test", "test.own", "test.others", "validation.all")  # where clients have test rows of one data set
SCORED = frozenset((model, kind) for model in ("personal", "global", "meme", ENSEMBLE, COPY) for kind in (*KINDS, *ACROSS))
"""What a client's score can be of: which model, on which rows."""


def pool_rows(data: Federation) -> dict[str, View]:
    """The rows of `centralised`, which has all; each client's own under names of their own."""
    found: dict[str, View | None] = {"private": data.pooled().private, "test": data.test}
    for i, shares in data.clients.items():
        found |= {f"validation of {i}": shares.validation, f"holdout of {i}": shares.holdout}
    return {k: v for k, v in found.items() if v is not None}


def list_client_rows(data: Federation, client: str, algorithm: Algorithm) -> dict[str, View]:
    """One client's: "private" to train on, "public" of the seed set, and those that it is scored on.

    Where clients have test rows of their own out of one data set, as domains have, they are scored on these, on the
    others', and on all clients' validation rows too; the rows of others' own data are not a client's to see.
    """
    shares = data.clients[client]
    found: dict[str, View | None] = {
        "private": _trains_on(data, shares, algorithm),
        "validation": shares.validation,
        "holdout": shares.holdout,
    }
    if data.public is not None and algorithm.public is not None and not algorithm.public.server:
        found["public"] = data.public.seen_by(client, algorithm.public.labelled)
    if not isinstance(data.test, Rows):  # of common data
        return {k: v for k, v in found.items() if v is not None}
    found["test"] = data.test
    if shares.test is not None:
        others = [s.test for i, s in data.clients.items() if i != client and s.test is not None]
        found |= {"test.own": shares.test, "test.others": merge_rows(others) if others else None}
        if not are_validation_rows_test_rows(data):
            found["validation.all"] = merge_rows([s.validation for s in data.clients.values()])
    return {k: v for k, v in found.items() if v is not None}


def are_validation_rows_test_rows(data: Federation) -> bool:
    """Return whether validation rows are test rows: a model chosen by them is then chosen by its test score."""
    test = set(data.test.index.tolist()) if isinstance(data.test, Rows) else set[int]()
    return any(not test.isdisjoint(s.validation.index.tolist()) for s in data.clients.values())


def describe_evaluation_rows(data: Federation, best_by: str | None) -> tuple[str, ...]:
    """Return the remarks for the user about the evaluation rows. best_by: `records.best_by`."""
    if (
        all(s.test is None for s in data.clients.values())
        or not isinstance(data.test, Rows)
        or not are_validation_rows_test_rows(data)
    ):
        return ()
    if best_by == "holdout" or (best_by is None and all(s.holdout is not None for s in data.clients.values())):
        return ()
    return (
        "split.validation is unset, so clients' validation rows are test rows: a best round that they choose is chosen by "
        "what judges it; set split.validation, or split.holdout",
    )


def _trains_on(data: Federation, shares: Shares, algorithm: Algorithm) -> View:
    if data.public is None or shares.public is None:
        return shares.private
    parts = {"private": [shares.private], "own public": [shares.public]}
    parts["public"] = [*data.public.parts]
    wanted = [part for name in algorithm.trains_on for part in parts[name]]
    return merge_rows(wanted) if isinstance(data.test, Rows) else ChainedRows(wanted)


def list_evaluations(
    known: Iterable[str], algorithm: Algorithm, complete: bool, copies: bool, client: str, ensemble: bool = False
) -> Iterable[EvalSpec]:
    """What is scored at a client that knows these rows: its personal net on all of them, its fork of the shared one on its
    own, and where clients are domains on the others' too; the ensemble of both on all but the hold-out rows, which choose
    its weight."""
    there = list(known)
    own = [kind for kind in KINDS if kind in there]
    across = [kind for kind in ACROSS if kind in there]
    if "personal" in algorithm.scores:
        yield from (EvalSpec("personal", kind, "personal", client, kind) for kind in (*own, *across))
    if "proxy" in algorithm.scores:
        yield from (EvalSpec("meme", kind, "meme", client, kind) for kind in (*own, *across))
    if ensemble and {"personal", "global"} <= set(algorithm.scores):
        yield from (EvalSpec(ENSEMBLE, kind, ENSEMBLE, client, kind) for kind in (*own, *across) if kind != "holdout")
    if "global" in algorithm.scores:
        every = (*own, *across) if "test.own" in there else own
        yield from (EvalSpec("meme", kind, "global" if complete else "meme", client, kind) for kind in every)
        if copies:
            yield from (EvalSpec("meme", kind, COPY, client, kind) for kind in own)


def list_pooled_evaluations(known: Iterable[str]) -> Iterable[EvalSpec]:
    """The same of `centralised`, whose one net stands for the shared one."""
    yield EvalSpec("personal", "test", "global", None, "test")
    for rows in known:
        kind, _, of = rows.partition(" of ")
        if of:
            yield EvalSpec("personal", rows, "global", of, kind)
