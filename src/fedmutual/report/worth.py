"""What participants give to each other, as sentences, as a matrix, as a page and as JSON; and what joining gives to one."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedmutual.report.cells import Column, PageTable, TableCell, list_records, make_gain_cell, make_table
from fedmutual.report.rendering import load_page_template, render_facts, write_text
from fedmutual.results.estimate import Estimate, Missing, Value
from fedmutual.results.scale import MetricScale
from fedmutual.results.worth import Coalition, GainMatrix, Worth

_ALL, _MEAN = "all others", "mean of the others"


def make_worth_tables(worth: Worth) -> list[PageTable]:
    """Return the matrix of Shapley values, where there are some, and that of participants left out: rows gain."""
    matrices = {
        "What each participant gains from each other one": worth.shapley,
        "What each participant loses if one other is left out": worth.left_out,
    }
    return [
        _make_matrix_table(f"matrix-{number}", caption, matrix, worth)
        for number, (caption, matrix) in enumerate(matrices.items())
        if any(matrix.numbers.values())
    ]


def _make_matrix_table(id: str, caption: str, matrix: GainMatrix, worth: Worth) -> PageTable:
    """Return a matrix: who gains in the rows, from whom in the columns, shaded by size where an interval excludes 0."""
    scale = MetricScale(metric=worth.metric)
    largest = max(abs(v.mean) for pair in worth.pairs if isinstance(v := matrix.measure([pair]), Estimate))

    def read(other: str, one: str) -> Value | None:
        if other == one:
            return None
        return matrix.measure_given(other) if one == _MEAN else matrix.measure([(one, other)])

    def form(value: Estimate | None) -> TableCell:
        if value is None:
            return TableCell("")
        cell = make_gain_cell(value, scale)
        return replace(cell, sub="", shade=min(abs(value.mean) / (largest or 1), 1) if cell.tone else None)

    columns = [Column("who gains", numeric=False)]
    columns += [Column(i, "from", read=partial(read, i), form=form) for i in worth.participants]
    if matrix is worth.shapley:  # whose sum is the gain from all others
        columns.append(Column(_ALL, read=lambda one: None if one == _MEAN else matrix.measure_received(one), form=form))
    lines = [*worth.participants, _MEAN]
    return make_table(id, f"{caption}{scale.difference_head}", columns, lines, worth.pairs, _list_pair_columns(worth))


def _list_pair_columns(worth: Worth) -> list[Column]:
    """Return the columns of CSV and JSON, a line for each pair."""
    return [
        Column("", keys=("participant", "gains_from"), numbers=tuple),
        Column("", keys=_list_keys("shapley"), read=lambda pair: worth.shapley.measure([pair])),
        Column("", keys=_list_keys("left_out"), read=lambda pair: worth.left_out.measure([pair])),
    ]


def _list_keys(number: str) -> tuple[str, ...]:
    """Return the keys of an estimate, in the order of `list_numbers`."""
    return (number, f"{number}_half_width", f"{number}_n", f"{number}_unit")


def describe_worth(worth: Worth) -> dict[str, Any]:
    """Return the numbers for JSON: fractions in [0, 1]; a missing number is None."""
    of_participants = [
        Column("", keys=("participant",)),
        Column("", keys=_list_keys("shapley_given"), read=worth.shapley.measure_given),
        Column("", keys=_list_keys("shapley_received"), read=worth.shapley.measure_received),
        Column("", keys=_list_keys("left_out_given"), read=worth.left_out.measure_given),
    ]
    of_overlaps = [
        Column("", keys=("first", "second"), numbers=tuple),
        Column("", keys=_list_keys("overlap"), read=worth.overlaps.__getitem__),
    ]
    return {
        "format": 1,
        "name": worth.name,
        "method": worth.method,
        "metric": worth.metric.name,
        "higher_is_better": worth.metric.is_higher_better,
        "runs": worth.runs,
        "pairs": list_records(_list_pair_columns(worth), worth.pairs),
        "participants": list_records(of_participants, worth.participants),
        "overlaps": list_records(of_overlaps, worth.overlaps),
    }


def find_worth(worth: Worth) -> list[str]:
    """Return what is certain, one sentence each; the first is the answer."""
    say = partial(render_facts, "worth.j2", MetricScale(metric=worth.metric))
    has_values = any(worth.shapley.numbers.values())
    matrix = worth.shapley if has_values else worth.left_out
    gains = {i: v for i in worth.participants if isinstance(v := matrix.measure_given(i), Estimate)}  # of the others, from i
    ranked = sorted(gains, key=lambda i: -gains[i].mean)
    helping, harming = ([i for i in ranked if gains[i].sign == sign] for sign in (1, -1))
    sentences = [say("answer", helping=[*map(_name, helping)], harming=[*map(_name, harming)])]
    sentences += [say("given", name=_name(i), estimate=gains[i]) for i in ranked if gains[i].sign]
    overlaps = sorted(worth.overlaps.items(), key=lambda item: item[1].mean)
    sentences += [say("overlap", first=_name(a), second=_name(b), estimate=e) for (a, b), e in overlaps if e.sign < 0]
    for i in helping if has_values else ():
        loss = worth.left_out.measure_given(i)
        if isinstance(loss, Estimate) and loss.sign <= 0:
            sentences.append(say("replaceable", name=_name(i), estimate=loss))
    number = max((e.n for e in gains.values()), default=0)
    sentences.append(say("method", unit=matrix.unit if has_values else "", number=number))
    return [*sentences, *([say("sites")] if worth.at_sites else [])]


def describe_joining(worth: Worth, name: str, gains: dict[Coalition, Estimate], chosen: Value) -> dict[str, Any]:
    """Return what joining gives to one participant for JSON: a line for each coalition. Arguments: `Worth.judge_joining`."""
    columns = [
        Column("", keys=("with",), read=lambda c: _list_others(worth, name, c), numbers=lambda others: (others,)),
        Column("", keys=_list_keys("gain"), read=gains.__getitem__),
    ]
    best = Column("", keys=_list_keys("choosing_over_all"))
    about = {"format": 1, "name": worth.name, "method": worth.method, "metric": worth.metric.name, "participant": name}
    return about | list_records([best], [chosen])[0] | {"coalitions": list_records(columns, gains)}


def make_joining_table(worth: Worth, name: str, gains: dict[Coalition, Estimate]) -> PageTable:
    """Return the table of coalitions, the best first, with what one participant gains in each over training alone."""
    scale = MetricScale(metric=worth.metric)
    columns = [
        Column(f"{name} with", numeric=False, keys=("with",), read=lambda c: ", ".join(_list_others(worth, name, c))),
        Column(
            f"gain over training alone{scale.difference_head}",
            keys=_list_keys("gain"),
            read=gains.__getitem__,
            form=partial(make_gain_cell, scale=scale),
        ),
    ]
    lines = sorted(gains, key=lambda c: -gains[c].mean)
    return make_table("coalitions", f"What {name} gains by joining", columns, lines)


def find_joining(worth: Worth, name: str, gains: dict[Coalition, Estimate], chosen: Value) -> list[str]:
    """Return what one participant wins or loses by joining, and the best coalition for it, one sentence each."""
    say = partial(render_facts, "worth.j2", MetricScale(metric=worth.metric), name=_name(name))
    best = max(gains, key=lambda c: gains[c].mean)
    others, is_measured = [*map(_name, _list_others(worth, name, best))], not isinstance(chosen, Missing)
    return [
        say("joining", all=gains[frozenset(worth.participants)]),
        say("best", number=len(gains), others=others, best=gains[best], chosen=chosen, is_measured=is_measured),
    ]


def _name(participant: str) -> str:
    """Return a participant's name in a sentence."""
    return f"participant {participant}" if participant.isdecimal() else participant


def _list_others(worth: Worth, name: str, coalition: Coalition) -> list[str]:
    return [i for i in worth.participants if i in coalition and i != name]


def write_worth(worth: Worth, title: str, sentences: Sequence[str], tables: Sequence[PageTable], out: Path) -> None:
    """Write the page.

    Raises:
        RunError: `out` cannot be written, or is a file of another kind.
    """
    about = f"{worth.method}, {len(worth.participants)} participants, {worth.runs} runs; 95 % intervals"
    page = load_page_template("sheet.html.j2")
    write_text(page.render(title=title, about=about, sentences=sentences, tables=tables, version=version("fedmutual")), out)
