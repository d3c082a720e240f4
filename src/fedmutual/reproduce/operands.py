"""The numbers that a claim is made of, in its own cell and in others that it names, and what they come to seed by seed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedmutual.reproduce import measures
from fedmutual.reproduce.cell_results import Look
from fedmutual.reproduce.schema import Claim, End

Values = dict[int, float]
"""Seed -> the difference, or the ratio."""


class Side(NamedTuple):
    """One number of a claim."""

    sign: int  # +1, or -1 where it is taken off
    look: Look
    arm: str
    at: End


def sides(claim: Claim, look: Look, looks: Sequence[Look]) -> list[Side]:
    """The numbers that a claim is made of in a cell; none where the cell, or another that it names, lacks an arm of it."""
    by_name = {x.cell.name: x for x in looks}
    counts = measures.find(claim.measure)[0].counts
    than, elsewhere = claim.other
    found = []
    for sign, here in ((1, look), *([(-1, by_name.get(claim.less))] if claim.less else [])):
        found.append((sign, here, claim.arm, claim.at or counts))
        if than:
            found.append((-sign, by_name.get(elsewhere) if elsewhere else here, than, claim.than_at or counts))
    named = [Side(sign, here, arm, at) for sign, here, arm, at in found if here is not None and arm in here.cell.arms]
    return named if len(named) == len(found) else []


def grain(claim: Claim, found: Sequence[Side]) -> float:
    """By how much one example of the test set moves the claim's difference; 0.0 where it is not counted in examples."""
    of_measure = measures.find(claim.measure)[0].grain
    if of_measure is None or claim.times is not None:
        return 0.0
    runs = [[r for r in side.look.results.get(side.arm, {}).values() if not r.failed] for side in found]
    return max((of_measure(results, claim.per == "client") for results in runs if results), default=0.0)


def of_cell(claim: Claim, look: Look, found: Sequence[Side], seeds: Sequence[int]) -> Iterator[tuple[str, Values]]:
    """(the cell, its values)."""
    numbers = {}
    for seed in seeds:
        numbers[seed] = [side.look.number(claim.measure, side.arm, seed, side.at) for side in found]
        if claim.measure.startswith("rounds_to") and any(n is not None for n in numbers[seed]):  # more than there were
            more = [side.look.results[side.arm][seed].rounds + 1.0 for side in found]
            numbers[seed] = [m if n is None else n for n, m in zip(numbers[seed], more, strict=True)]
    yield look.cell.title, _held(claim, found, numbers)


def of_clients(claim: Claim, look: Look, found: Sequence[Side], seeds: Sequence[int]) -> Iterator[tuple[str, Values]]:
    """For each client (who, the values of its own numbers)."""
    nodes = measures.find(claim.measure)[0].nodes
    assert nodes is not None  # else the index was refused
    each = {s: [nodes(side.look.results[side.arm][s], side.at) for side in found] for s in seeds}
    clients = dict.fromkeys(i for of in each.values() for i in of[0] if all(i in other for other in of))
    for i in clients:
        numbers = {s: [one.get(i) for one in of] for s, of in each.items()}
        yield f"{look.cell.title}, client {i} ({look.networks[i]})", _held(claim, found, numbers)
    if not clients:
        yield look.cell.title, {}


def _held(claim: Claim, found: Sequence[Side], numbers: Mapping[int, Sequence[float | None]]) -> Values:
    """The first number of each seed against the others, of seeds that have all."""
    values = {}
    for seed, of in numbers.items():
        there = [n for n in of if n is not None]
        if len(there) < len(found):
            continue
        if claim.times is None:
            values[seed] = sum(side.sign * n for side, n in zip(found, there, strict=True))
        elif there[1]:  # nothing is so many times nothing
            values[seed] = there[0] / there[1]
    return values
