"""Several inputs in one example: named arrays, and series of different length with their mask."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, StackDataset

import fedmutual
from input_kinds import PRIVACY, PUBLIC, Fusion, check_by_hand, draw_fusion, federate, federate_with_public_rows, items, seen

pytestmark = pytest.mark.run


class InOne(Fusion):
    """The same, with all inputs in one dictionary."""

    def forward(self, x):
        return super().forward(**x)


def collate(batch):
    """Stack the inputs, as tensors."""
    x, y = zip(*batch, strict=True)
    return {k: torch.stack([torch.as_tensor(one[k]) for one in x]) for k in x[0]}, torch.tensor(y)


CONTAINERS = {
    "arrays": lambda x, y: (x, y),
    "tensors": lambda x, y: ({k: torch.tensor(v) for k, v in x.items()}, torch.tensor(y)),
    "Dataset": items,
    "items as dictionaries": lambda x, y: StackDataset(**x, labels=y.tolist()),
    "DataLoader": lambda x, y: DataLoader(items(x, y), batch_size=64),
    "own collate": lambda x, y: DataLoader(items(x, y), batch_size=64, collate_fn=collate),
}


def read(x):
    """Return the inputs as a network gets them: pixels are divided by 255, ids stay int64."""
    return torch.tensor(x["image"]) / 255, torch.tensor(x["table"]).float(), torch.tensor(x["ids"])


@pytest.mark.parametrize("container", CONTAINERS)
def test_several_inputs_train_as_a_plain_loop_trains(container):
    torch.manual_seed(0)
    data, net = {i: draw_fusion(k) for k, i in enumerate("ab")}, InOne() if container == "tensors" else Fusion()
    seen.clear()
    run = check_by_hand(net, Fusion(), read, data, CONTAINERS[container], 1)
    assert seen == {(torch.float32, torch.float32, torch.int64)}
    about = json.loads((run.folder / "environment.json").read_text())["clients"]["a"]
    assert about["input"] == {"image": [1, 6, 6], "table": [3], "ids": [5]}
    answers = run.predict(data["a"][0])
    assert np.allclose(run.predict({k: v[:3] for k, v in data["a"][0].items()}), answers[:3])


@pytest.mark.parametrize(
    "more",
    [
        {"engine": "stacked"},
        {"settings": PRIVACY},
        {"settings": {"data.resident": False}},
        {"settings": {"data.augment": "crop-flip"}},
        {"settings": {"data.mean": {"table": [0, 0, 0]}, "data.std": {"table": [2, 2, 2]}}},
        {"settings": {"engine.precision": "bf16"}},
    ],
)
def test_several_inputs_train_in_every_way(more):
    run = federate(draw_fusion, Fusion(), **more)
    assert run.history()["value"].notna().all()
    if "engine" in more or "data.resident" in more.get("settings", {}):  # as resident rows on the default engine
        nets = []
        for options in ({}, more):
            torch.manual_seed(0)
            nets.append(federate(draw_fusion, Fusion(), **options).global_model())
        torch.testing.assert_close(*(dict(net.state_dict()) for net in nets))


@pytest.mark.parametrize("method", PUBLIC)
def test_several_inputs_in_the_public_set(method):
    assert federate_with_public_rows(draw_fusion, Fusion, method).finished


class Steps(nn.Module):
    """Series [B, L, 2] with a mask [B, L] -> logits [B, 2]: the mean over the steps of each series."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x, mask):
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class WithoutMask(nn.Module):
    """The same, of the sum over all steps: zeros that fill up a series do not count."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, series):
        return self.head(series.sum(1))


def ragged(seed, n=40):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    return [rng.normal(size=(int(length), 2)) + label for length, label in zip(rng.integers(2, 9, n), y, strict=True)], y


class Ward(nn.Module):
    """Series "ecg" [B, L, 2] with their mask, and "table" [B, 1] -> logits [B, 2]."""

    def __init__(self):
        super().__init__()
        self.steps = Steps()

    def forward(self, ecg, table, mask):
        return self.steps(ecg, mask) + table


@pytest.mark.parametrize(
    "container",
    [
        lambda x, y: (x, y),
        items,
        lambda x, y: [({"ecg": one, "table": row}, label) for one, row, label in zip(*x.values(), y, strict=True)],
    ],
)
def test_series_among_several_inputs_are_padded_with_a_mask(container):
    def make(k):
        x, y = ragged(k)
        return {"ecg": x, "table": np.ones((len(x), 1))}, y

    x, y = make(0)
    run = federate(lambda k: container(*make(k)), Ward())
    model, answers = run.global_model(), run.predict({"ecg": x["ecg"][:2], "table": x["table"][:2]})
    for row in range(2):
        one = torch.tensor(x["ecg"][row])[None].float()
        logits = model(one, torch.ones(1, 1), torch.ones(1, one.shape[1], dtype=torch.bool))
        assert answers.to_numpy()[row] == pytest.approx(logits.softmax(1)[0].detach().numpy(), abs=1e-5)
    assert run.score(container(x, y)).values["examples"] == 40


@pytest.mark.parametrize(
    "container", [lambda x, y: (x, y), items, lambda x, y: (pd.Series(x), y), lambda x, y: (pd.Series(x).to_numpy(), y)]
)
@pytest.mark.parametrize("net", [Steps, WithoutMask])
def test_series_of_different_length_are_padded_with_a_mask_that_a_network_may_take(container, net):
    x, _ = ragged(0)
    run = federate(lambda k: container(*ragged(k)), net())
    model, answers = run.global_model(), run.predict(x)
    for row in range(3):
        one = torch.tensor(x[row])[None].float()
        more = (torch.ones(1, len(x[row]), dtype=torch.bool),) if net is Steps else ()
        assert answers.to_numpy()[row] == pytest.approx(model(one, *more).softmax(1)[0].detach().numpy(), abs=1e-5)
    with pytest.warns(fedmutual.RemarkWarning, match="cut to the 8 steps of the training; the longest has 30"):
        run.predict([np.ones((30, 2))])
    for other in ([], np.ones(3), pd.DataFrame(np.ones((3, 8))), ["a", "b"], None):
        with pytest.raises(fedmutual.UserError, match="the model takes the inputs 'x', 'mask'"):
            run.predict(other)


@pytest.mark.parametrize("other", [np.ones(40), {"table": np.ones((40, 1))}])
def test_test_rows_that_do_not_fit_the_series_of_the_training_are_refused(other):
    x, y = ragged(0)
    site = fedmutual.Site(train=({"ecg": x, "table": np.ones((40, 1))}, y), test=(other, y))
    with pytest.raises(fedmutual.UserError, match=r"training examples are ecg .* make them equal"):
        fedmutual.federate({"a": site}, "fedavg", Ward(), rounds=1, progress=False)
    with pytest.raises(fedmutual.UserError, match=r"training examples are x .* make them equal"):
        fedmutual.federate({"a": fedmutual.Site(train=(x, y), test=(other, y))}, "fedavg", Steps(), rounds=1, progress=False)
