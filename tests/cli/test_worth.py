"""`worth` and `compare --join` as their users type them."""

import itertools
import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

import fedmutual
from fedmutual.config import load_config
from fedmutual.errors import ConfigError
from fedmutual.studies.worth import plan_worth

pytestmark = pytest.mark.run

EXPERIMENT = """
name = "joined"
rounds = 1
data = { name = "npz", classes = ["0", "1", "2", "3"] }
split = { validation = 0.3, test = 0.2 }
algorithm = { name = "fedavg" }
model = { shared = "mlp" }
training = { local_epochs = 2, batch_size = 16 }
optimizer = { lr = 0.05 }
engine = { device = "cpu", name = "inprocess" }
"""


def write_clusters(folder, mixes, rows):
    """Write NAME.npz with rows of four Gaussian clusters, mixed by the weights of the classes."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(4, 8)) * 1.1
    for name, mix in mixes.items():
        y = draw.choice(4, size=rows, p=mix)
        np.savez(folder / f"{name}.npz", x=(centres[y] + draw.normal(size=(rows, 8))).astype("float32"), y=y)


def describe(names, **more):
    """Return the experiment of these participants; more: participant -> the rest of its table."""
    return EXPERIMENT + "".join(f'clients.{i} = {{ data = {{ root = "{i}.npz" }}{more.get(i, "")} }}\n' for i in names)


@pytest.fixture
def joined(tmp_path, in_tmp_path):
    names = ("north", "south", "east", "west")
    write_clusters(tmp_path, {i: np.roll([0.4, 0.3, 0.2, 0.1], k) for k, i in enumerate(names)}, 60)
    Path("joined.toml").write_text(describe(names))
    return names


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fedmutual.RemarkWarning")
def test_joining_is_what_a_loop_over_coalitions_finds(joined, cli):
    """A coalition has equal rows and equal random numbers as a federation that never knew the others."""
    seeds = (0, 1)
    _, err = cli.run("compare", "joined.toml", "--join", "south", "--seeds", 2, "--out", "j")
    assert "8 coalitions x 2 seeds: 16 runs" in err

    def train(members, seed, method):
        Path("part.toml").write_text(describe(members))
        config = load_config("part.toml", **{"algorithm.name": method, "seed": seed})
        run = fedmutual.run(config, f"loop/{method}/{'-'.join(members)}/{seed}")
        return run.summary["personal"]["val_accuracy"]["last"]["per_client"]["south"]

    alone, expected = [train(["south"], seed, "independent") for seed in seeds], {}
    for size in (3, 2, 1):
        for members in sorted(itertools.combinations(joined, size + 1), key=sorted):
            if "south" in members:
                others = tuple(i for i in members if i != "south")
                expected[others] = [train(members, seed, "fedavg") - alone[k] for k, seed in enumerate(seeds)]
    record = json.loads(Path("j/join.json").read_text())
    gains = {tuple(line["with"]): line["gain"] for line in record["coalitions"]}
    assert gains == {others: fmean(of_seeds) for others, of_seeds in expected.items()}
    first = max(expected, key=lambda others: expected[others][1])  # the other seed chooses
    second = max(expected, key=lambda others: expected[others][0])
    over_all = [expected[c][k] - expected["north", "east", "west"][k] for k, c in enumerate((first, second))]
    assert record["choosing_over_all"] == fmean(over_all)
    assert "south gain by joining" in Path("j/join.html").read_text()


def test_worth_trains_once_and_reads_finished_runs(joined, cli):
    command = ("worth", "joined.toml", "--left-out", "--seeds", 1, "--out", "w")
    out, err = cli.run(*command)
    assert "5 coalitions x 1 seed: 5 runs" in err
    assert "who gains" in out
    assert "What each participant loses if one other is left out, points" in Path("w/worth.html").read_text()
    before = {p: p.stat().st_mtime_ns for p in Path("w").rglob("metrics.jsonl")}
    assert len(before) == 5
    resumed, _ = cli.run(*command, "--resume", "--json")
    assert {p: p.stat().st_mtime_ns for p in before} == before
    again, err = cli.run("worth", "w", "--json")
    assert json.loads(again) == json.loads(resumed) == json.loads(Path("w/worth.json").read_text())
    assert "coalitions" not in err
    assert "--resume" in cli.fail(*command)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["worth", "--runs", "44"], "15 coalitions x 3 seeds are 45 runs, more than 44; allow them with --runs 45, or take"),
        (["worth", "--set", "algorithm.name=independent"], "algorithm 'independent' does not federate"),
        (["worth", "--set", 'participants=["north","south"]'], "remove the key 'participants'"),
        (["worth", "--set", 'participants=["nort"]', "--left-out"], "remove the key 'participants'"),
        (["run", "--set", 'participants=["nort"]'], "key 'participants': there is no client 'nort'; there are 'north'"),
        (["compare", "--join", "nobody"], "--join: there are north, south, east, west; name one of them"),
        (["compare", "--join", "north", "--methods", "fml"], "leave out --methods and --tune"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(joined, cli, words, sentence):
    command, *rest = words
    assert sentence in cli.fail(command, "joined.toml", *rest)


def test_noise_is_refused(joined):
    config = load_config("joined.toml", **{"privacy.nets": "meme", "privacy.sigma": 1.0, "algorithm.name": "fedavg"})
    with pytest.raises(ConfigError, match="the runs would cost privacy that epsilon does not count"):
        plan_worth(config, Path("w"))


def test_of_many_participants_orders_are_trained_as_far_as_the_runs_go(small):
    config = load_config(small, **{"partition.clients": 7, "partition.examples": 20})
    plan = plan_worth(config, Path("w"), seeds=2, most=70)
    assert plan.cost == "8 coalitions x 2 seeds, then at most 4 orders of 13 coalitions: 62 runs"
    assert len(plan.folders) == 62
    assert [len(study.runs) for study in plan.studies] == [16, 13, 13, 13, 13]
    assert [list(study.seeds) for study in plan.studies[1:]] == [[0], [1], [2], [3]]
    with pytest.raises(ConfigError, match=r"more than 40; allow them with --runs \d+, or .*--left-out, which takes 16"):
        plan_worth(config, Path("w"), seeds=2, most=40)


@pytest.mark.long
def test_planted_participants_are_found_by_training(tmp_path, in_tmp_path, cli):
    """South has a copy, the labels of noise are shuffled, and rare has the rows of a class that others hardly have."""
    common = [0.31, 0.31, 0.31, 0.07]
    write_clusters(tmp_path, dict.fromkeys(("north", "south", "noise"), common) | {"rare": [0.1, 0.1, 0.1, 0.7]}, 60)
    Path("copy.npz").write_bytes(Path("south.npz").read_bytes())
    Path("planted.toml").write_text(
        describe(("north", "south", "copy", "noise", "rare"), noise=", training = { shuffled = 1.0 }")
    )
    out, _ = cli.run("worth", "planted.toml", "--set", "rounds=4", "--seeds", 5, "--out", "w")
    record = json.loads(Path("w/worth.json").read_text())
    lines = {line["participant"]: line for line in record["participants"]}

    def bounds(line, key):
        return line[key] - line[f"{key}_half_width"], line[key] + line[f"{key}_half_width"]

    assert bounds(lines["noise"], "shapley_given")[1] < 0
    assert bounds(lines["rare"], "shapley_given")[0] > 0
    overlaps = {(line["first"], line["second"]): line for line in record["overlaps"]}
    assert min(overlaps, key=lambda pair: overlaps[pair]["overlap"]) == ("south", "copy")
    assert bounds(overlaps["south", "copy"], "overlap")[1] < 0
    assert "south and copy may give the same" in out
