"""The rows that a client trains on, and the rows that each of its nets is scored on."""

from collections.abc import Iterable

from fedmutual.core import Algorithm
from fedmutual.data.federation import Federation, Shares
from fedmutual.data.rows import ChainedRows, Rows, merge_rows
from fedmutual.federation.ensemble import ENSEMBLE
from fedmutual.federation.evaluation import COPY, EvalSpec

View = Rows | ChainedRows
EVALUATION_KINDS = ("validation", "holdout")  # rows of a client's own data that are not training rows
ACROSS = ("test", "test.own", "test.others", "validation.all")  # only if all clients divide one data set
SITE_SCORES = frozenset(
    (model, kind) for model in ("personal", "global", "meme", ENSEMBLE, COPY) for kind in (*EVALUATION_KINDS, *ACROSS)
)
"""The pairs (model, rows) that a client can have a score of."""


def pool_rows(data: Federation) -> dict[str, View]:
    """Return the rows of the method `centralised` by name: the rows of all clients, and each client's evaluation rows."""
    views: dict[str, View | None] = {"private": data.pool_clients().private, "test": data.test}
    for i, shares in data.clients.items():
        views |= {f"validation of {i}": shares.validation, f"holdout of {i}": shares.holdout}
    return {k: v for k, v in views.items() if v is not None}


def list_client_rows(data: Federation, client: str, algorithm: Algorithm) -> dict[str, View]:
    """Return a client's rows by name: "private" for training, "public" of the seed set, and the evaluation rows.

    If each client has test rows out of one common data set, as domains have, the evaluation rows include the client's test
    rows, the test rows of the others, and the validation rows of all clients. If a client has a data set of its own, no
    other client sees rows of that data set.
    """
    shares = data.clients[client]
    views: dict[str, View | None] = {
        "private": _select_training_rows(data, shares, algorithm),
        "validation": shares.validation,
        "holdout": shares.holdout,
    }
    if data.public is not None and algorithm.public is not None and not algorithm.public.server:
        views["public"] = data.public.show_to(client, algorithm.public.labelled)
    if not isinstance(data.test, Rows):  # clients do not divide one data set
        return {k: v for k, v in views.items() if v is not None}
    views["test"] = data.test
    if shares.test is not None:
        others = [s.test for i, s in data.clients.items() if i != client and s.test is not None]
        views |= {"test.own": shares.test, "test.others": merge_rows(others) if others else None}
        if not are_validation_rows_test_rows(data):
            views["validation.all"] = merge_rows([s.validation for s in data.clients.values()])
    return {k: v for k, v in views.items() if v is not None}


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
        "split.validation is unset, so clients' validation rows are test rows, and the best round would be chosen by its "
        "test score; set split.validation or split.holdout",
    )


def _select_training_rows(data: Federation, shares: Shares, algorithm: Algorithm) -> View:
    if data.public is None or shares.public is None:
        return shares.private
    parts = {"private": [shares.private], "own public": [shares.public]}
    parts["public"] = [*data.public.parts]
    selected = [part for name in algorithm.trains_on for part in parts[name]]
    return merge_rows(selected) if isinstance(data.test, Rows) else ChainedRows(selected)


def list_evaluations(
    known: Iterable[str], algorithm: Algorithm, complete: bool, copies: bool, client: str, ensemble: bool = False
) -> Iterable[EvalSpec]:
    """Yield the evaluations at a client that has these rows.

    The personal net is scored on all rows. The shared model is scored on rows of the client's own data; if clients are
    domains, on all rows. The ensemble of both is scored on all rows but the hold-out rows, which choose its weight.

    known: the names of the client's rows. complete: whether the server holds all tensors of the shared model.
    copies, ensemble: the keys `records.copies` and `records.ensemble`.
    """
    names = list(known)
    client_kinds = [kind for kind in EVALUATION_KINDS if kind in names]
    common_kinds = [kind for kind in ACROSS if kind in names]
    if "personal" in algorithm.scores:
        yield from (EvalSpec("personal", kind, "personal", client, kind) for kind in (*client_kinds, *common_kinds))
    if "proxy" in algorithm.scores:
        yield from (EvalSpec("meme", kind, "meme", client, kind) for kind in (*client_kinds, *common_kinds))
    if ensemble and {"personal", "global"} <= set(algorithm.scores):
        yield from (
            EvalSpec(ENSEMBLE, kind, ENSEMBLE, client, kind) for kind in (*client_kinds, *common_kinds) if kind != "holdout"
        )
    if "global" in algorithm.scores:
        every = (*client_kinds, *common_kinds) if "test.own" in names else client_kinds
        yield from (EvalSpec("meme", kind, "global" if complete else "meme", client, kind) for kind in every)
        if copies:
            yield from (EvalSpec("meme", kind, COPY, client, kind) for kind in client_kinds)


def list_pooled_evaluations(known: Iterable[str]) -> Iterable[EvalSpec]:
    """Yield the evaluations of the method `centralised`; the score of its only net is the score of the shared model.

    known: the names of the rows, as `pool_rows` returns them.
    """
    yield EvalSpec("personal", "test", "global", None, "test")
    for rows in known:
        kind, _, of = rows.partition(" of ")
        if of:
            yield EvalSpec("personal", rows, "global", of, kind)
