"""Sites over a post in this process: what each does, keeps and lets go of, without any network."""

from collections.abc import Iterator, Mapping

import pytest
import torch

import fedmutual
from fedmutual.config import parse_config
from fedmutual.engines.sites import contract as contracts
from fedmutual.engines.sites.coordinator import Coordinator
from fedmutual.engines.sites.half import Half, own
from fedmutual.records.logs import LEDGER, read_lines
from wards import COMMON, SITES, contract, site, together


class Desk:
    """A post whose sites are objects in this process."""

    def __init__(self, halves: Mapping[str, Half]) -> None:
        self.halves = dict(halves)
        self.away: set[str] = set()

    def there(self) -> tuple[str, ...]:
        return tuple(i for i in self.halves if i not in self.away)

    def ask(self, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        for i, order in orders.items():
            answer = self.halves[i].do(order)
            for to, letter in self.halves[i].letters(order).items():
                self.halves[to].peers.receive(i, letter)
            yield i, answer


def halves(folder, path, sites=SITES):
    agreed = contracts.read(path)
    return agreed, {i: Half(agreed, own(site(folder, i, sites[i]))) for i in sites}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_three_sites_are_one_run_in_one_process(tmp_path):
    agreed, sites = halves(tmp_path, contract(tmp_path))
    Coordinator(agreed, tmp_path / "server").run(Desk(sites))
    run = fedmutual.run(parse_config(together()), tmp_path / "one")
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
            notes.append(event.text)

    Coordinator(agreed, tmp_path / "server").run(desk, [watch])
    assert any(f"site 'west' is left out of round {round + 1}: it is not there" in note for note in notes)
    ledger = read_lines(tmp_path / "server" / LEDGER)
    rounds = [line["round"] for line in ledger if line["client"] == "west" and line["up"]]
    assert rounds == [r for r in (1, 2, 3) if r != round + 1]
