"""Build the tables of an experiment in the layout of the paper's tables, with the paper's numbers, and as records."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pandas as pd

from fedmutual.errors import format_count, join_words
from fedmutual.report.cells import Column, PageTable, TableCell
from fedmutual.results.estimate import Estimate
from fedmutual.results.scale import format_percent_number
from fedmutual_papers import measures
from fedmutual_papers.claims import DIVERGED, NOT_RUN, Judgement
from fedmutual_papers.experiment_files import AVERAGE, PaperExperiment, normalize_node
from fedmutual_papers.measured_cell import MeasuredCell, is_incomplete
from fedmutual_papers.prose import (
    capitalize,
    describe_divergence,
    describe_mixed_versions,
    describe_seeds,
    describe_verdict,
    format_p_value,
    format_value,
    name_arm,
)
from fedmutual_papers.store import End, Result, ResultStore

LAST: End = "last"
BEST: End = "best"
FAIR = "after the best round of each node, chosen on validation data"
OWN = "own_validation"
WIDEST = 8  # columns of numbers
TUNED_CAPTION = (
    "Settings with the highest accuracy after the last round of a sweep, on rows held out of clients' training data. "
    "Rounds: of the sweep, and of the runs on this page"
)
P_VALUES = ("p", "Holm, this page", "Holm, all pages")
FULL, SHORTENED = "full", "shortened"
STATES = (FULL, SHORTENED, NOT_RUN)  # of printed numbers, the fullest first
ALL = "all"
MACHINE = ("platform", "cpus", "device", "threads", "python", "torch")  # on an equal one, equal runs have equal bits


def tabulate(
    id: str,
    caption: str,
    texts: Sequence[object],
    numbers: Sequence[object],
    rows: Iterable[Sequence[object]],
) -> PageTable:
    """Return a table. texts, numbers: the heads of the columns of texts, and of the columns of numbers to their right.

    A head is a `Column` or its name, and a cell of a row is a `TableCell` or its text.
    """
    heads = [head if isinstance(head, Column) else Column(str(head), numeric=False) for head in texts]
    heads += [head if isinstance(head, Column) else Column(str(head)) for head in numbers]
    cells = (tuple(cell if isinstance(cell, TableCell) else TableCell(str(cell)) for cell in row) for row in rows)
    return PageTable(id, caption, tuple(heads), tuple(cells), "")


def make_entry(
    measured: MeasuredCell, arm: str, value: Estimate | None, paper: float | None, measure: str, decimals: int
) -> TableCell:
    """Return the table cell of an arm's number with the paper's number, or with the reason why there is no number."""
    kind, results = measures.find(measure)[0], measured.results.get(arm, {})
    paper_text = f"paper {paper:.2f}" if paper is not None else ""
    failed = "; ".join(f"seed {s}: {r.failed}" for s, r in results.items() if r.failed)
    short = measured.describe_arm(arm)
    if value is not None:
        missing, target = len(results) - value.n, ", because the target was not reached" if kind.unit == "rounds" else ""
        lacking = f"{format_count(missing, 'more seed')} without this number{target}" if missing else ""
        versions = describe_mixed_versions(measured.list_numerics(arm))
        notes = (short, describe_seeds(value.n), lacking, versions, failed)
        mean, spread = format_value(value, kind.unit, decimals)
        return TableCell(mean, spread, paper_text, "; ".join(filter(None, notes)))
    if failed:
        text, note = DIVERGED, failed
    elif not results:
        text, note = NOT_RUN, ""
    elif kind.of_weights and any(is_incomplete(measured.cell, r) for r in results.values()):
        text, note = NOT_RUN, "the run has results, but this number of its weights was not computed"
    elif kind.unit == "rounds":
        text, note = "not reached", "; ".join(filter(None, ("not reached", short)))
    else:
        text, note = "n/a", "n/a: this method does not have this number"
    return TableCell(text, sub=paper_text, note=note)


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
        tables = _tabulate_settings(experiment, measured_cells, BEST if fair else LAST, fair or list(kinds))
    if not run or not index.paper:  # a best round stands beside printed numbers only
        return tables
    rest = [name for name, kind in kinds.items() if (not kind.only_best if fair else kind.chosen)]
    return tables + _tabulate_settings(experiment, run, LAST if fair else BEST, rest)


def _tabulate_settings(
    experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell], at: End, names: Sequence[str]
) -> list[PageTable]:
    """Return tables of measures with a row for each setting and arm, and columns for each data set with its network.

    All measures stand in one table if it is not too wide, else each in a table of its own.
    """
    columns = list(dict.fromkeys(measured.cell.about.column for measured in measured_cells))
    rows = list(dict.fromkeys(measured.cell.about.row for measured in measured_cells))
    rows.sort(key=lambda row: not row.startswith("IID"))  # first, as in all papers
    by_place = {(measured.cell.about.row, measured.cell.about.column): measured for measured in measured_cells}
    tables = []
    for wanted in [names] if len(columns) * len(names) <= WIDEST else [[name] for name in names]:
        if not wanted:
            continue
        titles = [_make_head(name, at, measured_cells) for name in wanted]
        heads = [Column(title, column) if len(wanted) > 1 else Column(column) for column in columns for title in titles]
        lines = []
        for row in rows:
            of_row = {column: by_place[row, column] for column in columns if (row, column) in by_place}
            for arm, label in _list_arms(of_row.values()).items():
                places = ((of_row.get(column), name) for column in columns for name in wanted)
                entries = (_make_cell(measured, arm, name, at, experiment.index.decimals) for measured, name in places)
                lines.append((row, label, *entries))
        is_fair = at == BEST and all(measures.find(name)[0].counts == BEST for name in wanted)
        of_best = FAIR if is_fair else "after the best round, so the numbers are too high"
        when = "after the last round" if at == LAST else of_best
        caption = capitalize(f"{titles[0]}, {when}" if len(wanted) == 1 else when)
        id = f"{at}-{wanted[0].partition(':')[0]}"
        tables.append(tabulate(id, caption, ("Setting", "Method"), heads, lines))
    return tables


def _make_head(measure: str, at: End, measured_cells: Sequence[MeasuredCell]) -> str:
    kind, title = measures.find(measure)[0], measures.get_title(measure)
    if at in (LAST, kind.counts):
        return title
    tests = all(measured.cell.validates_on_test for measured in measured_cells)
    return f"{title}, {measures.CHOSEN_BY_TEST if tests else kind.chosen}"


def _list_arms(measured_cells: Iterable[MeasuredCell]) -> dict[str, str]:
    return {key: name_arm(key, arm) for measured in measured_cells for key, arm in measured.cell.shown.items()}


def _make_cell(measured: MeasuredCell | None, arm: str, measure: str, at: End, decimals: int) -> TableCell:
    if measured is None or arm not in measured.cell.shown:
        return TableCell("")
    is_printed = measures.find(measure)[0].is_printed_at(at)
    paper = measured.cell.shown[arm].find_printed(measure) if is_printed else None
    return make_entry(measured, arm, measured.estimate(measure, arm, at), paper, measure, decimals)


def _tabulate_nodes(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell], measure: str) -> PageTable:
    """Return a table of one measure with a row for each setting and arm and a column for each node, the mean last."""
    counts, pairs = measures.find(measure)[0].counts, [(x, arm) for x in measured_cells for arm in x.cell.shown]
    printed = (a.paper for x, arm in pairs for a in [x.cell.shown[arm]])
    tables: list[Mapping[str, object]] = [paper.get(measure, {}) for paper in printed if isinstance(paper, dict)]
    tables += [measured.estimate_nodes(measure, arm, counts) for measured, arm in pairs]
    names: dict[str, str] = {}  # plain name -> displayed name
    for node in (node for table in tables for node in table):
        names.setdefault(normalize_node(node), node)
    names = {plain: node for plain, node in names.items() if plain != AVERAGE} | {AVERAGE: AVERAGE}
    lines = []
    for measured, arm in pairs:
        about = measured.cell.shown[arm]
        values = {normalize_node(i): v for i, v in measured.estimate_nodes(measure, arm, counts).items()}
        values |= {AVERAGE: v} if (v := measured.estimate(measure, arm, counts)) else {}
        entries = (
            make_entry(measured, arm, values.get(i), about.find_printed(measure, i), measure, experiment.index.decimals)
            for i in names
        )
        lines.append((measured.cell.about.row, name_arm(arm, about), *entries))
    caption = capitalize(f"{measures.get_title(measure)}, {FAIR}")
    return tabulate(f"nodes-{measure}", caption, ("Setting", "Method"), list(names.values()), lines)


def _tabulate_clients(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> PageTable:
    """Return a table with a row for each client: the accuracy of its model on its validation data, last and best round."""
    arms, lines = _list_arms(measured_cells), list[Sequence[object]]()
    ends = [(arm, at) for arm in arms for at in (LAST, BEST)]
    for measured in measured_cells:
        row, estimates = measured.cell.about.row, {end: measured.estimate_nodes(OWN, *end) for end in ends}
        for i, network in measured.networks.items():
            entries = (
                make_entry(measured, arm, value, None, OWN, experiment.index.decimals)
                if (value := estimates[arm, at].get(i))
                else NOT_RUN
                for arm, at in ends
            )
            lines.append((row, f"{i}, {network}", *entries))
        if not measured.networks:
            lines.append((row, "all", *(NOT_RUN for _ in ends)))
    heads = [Column(f"{at} round", arms[arm]) for arm, at in ends]
    images = ", which are test images" if all(measured.cell.validates_on_test for measured in measured_cells) else ""
    caption = f"Each client's own model on its own validation data, %; the best round is chosen on these data{images}"
    return tabulate(LAST, caption, ("Setting", "Client"), heads, lines)


def list_records(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> Iterator[dict[str, Any]]:
    """Yield one record for each cell, arm, measure and end (fractions, rounds, losses or bytes); also for nodes if shown."""
    for measured in measured_cells:
        for arm, about in measured.cell.shown.items():
            for measure in experiment.index.measures:
                kind = measures.find(measure)[0]
                for at in (LAST, BEST):
                    values: dict[str | None, Estimate | None] = {}
                    if experiment.index.view == "nodes":
                        values = dict(measured.estimate_nodes(measure, arm, at).items())
                    mean = measured.estimate(measure, arm, at)
                    if mean is not None or (at == kind.counts and not measured.results[arm]):
                        values[None] = mean
                    for node, value in values.items():
                        yield {
                            "cell": measured.cell.name,
                            "row": measured.cell.about.row,
                            "column": measured.cell.about.column,
                            "arm": arm,
                            "measure": measure,
                            "unit": kind.unit,
                            "at": at,
                            "node": node,
                            "mean": value.mean if value else None,
                            "half": value.half if value else None,
                            "seeds": value.n if value else 0,
                            "paper": about.find_printed(measure, node or AVERAGE) if at == kind.counts else None,
                            "state": measured.describe_arm(arm) if measured.results[arm] else NOT_RUN,
                        }


def make_claims_table(readings: Sequence[Sequence[Judgement]], decimals: int) -> PageTable:
    """Return the table of all claims with their verdicts, one row for each reading, with p-values and Holm's adjustments."""
    several, lines = any(len(of_claim) > 1 for of_claim in readings), []
    for number, of_claim in enumerate(readings, 1):
        for place, judged in enumerate(of_claim):
            head = [str(number), judged.claim.text] if place == 0 else ["", ""]
            head += [judged.reading] if several else []
            p_values = map(format_p_value, (judged.p, *judged.holm))
            lines.append((*head, capitalize(describe_verdict(judged, decimals)), *p_values))
    texts = [Column("No."), "Claim", *(["Reading"] if several else []), "Verdict"]
    return tabulate("claims", "Claims and verdicts", texts, P_VALUES, lines)


def make_verdicts_table(judged: Judgement, decimals: int, only_judged: bool = False) -> PageTable:
    """Return the table of a claim's verdicts, one row for each cell or client. only_judged: without those not run."""
    lines = []
    for line in judged.judged_lines if only_judged else judged.lines:
        e, notes = line.difference, (line.scale, describe_mixed_versions(line.numerics), describe_divergence(line.diverged))
        text, spread = format_value(e, judged.unit, decimals) if e else (DIVERGED if line.is_judged else NOT_RUN, "")
        lines.append((line.title, line.verdict, TableCell(text, spread, note="; ".join(filter(None, notes)))))
    return tabulate("verdicts", judged.claim.text, ("Where", "Verdict"), ("Difference",), lines)


def make_tunings_table(measured_cells: Sequence[MeasuredCell]) -> PageTable | None:
    """Return the table of the settings that sweeps chose, one row for each such arm; None if there is none."""
    texts = ("Setting", "Method", "Chosen", "Sweep", "Tried", "At an end of the grid", "Model")
    numbers, rows = ("Held out", "Rounds", "Seeds"), []
    for cell, arm, tuning in ((m.cell, arm, tuning) for m in measured_cells for arm, tuning in m.cell.tunings.items()):
        share = "" if tuning.rate_times == 1 else f", times {tuning.rate_times:g}"
        rows.append(
            (
                cell.title,
                name_arm(arm, cell.arms[arm]),
                ", ".join(f"{key} = {value}" for key, value in tuning.chosen.items()) + share,
                f"{tuning.path.parent.name}/{tuning.path.name}",
                "; ".join(f"{key}: {', '.join(map(str, tried))}" for key, tried in tuning.grid.items()),
                join_words(tuning.ends) or "no",
                {"global": "shared", "personal": "personal"}.get(tuning.by or "", "a client's"),
                f"{100 * tuning.holdout:g} %",
                f"{tuning.rounds} of {cell.get_rounds(arm)}",
                str(len(tuning.seeds)),
            )
        )
    return tabulate("tunings", TUNED_CAPTION, texts, numbers, rows) if rows else None


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
    names = {name: f"[{name}]({name}.md)" if name != ALL else "**all**" for name in counts.index}
    rows = [(names[name], *(f"{n:,}" for n in (numbers.sum(), *numbers))) for name, numbers in counts.iterrows()]
    return tabulate("printed", "", ("Experiment",), ("Printed numbers", *STATES), rows)


def make_repeats_frame(store: ResultStore) -> pd.DataFrame:
    """Return a row for each cell, arm and machine: "pairs" of runs, "scores", the "equal" scores, "largest" difference.

    The largest difference is a fraction. Scores are those of the curves, in rounds that both runs evaluated. The two runs
    of a pair have one configuration, seed and numerics version, and differ only in the rounds. Runs with equal rounds are
    no pair, because they may be one run that two cells share.
    """
    alike: dict[tuple[str, int], dict[int, tuple[str, Result]]] = defaultdict(dict)  # by rounds
    for cell, result in ((id, result) for id in store.cells for result in store.list_results(id) if not result.failed):
        alike[result.fingerprint.rpartition("-")[0], result.numerics].setdefault(result.rounds, (cell, result))
    rows = []
    for (cell, first), (_, second) in (pair for runs in alike.values() for pair in combinations(runs.values(), 2)):
        differences = [
            abs(one[n] - other[n])
            for name in first.curves.keys() & second.curves.keys()
            for one, other in [[dict(zip(r.evaluated, r.curves[name], strict=True)) for r in (first, second)]]
            for n in one.keys() & other.keys()
        ]
        same = all(getattr(first.made, key) == getattr(second.made, key) for key in MACHINE)
        if differences:
            equal = differences.count(0.0)
            machine = "the same" if same else "another"
            rows.append((cell, first.arm, machine, 1, len(differences), equal, max(differences)))
    frame = pd.DataFrame(rows, columns=["cell", "arm", "machine", "pairs", "scores", "equal", "largest"])
    sums = {"pairs": "sum", "scores": "sum", "equal": "sum", "largest": "max"}
    return frame.groupby(["cell", "arm", "machine"], sort=False).agg(sums).reset_index()


def make_repeats_table(frame: pd.DataFrame) -> PageTable:
    """Return the frame as a report table, with differences in points."""
    rows = [
        (r.cell, r.arm, r.machine, f"{r.pairs:,}", f"{r.equal:,} of {r.scores:,}", format_percent_number(r.largest, 2))
        for r in frame.itertuples()
    ]
    numbers = ("Pairs of runs", "Equal scores", "Largest difference")
    return tabulate("repeats", "", ("Cell", "Arm", "Machine"), numbers, rows)
