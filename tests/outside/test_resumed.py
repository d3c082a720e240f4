"""The sample run folders go on, and new runs begin with them, as if today's code had written them."""

import json

import pytest
from safetensors.torch import load_file

import fedmutual
from fedmutual.errors import RunError
from log_lines import read_lines
from outside import samples as sample_folders
from outside.layout import flatten, read_layout
from outside.state import assert_equal, assert_same, change, federate, forget, tensors

pytestmark = pytest.mark.long


def contents(folder):
    """The bytes of all files that are not made anew by each command."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock" and path.suffix != ".html"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", ["fml", "records", "part", "fedh2l"])
def test_a_sample_goes_on_as_if_it_had_never_stopped(name, samples, cli):
    command = ("run", f"{name}.toml", "--set", "rounds=3", "--out")
    for words in ((name, "--resume"), ("fresh",)):
        cli.run(*command, *words)
    assert fedmutual.Run(name).round == 3
    assert_same(name, tensors(samples / name), tensors(samples / "fresh"))
    assert [line["round"] for line in read_lines(samples / name / "metrics.jsonl")] == [1, 2, 3]
    assert flatten(read_layout(samples / name)) == flatten(read_layout(samples / "fresh"))


@pytest.mark.parametrize("name", ["compare", "sweep", "adapt", "reproduce"])
def test_a_finished_sample_is_not_trained_again(name, samples, cli):
    before = contents(samples / name)
    resume = () if name == "reproduce" else ("--resume",)
    out, err = cli.run(*sample_folders.words(name), *resume)
    assert "round 1/" not in err
    if name == "reproduce":
        assert "0 runs trained, 2 known" in out
    after = contents(samples / name)
    assert {file: after[file] for file in before if file.endswith(".safetensors")} == {
        file: content for file, content in before.items() if file.endswith(".safetensors")
    }
    for file in ("sweep.json", "adapt.json"):
        if file in before:  # later versions may add keys, and warn in other words
            then, now = (json.loads(content[file]) for content in (before, after))
            assert len(then.pop("warnings", [])) == len(now.pop("warnings", []))
            assert _is_contained(then, now)


def _is_contained(part, container):
    """Return whether all keys and values of a JSON value are in another value."""
    if isinstance(part, dict):
        return all(key in container and _is_contained(value, container[key]) for key, value in part.items())
    return part == container


def test_a_finished_sweep_is_judged_again_from_python(samples):
    swept = fedmutual.sweep("methods.toml", {"algorithm.alpha": [0.3, 0.6]}, out="sweep", resume=True)
    recorded = json.loads((samples / "sweep/sweep.json").read_text())
    assert [tried.label for tried in swept.tried] == [setting["label"] for setting in recorded["settings"]]
    assert [tried.last.mean for tried in swept.tried] == [
        s["holdout_accuracy"]["last"]["mean"] for s in recorded["settings"]
    ]
    assert {key: str(value) for key, value in swept.chosen.values.items()} == recorded["chosen"]


def test_a_comparison_goes_on_with_more_rounds(samples, cli):
    methods = ("fml", "fedavg", "centralised")
    words = ("--methods", ",".join(methods), "--seeds", 1, "--out", "compare")
    cli.run("compare", "methods.toml", *words, "--set", "rounds=3", "--resume")
    for method in methods:
        assert fedmutual.Run(f"compare/{method}/0").round == 3


def test_a_reproduction_goes_on_with_more_rounds(samples, cli):
    """The sample has one round of two: the new runs begin with a copy of it, and end as if there had been none."""
    for out in ("reproduce", "fresh"):
        cli.run("reproduce", "tiny", "--seeds", 1, "--experiments", "papers", "--out", out)
    folders = [path.name for path in (samples / "fresh/runs").iterdir()]
    assert len(folders) == 2
    for name in folders:
        log = (samples / "reproduce/runs" / name / "log.txt").read_text()
        assert "resumed" in log
        assert_same("reproduce", tensors(samples / "reproduce/runs" / name), tensors(samples / "fresh/runs" / name))


@pytest.mark.sites
def test_a_federation_of_real_sites_goes_on_with_more_rounds(samples):
    """A state of version 0.2 does not, and the refusal says what to do."""
    place = samples / sample_folders.SITES
    with pytest.raises(RunError, match="an older version of fedmutual wrote this state"):
        federate(samples)
    forget(samples)
    federate(samples)
    change(place / "federation.toml", "rounds = 2", "rounds = 3")
    federate(samples)
    went_on = {path: tensors(place / path) for path in ("server/wards/server", "north/state/wards", "south/state/wards")}
    assert fedmutual.Run(place / "server/wards").round == 3
    assert [line["round"] for line in read_lines(place / "server/wards/metrics.jsonl")] == [1, 2, 3]
    forget(samples)
    federate(samples)
    for path, state in went_on.items():
        assert_same(sample_folders.SITES, state, tensors(place / path))


@pytest.mark.parametrize("run", ["fml", "part", "records", "compare/fedavg/0", "sites/server/wards"])
def test_a_newcomer_adapts_a_sample(run, samples, cli):
    extra = ("--set", "data.size=[4, 4]") if run == "part" else ()
    cli.run("adapt", run, "--data", "newcomer.toml", "--examples", 20, "--seeds", 1, "--rounds", 1, "--out", "new", *extra)
    about = json.loads((samples / "new/adapt.json").read_text())
    assert (about["from"]["run"], about["from"]["round"]) == (run, 2)
    begun = load_file(samples / "new/fml/20/0/begun.safetensors")
    assert_equal(begun, load_file(samples / run / "server/round-2.safetensors"))


def test_a_newcomer_fine_tunes_a_sample_of_fedavg(samples, cli):
    words = ("--fedavg", "compare/fedavg/0", "--examples", 20, "--seeds", 1, "--out", "new")
    cli.run("adapt", "fml", "--data", "newcomer.toml", *words)
    begun = load_file(samples / "new/fine-tune/20/0/begun.safetensors")
    assert_equal(begun, load_file(samples / "compare/fedavg/0/server/round-2.safetensors"))


def test_a_run_begins_with_a_samples_model(samples, cli):
    cli.run("run", "methods.toml", "--set", "model.weights=fml", "--set", "rounds=1", "--out", "new")
    assert_equal(load_file("new/begun.safetensors"), load_file("fml/server/round-2.safetensors"))


def test_a_run_has_the_rows_of_a_sample(samples, cli):
    partition = 'kind = "iid", clients = 2, examples = 40'
    change(samples / "methods.toml", partition, 'kind = "file", file = "fml/partition.json"')
    cli.run("run", "methods.toml", "--out", "new", "--set", "rounds=1", "--set", "seed=5")
    rows = [json.loads((samples / name / "partition.json").read_text())["clients"] for name in ("new", "fml")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", ["fml", "records", "part", "fedh2l"])
def test_the_configuration_of_a_sample_makes_it_again(name, samples, cli):
    cli.run("run", f"{name}/config.toml", "--out", "again")
    assert_same(name, tensors(samples / "again"), tensors(samples / name))
