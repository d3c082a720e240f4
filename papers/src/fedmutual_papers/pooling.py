"""Choose the cells of a mean when the cells do not all have the same seeds."""

from collections.abc import Collection, Sequence


def pool(cells: Sequence[Collection[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (the positions of the pooled cells, the seeds that all of them have). cells: the seeds of each cell.

    At least two seeds are taken if possible, because one seed has no interval; then the most pairs of cell and seed;
    then the most cells; then the first. The choice does not use any result.
    """
    shared: set[frozenset[int]] = set()
    for seeds in map(frozenset, cells):
        shared |= {seeds} | {seeds & known for known in shared}
    best: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    for seeds in sorted(filter(None, shared), key=sorted):
        chosen = tuple(n for n, cell in enumerate(cells) if seeds <= set(cell))
        best = max(best, (chosen, tuple(sorted(seeds))), key=_find_worth)
    return best


def _find_worth(pooled: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[bool, int, int]:
    cells, seeds = map(len, pooled)
    return seeds > 1, cells * seeds, cells
