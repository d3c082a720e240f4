"""What a server that asks again, ahead, behind or with other tensors gets out of a site: one answer a place, and no more."""

from collections.abc import Iterator

import pytest
import torch

from fedmutual.core import Data, Message
from fedmutual.errors import RunError
from fedmutual.federation.experiment import Experiment
from fedmutual.rundir.file_names import METRICS
from fedmutual.sites import private_values, site_journal
from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.private_values import describe_disclosure
from fedmutual.sites.protocol import ATTEMPTS, EVALUATE, WORK, MalformedMessage, Order, SiteAnswer, pack_message, read_answer
from fedmutual.sites.site_journal import ROUNDS_BACK
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from log_lines import read_lines
from wards import COMMON, SITES, TELLING, contract, halves, same, site

pytestmark = pytest.mark.sites

MLP = {"north": SITES["north"]}
LONG = COMMON | {"rounds": 8}


def north(folder, common=LONG) -> SiteRuntime:
    """A site that is alone in its federation: what it does depends on what it is asked and on nothing else."""
    folder.mkdir(exist_ok=True)
    return halves(folder, contract(folder, common, MLP), MLP)[1]["north"]


def restarted(folder, common=LONG) -> SiteRuntime:
    (runtime,) = halves(folder, folder / "federation.toml", MLP)[1].values()
    return runtime


def weights(site_half: SiteRuntime, seed: int) -> Message:
    """Some shared model."""
    generator = torch.Generator().manual_seed(seed)
    state = site_half.experiment.make_server_state()
    return {k: torch.randn(v.shape, generator=generator) * 0.1 for k, v in state.items()}


def ask(
    site_half: SiteRuntime, kind: str, round: int, seed: int, attempt: int = 0, phase: int = 0
) -> tuple[SiteAnswer, bytes]:
    """An order with the shared model of a seed -> what is said to it, and as bytes."""
    content = site_half.carry_out(pack_message(Order(kind, round, phase, attempt=attempt), weights(site_half, seed)))
    return read_answer(content)[0], content


def list_scores(answer: SiteAnswer) -> list[dict]:
    return [score.values for score in answer.scores]


def orders(rounds: range, models: range) -> Iterator[tuple[int, int]]:
    return ((number, seed) for seed in models for number in rounds)


def test_evaluation_orders_without_end_bring_one_answer_a_finished_round(tmp_path):
    """A server that chooses what is scored could read validation examples, with their labels, out of exact losses."""
    runtime, answers = north(tmp_path), dict[int, set[tuple[float, ...]]]()
    for number, seed in orders(range(-1, 9), range(4)):
        answer, _ = ask(runtime, EVALUATE, number, seed)
        assert (answer.scores, answer.problem is not None) == ((), True), "no score leaves a site before training"
    for done in range(3):
        before, _ = ask(runtime, WORK, done, seed=100)
        assert (before.train, before.problem) == ({}, None)
        for number, seed in orders(range(-1, 9), range(8)):
            answer, _ = ask(runtime, EVALUATE, number, seed)
            if answer.scores:
                answers.setdefault(number, set()).add(tuple(v for values in list_scores(answer) for v in values.values()))
                assert [values.keys() for values in list_scores(answer)] == [{"accuracy"}] * 2
    assert answers.keys() == {0, 1, 2}
    assert all(len(distinct) == 1 for distinct in answers.values())
    assert all(value == round(value, 2) for distinct in answers.values() for values in distinct for value in values)
    exams = [line for line in read_ledger(runtime.folder) if line["what"] == EVALUATE and "problem" not in line["told"]]
    assert {line["sha256"] for line in exams} == {line["sha256"] for line in exams if line["told"]}
    declined = [line for line in read_ledger(runtime.folder) if "problem" in line["told"]]
    assert len(declined) < 20, "a server that asks for ever fills no disk"


def test_one_answer_a_place_with_equal_bytes_also_after_a_restart(tmp_path):
    """Each further inbox would be a look at the same examples through another network. Nothing is trained twice."""
    runtime = north(tmp_path)
    _, work = ask(runtime, WORK, 0, seed=1)
    answer, scores = ask(runtime, EVALUATE, 0, seed=2)
    assert list_scores(answer)
    at_home = read_lines(runtime.folder / METRICS)
    for half_ in (runtime, restarted(tmp_path)):
        for kind, content in ((WORK, work), (EVALUATE, scores)):
            assert ask(half_, kind, 0, seed=2 if kind == WORK else 3)[0].problem == site_journal.ANSWERED
            assert ask(half_, kind, 0, seed=1 if kind == WORK else 2)[1] == content
    sent = [line["sha256"] for line in read_ledger(runtime.folder) if "problem" not in line["told"]]
    assert len(sent) == 6  # every answer that left, the repeated ones too
    ask(runtime, WORK, 2, seed=4)
    assert ask(runtime, WORK, 1, seed=4)[0].problem == site_journal.PAST
    assert ask(runtime, WORK, 0, seed=1)[1] == work
    assert ask(runtime, EVALUATE, 0, seed=2)[1] == scores
    assert ask(runtime, EVALUATE, 0, seed=3)[0].problem == site_journal.ANSWERED
    assert read_lines(runtime.folder / METRICS) == at_home


def test_only_rounds_that_the_contract_scores_are_scored(tmp_path):
    runtime = north(tmp_path, LONG | {"rounds": 3, "records": {"evaluate_every": 2}})
    wanted = {0: site_journal.NOT_DUE, 1: None, 2: None}  # the last one is always scored
    for round, problem in wanted.items():
        assert ask(runtime, EVALUATE, round, seed=1)[0].problem == (problem or site_journal.UNFINISHED)
        ask(runtime, WORK, round, seed=1)
        assert ask(runtime, EVALUATE, round, seed=1)[0].problem == problem


def test_what_the_contract_does_not_have_is_not_done(tmp_path):
    runtime = north(tmp_path)
    beyond = ((WORK, 8, 0), (EVALUATE, 8, 0), (WORK, 0, 1), (WORK, -1, 0), (EVALUATE, -1, 0), (WORK, 2**62, 0))
    for kind, round, phase in beyond:
        assert ask(runtime, kind, round, 1, phase=phase)[0].problem == site_journal.BEYOND
    with pytest.raises(MalformedMessage):
        runtime.carry_out(b"nonsense")


def test_a_phase_that_failed_was_begun_too(tmp_path, monkeypatch):
    """Whether a site fails would be an answer as well."""
    runtime, participate = north(tmp_path), private_values.participate

    def fails(*_):
        raise RunError("No space left on device")

    monkeypatch.setattr(private_values, "participate", fails)
    assert ask(runtime, WORK, 0, seed=1)[0].problem == "it could not do its part; its operator reads why"
    monkeypatch.setattr(private_values, "participate", participate)
    for half_ in (runtime, restarted(tmp_path)):
        assert ask(half_, WORK, 0, seed=2)[0].problem == site_journal.ANSWERED
    assert ask(half_, WORK, 0, seed=1)[0].problem is None  # its disk has room again


def test_a_new_attempt_goes_back_to_the_state_before(tmp_path):
    runtime = north(tmp_path / "back")
    ask(runtime, WORK, 0, seed=1)
    for round in (1, 2, 3):
        ask(runtime, WORK, round, seed=50 + round)
    ask(runtime, EVALUATE, 3, seed=9)
    fresh = north(tmp_path / "straight")
    ask(fresh, WORK, 0, seed=1)
    for round in (1, 2):
        (_, again), (_, straight) = (
            ask(back_answer, WORK, round, seed=70 + round, attempt=1) for back_answer in (runtime, fresh)
        )
        assert same(read_answer(again)[1], read_answer(straight)[1])
    assert ask(runtime, EVALUATE, 3, seed=9, attempt=1)[0].problem == site_journal.UNFINISHED  # what followed was taken back
    back_answer, straight_answer = (
        ask(half_, EVALUATE, 2, seed=9, attempt=1)[0] for half_ in (restarted(tmp_path / "back"), fresh)
    )
    assert list_scores(back_answer) == list_scores(straight_answer) != []
    lines = read_ledger(runtime.folder)
    assert [line.get("attempt") for line in lines if line["what"] == WORK] == [None] * 4 + [1, 1]


def test_new_attempts_are_few_and_only_go_up(tmp_path):
    """Their number bounds what a server can ask beyond one answer a place."""
    runtime, distinct = north(tmp_path), set[bytes]()
    for attempt in (0, 2, 1, 3, 4, 2**40, 3, 0):
        for seed in range(5):
            answer, content = ask(runtime, WORK, 0, seed=10 * attempt % 97 + seed, attempt=attempt)
            distinct |= set() if answer.problem else {content}
            assert answer.problem in (None, site_journal.ANSWERED, site_journal.PAST, site_journal.SPENT)
    assert len(distinct) == 3  # of attempts 0, 2 and 3
    assert ask(runtime, WORK, 0, seed=1000, attempt=ATTEMPTS + 1)[0].problem == site_journal.SPENT
    assert ask(runtime, WORK, 0, seed=1000, attempt=0)[0].problem == site_journal.ANSWERED
    assert ask(runtime, WORK, 1, seed=1000, attempt=2)[0].problem == site_journal.PAST
    assert ask(runtime, WORK, 1, seed=1000, attempt=ATTEMPTS)[0].problem is None


def test_a_site_goes_back_over_so_many_rounds(tmp_path):
    runtime = north(tmp_path)
    for round in range(ROUNDS_BACK + 2):
        ask(runtime, WORK, round, seed=round)
    assert ask(runtime, WORK, 0, seed=90, attempt=1)[0].problem == site_journal.FORGOTTEN
    last = ROUNDS_BACK + 1
    assert ask(runtime, WORK, last, seed=last)[0].problem is None  # nothing was taken back for an order that was declined
    assert ask(runtime, WORK, last + 1 - ROUNDS_BACK, seed=90, attempt=1)[0].problem is None
    states = {file.name for file in (runtime.folder / "clients" / "north").glob("*.safetensors")}
    assert states == {f"round-{n}.safetensors" for n in (last + 1 - ROUNDS_BACK, last + 2 - ROUNDS_BACK)}


def test_scores_of_a_new_attempt_take_later_rounds_back(tmp_path):
    """A round of which all sites gave the answer before is scored with another mean, when the server left somebody out."""
    runtime = north(tmp_path)
    for round in range(3):
        _, before = ask(runtime, WORK, round, seed=round)
        ask(runtime, EVALUATE, round, seed=20 + round)
    assert ask(runtime, WORK, 2, seed=2, attempt=1)[1] == before
    assert list_scores(ask(runtime, EVALUATE, 1, seed=30, attempt=1)[0])
    assert ask(runtime, WORK, 2, seed=31, attempt=1)[0].problem is None
    assert ask(runtime, WORK, 1, seed=32, attempt=1)[0].problem == site_journal.ANSWERED


def test_nothing_but_scores_depends_on_validation_rows(tmp_path, monkeypatch):
    """No site trains on validation rows, and no message depends on them."""
    messages = {}
    read_rows = Experiment.load_rows

    def changed(self: Experiment, site: str) -> dict[str, Data]:
        rows = read_rows(self, site)
        return rows | {"validation": Changed(rows["validation"])}

    for name in ("as they are", "changed"):
        runtime = north(tmp_path / name, LONG | TELLING)
        answer = [ask(runtime, WORK, round, seed=round) for round in range(2)]
        scores, _ = ask(runtime, EVALUATE, 1, seed=5)
        messages[name] = [content for _, content in answer], list_scores(scores)
        monkeypatch.setattr(Experiment, "load_rows", changed)
    (works, scores), (other_works, other_scores) = messages.values()
    assert works == other_works
    assert scores != other_scores


class Changed:
    """Rows with other inputs and labels."""

    def __init__(self, rows: Data) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, plan, rng=None):
        return ((x * -2, y.flip(0)) for x, y in self._rows.rows(plan))


TOLD = {  # tables of a site -> the values of its scores, whether it tells losses, what its operator reads
    "unset": ({}, {"accuracy"}, False, "Accuracies to 1 %, of its validation rows, are sent once a round"),
    "hold-out": ({"split": {"holdout": 0.3}}, {"accuracy"}, False, "Accuracies to 1 %, of its validation and holdout rows"),
    "few rows": ({"split": {"validation": 0.02}}, set(), False, "not sent: it has fewer than 50 validation rows"),
    "none": ({"share": {"metrics": "none"}}, set(), False, "Its losses and scores are not sent."),
    "stops": ({"training": {"patience": 9}}, {"accuracy"}, False, "(training.patience) can be seen in its messages"),
    "all": (TELLING, {"accuracy", "loss", "examples", "recall"}, True, "All its losses and scores are sent"),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_a_site_tells_and_its_operator_reads(tmp_path, case):
    tables, scores, losses, words = TOLD[case]
    (runtime,) = halves(tmp_path, contract(tmp_path, LONG, MLP), {"north": MLP["north"] | tables})[1].values()
    assert words in describe_disclosure(runtime.experiment, "north", trains_alone=False)
    work, _ = ask(runtime, WORK, 0, seed=1)
    answer, _ = ask(runtime, EVALUATE, 0, seed=1)
    assert (bool(work.train), answer.problem) == (losses, None)
    assert {key for values in list_scores(answer) for key in values} >= scores
    assert scores or not answer.scores
    assert losses or {key for values in list_scores(answer) for key in values} == scores
    (line,) = read_lines(runtime.folder / METRICS)
    assert all({"loss", "examples", "recall"} <= score.keys() for score in line["scores"])  # at home it has them all


def test_a_site_may_tell_less_while_the_federation_goes_on(tmp_path):
    runtime = north(tmp_path, LONG | TELLING)
    ask(runtime, WORK, 0, seed=1)
    silent = MLP["north"] | {"share": {"metrics": "none"}}
    again = SiteRuntime(
        halves(tmp_path, tmp_path / "federation.toml", MLP)[0], read_site_file(site(tmp_path, "north", silent))
    )
    assert list_scores(ask(again, EVALUATE, 0, seed=1)[0]) == []


def test_an_order_that_fails_each_time_fills_no_ledger(tmp_path):
    """A server can choose a shared model on which every site diverges."""
    runtime = north(tmp_path)
    state = {k: torch.full_like(v, torch.nan) for k, v in runtime.experiment.make_server_state().items()}
    order = pack_message(Order(WORK, 0, 0), state)
    assert all(t.isnan().all() for t in read_answer(runtime.carry_out(order))[1].values())
    for _ in range(100):
        runtime.carry_out(order)
    with pytest.raises(MalformedMessage, match="is not answered again"):
        runtime.carry_out(order)
    assert len(read_ledger(runtime.folder)) == 101
