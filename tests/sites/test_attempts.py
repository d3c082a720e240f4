"""A server that goes back, because it was killed in a round or has to: what it asks then, and what sites make of it."""

from contextlib import suppress

import pytest

from fedmutual.errors import RunError
from fedmutual.events import PhaseDone, Started
from fedmutual.sites.protocol import ATTEMPTS, WORK, Order, read_answer
from fedmutual.sites.server_journal import ServerJournal
from wards import SEEDED, Federation, find_event, same

pytestmark = pytest.mark.sites

FEDMD = SEEDED | {"algorithm": {"name": "fedmd", "public_batch": 8, "transfer_epochs": 1}}


class Killed(BaseException):
    """A process dies."""


def federate(folder, common):
    return Federation(folder, common, public=True)


def run(federation, watch):
    """Run from what is saved on, with processes that are new. watch: called with the transport and each event."""
    federation.restart()
    federation.transport.answers.clear()
    with suppress(Killed):
        federation.run(lambda event: watch(federation.transport, event))
    return federation


def list_attempts(federation, site):
    """Of each message of work that left, in the order in which it did: round, phase, attempt."""
    return [
        (line["round"], line["phase"], line.get("attempt", 0))
        for line in federation.ledger(site)
        if line["what"] == WORK and line["to"] == "server" and "problem" not in line["told"]
    ]


def ended(event, round, phase):
    return isinstance(event, PhaseDone) and (event.round, event.phase) == (round, phase)


def kill(phase):
    def watch(transport, event):
        if ended(event, 2, phase):
            raise Killed

    return watch


def lose_west(transport, event):
    """West is away in round 2."""
    if isinstance(event, Started) and event.done == 1:
        transport.away = {"west"}
    if find_event("RoundDone")(event):
        transport.away = {"west"} if event.round == 1 else set()


def test_a_round_that_other_sites_answer_than_before_a_crash_takes_one_attempt(tmp_path):
    """FedMD's consensus is then another one, which sites that learned the first would not take without it."""
    cut = run(run(federate(tmp_path / "cut", FEDMD), kill("digest")), lose_west)
    uninterrupted = run(federate(tmp_path / "whole", FEDMD), lose_west)
    assert ServerJournal(cut.server).attempt == 1
    assert cut.notes == uninterrupted.notes
    for site in ("north", "south"):
        assert same(cut.personal(site)[site], uninterrupted.personal(site)[site])
        assert [place for place in list_attempts(cut, site) if place[0] == 2] == [
            *((2, 1, 0), (2, 2, 0)),  # before the crash
            *((2, 1, 0), (2, 2, 1), (2, 3, 1)),  # the first one is repeated; what depends on who answered is done anew
        ]
        assert {attempt for round, _, attempt in list_attempts(cut, site) if round == 3} == {1}
    assert all(line[2] == 0 for line in list_attempts(uninterrupted, "north"))
    assert ServerJournal(uninterrupted.server).attempt == 0


def test_peers_are_asked_for_the_messages_of_the_same_sites_after_a_crash(tmp_path):
    """FedH2L's server sends no tensors: it only says whose messages count, and says so again."""
    federation = run(federate(tmp_path / "cut", SEEDED), kill("mutual"))
    first = federation.personal("north")["north"]
    run(federation, lose_west)
    assert ServerJournal(federation.server).attempt == 0
    declined = [read_answer(answer)[0].problem for _, _, answer in federation.transport.answers]
    assert declined == [None] * len(declined)
    orders = [line for line in list_attempts(federation, "north") if line[0] == 2]
    assert orders == [(2, 1, 0), (2, 2, 0)] * 2
    assert set(federation.notes) == {"note in round 2: site 'west' is left out: it is not connected"}
    assert not same(first, federation.personal("north")["north"])  # round 3 was done


def test_attempts_are_counted_on_disk_and_end(tmp_path):
    for number in range(1, ATTEMPTS + 1):
        ServerJournal(tmp_path).raise_attempt()
        assert ServerJournal(tmp_path).attempt == number
    with pytest.raises(RunError, match=f"the federation went back {ATTEMPTS} times, and sites accept no further attempt"):
        ServerJournal(tmp_path).raise_attempt()
    orders = {"north": (Order(WORK, 3, 0), {})}
    assert ServerJournal(tmp_path).stamp(orders)["north"][0].attempt == ATTEMPTS


def test_the_attempt_goes_up_once_for_all_later_phases_of_a_round(tmp_path):
    def stamped(phase, seed, *sites):
        order = Order(WORK, 5, phase, senders=(str(seed),))
        return {
            order_and_inbox[0].attempt
            for order_and_inbox in ServerJournal(tmp_path).stamp(dict.fromkeys(sites, (order, {}))).values()
        }

    assert stamped(0, 1, "north", "south") == stamped(1, 1, "north", "south") == stamped(2, 1, "north", "south") == {0}
    assert stamped(0, 2, "north", "south") == {0}  # the first phase begins with what is saved
    assert stamped(1, 1, "north", "west") == {0}
    assert stamped(1, 2, "north", "south") == {1}
    assert stamped(2, 2, "north", "south") == {1}
    assert stamped(1, 2, "south", "west") == {1}
    assert stamped(1, 3, "south", "west") == {2}
