"""What the server's file says of notes: each once, with its rounds, the last ones."""

import pytest

from fedmutual.errors import RunError
from fedmutual.events import Noted
from fedmutual.sites import contract as contracts
from fedmutual.sites.flare.progress import ProgressFile, change_progress, format_notes, read_progress
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


@pytest.mark.parametrize("text", ["", '{"format": 1, "na', "[1]", "\x00" * 100])
def test_a_damaged_progress_file_is_named_and_replaced_by_the_next_job(tmp_path, text):
    """Without the file a federation counts as never started, and the archive of its job would be removed."""
    (tmp_path / "progress.json").write_text(text)
    for function in (read_progress, change_progress):
        with pytest.raises(RunError, match=r"progress\.json: is damaged"):
            function(tmp_path)
    ProgressFile(tmp_path, contracts.read_contract(contract(tmp_path)), "job-1").begin(("north",))
    assert read_progress(tmp_path)["in"] == ["north"]
