"""What the server's file says of notes: each once, with its rounds, the last ones. Which files it can be read from."""

import json

import pytest

from fedmutual.errors import RunError
from fedmutual.events import Noted
from fedmutual.sites import contract as contracts
from fedmutual.sites.flare.progress import FILE, ProgressFile, change_progress, format_notes, read_progress
from wards import contract

pytestmark = pytest.mark.sites


def test_a_note_of_many_rounds_is_one_and_pushes_no_other_out(tmp_path):
    agreed = contracts.read_contract(contract(tmp_path))
    progress = ProgressFile(tmp_path, agreed, "job-1")
    progress(Noted(0, "west is away"))
    progress(Noted(3, "south is odd"))
    for round in range(1, 90):
        progress(Noted(round, "west is away"))
    assert [format_notes(n) for n in read_progress(tmp_path)["notes"]] == [
        "round 3: south is odd",
        "the start to round 89: west is away",
    ]
    again = ProgressFile(tmp_path, agreed, "job-1")  # the server began the job anew
    again(Noted(90, "west is away"))
    for n in range(30):
        again(Noted(91, f"note {n}"))
    notes = [format_notes(n) for n in read_progress(tmp_path)["notes"]]
    assert (len(notes), notes[0], notes[-1]) == (20, "round 91: note 10", "round 91: note 29")


@pytest.fixture
def state(tmp_path):
    """The content of a progress file of this version, which is written into `tmp_path`."""
    progress = ProgressFile(tmp_path, contracts.read_contract(contract(tmp_path)), "job-1")
    progress.begin(("north",))
    progress(Noted(1, "west is away"))
    return json.loads((tmp_path / FILE).read_text())


def test_a_progress_file_is_read_as_it_was_written(tmp_path, state):
    assert read_progress(tmp_path) == state
    change_progress(tmp_path, tries=1)
    assert (tmp_path / FILE).read_text() == json.dumps(state | {"tries": 1}, indent=1) + "\n"


DAMAGED = [
    *("", '{"format": 1, "na', "[1]", "\x00" * 100, '{"format": 1}'),
    *({"outcome": 3}, {"outcome": "over"}, {"job": None}, {"submitted": 1}, {"notes": 3}, {"notes": [{"text": "x"}]}),
    *({"sites": "north"}, {"limits": {}}, {"tries": -1}, {"bytes": {"up": "x"}}, {"began": float("nan")}),
    *({"rejoined": {"south": ["1"]}}, {"rejoined": {"south": {"times": "x"}}}),
]


@pytest.mark.parametrize("damage", DAMAGED, ids=str)
def test_a_damaged_progress_file_is_named_and_replaced_by_the_next_job(tmp_path, state, damage):
    """Without the file a federation counts as never started, and the archive of its job would be removed."""
    (tmp_path / FILE).write_text(damage if isinstance(damage, str) else json.dumps(state | damage))
    key = "" if isinstance(damage, str) else next(iter(damage))
    for function in (read_progress, change_progress):
        with pytest.raises(RunError, match=rf"progress\.json: is damaged.*{key}"):
            function(tmp_path)
    ProgressFile(tmp_path, contracts.read_contract(contract(tmp_path)), "job-1").begin(("north",))
    assert read_progress(tmp_path)["in"] == ["north"]


def test_a_progress_file_of_an_older_server_is_read(tmp_path, state):
    """It lacks `old` and `contract`."""
    older = {key: value for key, value in state.items() if key not in ("old", "contract")}
    (tmp_path / FILE).write_text(json.dumps(older))
    assert read_progress(tmp_path) == state | {"old": [], "contract": ""}
