"""The weights of the best round: which those are, that they survive a stop where they should, and are read back."""

from pathlib import Path

import pytest
import torch

import fedmutual
from fedmutual.engines import base
from fedmutual.errors import RunError
from fedmutual.events import Score
from fedmutual.rundir import best
from fedmutual.rundir.best import BestRule, compute_merit, save_if_better, settle_best_files
from fedmutual.tensor_files import write_tensors
from log_lines import read_lines

KEEP = ("--set", "records.keep_best=true")


def score(data: str, client: str | None = "0", model: str = "personal", **values: float | None) -> Score:
    return Score(model, client, data, {"examples": 5, **values})


# What is better


def test_the_data_that_choose() -> None:
    every = [score("validation", accuracy=0.1), score("validation.all", accuracy=0.2), score("test", accuracy=0.3)]
    held = [*every, score("holdout", accuracy=0.4)]
    assert compute_merit(every, "validation", "validation") == 0.2  # of all clients' rows, where they can be had
    assert compute_merit([every[0], every[2]], "validation", "validation") == 0.1
    assert compute_merit(held, "validation", None) == 0.4
    assert compute_merit(every, "validation", None) == 0.2
    assert compute_merit(held, "validation", "test") == 0.3
    assert compute_merit(every, "validation", "holdout") == 0.2  # there is none
    assert compute_merit([every[2]], "validation", None) is None


def test_the_shared_models_score_is_on_the_test_set_or_the_mean_over_clients() -> None:
    clients = [score("validation", i, "global", accuracy=a) for i, a in (("0", 0.2), ("1", 0.6))]
    assert compute_merit(clients, "test", "validation") == pytest.approx(0.4)
    assert compute_merit([score("test", None, "global", accuracy=0.9), *clients], "test", None) == 0.9


def test_without_a_shared_accuracy_the_loss_decides() -> None:
    assert compute_merit([score("validation", loss=0.25)], "validation", None) == -0.25
    assert compute_merit([score("validation", loss=None)], "validation", None) is None


# Files


def rounds(half: Path) -> dict[str, str]:
    """File -> the round in its header."""
    return {p.name: str(best.read_header(p).round) for p in sorted(half.glob("best*"))}


def offered(half: Path, *merits: tuple[int, float | None], every: int = 2) -> None:
    for round, value in merits:
        save_if_better(
            half, lambda round=round: {"w": torch.full((2,), float(round))}, value, round, BestRule(None, every, "run")
        )


def test_the_first_of_equal_rounds_is_kept_and_worse_ones_are_not_written(tmp_path: Path) -> None:
    half = tmp_path / "server"
    offered(half, (2, 0.5), (4, 0.5), (6, 0.4), (8, None))
    assert rounds(half) == {"best-2.safetensors": "2"}
    settle_best_files(tmp_path, 8, 8, 2)
    assert rounds(half) == {"best.safetensors": "2"}
    offered(half, (10, 0.5))
    assert rounds(half) == {"best.safetensors": "2"}
    offered(half, (12, -0.5), (14, 0.50001))
    assert rounds(half) == {"best-14.safetensors": "14", "best.safetensors": "2"}
    assert best.read_best_state(half, 13, "run")["w"].tolist() == [2.0, 2.0]
    # round 14 was saved, and a kill came before its file was renamed
    assert best.read_best_state(half, 14, "run")["w"].tolist() == [14.0, 14.0]


@pytest.mark.parametrize(("saved", "left"), [(None, {}), (5, {}), (6, {"best.safetensors": "6"})])
def test_what_was_not_saved_goes(tmp_path: Path, saved: int | None, left: dict[str, str]) -> None:
    half = tmp_path / "clients" / "a"
    offered(half, (4, 0.1), (6, 0.2))
    settle_best_files(tmp_path, saved, 20, 2)
    assert rounds(half) == left


def test_a_best_before_the_unsaved_one_stays(tmp_path: Path) -> None:
    half = tmp_path / "clients" / "a"
    offered(half, (2, 0.1))
    settle_best_files(tmp_path, 3, 20, 2)
    offered(half, (4, 0.2), (6, 0.3))
    settle_best_files(tmp_path, 3, 20, 2)
    assert rounds(half) == {"best.safetensors": "2"}


def test_a_last_round_that_is_the_last_no_more_gives_way_to_the_best_before_it(tmp_path: Path) -> None:
    """Round 5 of 5 is evaluated though 2 does not divide it; a run of 20 never looks at it."""
    half = tmp_path / "server"
    offered(half, (2, 0.1))
    settle_best_files(tmp_path, 2, 5, 2)
    offered(half, (4, 0.2), (5, 0.3))
    settle_best_files(tmp_path, 5, 5, 2)
    assert rounds(half) == {"best-4.safetensors": "4", "best.safetensors": "5"}
    settle_best_files(tmp_path, 5, 5, 2)  # asked for once more, it is not trained
    assert rounds(half) == {"best-4.safetensors": "4", "best.safetensors": "5"}
    settle_best_files(tmp_path, 5, 20, 2)
    assert rounds(half) == {"best.safetensors": "4"}
    assert best.read_best_state(half, 5, "run")["w"].tolist() == [4.0, 4.0]


def test_the_same_where_nothing_was_better_before(tmp_path: Path) -> None:
    offered(tmp_path / "server", (5, 0.3))
    settle_best_files(tmp_path, 5, 5, 2)
    assert rounds(tmp_path / "server") == {"best.safetensors": "5"}
    settle_best_files(tmp_path, 5, 6, 2)
    assert rounds(tmp_path / "server") == {}


def test_another_runs_best_is_refused(tmp_path: Path) -> None:
    offered(tmp_path / "server", (2, 0.1))
    with pytest.raises(RunError, match=r"best-2\.safetensors: belongs to another run"):
        best.read_best_state(tmp_path / "server", 2, "another")


@pytest.mark.parametrize("key", ["round", "merit"])
@pytest.mark.parametrize("value", [None, "many", ["1"]], ids=["missing", "text", "list"])
def test_a_header_without_its_numbers_is_damaged(tmp_path: Path, key: str, value: object) -> None:
    half = tmp_path / "server"
    header = {"format": "1", "run": "run", "round": "2", "merit": "0.5", key: value}
    write_tensors(half / "best.safetensors", {"w": torch.zeros(2)}, {k: v for k, v in header.items() if v is not None})
    for use in (
        lambda: best.check_best_files(tmp_path),
        lambda: settle_best_files(tmp_path, 2, 5, 1),
        lambda: best.find_best(half, 2),
        lambda: best.read_best_state(half, 2, "run"),
        lambda: offered(half, (3, 0.6)),
    ):
        with pytest.raises(RunError, match=rf"best\.safetensors: .*{key}"):
            use()
    assert [p.name for p in half.iterdir()] == ["best.safetensors"]


# Runs


def best_round(folder: str, model: str, client: str | None, data: str) -> int:
    """By the lines of the run: the first of the greatest accuracy."""
    accuracies = {
        line["round"]: s["accuracy"]
        for line in read_lines(Path(folder, "metrics.jsonl"))
        for s in line["scores"]
        if (s["model"], s["client"], s["data"]) == (model, client, data)
    }
    return max(accuracies, key=lambda r: (accuracies[r], -r))


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    other_state = b.state_dict()
    return all(torch.equal(v, other_state[k]) for k, v in a.state_dict().items())


LONG = ("--set", "rounds=12", "--set", "optimizer.lr=0.3", *KEEP)  # a rate at which scores go up and down


@pytest.mark.parametrize("engine", ["inprocess", "processes", "stacked"])
def test_the_models_are_those_of_the_best_round(small, cli, engine: str) -> None:
    engines = ("--set", f"engine.name={engine}", *(("--set", "engine.workers=2") if engine == "processes" else ()))
    assert cli("run", small, *LONG, *engines, "--out", "run")[0] == 0
    run, chosen = fedmutual.Run("run"), {}
    for i in ("0", "1", "2"):
        chosen[i] = best_round("run", "personal", i, "validation")
        assert rounds(Path("run/clients", i)) == {"best.safetensors": str(chosen[i])}
    chosen["server"] = best_round("run", "global", None, "test")
    assert rounds(Path("run/server")) == {"best.safetensors": str(chosen["server"])}
    assert chosen["server"] == run.summary["global"]["test_accuracy"]["best_round"]
    assert min(chosen.values()) < 12
    for owner, round in chosen.items():
        if engine == "inprocess":
            assert cli("run", small, *LONG, "--set", f"rounds={round}", "--out", f"to-{round}", "--resume")[0] == 0
            short = fedmutual.Run(f"to-{round}")
            if owner == "server":
                assert equal(run.global_model(best=True), short.global_model())
            else:
                assert equal(run.personal_model(owner, best=True), short.personal_model(owner))
                assert equal(run.personal_model(owner, best=True), run.personal_model(owner)) == (round == 12)


def test_pooled_data_have_one_best(small, cli) -> None:
    assert cli("run", small, *LONG, "--set", "algorithm.name=centralised", "--out", "run")[0] == 0
    round = best_round("run", "global", None, "test")
    assert rounds(Path("run/clients/pooled")) == {"best.safetensors": str(round)}
    assert rounds(Path("run/server")) == {}
    assert (
        cli("run", small, *LONG, "--set", "algorithm.name=centralised", "--set", f"rounds={round}", "--out", "short")[0] == 0
    )
    assert equal(fedmutual.Run("run").global_model(best=True), fedmutual.Run("short").global_model())


def test_a_client_that_tells_no_scores_keeps_its_best_all_the_same(small, cli) -> None:
    small.write_text(small.read_text() + '[clients.1.share]\nmetrics = "none"\n')
    assert cli("run", small, *KEEP, "--out", "run")[0] == 0
    assert "best.safetensors" in rounds(Path("run/clients/1"))


def test_without_the_key_nothing_is_kept_and_asking_says_so(small, cli) -> None:
    assert cli("run", small, "--out", "run")[0] == 0
    assert not list(Path("run").rglob("best*"))
    for ask in (lambda run: run.personal_model("1", best=True), lambda run: run.global_model(best=True)):
        with pytest.raises(RunError, match=r"a run keeps them with records\.keep_best"):
            ask(fedmutual.Run("run"))


def results(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    return {str(p.relative_to(root)): p.read_bytes() for p in (*root.rglob("*.safetensors"), root / "metrics.jsonl")}


def test_a_stop_after_an_unsaved_best_leaves_no_trace(small, cli, monkeypatch) -> None:
    sparse = (*KEEP, "--set", "rounds=12", "--set", "records.checkpoint_every=5", "--set", "engine.name=inprocess")
    assert cli("run", small, *sparse, "--out", "whole")[0] == 0
    evaluate = base.evaluate_client

    def stopped(client, evaluations, inbox, round, *rest):
        scores = evaluate(client, evaluations, inbox, round, *rest)
        if (client.id, round) == ("1", 9):
            raise KeyboardInterrupt
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(base, "evaluate_client", stopped)
        assert cli("run", small, *sparse, "--out", "part")[0] == 130
    left = {int(round) for half in Path("part").glob("clients/*") for round in rounds(half).values()}
    assert min(left) <= 5 < max(left) <= 9  # or there is nothing to see here
    assert cli("run", small, *sparse, "--out", "part", "--resume")[0] == 0
    assert results("part") == results("whole")


@pytest.mark.parametrize("every", [2, 3])
def test_rounds_grow_as_if_they_had_been_asked_for_at_once(small, cli, every: int) -> None:
    sparse = (*KEEP, "--set", f"records.evaluate_every={every}", "--set", "optimizer.lr=0.1")
    for reached in (5, 7, 12):
        assert cli("run", small, *sparse, "--set", f"rounds={reached}", "--out", "grown", "--resume")[0] == 0
    assert cli("run", small, *sparse, "--set", "rounds=12", "--out", "whole")[0] == 0
    assert results("grown") == results("whole")


def test_a_file_with_another_name_is_not_a_best_round(tmp_path):
    """The folder comes from another person."""
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "best-x.safetensors").touch()
    best.check_best_files(tmp_path)
    with pytest.raises(RunError, match="no best weights are kept here"):
        best.find_best(tmp_path / "server", 3)
