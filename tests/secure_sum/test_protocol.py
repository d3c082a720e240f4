"""A secure sum driven in memory: every point at which sites drop out, and what a dishonest server or site tries."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from authority import make_signer
from fedmutual.sites.protocol import TooFew
from fedmutual.sites.secure_sum import messages
from fedmutual.sites.secure_sum.messages import ANSWERS, ORDERS, Rejected, Stage, find_threshold, pack_content, read_content
from fedmutual.sites.secure_sum.site import SumSite
from masked import NAMES, Table, make_context

FIVE = NAMES[:5]


def change(kind, value, site=None):
    """Return a function that changes the content of messages of a site, or of all sites."""

    def apply(to, message):
        return pack_content(value(read_content(kind, message, to))) if site in (None, to) else message

    return apply


def test_the_threshold_is_more_than_two_thirds() -> None:
    assert [find_threshold(n) for n in (3, 4, 5, 6, 7, 9, 10, 20)] == [3, 3, 4, 5, 5, 7, 7, 14]
    assert all(3 * find_threshold(n) > 2 * n for n in range(3, 21))


@pytest.mark.parametrize("count", [3, 4, 5, 10])
def test_the_sum_of_all_is_that_of_their_words(count) -> None:
    table = Table(count).run()
    assert table.server.add_words().tolist() == table.plain(NAMES[:count])
    assert table.refusals == {}


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize(("count", "gone"), [(5, {"birch"}), (10, {"ash"}), (10, {"ash", "fir", "pine"})])
def test_sites_that_drop_out_at_any_stage_cost_nothing(stage, count, gone) -> None:
    """A site is in the sum exactly if it sent its words before it dropped out."""
    table = Table(count, away={stage: gone}).run()
    counted = set(NAMES[:count]) - (gone if stage <= Stage.UPLOAD else set())
    assert set(table.server.present) == counted
    assert table.server.add_words().tolist() == table.plain(counted)


def test_sites_that_drop_out_one_after_the_other() -> None:
    away = {Stage.SHARES: {"ash"}, Stage.UPLOAD: {"oak"}, Stage.UNMASK: {"elm"}}
    table = Table(10, away=away).run()
    counted = set(NAMES) - {"ash", "oak"}
    assert table.server.add_words().tolist() == table.plain(counted)
    assert table.server.absent == ("oak",)


@pytest.mark.parametrize("stage", Stage)
def test_below_the_threshold_the_stage_comes_to_nothing(stage) -> None:
    table = Table(5, away={stage: {"ash", "birch"}})
    with pytest.raises(TooFew, match=f"3 of 5 .* {stage.name} .* 4 are needed"):
        table.run()


@pytest.mark.parametrize("stage", Stage)
def test_a_restarted_server_continues_from_its_last_round(stage) -> None:
    """Orders depend only on the saved answers."""
    table = Table(5).run()
    again = Table(5)
    again.server.answers = {s: a for s, a in table.server.answers.items() if s < stage}
    mine, theirs = again.server.make_orders(stage), table.server.make_orders(stage)
    assert {i: m["content"].tolist() for i, m in mine.items()} == {i: m["content"].tolist() for i, m in theirs.items()}


def test_uploads_of_two_memes_look_alike() -> None:
    """Bytes of what is sent are uniform whatever the update, which the plain words are not."""
    size = 20_000
    for value in (0, 2**40):
        table = Table(3)
        table.server.count = size
        table.words = {i: np.full(size, value, np.uint64) for i in table.words}
        table.run()
        for words in table.uploads.values():
            assert chisquare(np.bincount(np.array(words, np.uint64).view(np.uint8), minlength=256)).pvalue > 1e-6
        plain = np.bincount(table.words["ash"].view(np.uint8), minlength=256)
        assert chisquare(plain).pvalue < 1e-6


def test_the_same_update_is_sent_under_other_masks_each_time() -> None:
    first, second = Table(3).run(), Table(3).run()
    assert all(first.uploads[i] != second.uploads[i] for i in NAMES[:3])


def test_a_forged_key_is_refused_by_every_site_and_named() -> None:
    """A server that knows a pair's key takes the pair's mask off."""

    def swap(keys):
        return [k.model_copy(update={"mask_key": "ab" * 32}) if k.site == "cedar" else k for k in keys]

    table = Table(5, orders={Stage.SHARES: change(ORDERS[Stage.SHARES], swap)})
    with pytest.raises(TooFew, match="0 of 5"):
        table.run()
    assert all("'cedar'" in why and "signature" in why for why in table.refusals.values())
    assert table.refusals.keys() == set(FIVE)


@pytest.mark.parametrize(
    ("signer", "changed", "reason"),
    [
        ("elm", {}, "another participant's"),
        # gives one secret with every other key: each site would refuse the order with it, and no sum would end
        ("cedar", {"mask_key": b"\x01" + bytes(31)}, "X25519"),
        ("cedar", {"seal_key": b"\x01" + bytes(31)}, "X25519"),
    ],
)
def test_a_site_that_announces_keys_of_another_kit_or_of_small_order_is_left_out_and_named(signer, changed, reason) -> None:
    context = make_context(5)

    def spoil(to, message):
        if to != "cedar":
            return message
        keys = read_content(ANSWERS[Stage.KEYS], message, to)
        public = {name: bytes.fromhex(getattr(keys, name)) for name in ("mask_key", "seal_key", "seed")}
        return pack_content(messages.make_announcement(context, "cedar", **(public | changed), signer=make_signer(signer)))

    table = Table(5, answers={Stage.KEYS: spoil}).run()
    assert "'cedar'" in table.refusals["cedar"]
    assert reason in table.refusals["cedar"]
    assert table.server.add_words().tolist() == table.plain(set(FIVE) - {"cedar"})


def test_a_site_that_was_sent_another_model_is_found_and_named() -> None:
    """By an honest server, which leaves it out; and by every site, where the server hides it."""
    other = {"cedar": make_context(5, model="22" * 32)}
    table = Table(5, contexts=other).run()
    assert "another model" in table.refusals["cedar"]
    assert "cedar" not in table.server.present
    hidden = Table(5, contexts=other)
    hidden.server.check_answer = lambda stage, site, message: None
    with pytest.raises(TooFew):
        hidden.run()
    assert all("'cedar'" in hidden.refusals[i] and "another model" in hidden.refusals[i] for i in set(FIVE) - {"cedar"})


@pytest.mark.parametrize("changed", [{"round": 3}, {"attempt": 1}, {"contract": "c1" * 32}])
def test_keys_of_another_sum_are_refused(changed) -> None:
    """As a server would use them that kept them."""
    old = Table(5, context=make_context(5, **changed)).run(Stage.KEYS).server.answers[Stage.KEYS]["cedar"]
    replayed = read_content(ANSWERS[Stage.KEYS], old, "cedar")

    def swap(keys):
        return [replayed if k.site == "cedar" else k for k in keys]

    table = Table(5, orders={Stage.SHARES: change(ORDERS[Stage.SHARES], swap)})
    with pytest.raises(TooFew):
        table.run()
    assert all("'cedar'" in why for i, why in table.refusals.items() if i != "cedar")


def test_shares_that_were_changed_on_their_way_are_refused_and_named() -> None:
    def flip(shares):
        return {i: ("0" if s[0] != "0" else "1") + s[1:] if i == "cedar" else s for i, s in shares.items()}

    table = Table(5, orders={Stage.UPLOAD: change(ORDERS[Stage.UPLOAD], flip, "ash")}).run()
    assert table.refusals.keys() == {"ash"}
    assert "'cedar'" in table.refusals["ash"]
    assert table.server.add_words().tolist() == table.plain(set(FIVE) - {"ash"})


def test_a_site_reported_as_dropped_out_gives_no_signature() -> None:
    without = [i for i in FIVE if i != "ash"]
    table = Table(5, orders={Stage.CONFIRM: change(ORDERS[Stage.CONFIRM], lambda sites: without)})
    with pytest.raises(TooFew):
        table.run()
    assert "this site dropped out" in table.refusals["ash"]


def test_a_dropout_reported_to_some_sites_only_reveals_nothing() -> None:
    """Two sites hear of a dropout and the others do not: no four signatures cover one list."""

    def lie(to, message):
        without = [i for i in FIVE if i != "ash"]
        return pack_content(without) if to in ("birch", "cedar") else message

    table = Table(5, orders={Stage.CONFIRM: lie})
    table.server.check_answer = lambda stage, site, message: None
    with pytest.raises(TooFew, match="0 of 5"):
        table.run()
    assert "site 'birch' did not sign" in table.refusals["ash"]
    assert "site 'ash' is refused" in table.refusals["birch"]


def test_no_site_reveals_both_secrets_of_another_site() -> None:
    """For a present site only its seed is revealed, for an absent site only its key."""
    table = Table(5, away={Stage.UPLOAD: {"elm"}}).run()
    for answer in table.server.answers[Stage.UNMASK].values():
        seeds, keys = read_content(ANSWERS[Stage.UNMASK], answer, "")
        assert (set(seeds), set(keys)) == (set(FIVE) - {"elm"}, {"elm"})


@pytest.mark.parametrize("changed", [{"attempt": 1}, {"model": "22" * 32}])
def test_a_second_attempt_of_a_round_that_was_opened_is_refused(changed) -> None:
    records = Table(5).run().sites
    table = Table(5, context=make_context(5, **changed), records=records)
    with pytest.raises(TooFew):
        table.run()
    assert all("opened before" in why for why in table.refusals.values())
    assert table.refusals.keys() == set(FIVE)


def test_an_attempt_that_was_not_opened_is_followed_by_another() -> None:
    records = Table(5).run(Stage.CONFIRM).sites
    table = Table(5, context=make_context(5, attempt=1), records=records).run()
    assert table.server.add_words().tolist() == table.plain(FIVE)


def fewer(stage):
    """Return a change of the order of a stage: the server leaves one site out."""

    def apply(message):
        content = read_content(ORDERS[stage], message, "")
        if isinstance(content, dict):
            return pack_content({i: value for i, value in content.items() if i != "elm"})
        return pack_content([one for one in content if getattr(one, "site", one) != "elm"])

    return apply


SECOND = {  # orders after a stage: the last finished stage, the repeated stage, the change of the order, why it is refused
    "the words for fewer sites": (Stage.UPLOAD, Stage.UPLOAD, fewer(Stage.UPLOAD), "other sites"),  # reveals a pair mask
    "secrets after the words": (Stage.UPLOAD, Stage.SHARES, fewer(Stage.SHARES), "masked its words"),
    "another list of present sites": (Stage.CONFIRM, Stage.CONFIRM, fewer(Stage.CONFIRM), "signed another list"),
    "another list once it was opened": (Stage.UNMASK, Stage.CONFIRM, fewer(Stage.CONFIRM), "signed another list"),
    "words of an opened round": (Stage.UNMASK, Stage.UPLOAD, lambda message: message, "opened before"),
}


@pytest.mark.parametrize("case", SECOND)
def test_a_second_order_that_would_open_more_is_refused(case) -> None:
    last, stage, change_order, reason = SECOND[case]
    table = Table(5).run(last)
    with pytest.raises(Rejected, match=reason):
        table.ask(stage, "ash", change_order(table.server.make_orders(stage)["ash"]))


def test_an_answer_that_was_lost_is_given_again() -> None:
    """With equal words, a signature, and the same shares."""
    table = Table(5).run(Stage.UPLOAD)
    again = table.ask(Stage.UPLOAD, "ash", table.server.make_orders(Stage.UPLOAD)["ash"])
    assert again[messages.WORDS].tolist() == table.server.answers[Stage.UPLOAD]["ash"][messages.WORDS].tolist()
    table = Table(5).run()
    assert table.ask(Stage.CONFIRM, "ash", table.server.make_orders(Stage.CONFIRM)["ash"])
    order = table.server.make_orders(Stage.UNMASK)["ash"]
    assert read_content(ANSWERS[Stage.UNMASK], table.ask(Stage.UNMASK, "ash", order), "")[1] == {}


def test_no_shares_are_sealed_twice_alike() -> None:
    """A site that is asked again after a crash draws other shares; the same keystream would give their difference away."""
    table = Table(5).run(Stage.KEYS)
    order = table.server.make_orders(Stage.SHARES)["ash"]
    first, second = (
        read_content(ANSWERS[Stage.SHARES], table.ask(Stage.SHARES, "ash", order), "")["birch"] for _ in range(2)
    )
    one, two = bytes.fromhex(first), bytes.fromhex(second)
    assert one[:12] != two[:12]
    assert one[12:] != two[12:]


def test_a_site_keeps_no_secret_that_the_server_does_not_have_after_a_sum() -> None:
    """Whoever reads the disk of every site then still learns no single update."""
    table = Table(5, away={Stage.UPLOAD: {"elm"}})
    table.run(Stage.UPLOAD)
    before = {i: table.sites[i].state for i in FIVE}
    table = Table(5, away={Stage.UPLOAD: {"elm"}}).run()
    for i in set(FIVE) - {"elm"}:
        secrets = table.sites[i].state
        assert (len(before[i].keys), secrets.keys) == (3, None)
        seeds, keys = read_content(ANSWERS[Stage.UNMASK], table.server.answers[Stage.UNMASK][i], i)
        assert {j: seed for j, (_, seed) in secrets.shares.items() if seed} == seeds
        assert {j: key for j, (key, _) in secrets.shares.items() if key} == keys


def test_a_wrong_share_is_left_out_if_enough_are_right_and_otherwise_named() -> None:
    wrong = change(ANSWERS[Stage.UNMASK], lambda opened: ({**opened[0], "birch": "00" * 66}, opened[1]), "ash")
    table = Table(5, answers={Stage.UNMASK: wrong}).run()
    assert table.server.add_words().tolist() == table.plain(FIVE)
    short = Table(5, away={Stage.UNMASK: {"elm"}}, answers={Stage.UNMASK: wrong}).run()
    with pytest.raises(Rejected, match="seed of site 'birch'"):
        short.server.add_words()


@pytest.mark.parametrize("liars", [1, 3])
def test_wrong_shares_of_the_first_of_twenty_sites_are_left_out(liars) -> None:
    """Most sets of 14 of 20 shares hold a wrong one."""
    names = tuple(f"site{k:02}" for k in range(20))

    def lie(to, message):
        seeds, keys = read_content(ANSWERS[Stage.UNMASK], message, to)
        return pack_content(({**seeds, names[7]: "00" * 66}, keys)) if to in names[:liars] else message

    table = Table(20, context=make_context(20, sites=names), answers={Stage.UNMASK: lie}).run()
    assert table.server.add_words().tolist() == table.plain(names)


@pytest.mark.parametrize("stage", [Stage.KEYS, Stage.SHARES, Stage.CONFIRM, Stage.UNMASK])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"sites": 3}', b"\xff\xfe"])
def test_a_malformed_message_is_refused_by_both(stage, content) -> None:
    message = {messages.CONTENT: torch.tensor(list(content), dtype=torch.uint8)}
    table = Table(5).run(Stage(max(stage - 1, 1)))
    with pytest.raises(Rejected):
        table.ask(stage, "ash", message)
    with pytest.raises(Rejected):
        table.server.check_answer(stage, "ash", message)


def test_what_is_printed_of_a_site_has_no_secret() -> None:
    site = Table(5).run(Stage.KEYS).sites["ash"]
    assert not [secret for secret in site.state.keys if secret in repr(site)]


def test_a_site_without_the_keys_of_this_sum_gives_nothing() -> None:
    table = Table(5).run(Stage.CONFIRM)
    order = table.server.make_orders(Stage.UNMASK)["ash"]
    stranger = SumSite(
        make_context(5, attempt=2), "ash", make_signer("ash"), table.server.authority, table.sites["ash"].state
    )
    with pytest.raises(Rejected, match="announced no keys"):
        stranger.answer(Stage.UNMASK, order, None)
