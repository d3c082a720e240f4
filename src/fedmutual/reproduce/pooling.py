"""Which cells a mean over several is made of, where not all were run with the same seeds."""

from collections.abc import Collection, Sequence


def pool(cells: Sequence[Collection[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the places of the cells that are pooled, the seeds that all of them have), from the seeds of each cell.

    Two seeds where there are any, for one has no interval; then the most pairs, cells times seeds; then the most cells; then
    the first. No result has a say in it.
    """
    shared: set[frozenset[int]] = set()
    for seeds in map(frozenset, cells):
        shared |= {seeds} | {seeds & known for known in shared}
    best: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    for seeds in sorted(filter(None, shared), key=sorted):
        chosen = tuple(n for n, cell in enumerate(cells) if seeds <= set(cell))
        best = max(best, (chosen, tuple(sorted(seeds))), key=_worth)
    return best


def _worth(pooled: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[bool, int, int]:
    cells, seeds = map(len, pooled)
    return seeds > 1, cells * seeds, cells
