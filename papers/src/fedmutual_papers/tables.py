"""Build the tables of an experiment in the layout of the paper's tables, with the paper's numbers."""

from collections.abc import Mapping, Sequence

from fedmutual.errors import join_words
from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual.results.estimate import estimate
from fedmutual_papers import measures
from fedmutual_papers.claims import DIVERGED, NOT_RUN, Judgement
from fedmutual_papers.entries import (
    capitalize,
    describe_divergence,
    describe_mixed_versions,
    format_value,
    get_unit,
    make_entry,
    name_arm,
)
from fedmutual_papers.experiment_files import PaperExperiment
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.numbers import format_records
from fedmutual_papers.prose import describe_verdict, format_p_value
from fedmutual_papers.schema import AVERAGE, End, normalize_node
from fedmutual_papers.tuning import Tuning

LAST: End = "last"
BEST: End = "best"
FAIR = "after the best round of each node, chosen on validation data"
WIDEST = 8  # columns of numbers
TUNED_CAPTION = (
    "Settings with the highest accuracy after the last round of a sweep, on rows held out of clients' training data. "
    "Rounds: of the sweep, and of the runs on this page"
)
P_VALUES = ("p", "Holm, this page", "Holm, all pages")


def make_tables(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> list[PageTable]:
    """Return the tables of an experiment: first those with the paper's numbers, then those of the cells with results."""
    if experiment.index.view == "clients":
        return [_tabulate_clients(experiment, measured_cells)]
    run, named = [measured for measured in measured_cells if measured.run], experiment.index.measures
    fair = [m for m in named if measures.find(m)[0].counts == BEST]
    if experiment.index.view == "nodes":
        tables = [_tabulate_nodes(experiment, measured_cells, m) for m in fair]
    elif fair:
        tables = [
            _tabulate_settings(experiment, measured_cells, BEST, group) for group in _group_measures(fair, measured_cells)
        ]
    else:
        tables = [
            _tabulate_settings(experiment, measured_cells, LAST, group) for group in _group_measures(named, measured_cells)
        ]
    if not run or not experiment.index.paper:  # a best round stands beside printed numbers only
        return tables
    rest = [m for m in named if (not measures.find(m)[0].only_best if fair else measures.find(m)[0].chosen)]
    return [
        *tables,
        *(_tabulate_settings(experiment, run, LAST if fair else BEST, group) for group in _group_measures(rest, run)),
    ]


def _group_measures(named: Sequence[str], measured_cells: Sequence[MeasuredCell]) -> list[Sequence[str]]:
    """Return groups of measures that share a table: all in one, or one for each measure if there are too many columns."""
    columns = len({measured.cell.about.column for measured in measured_cells})
    if not named:
        return []
    return [named] if columns * len(named) <= WIDEST else [[m] for m in named]


def _tabulate_settings(
    experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell], at: End, wanted: Sequence[str]
) -> PageTable:
    """Return a table with a row for each setting and arm and a column for each data set with its network."""
    rows, columns = _list_places(measured_cells)
    heads = [Column("Setting", numeric=False), Column("Method", numeric=False)]
    for column in columns:
        heads += [Column(_make_head(m, at, measured_cells), column) if len(wanted) > 1 else Column(column) for m in wanted]
    lines = []
    for row in rows:
        cell_by_column = {
            measured.cell.about.column: measured for measured in measured_cells if measured.cell.about.row == row
        }
        for arm, label in _list_arms(list(cell_by_column.values())).items():
            cells = [
                _make_cell(cell_by_column.get(c), arm, m, at, experiment.index.decimals) for c in columns for m in wanted
            ]
            lines.append((TableCell(row), TableCell(label), *cells))
    fair = at == BEST and all(measures.find(m)[0].counts == BEST for m in wanted)
    when = "after the last round" if at == LAST else FAIR if fair else "after the best round, so the numbers are too high"
    caption = capitalize(f"{_make_head(wanted[0], at, measured_cells)}, {when}" if len(wanted) == 1 else when)
    return PageTable(
        f"{at}-{wanted[0].partition(':')[0]}",
        caption,
        tuple(heads),
        tuple(lines),
        format_records(experiment, measured_cells),
    )


def _make_head(measure: str, at: End, measured_cells: Sequence[MeasuredCell]) -> str:
    if at in (LAST, measures.find(measure)[0].counts):
        return measures.get_title(measure)
    tests = all(measured.cell.validates_on_test for measured in measured_cells)
    return f"{measures.get_title(measure)}, {measures.CHOSEN_BY_TEST if tests else measures.find(measure)[0].chosen}"


def _list_places(measured_cells: Sequence[MeasuredCell]) -> tuple[list[str], list[str]]:
    """Return the rows and the columns, in the order in which the cells first name them."""
    rows = dict.fromkeys(measured.cell.about.row for measured in measured_cells)
    return _sort_settings(list(rows)), list(dict.fromkeys(measured.cell.about.column for measured in measured_cells))


def _sort_settings(rows: list[str]) -> list[str]:
    """Return the settings with IID first, as in all papers; the others keep their order."""
    return sorted(rows, key=lambda row: not row.startswith("IID"))


def _list_arms(measured_cells: Sequence[MeasuredCell]) -> dict[str, str]:
    return {key: name_arm(key, arm) for measured in measured_cells for key, arm in measured.cell.shown.items()}


def _make_cell(measured: MeasuredCell | None, arm: str, measure: str, at: End, decimals: int) -> TableCell:
    if measured is None or arm not in measured.cell.shown:
        return TableCell("")
    kind = measures.find(measure)[0]
    paper = measured.cell.shown[arm].find_printed(measure) if kind.is_printed_at(at) else None
    return make_entry(measured, arm, measured.estimate(measure, arm, at), paper, kind, decimals)


def _tabulate_nodes(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell], measure: str) -> PageTable:
    """Return a table of one measure with a row for each setting and arm and a column for each node, the mean last."""
    kind, decimals = measures.find(measure)[0], experiment.index.decimals
    printed = [a.paper.get(measure, {}) for x in measured_cells for a in x.cell.shown.values() if isinstance(a.paper, dict)]
    node_values = [
        measured.estimate_nodes(measure, arm, kind.counts) for measured in measured_cells for arm in measured.cell.shown
    ]
    nodes = _name_nodes([*printed, *node_values])
    heads = [Column("Setting", numeric=False), Column("Method", numeric=False), *map(Column, nodes.values())]
    lines = []
    for measured in measured_cells:
        for arm, about in measured.cell.shown.items():
            values = {normalize_node(i): v for i, v in measured.estimate_nodes(measure, arm, kind.counts).items()}
            values |= {AVERAGE: v} if (v := measured.estimate(measure, arm, kind.counts)) else {}
            cells = [make_entry(measured, arm, values.get(i), about.find_printed(measure, i), kind, decimals) for i in nodes]
            lines.append((TableCell(measured.cell.about.row), TableCell(name_arm(arm, about)), *cells))
    caption = capitalize(f"{measures.get_title(measure)}, {FAIR}")
    return PageTable(f"nodes-{measure}", caption, tuple(heads), tuple(lines), format_records(experiment, measured_cells))


def _name_nodes(tables: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return plain name -> displayed name of all nodes, each once, with the average last."""
    names: dict[str, str] = {}
    for table in tables:
        for node in table:
            names.setdefault(normalize_node(node), node)
    names.pop(AVERAGE, None)
    return {**names, AVERAGE: AVERAGE}


def _tabulate_clients(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> PageTable:
    """Return a table with a row for each client: the accuracy of its model on its validation data, last and best round."""
    decimals, arms = experiment.index.decimals, _list_arms(measured_cells)
    heads = [Column("Setting", numeric=False), Column("Client", numeric=False)]
    for label in arms.values():
        heads += [Column("last round", label), Column("best round", label)]
    lines = []
    for measured in measured_cells:
        clients = measured.networks
        for i, network in clients.items():
            cells = [_make_client_cell(measured, arm, i, at, decimals) for arm in arms for at in (LAST, BEST)]
            lines.append((TableCell(measured.cell.about.row), TableCell(f"{i}, {network}"), *cells))
        if not clients:
            lines.append((TableCell(measured.cell.about.row), TableCell("all"), *(TableCell(NOT_RUN) for _ in heads[2:])))
    images = ", which are test images" if all(measured.cell.validates_on_test for measured in measured_cells) else ""
    caption = f"Each client's own model on its own validation data, %; the best round is chosen on these data{images}"
    return PageTable(LAST, caption, tuple(heads), tuple(lines), format_records(experiment, measured_cells))


def _make_client_cell(measured: MeasuredCell, arm: str, client: str, at: End, decimals: int) -> TableCell:
    runs = [r for r in measured.results.get(arm, {}).values() if client in r.clients]
    if not runs:
        return TableCell(NOT_RUN)
    e = estimate([getattr(r.clients[client], at) for r in runs], "seeds")
    mean, spread = format_value(e, "%", decimals)
    notes = (
        measured.describe_arm(arm),
        f"{e.n} seed" + ("s" if e.n > 1 else ""),
        describe_mixed_versions(r.numerics for r in runs),
    )
    return TableCell(mean, spread, note="; ".join(filter(None, notes)))


def make_claims_table(readings: Sequence[Sequence[Judgement]], decimals: int) -> PageTable:
    """Return the table of all claims with their verdicts, one row for each reading, with p-values and Holm's adjustments."""
    several = any(len(of_claim) > 1 for of_claim in readings)
    lines, rows = [], []
    for number, of_claim in enumerate(readings, 1):
        for place, judged in enumerate(of_claim):
            head = (TableCell(str(number)), TableCell(judged.claim.text)) if place == 0 else (TableCell(""), TableCell(""))
            p_values = (judged.p, *judged.holm)
            read = (TableCell(judged.reading),) if several else ()
            lines.append(
                (
                    *head,
                    *read,
                    TableCell(capitalize(describe_verdict(judged, decimals))),
                    *(TableCell(format_p_value(p)) for p in p_values),
                )
            )
            rows.append([number, judged.claim.text, judged.reading, judged.verdict, *p_values])
    heads = [Column("No."), Column("Claim", numeric=False), Column("Verdict", numeric=False), *map(Column, P_VALUES)]
    if several:
        heads.insert(2, Column("Reading", numeric=False))
    csv = format_csv(["claim", "text", "reading", "verdict", "p", "holm_page", "holm_all"], rows)
    return PageTable("claims", "Claims and verdicts", tuple(heads), tuple(lines), csv)


def make_tunings_table(measured_cells: Sequence[MeasuredCell]) -> PageTable | None:
    """Return the table of the settings that sweeps chose, one row for each such arm; None if there is none."""
    rows, csv = [], []
    for measured in measured_cells:
        for arm, tuning in measured.cell.tunings.items():
            file, share = tuning.file, "" if tuning.rate_times == 1 else f", times {tuning.rate_times:g}"
            texts = [
                measured.cell.title,
                name_arm(arm, measured.cell.arms[arm]),
                ", ".join(f"{key} = {value}" for key, value in tuning.chosen.items()) + share,
                get_sweep_path(tuning),
                "; ".join(f"{key}: {', '.join(map(str, tried))}" for key, tried in tuning.grid.items()),
                join_words(tuning.ends) or "no",
                {"global": "shared", "personal": "personal"}.get(file.by or "", "a client's"),
                f"{100 * file.holdout:g} %",
                f"{tuning.rounds} of {measured.cell.get_rounds(arm)}",
                str(len(file.seeds)),
            ]
            rows.append(tuple(map(TableCell, texts)))
            csv.append(texts)
    heads = (
        "Setting",
        "Method",
        "Chosen",
        "Sweep",
        "Tried",
        "At an end of the grid",
        "Model",
        "Held out",
        "Rounds",
        "Seeds",
    )
    columns = tuple(Column(head, numeric=head in ("Held out", "Rounds", "Seeds")) for head in heads)
    return PageTable("tunings", TUNED_CAPTION, columns, tuple(rows), format_csv(heads, csv)) if rows else None


def get_sweep_path(tuning: Tuning) -> str:
    """Return the path of a sweep file below the folder of the experiments: "sweeps/mnist-mlp-noniid3-fml.json"."""
    return f"{tuning.path.parent.name}/{tuning.path.name}"


def make_verdicts_table(judged: Judgement, decimals: int) -> PageTable:
    """Return the table of a claim's verdicts, one row for each cell or client."""
    lines = []
    for line in judged.lines:
        none = DIVERGED if line.is_judged else NOT_RUN
        text, spread = format_value(line.difference, get_unit(judged), decimals) if line.difference else (none, "")
        note = "; ".join(
            filter(None, (line.scale, describe_mixed_versions(line.numerics), describe_divergence(line.diverged)))
        )
        lines.append((TableCell(line.title), TableCell(line.verdict), TableCell(text, spread, note=note)))
    heads = (Column("Where", numeric=False), Column("Verdict", numeric=False), Column("Difference"))
    rows = [[line.title, line.verdict, *((e.mean, e.half, e.n) if (e := line.difference) else ())] for line in judged.lines]
    csv = format_csv(["where", "verdict", "difference", "half_width", "seeds"], rows)
    return PageTable("verdicts", judged.claim.text, heads, tuple(lines), csv)
