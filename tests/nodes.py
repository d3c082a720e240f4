"""A Ray cluster of three nodes on this machine, for all tests of a session."""

import atexit
import os
from functools import cache
from typing import Any

import pytest
import torch

CPUS = max(2, torch.get_num_threads())  # of a node: room for three workers of one thread when one node is gone


@cache
def start_three_nodes() -> Any:
    """Return the cluster, which engines join by its address; skip the test if Ray is not installed."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_worker_niceness": "0",  # else other tests take almost all of the cores, and a test of Ray takes minutes
    }
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=CPUS)
    atexit.register(cluster.shutdown)
    atexit.register(ray.shutdown)  # before it
    return cluster
