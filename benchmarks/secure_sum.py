"""Section secure-sum: bytes and seconds that masks add to a round of real sites, without their network and training."""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tomli_w
import torch
from common import Options

from fedmutual.core import Message
from fedmutual.engines.loop import count_bytes
from fedmutual.sites.flare.kits import provision
from fedmutual.sites.secure_sum.identity import read_authority
from fedmutual.sites.secure_sum.messages import Stage, SumContext
from fedmutual.sites.secure_sum.server_files import SumStages
from fedmutual.sites.secure_sum.site_files import SumFiles

SITES, MEGABYTES = (3, 5, 10), (0.8, 50.0)  # of a model of float32


def measure(options: Options) -> list[dict[str, Any]]:
    print("a secure sum: a site's bytes and seconds a round beside its training, and the server's seconds, disks included")
    results = []
    for count in SITES[: 1 if options.tiny else None]:
        for size in MEGABYTES[: 1 if options.tiny else None]:
            line = {"sites": count, "megabytes": size, **_measure_round(count, int(size * 1e6 / 4))}
            plain, up, down = line["plain_up"], line["up"], line["down"]
            print(
                f"{count:2} sites, {size:4} MB: {up:>11,} bytes up (plain {plain:,}), {down:,} down beside the model; "
                f"site {line['site_seconds']:.2f} s, server {line['server_seconds']:.2f} s"
            )
            results.append(line)
    return results


def _measure_round(count: int, numbers: int) -> dict[str, float]:
    """Measure one sum of random updates, with one site that drops out before its upload if the threshold permits it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sites = tuple(f"site{k}" for k in range(count))
        startups = _make_kits(folder, sites)
        base = {"w": torch.zeros(numbers)}
        context = SumContext("00" * 32, sites, 0, 0, "11" * 32)
        files = {i: SumFiles(folder / i, i, sites, context.contract, startups[i]) for i in sites}
        seconds, up, down = Counter[str](), Counter[str](), Counter[str]()
        for k, i in enumerate(sites):
            reply = {"w": torch.randn(numbers, generator=torch.Generator().manual_seed(k)) / 100}
            began = time.perf_counter()
            files[i].write_update(reply, base, 0, context.model)
            seconds[i] += time.perf_counter() - began
        began, waited = time.perf_counter(), 0.0
        stages = SumStages(folder / "server", read_authority(startups[sites[0]]))
        server = stages.begin(context, numbers)
        absent = {sites[-1]} if context.threshold < count else set()
        for stage in Stage:
            answers: dict[str, Message] = {}
            for i, order in server.make_orders(stage).items():
                if stage >= Stage.UPLOAD and i in absent:
                    continue
                start = time.perf_counter()
                answers[i] = files[i].answer_stage(stage, 0, 0, order)[0]
                seconds[i] += time.perf_counter() - start
                waited += time.perf_counter() - start
                server.check_answer(stage, i, answers[i])
                up[i] += count_bytes(answers[i])
                down[i] += count_bytes(order)
            server.close_stage(stage, answers)
            stages.save(server, stage)
        server.add_words()
        present = server.present
        return {
            "absent": len(absent),
            "plain_up": 4 * numbers,
            "up": max(up[i] for i in present),
            "down": max(down[i] for i in present),
            "site_seconds": sum(seconds[i] for i in present) / len(present),
            "server_seconds": time.perf_counter() - began - waited,
        }


def _make_kits(folder: Path, sites: tuple[str, ...]) -> dict[str, Path]:
    """Make the start-up folder of each site's kit, as `fedmutual provision` does."""
    file = folder / "federation.toml"
    tables = {
        "name": "sum",
        "algorithm": {"name": "fml"},
        "data": {"classes": ["a", "b"]},
        "server": {"sum": "masked"},
        "sites": {"names": list(sites), "input": [4]},
    }
    file.write_text(tomli_w.dumps(tables))
    return {kit.name: kit.startup for kit in provision(file, folder / "kits") if kit.kind == "site"}
