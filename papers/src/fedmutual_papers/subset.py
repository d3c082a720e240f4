"""Write a partition file for some clients of a partition, so that a new client's rows belong to no other client."""

import tomllib
from pathlib import Path
from typing import Any

from fedmutual import data
from fedmutual.config import Config, dump_config, parse_config
from fedmutual.core import At
from fedmutual.data import record
from fedmutual.data.division import Division, divide
from fedmutual.data.draws import make_numpy_generator, sample
from fedmutual.data.kinds import PRIVATE
from fedmutual.errors import ConfigError
from fedmutual.files import write_json
from fedmutual_papers.plan import Job
from fedmutual_papers.run_dirs import make_run_path


def place_config(job: Job, out: Path) -> Config:
    """Return the configuration of a run with the paths of this machine: the run it starts from, and its partition file.

    Raises:
        UserError: the partition has no such client, or a client has too few examples; or the data cannot be read, or the
            partition file cannot be written.
    """
    tables: dict[str, Any] = tomllib.loads(dump_config(job.config))
    changed = {"model.weights": str(make_run_path(out, job.needs))} if job.needs is not None else {}
    if job.about.clients is not None or job.about.examples is not None:
        tables["partition"] = {"kind": "file", "file": str(_write_partition(job, out))}
    elif not changed:
        return job.config
    return parse_config(tables, f"{job.cell.path}, arm {job.arm!r}", changed)


def _write_partition(job: Job, out: Path) -> Path:
    """Write the partition file of a run's clients and return its path."""
    path = out / "partitions" / f"{job.fingerprint}.json"
    read = data.prepare(job.config)[""]
    full_partition = divide(job.config, read.table)
    clients = job.about.clients or tuple(full_partition.clients)
    unknown = [i for i in clients if i not in full_partition.clients]
    if unknown:
        raise ConfigError(
            f"{job.cell.path}, arm {job.arm!r}: there is no client {unknown[0]!r} in its partition; there are "
            f"{', '.join(full_partition.clients)}"
        )
    shares = {i: dict(full_partition.clients[i]) for i in clients}
    wanted, capped = job.about.examples, job.config.partition.examples is not None
    for i in clients:
        rows = shares[i][PRIVATE]
        if wanted is None or (wanted >= len(rows) and capped):
            continue
        if wanted > len(rows):
            raise ConfigError(
                f"{job.cell.path}, arm {job.arm!r}: client {i!r} has {len(rows)} training examples, not {wanted}; lower "
                "'examples'"
            )
        rng = make_numpy_generator(At(job.seed, -1, job.config.rounds).rng("newcomer", i))
        shares[i][PRIVATE] = sample(rows, read.table.labels[rows], wanted, rng, keep=True)
    write_json(path, record.make_record(job.config, read.table, Division(full_partition.test, shares), read.digest))
    return path
