"""The schemas of an experiment's files: [cell] with its arms, index.toml with its claims, and notes.toml."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedmutual.config.keys import Table

End = Literal["last", "best"]
Of = Literal["mean", "every", "most"]
AVERAGE = "average"  # beside the nodes' own, the paper's mean over them

Printed = Annotated[dict[str, dict[str, float]], Field(min_length=1)]
"""Measure -> node -> the paper's number; the node "average" is the mean as the paper prints it."""


def normalize_node(node: str) -> str:
    """Return the node's name in the spelling common to all copies of a data set: "Real_World" becomes "real world"."""
    return node.casefold().replace("_", " ")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Section):
    """One way to train a cell: overrides of its configuration, and the paper's numbers."""

    title: str = ""  # what a row is called; unset, the name of its algorithm
    set: Table = {}
    paper: float | Printed | None = None  # a number, whatever is measured; or one a measure and node
    needs: str | None = None  # the arm whose shared model this one starts from (`model.weights`)
    clients: tuple[str, ...] | None = None  # of the partition, these alone take part
    examples: int | None = Field(default=None, ge=1)  # and with so many training examples each
    sweep: str = ""  # the file of `sweeps`, without .json, whose winning settings the arm takes; `set` comes after
    rate_times: float = Field(default=1.0, gt=0)  # so many times the learning rate of the sweep, or of the cell
    shown: bool = True  # False: it is trained only because others need it

    def list_printed(self, measure: str) -> list[tuple[str, str, float]]:
        """Return every printed number as (measure, node, number). measure: for numbers that do not name their measure."""
        if isinstance(self.paper, dict):
            return [(name, normalize_node(node), v) for name, nodes in self.paper.items() for node, v in nodes.items()]
        return [] if self.paper is None else [(measure, AVERAGE, self.paper)]

    def find_printed(self, measure: str, node: str = AVERAGE) -> float | None:
        """Return the paper's number, in the paper's unit; None if the paper has none."""
        if isinstance(self.paper, dict):
            return {normalize_node(k): v for k, v in self.paper.get(measure, {}).items()}.get(normalize_node(node))
        return self.paper if node == AVERAGE else None


class CellTable(_Section):
    """A cell of a table or a figure of a paper: where it stands, and what of its runs is read."""

    row: str
    column: str
    printed_in: str = ""  # the cell, by its id, where the paper's numbers of these arms are counted; unset, here
    paper_rounds: int | None = Field(default=None, ge=1)  # what the paper trains for, where `rounds` is not that
    clients: tuple[str, ...] | None = None  # the clients that are scored; unset, all
    each: bool = False  # whether every client's curve is kept
    noise: tuple[float, ...] = ()  # Gaussian weight noise under which the last global model is scored
    node: str | None = None  # the node that is looked at closely: its losses over the rounds, its features at the end
    optional: bool = False  # left out, with a word, where its data are not there
    arms: dict[str, Arm]


class ReadingTable(_Section):
    """Another reading of a claim, with other arms in place of the claim's arms."""

    name: str  # "at equal gradient steps"
    arm: str = ""  # in the place of the claim's arm; unset, the claim's
    than: str = ""  # in the place of the claim's than


class Claim(_Section):
    """A claim of the paper in our words, and the difference or ratio of two numbers that decides it."""

    text: str
    finding: str = ""  # the claim as a complete sentence for the page of findings; unset, the page does not have the claim
    measure: str
    arm: str
    than: str = ""  # another arm, or ARM@CELL, one of another cell; unset, `less` says what is taken off
    less: str = ""  # a cell in which the same is taken, and taken off
    sign: Literal["more", "less", "same"] = "more"
    times: float | None = Field(default=None, gt=0)  # arm is so many times than: the ratio is judged, not the difference
    margin: float = Field(default=0.0, ge=0)  # of "same": so far apart is still the same, in the measure's own unit
    at: End | None = None  # unset, the best round if other data than the measured data chose it, else the last round
    than_at: End | None = None
    per: Literal["cell", "client"] = "cell"
    of: Of | None = None  # of which cells it is; unset, of their mean, and of every client where it is of clients
    cells: str = "*"
    first_reading: str = "as the paper trains"  # the name of the reading without changes, where there are others
    readings: tuple[ReadingTable, ...] = ()  # judged beside it

    @property
    def read_otherwise(self) -> list["Claim"]:
        """Return the claim under each of its other readings, with the arms of that reading."""
        changed_arms = ({k: v for k, v in (("arm", r.arm), ("than", r.than)) if v} for r in self.readings)
        return [self.model_copy(update={**arms, "readings": ()}) for arms in changed_arms]

    @property
    def scope(self) -> Of:
        """Return the scope of the claim: "mean" over cells, "every" cell or client, or "most" cells."""
        return self.of or ("every" if self.per == "client" else "mean")

    @property
    def other(self) -> tuple[str, str]:
        """Return (the arm that is compared with, its cell); the cell is "" if it is the same."""
        arm, _, cell = self.than.partition("@")
        return arm, cell


class Index(_Section):
    """The content of index.toml."""

    title: str
    paper: str = ""  # the paper of this experiment; "" where no paper has it
    about: str
    order: int = 0  # its place in lists
    cells: str = ""  # patterns of cells of another experiment that are looked at, as "table1/mnist/*"; "" is none
    columns: tuple[str, ...] = ()  # the order of the columns; those that are not named come after
    arms: tuple[str, ...] | None = None  # those looked at, in this order; unset, all
    add: dict[str, Arm] = {}  # arms for every cell
    measures: tuple[str, ...]
    view: Literal["settings", "clients", "nodes"] = "settings"
    figures: tuple[str, ...] = ()
    draw: str = "*"  # the cells that are drawn
    decimals: int = Field(default=2, ge=0, le=4)
    claims: tuple[Claim, ...] = ()
    supports: str = ""  # which reading of claims that have several the paper's text supports
    differences: tuple[str, ...]  # this experiment's own
    notes: tuple[str, ...] = ()  # differences that others share, by their names in notes.toml
    code: str = ""  # the public code that is compared with this, by its name in notes.toml; "" for none


class Notes(_Section):
    """The content of notes.toml: sentences that several experiments share."""

    differences: dict[str, str] = {}
    code: dict[str, tuple[str, ...]] = {}  # name of public code -> how it differs
