"""Who says that another site has another public seed set: believed where sets are compared, and of most sites alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import wards
from fedmutual.algorithms import FedH2L
from fedmutual.algorithms.agree import Compare
from fedmutual.algorithms.peers import make_agreed_state as owned_by
from fedmutual.core import At
from fedmutual.errors import RunError
from fedmutual.sites.engine import SitesEngine
from fedmutual.sites.protocol import SiteAnswer, pack_message, read_order
from fedmutual.sites.schema import SitesTable
from fedmutual.sites.server_journal import ServerJournal
from fedmutual.sites.sizes import MessageSizes
from puppets import Federation, Puppet
from wards import SEEDED, InMemoryTransport

pytestmark = pytest.mark.sites

FEDMD = {"name": "fedmd", "public_batch": 8, "transfer_epochs": 1}
ONE_ROUND = {"fedh2l": SEEDED | {"rounds": 1}, "fedmd": SEEDED | {"rounds": 1, "algorithm": FEDMD}}


def seeded(folder, common):
    """Real sites with a public seed set."""
    return wards.Federation(folder, common, public=True)


def with_another_set(federation, *sites):
    """These sites hold another public seed set than the contract was made with."""
    for n, i in enumerate(sites):
        half = federation[i]
        data = half.experiment.data
        public = replace(data.public, digest=f"{n:02}" * 32)
        half.experiment = replace(half.experiment, data=replace(data, public=public))
    return federation


def lie(federation, **says):
    """West's answer to the order to compare is another one."""

    def change(site, order, content):
        is_lie = (site, order.round, order.phase) == ("west", -1, 1)
        return [pack_message(replace(SiteAnswer(order), **says), {}) if is_lie else content]

    federation.transport.change = change
    return federation.run()


def asked_after_the_start(transport):
    return {site for site, asked, _ in transport.answers if read_order(asked)[0].round >= 0}


@pytest.mark.parametrize("name", ONE_ROUND)
def test_a_site_with_another_public_set_is_left_out_and_the_others_continue(name, tmp_path):
    federation = with_another_set(seeded(tmp_path, ONE_ROUND[name]), "south").run()
    (note,) = federation.notes
    assert note.startswith(
        "note at the start: site 'south' is left out for good: most sites say that it has another public seed set: as many "
        "examples of each class, but not the same ones in the same order"
    )
    assert asked_after_the_start(federation.transport) == {"north", "west"}
    assert ServerJournal(tmp_path / "server").excluded.keys() == {"south"}


@pytest.mark.parametrize("name", ONE_ROUND)
def test_a_single_accuser_is_left_out(name, tmp_path):
    """The accused site and the federation continue."""
    federation = lie(seeded(tmp_path, ONE_ROUND[name]), accused=("north",), problem="its rows are others")
    why = "it says that another site has another public seed set, and most sites do not"
    assert federation.notes == [f"note at the start: site 'west' is left out for good: {why}"]
    assert asked_after_the_start(federation.transport) == {"north", "south"}


@pytest.mark.parametrize("accused", ["nobody", "server", "west", ""])
def test_an_accusation_of_an_unknown_site_excludes_the_accuser(accused, tmp_path):
    lie(seeded(tmp_path, ONE_ROUND["fedh2l"]), accused=(accused,), problem="x" * 400)
    assert ServerJournal(tmp_path / "server").excluded.keys() == {"west"}


def test_an_accusation_outside_the_start_only_leaves_the_accuser_out_of_the_round(tmp_path):
    """A site that accuses in a round is left out of that round, like a site that could not carry out its order."""
    federation = Federation(tmp_path)
    accusing = SiteAnswer(order=None, accused=("north",), problem="its rows are others")
    federation["west"].does = lambda asked, inbox: accusing if asked.round == 1 else {k: v + 0 for k, v in inbox.items()}
    federation.run()
    assert federation.notes == ["note in round 2: site 'west' is left out: its rows are others"]
    assert ServerJournal(federation.server).excluded == {}
    assert federation["west"].rounds() == federation["north"].rounds() == [(0, 0), (0, 1), (0, 2)]


def test_too_few_remaining_sites_end_the_federation(tmp_path):
    federation = with_another_set(seeded(tmp_path, SEEDED), "south", "west")  # three sets: of them the first one counts
    answer_counts = []
    for _ in range(2):
        with pytest.raises(RunError, match="2 sites are needed, and of 3 these left or are excluded for good: south, west"):
            federation.run()
        answer_counts.append(len(federation.transport.answers))
    assert answer_counts[0] == answer_counts[1]
    assert "is left out for good: most sites say" in (tmp_path / "server" / "log.txt").read_text()


VOTES = {  # site -> whom it accuses, a letter each, of five; who is left out
    "nobody": ({}, set()),
    "two liars of five": ({"d": "a", "e": "a"}, {"d", "e"}),
    "three of five": ({"b": "a", "c": "a", "d": "a"}, {"a"}),
    "two of five": (dict.fromkeys("abcde", "ab"), {"a", "b"}),
    "two of five, and one more by a liar": ({"a": "ab", "b": "ab", "c": "ab", "d": "abc"}, {"a", "b", "d"}),
    "all, itself too": (dict.fromkeys("abcde", "a"), {"a"}),
    "itself alone": ({"a": "a"}, {"a"}),
    "most, and a liar beside them": ({"b": "a", "c": "a", "d": "a", "e": "b"}, {"a", "e"}),
    "each other": ({"a": "b", "b": "a"}, {"a", "b"}),
    "most of those who accuse": ({"b": "a", "c": "a", "a": "b"}, {"a", "b", "c"}),
}


@pytest.mark.parametrize("case", VOTES)
def test_most_of_all_sites_decide(case, tmp_path):
    accusations, out = VOTES[case]
    transport = InMemoryTransport(
        {i: Puppet(lambda asked, inbox, i=i: says(asked, accusations.get(i, ""))) for i in "abcde"}
    )
    journal = ServerJournal(tmp_path)
    peers = FedH2L(batch_size=8, public_batch=4).algorithm()
    sizes = MessageSizes(peers, owned_by(dict.fromkeys("abcde", range(9)), 10), "abcde")
    table = SitesTable(names=("a", "b", "c", "d", "e"), input=(1,), deadline=1.0)
    agreed = SimpleNamespace(quorum=2, sites=table, algorithm=peers, trains_alone=False)
    sites = SitesEngine(transport, agreed, journal, sizes)
    answers = sites.train(Compare(), At(0, -1, 1, 1), {i: {} for i in "abcde"}, {})
    assert dict(answers).keys() == set("abcde") - set(accusations) - out
    assert journal.excluded.keys() == out


def says(asked, accused):
    return SiteAnswer(asked, problem="its rows are others", accused=tuple(accused)) if accused else SiteAnswer(asked)
