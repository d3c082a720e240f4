"""Section secure-sum: bytes and seconds of a round under masks and of a plain round, without network and training.

A site's part of a plain round is to pack its reply and to write it to its disk; the server reads the replies and makes their
mean. Under masks, sites and server also do all stages, with the files that they write. One site drops out before UPLOAD
where the threshold permits it, so that the server also recovers the masks of a site: the expensive case.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tomli_w
import torch
from common import Options, ratios, spread

from fedmutual.aggregation import Aggregation, average_total
from fedmutual.core import Message, Total
from fedmutual.engines.loop import count_bytes
from fedmutual.files import write_bytes
from fedmutual.sites.flare.kits import provision
from fedmutual.sites.protocol import WORK, Order, SiteAnswer, pack_message, read_answer
from fedmutual.sites.secure_sum.identity import read_authority
from fedmutual.sites.secure_sum.messages import Stage, SumContext
from fedmutual.sites.secure_sum.server import SecureSums
from fedmutual.sites.secure_sum.site import SiteSums
from fedmutual.sites.server_journal import ServerJournal
from fedmutual.sites.site_journal import REPLY, UPDATE, SiteJournal

SITES, MEGABYTES, TURNS = (3, 5, 10), (0.8, 50.0), 3  # MEGABYTES: of a model of float32
SERVER = "server"
T = TypeVar("T")


def measure(options: Options) -> list[dict[str, Any]]:
    print("a round under masks over a plain round: bytes and seconds of a site and of the server, disks included")
    results = []
    for count in SITES[: 1 if options.tiny else None]:
        for size in MEGABYTES[: 1 if options.tiny else None]:
            results.append(line := {"sites": count, "megabytes": size, **_measure(count, int(size * 1e6 / 4))})
            print(
                f"{count:2} sites, {size:4} MB: {line['up']:>11,} bytes up (plain {line['plain_up']:,}), {line['down']:,} "
                f"down beside the model; site {line['site_seconds']:.2f} s, {line['site_ratio']:.1f} times plain; "
                f"server {line['server_seconds']:.2f} s, {line['server_ratio']:.1f} times plain",
                flush=True,
            )
    return results


def _measure(count: int, numbers: int) -> dict[str, Any]:
    """Measure plain rounds and rounds under masks in turn, of random updates."""
    sites = tuple(f"site{k}" for k in range(count))
    base = {"w": torch.zeros(numbers)}
    generators = (torch.Generator().manual_seed(k) for k in range(count))
    replies = {i: {"w": torch.randn(numbers, generator=rng) / 100} for i, rng in zip(sites, generators, strict=True)}
    masked, plain = list[Counter[str]](), list[Counter[str]]()
    with tempfile.TemporaryDirectory() as name:
        startups = _make_kits(Path(name), sites)
        for turn in range(TURNS):
            folder = Path(name) / str(turn)
            plain.append(_run_plain_round(folder / "plain", replies, base))
            seconds, about = _run_masked_round(folder / "masked", replies, base, startups)
            masked.append(seconds)
    site_ratio, server_ratio = (
        ratios([turn[who] for turn in masked], [turn[who] for turn in plain]) for who in ("site", SERVER)
    )
    seconds_by_who = {who: spread([turn[who] for turn in masked]) for who in ("site", SERVER)}
    return {
        **about,
        "plain_up": 4 * numbers,
        "site_seconds": seconds_by_who["site"],
        "site_ratio": site_ratio,
        "server_seconds": seconds_by_who[SERVER],
        "server_ratio": server_ratio,
    }


class _Clock:
    """The seconds of each participant."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()

    def time(self, who: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        self.seconds[who] += time.perf_counter() - began
        return result

    def summarize(self, present: tuple[str, ...]) -> Counter[str]:
        """Return the seconds of the server, and the mean over the present sites."""
        mean = sum(self.seconds[i] for i in present) / len(present)
        return Counter({"site": mean, SERVER: self.seconds[SERVER]})


def _send(folder: Path, message: Message) -> bytes:
    """Pack a site's message, and write it to the disk, as a site does before its answer leaves."""
    content = pack_message(SiteAnswer(Order(WORK, 0, 0)), message)
    write_bytes(folder / "answer.safetensors", content)
    return content


def _run_plain_round(folder: Path, replies: dict[str, Message], base: Message) -> Counter[str]:
    clock = _Clock()
    sent = {i: clock.time(i, lambda i=i: _send(folder / i, replies[i])) for i in replies}

    def average() -> Message:
        return Aggregation()({i: read_answer(content)[1] for i, content in sent.items()}, base=base)

    clock.time(SERVER, average)
    return clock.summarize(tuple(replies))


def _run_masked_round(
    folder: Path, replies: dict[str, Message], base: Message, startups: dict[str, Path]
) -> tuple[Counter[str], dict[str, Any]]:
    """Return the seconds, and the bytes of a site."""
    sites, clock, up, down = tuple(replies), _Clock(), Counter[str](), Counter[str]()
    context = SumContext("00" * 32, sites, 0, 0, "11" * 32)
    journals = {i: SiteJournal(folder / i, i, "", (1, 0, 1 + len(Stage), 1)) for i in sites}
    sums = {i: SiteSums(journals[i], i, sites, context.contract, startups[i]) for i in sites}

    def train(i: str) -> None:
        with journals[i].change():
            journals[i].write("INSERT INTO phases VALUES (0, 0, ?, 0, '')", (context.model,))
            journals[i].write_tensors(sums[i].pack_update(replies[i], base), UPDATE, 0)

    for i in sites:
        assert sums[i].keys  # a site reads them once, not in each round
        clock.time(i, lambda i=i: train(i))
    stages = SecureSums(ServerJournal(folder / SERVER), read_authority(startups[sites[0]]), context.contract, sites)
    server = stages.begin(context, base["w"].numel())
    absent = {sites[-1]} if context.threshold < len(sites) else set()
    for stage in Stage:
        answers: dict[str, Message] = {}
        orders = clock.time(SERVER, lambda stage=stage: server.make_orders(stage))
        for i, order in orders.items():
            if stage >= Stage.UPLOAD and i in absent:
                continue

            def answer(i: str = i, order: Message = order, stage: Stage = stage) -> bytes:
                with journals[i].change(erase=True):
                    message, _ = sums[i].answer_stage(Order(WORK, 0, int(stage)), order)
                    content = pack_message(SiteAnswer(Order(WORK, 0, 0)), message)
                    journals[i].write_content(content, REPLY, 0, stage)
                return content

            def check(content: bytes, i: str = i, stage: Stage = stage) -> Message:
                message = read_answer(content)[1]
                server.check_answer(stage, i, message)
                return message

            content = clock.time(i, answer)
            answers[i] = clock.time(SERVER, lambda content=content, check=check: check(content))
            up[i] += count_bytes(answers[i])
            down[i] += count_bytes(order)

        def close(stage: Stage = stage, answers: dict[str, Message] = answers) -> None:
            server.close_stage(stage, answers)
            stages.save(server, stage)

        clock.time(SERVER, close)

    def average() -> Message:
        return average_total(Total(server.present, torch.from_numpy(server.add_words().view(np.int64))), base)

    clock.time(SERVER, average)
    present = server.present
    about = {"absent": len(absent), "up": max(up[i] for i in present), "down": max(down[i] for i in present)}
    return clock.summarize(present), about


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
