"""How many rounds a site takes part in."""

import json

import pytest

from fedmutual.errors import ConfigError
from fedmutual.sites import contract as contracts
from fedmutual.sites.contract import check_rounds
from fedmutual.sites.protocol import WORK, Order, pack_message, read_answer
from fedmutual.sites.schema import LimitsTable
from fedmutual.user_code import plugins
from wards import COMMON, SITES, contract, site

pytestmark = pytest.mark.sites


@pytest.mark.parametrize(
    ("limit", "rounds", "most"), [(None, 3, None), (None, 2, None), (None, 4, 3), (5, 5, None), (5, 6, 5), (2, 3, 2)]
)
def test_rounds_beyond_what_a_site_agreed_to(limit, rounds, most):
    """The contract that it agreed to has three."""
    limits = LimitsTable(rounds=limit)
    if most is None:
        check_rounds(rounds, 3, limits)
    else:
        with pytest.raises(
            ConfigError, match=f"^the job is of {rounds} rounds, and this site agreed to {most}; set 'limits."
        ):
            check_rounds(rounds, 3, limits)


class Context:
    """As much of FLARE's as a site asks for when a job begins: its workspace."""

    def __init__(self, folder):
        self.folder = folder

    def get_prop(self, key):
        return self

    def get_root_dir(self):
        return str(self.folder)


def test_one_site_refuses_more_rounds_and_the_other_takes_part(tmp_path, capsys, monkeypatch):
    executor = pytest.importorskip("fedmutual.sites.flare.executor")
    monkeypatch.setattr(plugins, "process_rule", None)  # a site confines its process
    two = {i: SITES[i] for i in ("north", "south")}
    agreed = contract(tmp_path, COMMON, two).rename(tmp_path / "agreed.toml")
    submitted = contracts.read_contract(contract(tmp_path, COMMON | {"rounds": 9}, two))
    limits, answers = {"north": {}, "south": {"limits": {"rounds": 9}}}, {}
    for name, more in limits.items():
        work = tmp_path / name / "flare"
        (work / "local").mkdir(parents=True)
        about = {
            "config": str(site(tmp_path, name, two[name], **more)),
            "contracts": [contracts.read_contract(agreed).record()],
            "rounds": 3,
        }
        (work / "local" / "fedmutual.json").write_text(json.dumps(about))
        taking_part = executor.SiteExecutor(json.dumps(submitted.record()))
        taking_part.handle_event("_start_run", Context(work))
        task = executor.Shareable()
        task[executor.BODY] = pack_message(Order(WORK, 0, 0), {})
        answers[name] = read_answer(taking_part.execute("do", task, Context(work), None)[executor.BODY])[0].problem
        taking_part.handle_event("_end_run", Context(work))
        assert not list((tmp_path / name / "state").rglob("journal.sqlite-wal")), "the journal is closed"
    output = capsys.readouterr().out
    refusal = "the job is of 9 rounds, and this site agreed to 3; set 'limits.rounds' in its file to allow more"
    assert output.count(refusal) == 1
    assert output.count("takes part\n") == 1
    assert answers["north"] == "it does not take part; its operator reads why"
    assert answers["south"] is None  # the order had no tensors, so the phase failed, which no word tells
