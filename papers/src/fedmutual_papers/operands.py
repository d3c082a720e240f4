"""Find the numbers that a claim compares, in its cell and in other named cells, and compute the difference for each seed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedmutual_papers import measures
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.schema import Claim, End

Values = dict[int, float]
"""Seed -> the difference, or the ratio."""


class Side(NamedTuple):
    """One number of a claim."""

    sign: int  # +1, or -1 where it is taken off
    measured: MeasuredCell
    arm: str
    at: End


def find_operands(claim: Claim, measured: MeasuredCell, measured_cells: Sequence[MeasuredCell]) -> list[Side]:
    """Return the numbers that a claim compares in a cell; [] if the cell, or another cell of the claim, lacks an arm."""
    by_name = {x.cell.name: x for x in measured_cells}
    counts = measures.find(claim.measure)[0].counts
    than, elsewhere = claim.other
    operands = []
    for sign, other_look in ((1, measured), *([(-1, by_name.get(claim.less))] if claim.less else [])):
        operands.append((sign, other_look, claim.arm, claim.at or counts))
        if than:
            operands.append((-sign, by_name.get(elsewhere) if elsewhere else other_look, than, claim.than_at or counts))
    named = [
        Side(sign, other_look, arm, at)
        for sign, other_look, arm, at in operands
        if other_look is not None and arm in other_look.cell.arms
    ]
    return named if len(named) == len(operands) else []


def find_grain(claim: Claim, operands: Sequence[Side]) -> float:
    """Return the change of the claim's difference by one test example; 0.0 for a measure that does not count examples."""
    of_measure = measures.find(claim.measure)[0].grain
    if of_measure is None or claim.times is not None:
        return 0.0
    runs = [[r for r in side.measured.results.get(side.arm, {}).values() if not r.failed] for side in operands]
    return max((of_measure(results, claim.per == "client") for results in runs if results), default=0.0)


def list_cell_values(
    claim: Claim, measured: MeasuredCell, operands: Sequence[Side], seeds: Sequence[int]
) -> Iterator[tuple[str, Values]]:
    """Yield one pair: the cell's title, and for each seed the difference (or the quotient) that the claim is about."""
    numbers = {}
    for seed in seeds:
        numbers[seed] = [side.measured.read_number(claim.measure, side.arm, seed, side.at) for side in operands]
        if claim.measure.startswith("rounds_to") and any(n is not None for n in numbers[seed]):
            # A target that was not reached counts one round more than were run.
            more = [side.measured.results[side.arm][seed].rounds + 1.0 for side in operands]
            numbers[seed] = [m if n is None else n for n, m in zip(numbers[seed], more, strict=True)]
    yield measured.cell.title, _compare(claim, operands, numbers)


def list_client_values(
    claim: Claim, measured: MeasuredCell, operands: Sequence[Side], seeds: Sequence[int]
) -> Iterator[tuple[str, Values]]:
    """Yield (the client's title, seed -> value) for each client."""
    nodes = measures.find(claim.measure)[0].nodes
    assert nodes is not None  # else the index was refused
    each = {s: [nodes(side.measured.results[side.arm][s], side.at) for side in operands] for s in seeds}
    clients = dict.fromkeys(
        i for by_operand in each.values() for i in by_operand[0] if all(i in other for other in by_operand)
    )
    for i in clients:
        numbers = {s: [numbers_of_operand.get(i) for numbers_of_operand in by_operand] for s, by_operand in each.items()}
        yield f"{measured.cell.title}, client {i} ({measured.networks[i]})", _compare(claim, operands, numbers)
    if not clients:
        yield measured.cell.title, {}


def _compare(claim: Claim, operands: Sequence[Side], numbers: Mapping[int, Sequence[float | None]]) -> Values:
    """Return seed -> the difference or the ratio, for the seeds that have all numbers."""
    values = {}
    for seed, seed_numbers in numbers.items():
        present = [n for n in seed_numbers if n is not None]
        if len(present) < len(operands):
            continue
        if claim.times is None:
            values[seed] = sum(side.sign * n for side, n in zip(operands, present, strict=True))
        elif present[1]:  # a ratio to 0 is undefined
            values[seed] = present[0] / present[1]
    return values
