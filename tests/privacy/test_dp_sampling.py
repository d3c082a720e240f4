"""Sampling and noise: from a secret, Poisson, Gaussian; other for every inbox, the same for the same one."""

import errno
import math
import os
import stat
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy import stats

from fedmutual.algorithms import FML, FedAvg, Independent
from fedmutual.boundary import Refused, release
from fedmutual.data.rows import CropFlip
from fedmutual.errors import RunError
from fedmutual.fitting import Fitted
from fedmutual.losses import Classification
from fedmutual.privacy import secret
from fedmutual.privacy.sampling import Units
from fedmutual.privacy.secret import SIZE, Stream, derive_key, derive_simulation_secret, read_site_secret
from fedmutual.rundir.checkpoint import collect_client_state, load_client
from fedmutual.stepping import work
from fedmutual.tasks import UserTask
from fedmutual.tensor_files import write_tensors
from noised import SECRET, client
from toy import FEATURES, at, difference, federation, rows, server, weights

UNIFORM = {"weighting": "uniform", "batch_size": 8}


def stream(*purpose):
    return Stream(derive_key(SECRET, *purpose))


def test_each_purpose_and_each_secret_has_its_own_key():
    keys = {derive_key(SECRET, *p) for p in [("a",), ("b",), ("a", "b"), ("ab",), ("a", ""), ("", "a")]}
    assert len(keys) == 6
    assert derive_key(SECRET, "a") not in {derive_key(bytes(32), "a"), SECRET}
    assert derive_simulation_secret(1, "0") not in {derive_simulation_secret(2, "0"), derive_simulation_secret(1, "1")}


def test_random_numbers_are_the_keystream_of_chacha20():
    key = derive_key(SECRET, "a")
    plain = Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(bytes(80))
    one = Stream(key)
    taken = torch.cat([one.draw_words(3), one.draw_words(0), one.draw_words(7)])
    assert taken.numpy().tobytes() == plain


def test_normals_are_normal():
    draws = stream("normals").draw_normals(200_001, torch.device("cpu"))
    assert draws.dtype == torch.float64
    assert draws.shape == (200_001,)
    assert stats.kstest(draws.numpy(), "norm").pvalue > 0.001
    tail = (draws.abs() > 3).double().mean().item()
    expected = 2 * stats.norm.sf(3)
    assert abs(tail - expected) < 4 * math.sqrt(expected / len(draws))
    half = len(draws) // 2
    assert abs(np.corrcoef(draws[:half], draws[half : 2 * half])[0, 1]) < 0.02  # sines and cosines of the same angles


def test_batches_are_poisson():
    units = Units(rows=400, batch_size=40)
    assert (units.rate, units.expected, units.count) == (0.1, 40.0, 400)
    source, batches = stream("sampling"), []
    for _ in range(2000):
        taken = torch.zeros(400)
        taken[units.sample(source)[0]] = 1
        batches.append(taken)
    drawn = torch.stack(batches)
    sizes = drawn.sum(1)
    assert abs(sizes.mean().item() - 40) < 4 * math.sqrt(36 / 2000)
    assert 0.9 < sizes.var().item() / (400 * 0.1 * 0.9) < 1.1  # of a shuffled epoch it is 0
    counts = drawn.sum(0)
    assert 0.8 < counts.var().item() / (2000 * 0.1 * 0.9) < 1.25  # likewise: each row would be taken as often
    both = (drawn[:, 0] * drawn[:, 1]).mean().item()
    assert both < 4 * 0.1 * 0.1
    again = torch.stack([(drawn[:-1, i] * drawn[1:, i]).mean() for i in range(400)]).mean().item()
    assert abs(again - 0.01) < 0.002  # taken once, a row is taken in the next batch as any other is


def test_a_batch_may_be_empty_or_all_rows():
    tiny = Units(rows=10, batch_size=1)
    sizes = [len(tiny.sample(stream("tiny", str(k)))[0]) for k in range(100)]
    assert 0 in sizes
    assert max(sizes) > 1
    assert len(Units(rows=5, batch_size=64).sample(stream("all"))[0]) == 5


def test_groups_are_drawn_whole_and_capped():
    groups = np.array([7] * 30 + [3] * 2 + list(range(100, 128)))
    units = Units(60, 10, groups, most=4)
    assert units.count == 30
    assert units.expected == 10
    assert math.isclose(units.rate, 10 / (4 + 2 + 28))
    source, big, drawn_rows = stream("groups"), [], set()
    for _ in range(400):
        index, codes = units.sample(source)
        taken = groups[index.numpy()]
        assert (np.bincount(codes.numpy(), minlength=30) <= 4).all()
        assert (taken == 3).sum() in (0, 2)
        big.append((taken == 7).sum())
        drawn_rows |= set(index[torch.from_numpy(taken == 7)].tolist())
    assert set(big) == {0, 4}
    assert drawn_rows == set(range(30))  # by lot, so that each row of a large group is learned from
    assert abs(np.mean(np.array(big) > 0) - units.rate) < 0.1


def test_a_group_is_drawn_whatever_the_others_are():
    groups = np.array([1, 1, 1, 2, 2, 2, 3, 3, 3])
    more = np.concatenate([groups, [4, 4, 4]])
    for k in range(30):
        few, many = (Units(len(g), 0, g, most=2) for g in (groups, more))
        few.rate = many.rate = 0.5
        one, other = (units.sample(stream("coupled", str(k))) for units in (few, many))
        drawn = [set(codes.tolist()) for _, codes in (one, other)]
        assert drawn[0] == drawn[1] - {3}


def update(inbox, sigma=1e3, **more):
    """What one round adds to the received model, all but noise."""
    algorithm = FedAvg(local_epochs=1, **UNIFORM).algorithm()
    one = client("0", algorithm, ["meme"], sigma=sigma, **more)
    reply, _ = work(algorithm.phases[0], one, inbox, at())
    return torch.cat([(reply[k] - inbox[k]).flatten() for k in inbox])


def test_noise_is_the_same_for_the_same_inbox_and_another_for_every_other():
    inbox = server()
    first = update(inbox)
    assert torch.equal(first, update(inbox))
    nearly = {k: v.clone() for k, v in inbox.items()}
    nearly["0.bias"][0] += 1e-6
    changes = {
        "another inbox": update(nearly),
        "another learning rate": update(inbox, rate=0.1000001),
        "another secret": update(inbox, secret=bytes(32)),
        "another clipping norm": update(inbox, clip=1.000001),
        "one row more": update(inbox, n=21),
    }
    for what, other in changes.items():
        cosine = torch.cosine_similarity(first, other, 0).item()
        assert abs(cosine) < 0.4, what  # of 83 numbers; nearly 1 where the noise is the same


@pytest.mark.parametrize("at_once", [False, True])
def test_each_read_of_a_phase_is_paid_for(at_once):
    """Two reads that are both asked for before the first step would have one label, and with it equal batches."""

    @dataclass(frozen=True, kw_only=True)
    class Twice(Independent):
        def batches(self, client, inbox, at):
            reads = (client.data["private"].rows([torch.arange(8)] * 3) for _ in range(2))
            for read in [*reads] if at_once else reads:
                yield from read

    one, spent, drawn = client("0", Twice().algorithm(), ["personal"], n=200), [], []
    units = one.privacy.units
    one.privacy.spend, sample = spent.append, units.sample
    units.sample = lambda stream: drawn.append(sample(stream)) or drawn[-1]
    work(Twice(), one, {}, at())
    assert one.privacy.steps == 6
    assert sum({release.label: release.steps for release in spent}.values()) == 6
    assert len({tuple(rows.tolist()) for rows, _ in drawn}) == 6


def test_noise_differs_by_what_stays_home():
    algorithm = FML(local_epochs=1, batch_size=8, beta=1.0).algorithm()
    taken = []
    for seed in (0, 1):
        one = client("0", algorithm, ["meme"], sigma=1e3)
        with torch.no_grad():
            one.nets["personal"][0].bias += seed * 1e-4
        reply, _ = work(algorithm.phases[0], one, server(), at())
        taken.append(torch.cat([(reply[k] - v).flatten() for k, v in server().items()]))
    assert abs(torch.cosine_similarity(*taken, 0).item()) < 0.4


def test_noise_differs_by_networks_of_equal_weights():
    """A server that trains two networks with equal shapes of weights could subtract equal noise."""
    inbox, taken = server(), []
    for layer in (torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.LeakyReLU(0.1), torch.nn.LeakyReLU(0.2)):
        algorithm = FedAvg(local_epochs=1, **UNIFORM).algorithm()
        noised_client = client("0", algorithm, ["meme"], sigma=1e3)
        place = next(k for k, m in enumerate(noised_client.nets["meme"]) if not list(m.parameters()))
        noised_client.nets["meme"][place] = layer
        reply, _ = work(algorithm.phases[0], noised_client, inbox, at())
        taken.append(torch.cat([(reply[k] - inbox[k]).flatten() for k in inbox]))
    for k, noised_client in enumerate(taken):
        assert all(
            abs(torch.cosine_similarity(noised_client, other_update, 0).item()) < 0.4 for other_update in taken[k + 1 :]
        )


def test_noise_differs_by_the_task_and_by_augmentation():
    @dataclass(frozen=True)
    class Smoothed(Classification):
        label_smoothing: float = 0.1

    class Plain:
        outputs, fit, mutual = None, Classification().fit, Classification().mutual

    class Other(Plain):
        pass

    class Halved(torch.optim.SGD):
        pass

    def label(task, augment, optimizer=None):
        phase = FedAvg(local_epochs=1, **UNIFORM, task=task)
        one = client("0", phase.algorithm(), ["meme"])
        if optimizer is not None:
            one.optimizers["meme"].__class__ = optimizer
        one.data["private"].source.augment = augment
        one.privacy.spend = spent.append
        work(phase, one, server(), at())
        return spent.pop().label

    spent = []
    labels = [label(Classification(), None), label(Classification(), CropFlip(torch.zeros(1)))]
    labels += [label(Smoothed(label_smoothing=amount), None) for amount in (0.1, 0.2)]
    labels += [label(Fitted(UserTask(Plain()), focal=gamma), None) for gamma in (0.0, 1.0)]
    labels += [label(UserTask(kind()), None) for kind in (Plain, Other)] + [label(Classification(), None, Halved)]
    assert len(set(labels)) == 9
    assert label(Fitted(UserTask(Plain()), focal=1.0), None) == labels[5], "of another object of the class"
    assert label(Classification(), None) == labels[0]


def test_noise_has_the_size_that_was_asked_for():
    drawn = []
    for k in range(30):
        algorithm = FedAvg(local_steps=1, **UNIFORM).algorithm()
        one = client("0", algorithm, ["meme"], sigma=50.0, clip=0.1, n=200, secret=derive_simulation_secret(k, "0"))
        one.optimizers = {"meme": torch.optim.SGD(one.nets["meme"].parameters(), lr=0.0)}
        reply, _ = work(algorithm.phases[0], one, server(), at())
        drawn.append(torch.cat([((reply[k] - v) / -0.1).flatten() for k, v in server().items()]))
    deviation = torch.cat(drawn).std().item()
    assert 0.95 < deviation / (50 * 0.1 / 8) < 1.05  # sigma C over the expected batch size, whatever the batch was


def test_private_rows_are_read_in_gradient_steps_alone():
    class Peeking(Independent):
        def end(self, client, at):
            list(client.data["private"].rows([torch.arange(3)]))
            return {}

    algorithm = Independent(local_epochs=1, batch_size=8).algorithm()
    noised_client = client("0", algorithm, ["personal"])
    with pytest.raises(Refused, match="outside of its gradient steps"):
        noised_client.data["private"].rows([torch.arange(3)])
    with pytest.raises(Refused, match="outside of its gradient steps"):
        work(Peeking(local_epochs=1, batch_size=8), noised_client, {}, at())
    assert not hasattr(noised_client.data["private"], "labels")


def test_the_boundary_still_sees_the_rows():
    algorithm = FedAvg(local_epochs=1, **UNIFORM).algorithm()
    one = client("0", algorithm, ["meme"])
    row = rows(0, 20).x[4]
    with pytest.raises(Refused, match="row of the client's private data"):
        release({"row": row}, {"row": (row.dtype, (FEATURES,))}, one, {})


def test_steps_are_as_many_as_without_noise():
    for settings, expected in (({"local_epochs": 3}, 9), ({"local_steps": 5}, 5)):
        algorithm = Independent(batch_size=8, **settings).algorithm()
        one = client("0", algorithm, ["personal"])
        work(algorithm.phases[0], one, {}, at())
        assert one.privacy.steps == expected


@pytest.mark.parametrize("steps", [None, torch.tensor(-1), torch.tensor([3]), torch.tensor(2.5)])
def test_a_saved_state_without_its_number_of_noised_steps_is_refused(tmp_path, steps):
    """A count that began again at 0 would make epsilon too small."""
    one, path = client("0", Independent(batch_size=8).algorithm(), ["personal"]), tmp_path / "state.safetensors"
    state = collect_client_state(one)
    del state["privacy.steps"]
    write_tensors(path, state if steps is None else {**state, "privacy.steps": steps}, {"run": "a", "round": "1"})
    with pytest.raises(RunError, match=r"state\.safetensors: .*noised steps of client '0'"):
        load_client(one, path, "a", 1)


def test_an_empty_batch_is_a_step_of_noise_alone():
    algorithm = FML(local_steps=40, batch_size=1, beta=1.0).algorithm()
    noised_client = client("0", algorithm, ["meme"], batch_size=1, n=3, sigma=1.0)
    before = weights(noised_client.nets["personal"])
    sampled = [len(noised_client.privacy.units.sample(stream("look", str(k)))[0]) for k in range(20)]
    assert 0 in sampled
    _, train = work(algorithm.phases[0], noised_client, server(), at())
    assert noised_client.privacy.steps == 40
    assert set(train) == {"personal", "meme"}
    assert difference(before, weights(noised_client.nets["personal"])) > 0


@pytest.mark.process
@pytest.mark.parametrize("nets", [["meme"], ["personal", "meme"]], ids=["meme", "both"])
def test_workers_change_no_bit(nets):
    results = []
    for engine in ("inprocess", "processes"):
        algorithm = FML(local_epochs=1, batch_size=8, beta=1.0).algorithm()
        ours = [client(i, algorithm, nets, secret=derive_simulation_secret(7, i)) for i in ("0", "1", "2")]
        last = federation(algorithm, ours, engine=engine)
        results.append(last | {f"{c.id}.{k}": v for c in ours for k, v in weights(c.nets["personal"]).items()})
    assert difference(*results) == 0.0


def test_part_files_of_killed_processes_are_removed(tmp_path):
    (tmp_path / ".secret.part").write_bytes(b"cut off")
    assert len(read_site_secret(tmp_path / "secret")) == SIZE
    assert not [*tmp_path.glob("*.part")]


def test_a_process_reads_the_secret_of_a_faster_process(tmp_path, monkeypatch):
    path, lock_folder, faster = tmp_path / "secret", secret.lock_folder, []

    def lock_second(*arguments):
        monkeypatch.setattr(secret, "lock_folder", lock_folder)
        faster.append(read_site_secret(path))
        return lock_folder(*arguments)

    monkeypatch.setattr(secret, "lock_folder", lock_second)
    assert [read_site_secret(path)] == faster


def test_a_secret_that_cannot_be_written_leaves_no_part_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match="secret"):
        read_site_secret(tmp_path / "secret")
    assert not [*tmp_path.glob(".secret*")]
    assert not (tmp_path / "secret").exists()


def test_a_site_draws_its_own_secret_once(tmp_path):
    path = tmp_path / "state" / "secret"
    first = read_site_secret(path)
    assert len(first) == SIZE
    assert read_site_secret(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_site_secret(tmp_path / "other" / "secret") != first
    assert not [*path.parent.glob("*.part")]
    path.chmod(0o640)
    with pytest.raises(RunError, match="chmod 600"):
        read_site_secret(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(RunError, match="32 bytes"):
        read_site_secret(path)
