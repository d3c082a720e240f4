"""`fedmutual stop` of one submission with several runs: it stops the run under way, and those that have not begun."""

import json
import os

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from fedmutual.cli import leads
from fedmutual.files import JSON_LOGS
from fedmutual.sites.contract import read_contract
from fedmutual.sites.flare import progress, session, watch, workspace
from fedmutual.sites.server_journal import LEFT
from wards import COMMON, contract

pytestmark = pytest.mark.sites


class Server:
    """The server that a lead's session reaches: the outcome of each run that has begun, and the runs with a mark."""

    def __init__(self, **outcomes):
        self.outcomes, self.marked, self.submitted = dict(outcomes), set(), []
        self.when_submitted = lambda name: None

    def __call__(self, kit):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def status(self, name):
        outcome = self.outcomes.get(name)
        state = outcome and {
            "outcome": outcome,
            "round": 3,
            "rounds": 3,
            "said": "",
            "sites": [],
            "in": [],
            "evaluators": [],
            "left": "",
        }
        more = {"scores": "", "bytes": {"up": 0, "down": 0}, "notes": []}
        return {"progress": state and state | more, "connected": ["north"], "stops": name in self.marked, "gone": {}}

    def find_job(self, agreed):
        return None

    def allow_start(self, name):
        self.marked.discard(name)

    def stop(self, name):
        self.marked.add(name)

    def submit(self, agreed):
        self.submitted.append(agreed.name)
        self.when_submitted(agreed.name)
        self.outcomes[agreed.name] = "done"
        return agreed.name

    def watch(self, name, job):
        yield self.status(name)["progress"]

    def fetch(self, name, folder):
        return []


@pytest.fixture
def three_folds(tmp_path, monkeypatch):
    """A function: the file of three runs, with a server whose runs have these outcomes."""
    common = {**COMMON, "split": {"folds": 3}}

    def begin(**outcomes):
        server = Server(**{name.replace("_", "-"): outcome for name, outcome in outcomes.items()})
        monkeypatch.setattr(session, "Session", server)
        monkeypatch.setattr("fedmutual.sites.flare.kits.open_kit", lambda folder, kind=None: None)
        return contract(tmp_path, common, ["north"]), server

    return begin


STOPS = [
    ({"wards_0": "running"}, {"wards-0", "wards-1", "wards-2"}, "'wards-0' ends after the current round; round 3 is saved"),
    ({"wards_0": "done"}, {"wards-1", "wards-2"}, "'wards-1' has not begun, and does not begin"),
    ({"wards_0": "done", "wards_1": "done", "wards_2": "done"}, set(), "'wards' is over already"),
]


@pytest.mark.parametrize(("outcomes", "marked", "said"), STOPS)
def test_a_stop_is_for_the_runs_that_are_not_over(three_folds, capsys, outcomes, marked, said):
    file, server = three_folds(**outcomes)
    leads.stop_federation(file, file)
    assert server.marked == marked
    assert said in capsys.readouterr().out


def test_a_stop_between_two_runs_ends_the_submission_and_a_new_one_goes_on(three_folds, tmp_path, capsys):
    file, server = three_folds()
    server.when_submitted = lambda name: server.marked.update({"wards-1", "wards-2"})
    with pytest.raises(SystemExit) as end:
        leads.submit(file, file, tmp_path / "out")
    assert (end.value.code, server.submitted) == (3, ["wards-0"])
    assert "stopped by hand" in capsys.readouterr().err
    server.when_submitted = lambda name: None
    leads.submit(file, file, tmp_path / "out")
    assert server.submitted == ["wards-0", "wards-0", "wards-1", "wards-2"]


def test_no_run_waits_for_a_site_that_left_another_one(three_folds, tmp_path, capsys):
    file, server = three_folds()
    names, status = ["north", "south"], server.status
    contract(tmp_path, {**COMMON, "split": {"folds": 3}}, names, wait=1)
    server.status = lambda name: status(name) | {"gone": {"south": LEFT} if name == "wards-0" else {}}
    leads.submit(file, file, tmp_path / "result")
    assert server.submitted == ["wards-0", "wards-1", "wards-2"]
    assert "waiting for" not in capsys.readouterr().out


def test_the_server_marks_no_federation_that_it_did_not_agree_to(tmp_path, three_folds):
    file, _ = three_folds()
    pointer = tmp_path / workspace.WORK_FOLDER / "local" / workspace.POINTER
    pointer.parent.mkdir(parents=True)
    pointer.write_text(json.dumps({"contracts": [read_contract(file).record()]}))
    for name in ("wards-1", "other"):
        assert watch._carry_out(tmp_path, None, "stop", name, "") == {"progress": None}
        assert (tmp_path / name / progress.STOP).exists() == (name == "wards-1")


def test_json_lines_of_a_job_name_its_run(monkeypatch, capsys):
    monkeypatch.setenv(JSON_LOGS, "wards")
    progress.name_lines("wards-1")
    progress.print_line("round 2 done")
    line = json.loads(capsys.readouterr().out)
    assert (line["federation"], line["round"]) == ("wards-1", 2)
    monkeypatch.delenv(JSON_LOGS)
    progress.name_lines("wards-1")
    assert JSON_LOGS not in os.environ


def test_a_line_of_progress_does_not_miss_a_site_that_only_scores():
    state = {"sites": ["north", "east", "west"], "in": ["north"], "evaluators": ["east"], "round": 3, "rounds": 4}
    more = {"scores": "", "bytes": {"up": 0, "down": 0}, "outcome": "running", "left": ""}
    assert leads._format_progress(state | more) == "round 3/4  sites north (without west)  0 B up, 0 B down"
