"""What was found as tables: as the paper prints it where it prints one, ours beside its numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

from fedmutual.report.cells import Cell, Column, Table, csv_text
from fedmutual.report.comparison import NAMES
from fedmutual.report.statistics import Estimate, estimate
from fedmutual.report.text import count, fixed, listed, percent
from fedmutual.reproduce import measures
from fedmutual.reproduce.cells import Arm, Experiment
from fedmutual.reproduce.claims import DIVERGED, Judged, Lost
from fedmutual.reproduce.looks import Look

NOT_RUN = "not run"
LAST, BEST = "last", "best"
WIDEST = 8  # columns of numbers


def all_tables(experiment: Experiment, looks: Sequence[Look]) -> list[Table]:
    """The tables of an experiment: after the last round of all cells, then after the best of those that were run."""
    if experiment.index.view == "clients":
        return [_clients(experiment, looks)]
    run, named = [look for look in looks if look.run], experiment.index.measures
    chosen = [m for m in named if measures.find(m)[0].chosen]
    return [
        *(_settings(experiment, looks, LAST, group) for group in _grouped(named, looks)),
        *(_settings(experiment, run, BEST, group) for group in _grouped(chosen, run) if run),
    ]


def _grouped(named: Sequence[str], looks: Sequence[Look]) -> list[Sequence[str]]:
    """Measures that share a table: all, unless that makes too many columns; then each has its own."""
    columns = len({look.cell.about.column for look in looks})
    if not named:
        return []
    return [named] if columns * len(named) <= WIDEST else [[m] for m in named]


def name(key: str, arm: Arm) -> str:
    """What an arm is called."""
    return arm.title or NAMES.get(key, key)


def amount(value: Estimate, unit: str, decimals: int) -> tuple[str, str]:
    """(a mean, half the width of its interval with its sign; "" where there is none)."""
    if unit in ("%", "points"):
        return percent(value.mean, decimals), "" if value.half is None else f"± {percent(value.half, decimals)}"
    places = 1 if unit == "rounds" else 3
    return fixed(value.mean, places), "" if value.half is None else f"± {fixed(value.half, places)}"


def _settings(experiment: Experiment, looks: Sequence[Look], at: str, wanted: Sequence[str]) -> Table:
    """A row a setting and arm, a column a data set with its network, as the paper's table."""
    rows, columns = _places(looks)
    heads = [Column("Setting", numeric=False), Column("Method", numeric=False)]
    for column in columns:
        heads += [Column(_head(m, at, looks), column) if len(wanted) > 1 else Column(column) for m in wanted]
    lines = []
    for row in rows:
        here = {look.cell.about.column: look for look in looks if look.cell.about.row == row}
        for arm, label in _arms(list(here.values())).items():
            cells = [_cell(here.get(c), arm, m, at, experiment.index.decimals) for c in columns for m in wanted]
            lines.append((Cell(row), Cell(label), *cells))
    when = "after the last round" if at == LAST else "after the best round, which flatters"
    caption = capital(f"{_head(wanted[0], at, looks)}, {when}" if len(wanted) == 1 else when)
    return Table(f"{at}-{wanted[0].partition(':')[0]}", caption, tuple(heads), tuple(lines), _csv(experiment, looks))


def _head(measure: str, at: str, looks: Sequence[Look]) -> str:
    if at == LAST:
        return measures.title(measure)
    tests = all(look.cell.validates_on_test for look in looks)
    return f"{measures.title(measure)}, {measures.CHOSEN_BY_TEST if tests else measures.find(measure)[0].chosen}"


def capital(text: str) -> str:
    """A sentence's first letter as a capital; the others as they are."""
    return text[:1].upper() + text[1:]


def _places(looks: Sequence[Look]) -> tuple[list[str], list[str]]:
    """The rows and columns, in the order in which cells first name them."""
    rows = dict.fromkeys(look.cell.about.row for look in looks)
    return _by_paper(list(rows)), list(dict.fromkeys(look.cell.about.column for look in looks))


def _by_paper(rows: list[str]) -> list[str]:
    """Settings with IID first, as all papers have them; others as they come."""
    return sorted(rows, key=lambda row: not row.startswith("IID"))


def _arms(looks: Sequence[Look]) -> dict[str, str]:
    return {key: name(key, arm) for look in looks for key, arm in look.cell.shown.items()}


def _cell(look: Look | None, arm: str, measure: str, at: str, decimals: int) -> Cell:
    if look is None or arm not in look.cell.shown:
        return Cell("")
    paper = look.cell.shown[arm].paper
    beside = f"paper {paper:.2f}" if paper is not None and at == LAST else ""
    failed = [f"seed {s}: {r.failed}" for s, r in look.results[arm].items() if r.failed]
    value = look.value(measure, arm, at)
    unit = measures.find(measure)[0].unit
    if value is None:
        text = DIVERGED if failed else NOT_RUN if not look.results[arm] else _none(unit)
        why = {
            "n/a": "n/a: this method has no such number",
            "not reached": "; ".join(filter(None, ("not reached", look.words))),
        }
        return Cell(text, sub=beside, note="; ".join(failed) or why.get(text, ""))
    mean, spread = amount(value, unit, decimals)
    missing = len(look.results[arm]) - value.n
    notes = [look.words, f"{value.n} seed" + ("s" if value.n > 1 else "")]
    notes += [f"{missing} more had no such number" + (", it was not reached" if unit == "rounds" else "")] if missing else []
    return Cell(mean, spread, beside, "; ".join(filter(None, (*notes, *failed))))


def _none(unit: str) -> str:
    return "not reached" if unit == "rounds" else "n/a"


def _clients(experiment: Experiment, looks: Sequence[Look]) -> Table:
    """A row a client, columns last and best of each arm: of their own models on their own validation data."""
    decimals, arms = experiment.index.decimals, _arms(looks)
    heads = [Column("Setting", numeric=False), Column("Client", numeric=False)]
    for label in arms.values():
        heads += [Column("last round", label), Column("best round", label)]
    lines = []
    for look in looks:
        clients = look.networks
        for i, network in clients.items():
            cells = [_client_cell(look, arm, i, at, decimals) for arm in arms for at in (LAST, BEST)]
            lines.append((Cell(look.cell.about.row), Cell(f"{i}, {network}"), *cells))
        if not clients:
            lines.append((Cell(look.cell.about.row), Cell("all"), *(Cell(NOT_RUN) for _ in heads[2:])))
    images = ", which are test images" if all(look.cell.validates_on_test for look in looks) else ""
    caption = f"Each client's own model on its own validation data, %; the best round is chosen on them{images}"
    return Table(LAST, caption, tuple(heads), tuple(lines), _csv(experiment, looks))


def _client_cell(look: Look, arm: str, client: str, at: str, decimals: int) -> Cell:
    runs = [r for r in look.results.get(arm, {}).values() if client in r.clients]
    if not runs:
        return Cell(NOT_RUN)
    e = estimate([getattr(r.clients[client], at) for r in runs], "seeds")
    mean, spread = amount(e, "%", decimals)
    return Cell(mean, spread, note="; ".join(filter(None, (look.words, f"{e.n} seed" + ("s" if e.n > 1 else "")))))


def verdicts(judged: Judged, decimals: int) -> Table:
    """A claim cell by cell."""
    lines = []
    for line in judged.lines:
        none = DIVERGED if line.told else NOT_RUN
        text, spread = amount(line.difference, unit(judged), decimals) if line.difference else (none, "")
        note = "; ".join(filter(None, (line.scale, lost(line.diverged))))
        lines.append((Cell(line.title), Cell(line.verdict), Cell(text, spread, note=note)))
    heads = (Column("Where", numeric=False), Column("Verdict", numeric=False), Column("Difference"))
    rows = [[line.title, line.verdict, *((e.mean, e.half, e.n) if (e := line.difference) else ())] for line in judged.lines]
    csv = csv_text(["where", "verdict", "difference", "half_width", "seeds"], rows)
    return Table("verdicts", judged.claim.text, heads, tuple(lines), csv)


def lost(diverged: Lost) -> str:
    """ "fml diverged in 2 of 4 runs"; "" where none did."""
    return listed([f"{arm} diverged in {n} of {count(of, 'run')}" for arm, (n, of) in diverged.items()])


def unit(judged: Judged) -> str:
    """The unit of a claim's difference."""
    found = measures.find(judged.claim.measure)[0].unit
    return "points" if found == "%" else found


def numbers(experiment: Experiment, looks: Sequence[Look]) -> Iterator[dict[str, Any]]:
    """Every number of the tables, unrounded: fractions, rounds or losses."""
    for look in looks:
        for arm, about in look.cell.shown.items():
            for measure in experiment.index.measures:
                for at in (LAST, BEST):
                    value = look.value(measure, arm, at)
                    if value is None and (at == BEST or look.results[arm]):
                        continue
                    yield {
                        "cell": look.cell.name,
                        "row": look.cell.about.row,
                        "column": look.cell.about.column,
                        "arm": arm,
                        "measure": measure,
                        "unit": measures.find(measure)[0].unit,
                        "at": at,
                        "mean": value.mean if value else None,
                        "half": value.half if value else None,
                        "seeds": value.n if value else 0,
                        "paper": about.paper if at == LAST else None,
                        "state": look.words if look.results[arm] else NOT_RUN,
                    }


def _csv(experiment: Experiment, looks: Sequence[Look]) -> str:
    keys = ("cell", "arm", "measure", "at", "mean", "half", "seeds", "paper", "state")
    return csv_text(keys, [[line[k] for k in keys] for line in numbers(experiment, looks)])
