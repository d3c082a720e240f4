"""Attacks on a secure sum by the server and by a site that do not break the masks."""

import numpy as np
import pytest
import torch

from fedmutual.aggregation import HEAVIEST, LARGEST, Aggregation, FixedTotal, fixed_mean
from fedmutual.algorithms.fedavg import N_K
from fedmutual.errors import RunError
from fedmutual.sites import contract as contracts
from fedmutual.sites.protocol import WORK, Order, pack_message, read_answer
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from imprint import craft_model, flatten_rows, read_rows
from wards import COMMON, contract, site, with_data

pytestmark = pytest.mark.sites

MODEL = {"bias": torch.zeros(2), "count": torch.zeros(1, dtype=torch.int64)}
SITES = ("ash", "birch", "cedar")


def apply_total(*words, weighted=False):
    total = np.array([word % 2**64 for word in words], np.uint64)
    return Aggregation()(FixedTotal(SITES, torch.from_numpy(total.view(np.int64)), weighted), base=MODEL)


def test_the_largest_possible_sum_is_applied():
    assert apply_total(3 * LARGEST, -3 * LARGEST)["bias"].tolist() == [1024, -1024]
    assert apply_total(3 * LARGEST, 0, 3 * HEAVIEST, weighted=True)["bias"].tolist() == [1024, 0]


@pytest.mark.parametrize(
    ("words", "weighted"),
    [
        ((3 * LARGEST + 1, 0), False),
        ((0, -3 * LARGEST - 1), False),
        ((0, 2**63), False),  # the smallest integer, whose absolute value is itself
        ((0, 0, 2), True),  # three sites have at least one example each
        ((0, 0, -5), True),
        ((0, 0, 3 * HEAVIEST + 1), True),
    ],
)
def test_a_sum_that_no_updates_have_ends_the_federation(words, weighted):
    """A site that sends any words can spoil the sum; a sum out of range is noticed, although not whose words they were."""
    with pytest.raises(RunError, match=r"impossible.*ash, birch, cedar"):
        apply_total(*words, weighted=weighted)


def test_the_imprint_attack_recovers_rows_from_a_sum_but_not_their_owners(tmp_path):
    """A server whose crafted model has units that fire for one row of all sites reads this row out of the sum, too.

    Masks hide which site a row is from. `docs/secure-sum.md` states this.
    """
    sites = with_data(tmp_path)
    agreed = contracts.read_contract(contract(tmp_path, COMMON | {"algorithm": {"name": "fedavg"}}, sites))
    runtimes = [SiteRuntime(agreed, read_site_file(site(tmp_path, i, sites[i]))) for i in sites]
    parts = [runtime.experiment.load_rows(i) for i, runtime in zip(sites, runtimes, strict=True)]
    crafted = craft_model(
        runtimes[0].experiment.make_server_state(), torch.cat([flatten_rows(part["validation"]) for part in parts])
    )
    replies = {
        i: read_answer(runtime.carry_out(pack_message(Order(WORK, 0, 0), crafted)))[1]
        for i, runtime in zip(sites, runtimes, strict=True)
    }
    memes = {i: {name: reply[name] for name in crafted} for i, reply in replies.items()}
    weights = {i: float(reply[N_K]) for i, reply in replies.items()}
    total = fixed_mean(memes, weights, crafted)
    rows = torch.cat([flatten_rows(part["private"]) for part in parts])
    assert len(read_rows(total, crafted, rows)) > 3
