"""Build the tables of an experiment in the layout of the paper's tables, with the paper's numbers, and as records."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd

from fedmutual.errors import format_count, join_words
from fedmutual.report.cells import Column, PageTable, TableCell
from fedmutual.results.estimate import Estimate
from fedmutual_papers import measures
from fedmutual_papers.claims import DIVERGED, NOT_RUN, Judgement
from fedmutual_papers.collect import count_budget
from fedmutual_papers.experiment_files import AVERAGE, PaperExperiment, normalize_node
from fedmutual_papers.measured_cell import MeasuredCell, is_incomplete
from fedmutual_papers.measures import ENDPOINT, End
from fedmutual_papers.plan import make_arm_config
from fedmutual_papers.prose import (
    capitalize,
    describe_verdict,
    format_difference,
    format_p_value,
    format_value,
    name_arm,
    say,
)
from fedmutual_papers.store import Result

MEAN: End = "mean"
LAST: End = "last"
BEST: End = "best"
FAIR = "after the best round of each node, chosen on validation data"
OWN = "own_validation"
WIDEST = 8  # columns of numbers
TUNED_CAPTION = (
    "Settings with the highest accuracy after the last round of a sweep, on rows held out of clients' training data. "
    "Rounds: of the sweep, and of the runs on this page"
)
P_VALUES = ("Detectable", "p", "p after Holm")
STATES = ("full", "shortened", NOT_RUN)  # of printed numbers, the fullest first
ALL = "all"
KEYS = ["setting", "method", "rounds"]
HEADS = {
    "steps": "Gradient steps",
    "examples": "Examples seen",
    "up": "Bytes sent",
    "down": "Bytes received",
    "public": "Public examples sent, bytes",
}
SPENT_CAPTION = "For one client over the complete run, mean over clients and seeds"


def tabulate(
    id: str, caption: str, texts: Sequence[object], numbers: Sequence[object], rows: Iterable[Sequence[object]]
) -> PageTable:
    """Return a table. texts, numbers: the heads of the columns of texts, and of the columns of numbers to their right.

    A head is a `Column` or its name, and a cell of a row is a `TableCell` or its text.
    """
    named = [(head, False) for head in texts] + [(head, True) for head in numbers]
    heads = tuple(head if isinstance(head, Column) else Column(str(head), numeric=numeric) for head, numeric in named)
    cells = (tuple(cell if isinstance(cell, TableCell) else TableCell(str(cell)) for cell in row) for row in rows)
    return PageTable(id, caption, heads, tuple(cells), "")


def _join_notes(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def make_entry(measured: MeasuredCell, arm: str, measure: str, at: End, decimals: int, node: str | None = None) -> TableCell:
    """Return the table cell of an arm's number, or of the reason why there is none; below it the paper's number.

    Below a mean of the last rounds stands also the number of the last round.

    node: one of the nodes; None: the value of the run.
    """
    kind, results = measures.find(measure)[0], measured.results.get(arm, {})

    def find_value(at: End) -> Estimate | None:
        values = {i and normalize_node(i): e for i, e in measured.estimate_all(measure, arm, at).items()}
        return values.get(node and normalize_node(node))

    paper = measured.cell.shown[arm].find_printed(measure, node or AVERAGE) if kind.is_printed_at(at) else None
    is_mean = at == MEAN and kind.curve and any(len(r.evaluated) >= ENDPOINT for r in measured.list_finished(arm).values())
    last = f"last round {format_value(value, kind.unit, decimals)[0]}" if is_mean and (value := find_value(LAST)) else ""
    below = ", ".join(filter(None, (last, f"paper {paper:.2f}" if paper is not None else "")))
    failed = "; ".join(f"seed {s}: {r.failed}" for s, r in results.items() if r.failed)
    short = measured.describe_arm(arm)
    if (value := find_value(at)) is not None:
        missing, target = len(results) - value.n, ", because the target was not reached" if kind.unit == "rounds" else ""
        lacking = f"{format_count(missing, 'more seed')} without this number{target}" if missing else ""
        versions = say("mixed_versions", measured.list_numerics(arm))
        note = _join_notes(short, format_count(value.n, "seed"), lacking, versions, failed)
        return TableCell(*format_value(value, kind.unit, decimals), below, note)
    if failed:
        text, note = DIVERGED, failed
    elif not results:
        text, note = NOT_RUN, ""
    elif kind.of_weights and any(is_incomplete(measured.cell, r) for r in results.values()):
        text, note = NOT_RUN, "the run has results, but this number of its weights was not computed"
    elif kind.unit == "rounds":
        text, note = "not reached", _join_notes("not reached", short)
    else:
        text, note = "n/a", "n/a: this method does not have this number"
    return TableCell(text, sub=below, note=note)


def make_tables(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> list[PageTable]:
    """Return the tables of an experiment: first those with the paper's numbers, then those of the cells with results."""
    index, run = experiment.index, [measured for measured in measured_cells if measured.run]
    if index.view == "clients":
        return [_tabulate_clients(experiment, measured_cells)]
    kinds = {name: measures.find(name)[0] for name in index.measures}
    fair = [name for name, kind in kinds.items() if kind.counts == BEST]
    if index.view == "nodes":
        tables = [_tabulate_nodes(experiment, measured_cells, name) for name in fair]
    else:
        tables = _tabulate_settings(experiment, measured_cells, BEST if fair else MEAN, fair or list(kinds))
    if not run or not index.paper:  # a best round stands beside printed numbers only
        return tables
    rest = [name for name, kind in kinds.items() if (not kind.only_best if fair else kind.chosen)]
    return tables + _tabulate_settings(experiment, run, MEAN if fair else BEST, rest)


def _tabulate_settings(
    experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell], at: End, names: Sequence[str]
) -> list[PageTable]:
    """Return tables of measures with a row for each setting and arm, and columns for each data set with its network.

    All measures stand in one table if it is not too wide, else each in a table of its own.
    """
    by_place = {(measured.cell.about.row, measured.cell.about.column): measured for measured in measured_cells}
    columns, rows = (list(dict.fromkeys(place[k] for place in by_place)) for k in (1, 0))
    rows.sort(key=lambda row: not row.startswith("IID"))  # first, as in all papers
    tables = []
    for wanted in [names] if len(columns) * len(names) <= WIDEST else [[name] for name in names]:
        titles = {name: _make_head(name, at, measured_cells) for name in wanted}
        places = list(product(columns, wanted))
        heads = [Column(titles[name], column) if len(wanted) > 1 else Column(column) for column, name in places]
        lines = []
        for row in rows:
            of_row = {column: by_place[row, column] for column in columns if (row, column) in by_place}
            for arm, label in _list_arms(of_row.values()).items():
                entries = (
                    make_entry(of_row[column], arm, name, at, experiment.index.decimals)
                    if column in of_row and arm in of_row[column].cell.shown
                    else ""
                    for column, name in places
                )
                lines.append((row, label, *entries))
        is_fair = at == BEST and all(measures.find(name)[0].counts == BEST for name in wanted)
        of_best = FAIR if is_fair else "after the best round, so the numbers are too high"
        has_curve = any(measures.find(name)[0].curve for name in wanted)
        at_end = f"mean of the last {ENDPOINT} evaluated rounds" if has_curve else "after the last round"
        when = at_end if at == MEAN else of_best
        caption = capitalize(f"{titles[wanted[0]]}, {when}" if len(wanted) == 1 else when) if wanted else ""
        if wanted:
            tables.append(tabulate(f"{at}-{wanted[0].partition(':')[0]}", caption, ("Setting", "Method"), heads, lines))
    return tables


def _make_head(measure: str, at: End, measured_cells: Sequence[MeasuredCell]) -> str:
    kind, title = measures.find(measure)[0], measures.get_title(measure)
    if at in (MEAN, kind.counts):
        return title
    tests = all(measured.cell.validates_on_test for measured in measured_cells)
    return f"{title}, {measures.CHOSEN_BY_TEST if tests else kind.chosen}"


def _list_arms(measured_cells: Iterable[MeasuredCell]) -> dict[str, str]:
    return {key: name_arm(key, arm) for measured in measured_cells for key, arm in measured.cell.shown.items()}


def _tabulate_nodes(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell], measure: str) -> PageTable:
    """Return a table of one measure with a row for each setting and arm and a column for each node, the mean last."""
    counts, pairs = measures.find(measure)[0].counts, [(x, arm) for x in measured_cells for arm in x.cell.shown]
    printed = (x.cell.shown[arm].paper for x, arm in pairs)
    tables: list[Iterable[str | None]] = [paper.get(measure, {}) for paper in printed if isinstance(paper, dict)]
    tables += [x.read_numbers(measure, arm, counts) for x, arm in pairs]
    names: dict[str, str] = {}  # plain name -> displayed name
    for node in (node for table in tables for node in table if node not in (None, AVERAGE)):
        names.setdefault(normalize_node(node or ""), node or "")
    lines = [
        (
            x.cell.about.row,
            name_arm(arm, x.cell.shown[arm]),
            *(make_entry(x, arm, measure, counts, experiment.index.decimals, node) for node in (*names.values(), None)),
        )
        for x, arm in pairs
    ]
    caption = capitalize(f"{measures.get_title(measure)}, {FAIR}")
    return tabulate(f"nodes-{measure}", caption, ("Setting", "Method"), [*names.values(), AVERAGE], lines)


def _tabulate_clients(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> PageTable:
    """Return a table with a row for each client: the accuracy of its model on its validation data, mean and best round."""
    arms, lines = _list_arms(measured_cells), list[Sequence[object]]()
    ends, decimals = list(product(arms, (MEAN, BEST))), experiment.index.decimals
    for measured in measured_cells:
        row = measured.cell.about.row
        for i, network in measured.networks.items():
            scored = {arm for arm in arms if i in measured.read_numbers(OWN, arm)}
            entries = (make_entry(measured, arm, OWN, at, decimals, i) if arm in scored else NOT_RUN for arm, at in ends)
            lines.append((row, f"{i}, {network}", *entries))
        if not measured.networks:
            lines.append((row, "all", *(NOT_RUN for _ in ends)))
    heads = [Column("mean" if at == MEAN else "best round", arms[arm]) for arm, at in ends]
    images = ", which are test images" if all(measured.cell.validates_on_test for measured in measured_cells) else ""
    caption = f"Each client's own model on its own validation data, %; the best round is chosen on these data{images}"
    return tabulate(MEAN, caption, ("Setting", "Client"), heads, lines)


def list_records(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> Iterator[dict[str, Any]]:
    """Yield one record for each cell, arm, measure and end (fractions, rounds, losses or bytes); also for nodes if shown."""
    arms = [(measured, arm) for measured in measured_cells for arm in measured.cell.shown]
    for (measured, arm), measure, at in product(arms, experiment.index.measures, (MEAN, LAST, BEST)):
        kind, about = measures.find(measure)[0], measured.cell.about
        values: dict[str | None, Any] = dict(measured.estimate_all(measure, arm, at))
        if at == kind.counts and not measured.results[arm]:
            values[None] = None
        for node, value in values.items():
            if node is None or experiment.index.view == "nodes":
                printed = measured.cell.shown[arm].find_printed(measure, node or AVERAGE)
                yield {
                    "cell": measured.cell.name,
                    "row": about.row,
                    "column": about.column,
                    "arm": arm,
                    "measure": measure,
                    "unit": kind.unit,
                    "at": at,
                    "node": node,
                    "mean": value and value.mean,
                    "half": value and value.half,
                    "seeds": value.n if value else 0,
                    "paper": printed if at == kind.counts or (at, kind.counts) == (LAST, MEAN) else None,
                    "state": measured.describe_arm(arm) if measured.results[arm] else NOT_RUN,
                }


def make_claims_table(readings: Sequence[Sequence[Judgement]], decimals: int) -> PageTable:
    """Return the table of all claims with their verdicts, one row for each reading, with p-values."""
    several, lines = any(j.title for of_claim in readings for j in of_claim), []
    for number, of_claim in enumerate(readings, 1):
        for place, judged in enumerate(of_claim):
            head = [str(number), judged.claim.text] if place == 0 else ["", ""]
            head += [judged.title] if several else []
            least = "" if judged.detectable is None else format_difference(judged.detectable, judged.unit, decimals)
            p_values = map(format_p_value, (judged.p, judged.adjusted))
            lines.append((*head, capitalize(describe_verdict(judged, decimals)), least.removeprefix("+"), *p_values))
    texts = [Column("No."), "Claim", *(["Reading"] if several else []), "Verdict"]
    return tabulate("claims", "Claims and verdicts", texts, P_VALUES, lines)


def make_verdicts_table(judged: Judgement, decimals: int, only_judged: bool = False) -> PageTable:
    """Return the table of a claim's verdicts, one row for each cell or client. only_judged: without those not run."""
    lines = []
    for line in judged.judged_lines if only_judged else judged.lines:
        e, diverged = line.difference, say("divergence", line.diverged)
        text, spread = format_value(e, judged.unit, decimals) if e else (DIVERGED if line.is_judged else NOT_RUN, "")
        note = _join_notes(line.scale, say("mixed_versions", line.numerics), diverged)
        lines.append((line.title, line.verdict, TableCell(text, spread, note=note)))
    return tabulate("verdicts", judged.claim.text, ("Where", "Verdict"), ("Difference",), lines)


def make_tunings_table(measured_cells: Sequence[MeasuredCell]) -> PageTable | None:
    """Return the table of the settings that sweeps chose, one row for each such arm; None if there is none."""
    texts = ("Setting", "Method", "Chosen", "Sweep", "Tried", "At an end of the grid", "Model")
    rows = [
        (
            m.cell.title,
            name_arm(arm, m.cell.arms[arm]),
            ", ".join(f"{key} = {value}" for key, value in tuning.chosen.items())
            + ("" if m.cell.arms[arm].rate_times == 1 else f", times {m.cell.arms[arm].rate_times:g}"),
            f"{tuning.path.parent.name}/{tuning.path.name}",
            "; ".join(f"{key}: {', '.join(map(str, tried))}" for key, tried in tuning.grid.items()),
            join_words(tuning.ends) or "no",
            {"global": "shared", "personal": "personal"}.get(tuning.by or "", "a client's"),
            f"{100 * tuning.holdout:g} %",
            f"{tuning.rounds} of {m.cell.get_rounds(arm)}",
            len(tuning.seeds),
        )
        for m in measured_cells
        for arm, tuning in m.cell.tunings.items()
    ]
    return tabulate("tunings", TUNED_CAPTION, texts, ("Held out", "Rounds", "Seeds"), rows) if rows else None


def make_printed_frame(experiments: Iterable[tuple[PaperExperiment, Sequence[MeasuredCell]]]) -> pd.DataFrame:
    """Return the counts of the papers' printed numbers: a row for each experiment and "all", a column for each of STATES.

    A cell that repeats the paper's numbers of another cell (`printed_in`) counts for that cell if that cell has the arm; the
    most complete state counts.
    """
    states: dict[tuple[str, ...], list[int]] = defaultdict(list)  # a printed number -> the state in each cell that has it
    owners: dict[tuple[str, ...], str] = {}
    for experiment, measured in ((experiment, m) for experiment, measured_cells in experiments for m in measured_cells):
        about = measured.cell.about
        for arm, method in measured.cell.shown.items():
            state = 2 if not measured.results.get(arm) else 1 if measured.describe_arm(arm) else 0
            for measure, node, _ in method.list_printed(experiment.index.measures[0]):
                number = about.printed_in or measured.cell.id, arm, measure, node
                states[number].append(state)
                if not about.printed_in:
                    owners[number] = experiment.id
    rows = [(id, STATES[min(states[number])]) for number, id in owners.items()]
    frame = pd.DataFrame(rows, columns=["experiment", "state"])
    counts = pd.crosstab(frame["experiment"], frame["state"]).reindex(columns=list(STATES), fill_value=0)
    counts = counts.loc[frame["experiment"].drop_duplicates()]
    counts.loc[ALL] = counts.sum()
    return counts


def make_printed_table(counts: pd.DataFrame) -> PageTable:
    """Return the counts as a report table, with a link to the page of each experiment."""
    rows = [
        (f"[{name}]({name}.md)" if name != ALL else "**all**", *(f"{n:,}" for n in (numbers.sum(), *numbers)))
        for name, numbers in counts.iterrows()
    ]
    return tabulate("printed", "", ("Experiment",), ("Printed numbers", *STATES), rows)


def find_budget(measured: MeasuredCell, arm: str, result: Result) -> Mapping[Any, float | None]:
    """Return a run's stored budget, else "steps" and "examples" counted from its configuration and its clients' rows.

    {}: as `count_budget` returns None.
    """
    if result.budget:
        return result.budget
    config = make_arm_config(measured.cell, arm, result.seed, measured.scale)
    private = {i: client.examples for i, client in result.clients.items()}
    public_share, private_share = config.split.public, config.split.private or 1 - config.split.public
    public = {i: round(n * public_share / private_share) for i, n in private.items()} if public_share else {}
    return dict(zip(("steps", "examples"), count_budget(config, private, public) or (), strict=False))


def make_spent_frame(measured_cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    """Return a row for each arm with results, for one client over a run; numbers are means over clients and seeds, or NaN.

    Columns: "setting", "method", "rounds" (text), gradient "steps", "examples" in these steps, and in bytes "up", "down" and
    "public" (public examples).
    """
    rows = []
    for measured, arm in ((of_cell, arm) for of_cell in measured_cells for arm in of_cell.results):
        ran, planned = measured.scale.count_rounds(measured.cell, arm)
        rounds = f"{ran:,} of {planned:,}" if ran < planned else f"{planned:,}"
        place = measured.cell.title, name_arm(arm, measured.cell.shown[arm]), rounds
        for result in measured.list_finished(arm).values():
            budget, traffic = find_budget(measured, arm, result), result.traffic and {"seed": 0, **result.traffic}
            moved = (traffic[way] / (len(result.clients) or 1) if traffic else None for way in ("up", "down", "seed"))
            rows.append((*place, budget.get("steps"), budget.get("examples"), *moved))
    frame = pd.DataFrame(rows, columns=[*KEYS, *HEADS])
    return frame.groupby(KEYS, sort=False)[list(HEADS)].mean().reset_index()


def make_spent_table(measured_cells: Sequence[MeasuredCell]) -> PageTable | None:
    """Return the frame as a report table; None if nothing was run."""
    means = make_spent_frame(measured_cells)
    missing = TableCell("n/a", note="n/a: not counted in this run")
    rows = [
        (*row[:3], *(missing if pd.isna(number) else f"{number:,.0f}" for number in row[3:]))
        for row in means.itertuples(index=False)
    ]
    numbers = ("Rounds", *HEADS.values())
    return tabulate("spent", SPENT_CAPTION, ("Setting", "Method"), numbers, rows) if rows else None


def list_spent(measured_cells: Sequence[MeasuredCell]) -> list[dict[str, Any]]:
    """Return the rows of the frame for JSON."""
    records: list[dict[str, Any]] = json.loads(make_spent_frame(measured_cells).to_json(orient="records"))
    return records
