"""No word of an answer depends on a private row, whatever model the server chose; the operator reads each fault."""

import csv
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch

from authority import write_startup
from fedmutual.algorithms import FML
from fedmutual.boundary import Refused
from fedmutual.core import Diverged
from fedmutual.errors import AlgorithmError, DataError, RunError
from fedmutual.rundir.checkpoint import collect_client_state
from fedmutual.sites import contract as contracts
from fedmutual.sites import private_values, site_runtime
from fedmutual.sites.private_values import check_first_replies
from fedmutual.sites.protocol import EVALUATE, WORK, Order, pack_message, read_answer
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from wards import COMMON, MLPS, contract, halves, read_update, site

pytestmark = pytest.mark.sites

COLUMNS, STEPS, OPTIMIZER = ["age", "height", "pressure", "ldl", "weight", "hiv"], 8, {"lr": 0.05, "momentum": 0.9}
DECAY = 5e-4
MEAN, STD = [55.0, 175.0, 130.0, 150.0, 85.0, 0.5], [20.0, 15.0, 25.0, 90.0, 25.0, 0.5]
TABLES = {
    "rounds": 20,
    "data": {"classes": ["no", "yes"], "mean": MEAN, "std": STD},
    "split": {"validation": 0.3, "test": 0.1},
    "model": {"shared": "mlp"},
    "training": {"local_steps": STEPS, "batch_size": 32},
    "optimizer": OPTIMIZER | {"weight_decay": DECAY},
}
PLAIN, MASKED = {}, {"server": {"sum": "masked"}}
NOISED = {"privacy": {"nets": "both", "sigma": 1.0}}


def write_rows(path, changed=()):
    """Write 200 rows; the `changed` rows have another value of ldl."""
    rng = np.random.default_rng(3)
    x = np.stack([rng.integers(lo, hi, 200) for lo, hi in ((20, 90), (150, 200), (90, 180), (0, 300), (40, 130), (0, 2))], 1)
    y = rng.integers(0, 2, 200)
    x[list(changed), 3] = 299 - x[list(changed), 3]
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerows([[*COLUMNS, "label"], *([*row, "yes" if of else "no"] for row, of in zip(x, y, strict=True))])


def start(folder, more, changed=(), personal="mlp"):
    """Return (the runtime of a site with these rows, the lines for its operator)."""
    folder.mkdir()
    write_rows(folder / "north.csv", changed)
    names, lines = ["north", "south", "west"] if more.get("server") else ["north"], []
    common = {**TABLES, "name": "wards", "algorithm": {"name": "fml"}, **more}
    path = contract(folder, common, names, input=[6], columns=COLUMNS)
    tables = {"model": {"personal": personal}} if personal else {}
    tables |= {"data": {"name": "csv", "root": str(folder / "north.csv"), "label": "label"}}
    budget = {"privacy": {"epsilon": 1e6}} if "privacy" in more else {}
    settings = read_site_file(site(folder, "north", tables | budget))
    startup = write_startup(folder / "kit", "north") if more.get("server") else None
    return SiteRuntime(contracts.read_contract(path), settings, lines.append, startup=startup), lines


def read_rows(half, kind):
    data = half.experiment.load_rows("north")[kind]
    return next(iter(data.rows([torch.arange(len(data))])))[0]


def find_preimage(target):
    """Return weights that weight decay alone moves to exactly `target` in a phase, element by element."""

    def decay(w):
        p = torch.nn.Parameter(w.clone())
        optimizer = torch.optim.SGD([p], **OPTIMIZER, weight_decay=DECAY)
        for _ in range(STEPS):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        return p.detach()

    weights = target / decay(torch.ones_like(target))
    for k in range(400):
        is_off = (moved := decay(weights)) != target
        if not is_off.any():
            return weights
        toward = torch.where(moved < target, torch.inf, -torch.inf) * (-1 if k % 7 == 6 else 1)
        weights = torch.where(is_off, torch.nextafter(weights, toward), weights)
    raise AssertionError("no such weights")


def hold_row(model, row):
    """Return the model with dead units, the first of which has the row as its weights after the phase."""
    weight, bias = list(model)[:2]
    model = {k: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) * 0.05 for k, v in model.items()}
    model[weight][0], model[bias][0] = find_preimage(row), -1e6
    return model


def overflow_at_row(model, row):
    """Return a model with an infinite loss if, and only if, a row is near this one."""
    model = {k: torch.zeros_like(v) for k, v in model.items()}
    w1, b1, w2, b2, w3, _ = model
    for unit in range(12):
        sign = 1.0 if unit % 2 else -1.0
        model[w1][unit, unit // 2], model[b1][unit] = sign, -sign * row[unit // 2]
    model[w2][0, :12], model[b2][0] = -1e10, 1e6  # positive near the row alone
    model[w3][0, 0] = 3e38
    return model


def fill(value):
    return lambda model, row: {k: torch.full_like(v, value) for k, v in model.items()}


CRAFTED = {
    "a row of training after weight decay": ("private", hold_row),
    "a row of validation after weight decay": ("validation", hold_row),
    "overflow at a row of training": ("private", overflow_at_row),
    "overflow at a row of validation": ("validation", overflow_at_row),
    "dead": ("private", lambda model, row: {k: torch.full_like(v, -1e6 if v.ndim == 1 else 1.0) for k, v in model.items()}),
    "nan": ("private", fill(torch.nan)),
    "infinite": ("private", fill(torch.inf)),
    "huge": ("private", fill(3e38)),
    "honest": ("private", lambda model, row: model),
}


def read_words(content, metrics):
    """Return what is visible of an answer beside what the algorithm and `share.metrics` declare."""
    answer, message = read_answer(content)
    words = asdict(answer)
    if metrics == "all":  # declared: the losses of training and all scores
        words["train"] = None
    if metrics != "none":  # declared: the values of scores
        words["scores"] = [(score.model, score.data) for score in answer.scores]
    return words, {k: (v.dtype, v.shape) for k, v in message.items()}


@pytest.mark.parametrize(
    ("metrics", "more"),
    [(metrics, more) for metrics in ("none", "accuracy", "all") for more in (PLAIN, MASKED)] + [("none", NOISED)],
    ids=str,
)
def test_the_words_of_an_answer_do_not_depend_on_a_row(tmp_path, metrics, more):
    more = more | {"share": {"metrics": metrics}}
    half, lines = start(tmp_path / "with", more)
    state = half.experiment.make_server_state()
    rows = {kind: read_rows(half, kind)[7] for kind in ("private", "validation")}
    known = torch.tensor(np.loadtxt(tmp_path / "with/north.csv", delimiter=",", skiprows=1, usecols=range(6)))
    numbers = ((known - torch.tensor(MEAN)) / torch.tensor(STD)).float()
    changed = [int((numbers - row).abs().amax(1).argmin()) for row in rows.values()]
    other_half, other_lines = start(tmp_path / "without", more, changed)
    has_different_lines = {}
    for round, (name, (kind, craft)) in enumerate(CRAFTED.items()):
        inbox, counts = craft(state, rows[kind]), (len(lines), len(other_lines))
        for order in (Order(WORK, round, 0), Order(EVALUATE, round, 0)):
            content = pack_message(order, inbox)
            one, other = half.carry_out(content), other_half.carry_out(content)
            assert read_words(one, metrics) == read_words(other, metrics), name
            assert order.kind == EVALUATE or read_answer(one)[0].problem is None
            assert (half.carry_out(content), other_half.carry_out(content)) == (one, other), "a repeated order"
        has_different_lines[name] = " ".join(lines[counts[0] :]) != " ".join(other_lines[counts[1] :])
    if more.get("privacy") is None:  # the attacks work: the operators read different lines
        effective = list(CRAFTED)[: 3 if "server" in more else 4]  # a sum that is not opened has no model to score
        assert [name for name, is_different in has_different_lines.items() if is_different] == effective


FAILURES = {  # an error of a phase -> whether other parties may learn of it
    Diverged("north", 0, 0, "its loss is nan"): False,
    Refused("north", "weight", "it has another shape"): False,
    ValueError("a value of the patient"): False,
    MemoryError("unable to allocate 3 GiB"): False,
    AlgorithmError("phase 'own' raised ValueError", ""): False,
    DataError("rows.csv: cannot be read"): True,
    RunError("No space left on device"): True,
    OSError("Input/output error"): True,
}


@pytest.mark.parametrize(("problem", "is_reported"), FAILURES.items(), ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("more", [PLAIN, MASKED, NOISED], ids=str)
def test_a_failed_phase_has_the_answer_of_every_phase(tmp_path, monkeypatch, problem, is_reported, more):
    def fail(*_):
        raise problem

    half, lines = start(tmp_path / "one", more | {"share": {"metrics": "none"}})
    state, before = half.experiment.make_server_state(), half.experiment.build_client("north").nets["personal"].state_dict()
    content = pack_message(Order(WORK, 0, 0), state)
    monkeypatch.setattr(private_values, "participate", fail)
    answer, message = read_answer(half.carry_out(content))
    assert str(problem) in lines[0]
    assert str(problem) not in str(answer)
    if is_reported:
        assert (answer.problem, message) == ("it could not do its part; its operator reads why", {})
        return
    assert (answer.problem, answer.train) == (None, {})
    after = half._client.nets["personal"].state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before), "the phase is undone"
    if more is MASKED:
        assert message == {}
        assert not read_update(half.folder).any(), "the update is zero"
    elif more is NOISED:
        assert all(torch.equal(message[k], state[k]) for k in state), "the update is zero"
    else:
        assert message.keys() == state.keys()
        assert all(t.isnan().all() for t in message.values())
    monkeypatch.undo()
    assert read_answer(half.carry_out(content))[0] == answer, "a repeated order gets the first answer"


@pytest.mark.parametrize(
    ("name", "phase", "more"), [("apfl", 0, PLAIN), ("apfl", 0, MASKED), ("fedavg-ft", 1, PLAIN)], ids=str
)
def test_a_failed_phase_leaves_the_client_as_it_was(tmp_path, name, phase, more):
    """APFL reads private rows in `begin` and mixes weights in `end`: neither is a part of the reply to a failed phase."""
    settings = {"adaptive": True} if name == "apfl" else {}
    half, lines = start(tmp_path / "one", more | {"algorithm": {"name": name, **settings}}, personal=None)
    good = half.experiment.make_server_state()
    for number in range(phase + 1):
        half.carry_out(pack_message(Order(WORK, 0, number), good))
    for number in range(phase):
        half.carry_out(pack_message(Order(WORK, 1, number), good))
    before, lines[:] = {k: v.clone() for k, v in collect_client_state(half._client).items()}, []
    answer, _ = read_answer(half.carry_out(pack_message(Order(WORK, 1, phase), fill(3e38)(good, None))))
    assert (answer.problem, len(lines)) == (None, 1)
    after = collect_client_state(half._client)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_masked_update_of_a_model_that_is_not_finite_is_zero_and_has_its_count(tmp_path):
    half, lines = start(tmp_path / "one", MASKED | {"algorithm": {"name": "fedavg"}})
    rows = len(half.experiment.load_rows("north")["private"])
    for round, value in enumerate((torch.nan, torch.inf)):
        content = pack_message(Order(WORK, round, 0), fill(value)(half.experiment.make_server_state(), None))
        assert read_answer(half.carry_out(content))[0].problem is None
        words = read_update(half.folder, round)
        assert (words.count_nonzero().item(), words[-1].item()) == (1, rows)
        assert "only this site knows why" in lines[-1]


@pytest.mark.parametrize(("problem", "is_reported"), FAILURES.items(), ids=lambda one: type(one).__name__)
def test_scores_that_fail_are_left_out_without_a_word(tmp_path, monkeypatch, problem, is_reported):
    """A task of a site's own may raise an error where an output is not finite."""

    def fail(*_):
        raise problem

    half, lines = start(tmp_path / "one", {"share": {"metrics": "none"}})
    state = half.experiment.make_server_state()
    half.carry_out(pack_message(Order(WORK, 0, 0), state))
    monkeypatch.setattr(site_runtime, "compute_scores", fail)
    answer, _ = read_answer(half.carry_out(pack_message(Order(EVALUATE, 0, 0), state)))
    assert (answer.problem is not None, answer.scores) == (is_reported, ())
    assert str(problem) in lines[-1]


@dataclass(frozen=True, kw_only=True)
class Leaky(FML):
    """An algorithm with an error: instead of the meme it sends something else."""

    sends: str = ""

    def end(self, client, at):
        message = {k: v.clone() for k, v in super().end(client, at).items()}
        first = next(iter(message))
        if self.sends == "row":
            row, *_ = next(iter(client.data["private"].rows([torch.tensor([3])])))
            message[first].view(-1)[:64] = row.flatten()
        elif self.sends == "personal net":
            message[first] = client.nets["personal"].state_dict()[first].clone()
        elif self.sends == "other shape":
            message[first] = message[first][:1]
        elif self.sends == "error":
            raise ValueError("own error")
        return message


@pytest.mark.parametrize(
    ("sends", "words"),
    [
        ("row", "holds a row of the client's private data"),
        ("personal net", "its bytes are those of"),
        ("other shape", "declared as"),
        ("error", "own error"),
        ("", None),
    ],
)
def test_a_site_with_a_faulty_algorithm_does_not_take_part(tmp_path, sends, words):
    """No other party has chosen the model yet, so the refusal discloses no row."""
    experiment = halves(tmp_path, contract(tmp_path, COMMON, MLPS), MLPS)[1]["north"].experiment
    algorithm = Leaky(sends=sends, local_steps=2, batch_size=16).algorithm()
    faulty, source = replace(experiment, algorithm=algorithm), tmp_path / "site.toml"
    with pytest.raises(RunError, match=words) if words else nullcontext() as caught:
        check_first_replies(faulty, "north", ["north", "south", "west"], source)
    if words:
        assert str(caught.value).startswith(f"{source}: ")
        assert "\n" not in str(caught.value)
