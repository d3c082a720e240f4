"""What is seen of a long run: not too many lines, the last scores between evaluations, the time left, the worst node."""

import io

import pytest
from rich.console import Console

from fedmutual.events import Evaluated, Finished, Noted, Replied, Score, Started
from fedmutual.rundir import logs
from fedmutual.rundir.logs import AllRuns, format_holdout_scores, format_worst_nodes
from fedmutual.studies.observers import LINES, ProgressDisplay

pytestmark = pytest.mark.run

NODES = ("0", "40")
ROWS = {"test": (0.9, 0.8), "test.own": (0.95, 0.97), "test.others": (0.85, 0.7), "validation": (0.5, 0.5)}


def scores(model="personal"):
    return tuple(
        Score(model, i, data, {"accuracy": accuracies[k]}) for data, accuracies in ROWS.items() for k, i in enumerate(NODES)
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    return now


def screen(terminal, line=logs.format_scores, end=format_worst_nodes, runs=1):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    return ProgressDisplay(console, line, end, runs), console.file


def rounds(observer, clock, first, last, every):
    """Rounds of 70 ms with two phases, evaluated every so often."""
    for r in range(first, last + 1):
        for share in (0.5, 1.0):
            clock[0] = 0.07 * (r - 1 + share)
            for k, i in enumerate(NODES, 1):
                observer(Replied(r, "local" if share == 0.5 else "mutual", i, k, len(NODES)))
        if r % every == 0 or r == 10_000:
            observer(Evaluated(r, {}, scores()))


@pytest.mark.parametrize("every", [1, 50, 99])
def test_ten_thousand_rounds_say_about_a_hundred_lines(clock, every):
    watch, out = screen(terminal=False)
    observer = watch.observe("")
    observer(Started(0, 10_000, NODES, ()))
    rounds(observer, clock, 1, 10_000, every)
    observer(Finished(10_000))
    output = out.getvalue().splitlines()
    assert LINES <= len(output) <= LINES + 2
    assert output[-2] == "round 10000/10000  ACC 85.0 %  BWT 96.0 %  FWT 77.5 %  0 s left"
    assert output[-1] == "worst node: ACC 80.0 % (40)  BWT 95.0 % (0)  FWT 70.0 % (40)"


def test_a_short_run_says_every_evaluation(clock):
    watch, out = screen(terminal=False)
    observer = watch.observe("x")
    observer(Started(2, 60, NODES, ()))
    out.truncate(0)
    rounds(observer, clock, 3, 60, 2)
    assert len(out.getvalue().splitlines()) == 29


def test_between_evaluations_the_last_scores_and_the_time_left_stay(clock):
    watch, _ = screen(terminal=True)
    with watch:
        observer = watch.observe("")
        observer(Started(0, 10_000, NODES, ()))
        rounds(observer, clock, 1, 49, 50)
        [task] = watch.bar.tasks
        # 49 rounds of 0.07 s; 9,951 are left
        assert (task.description, task.fields["text"]) == ("50/10000", "11 min 37 s left")
        rounds(observer, clock, 50, 74, 50)
        assert task.description == "75/10000"
        assert task.fields["text"] == "ACC 85.0 %  BWT 96.0 %  FWT 77.5 %  11 min 35 s left"
        observer(Replied(75, "local", "0", 2, 2))
        completed = task.completed
        observer(Replied(75, "mutual", "0", 1, 2))
        assert task.completed == completed  # the second phase of a round does not go back


def test_a_screen_is_drawn_at_its_own_pace_however_fast_the_rounds_are(clock):
    watch, out = screen(terminal=True)
    with watch:
        observer = watch.observe("")
        observer(Started(0, 10_000, NODES, ()))
        rounds(observer, clock, 1, 2_000, 50)
        drawn = out.getvalue().count("\r")
        observer(Finished(10_000))
    assert drawn < 100
    assert "10000 rounds  ACC 85.0 %  BWT 96.0 %  FWT 77.5 %" in out.getvalue()
    assert "worst node: ACC 80.0 % (40)" in out.getvalue()


def test_a_sweep_shows_no_test_score(clock):
    watch, out = screen(terminal=False, line=format_holdout_scores, end=lambda scores: "")
    observer = watch.observe("")
    observer(Started(0, 1, NODES, ()))
    observer(Evaluated(1, {}, scores()))
    observer(Finished(1))
    assert "ACC" not in out.getvalue()


def test_a_shared_model_counts_for_every_node_and_only_domains_have_this_line():
    assert logs.format_scores(scores("global")) == "ACC 85.0 %  BWT 96.0 %  FWT 77.5 %"
    plain = tuple(s for s in scores() if s.data == "validation")
    assert logs.format_scores(plain) == "personal 50.0 % (worst 50.0 %)"
    assert format_worst_nodes(plain) == ""


def test_where_hold_out_rows_alone_are_scored_they_are_what_is_shown():
    """A regression's too, in the scores that it has."""
    held = tuple(Score("personal", i, "holdout", {"accuracy": share}) for i, share in (("0", 0.5), ("40", 0.7)))
    other = (Score("personal", "c", "holdout", {"loss": 0.1234}), Score("meme", "c", "holdout", {"loss": 0.2}))
    line = "personal 60.0 %  personal of c loss 0.123  fork of c loss 0.2 on hold-out"
    assert logs.format_scores((*held, *other)) == line
    assert logs.format_scores(()) == "no scores are shared"


def test_a_problem_of_every_round_is_remarked_once():
    watch, out = screen(terminal=False)
    observer = watch.observe("")
    for round in range(7, 10):
        observer(Noted(round, "the message of client 'b' is left out: why"))
    observer(Noted(9, "the message of client 'c' is left out: why"))
    assert out.getvalue().splitlines() == [
        "note in round 7: the message of client 'b' is left out: why",
        "note in round 9: the message of client 'c' is left out: why",
    ]


def test_of_several_runs_each_line_has_the_number_and_the_time_left_for_all(clock):
    watch, out = screen(terminal=False, runs=3)
    first, second, third = (watch.observe(name) for name in ("a", "b", "c"))
    for observer in (first, second):
        observer(Started(0, 2, NODES, ()))
        for round in (1, 2):
            clock[0] += 10.0
            observer(Evaluated(round, {}, scores()))
        observer(Finished(2))
    lines = [line for line in out.getvalue().splitlines() if "round " in line]
    assert [line[:22] for line in lines] == [
        "run 1 of 3  a  round 1",
        "run 1 of 3  a  round 2",
        "run 2 of 3  b  round 1",
        "run 2 of 3  b  round 2",
    ]
    # a round takes 10 s, and 5, 4, 3, 2 rounds are left
    assert [line.partition("77.5 %  ")[2] for line in lines] == [
        f"{left} left for all runs" for left in ("50 s", "40 s", "30 s", "20 s")
    ]
    third(Started(0, 2, NODES, ()))
    clock[0] += 20.0
    third(Evaluated(2, {}, scores()))
    assert out.getvalue().splitlines()[-1].endswith("  0 s left for all runs")


def test_a_run_that_was_finished_before_takes_no_time(clock):
    """Of four runs the first two are finished and the third goes on after half of its rounds."""
    runs = AllRuns(4)
    runs.start(3, 0.5)
    assert runs.format_time_left() == ""
    clock[0] = 10.0
    runs.reach(3, 1.0)
    assert runs.format_time_left() == "20 s left for all runs"


def test_runs_that_are_trained_at_once_count_together(clock):
    watch, out = screen(terminal=False, runs=2)
    observers = [watch.observe(name) for name in "ab"]
    for observer in observers:
        observer(Started(0, 4, NODES, ()))
    clock[0] = 8.0
    for observer in observers:
        observer(Evaluated(1, {}, scores()))
    assert out.getvalue().splitlines()[-1].endswith("  24 s left for all runs")
