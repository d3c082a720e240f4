"""Sites over a post in this process: what each does, keeps and lets go of, without any network."""

import pytest

import fedmutual
from fedmutual.config import parse_config
from fedmutual.engines.sites.coordinator import Coordinator
from fedmutual.records.logs import LEDGER, read_lines
from fedmutual.records.text import told
from wards import COMMON, SITES, TELLING, Desk, contract, halves, same, together


def test_three_sites_are_one_run_in_one_process(tmp_path):
    common = COMMON | TELLING
    agreed, sites = halves(tmp_path, contract(tmp_path, common))
    Coordinator(agreed, tmp_path / "server").run(Desk(sites))
    run = fedmutual.run(parse_config(together(common)), tmp_path / "one")
    found = fedmutual.Run(tmp_path / "server")
    assert same(found.global_model().state_dict(), run.global_model().state_dict())
    for i in SITES:
        mine = fedmutual.Run(sites[i].folder)
        assert same(mine.personal_model(i).state_dict(), run.personal_model(i).state_dict())
    assert found.summary["personal"] == run.summary["personal"]
    assert found.summary["bytes"] == run.summary["bytes"]
    assert COMMON["rounds"] == found.summary["rounds"]


@pytest.mark.parametrize("round", [1, 2])
def test_who_is_away_is_left_out_and_back_in(tmp_path, round):
    agreed, sites = halves(tmp_path, contract(tmp_path))
    desk, notes = Desk(sites), []

    def watch(event):
        if type(event).__name__ == "RoundDone":
            desk.away = {"west"} if event.round == round else set()
        if type(event).__name__ == "Noted":
            notes.extend(told(event))

    Coordinator(agreed, tmp_path / "server").run(desk, [watch])
    assert any(note == f"note in round {round + 1}: site 'west' is left out: it is not there" for note in notes)
    ledger = read_lines(tmp_path / "server" / LEDGER)
    rounds = [line["round"] for line in ledger if line["client"] == "west" and line["up"]]
    assert rounds == [r for r in (1, 2, 3) if r != round + 1]
