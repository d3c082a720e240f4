"""Kill a site or the server at each transaction of its journal. Writes benchmarks/results/journal-kills.json.

    uv run python benchmarks/journal_kills.py [--every 1]

Each trial is one federation of three sites (FML on the digits, noise and a masked sum, two rounds), each party in a process
of its own. One process ends by `os._exit` directly before or directly after one commit of its journal, and starts again from
its folder; a server then repeats its order, as over a network. Each commit of one site and of the server is a point of a
kill, with `--every N` each Nth. At the end the models must have the bits of a federation without a kill, and for each trial
the table counts: steps that were lost or trained twice, budgets that shrank, masks that covered two different updates, and
messages that left a site without a line in its ledger.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import command, machine, versions

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import fedmutual  # noqa: E402
from authority import write_startup  # noqa: E402
from fedmutual.privacy.secret import derive_simulation_secret  # noqa: E402
from fedmutual.sites import contract as contracts  # noqa: E402
from fedmutual.sites import journal  # noqa: E402
from fedmutual.sites.coordinator import Coordinator  # noqa: E402
from fedmutual.sites.ledger import read_ledger  # noqa: E402
from fedmutual.sites.protocol import WORK, Order, pack_message, read_answer, read_order  # noqa: E402
from fedmutual.sites.secure_sum.messages import ANSWERS, Stage, read_content  # noqa: E402
from fedmutual.sites.site_runtime import SiteRuntime  # noqa: E402
from fedmutual.sites.site_settings import read_site_file  # noqa: E402
from wards import COMMON, contract, same, site  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "journal-kills.json"
NAMES = ("ash", "birch", "cedar")
TABLES = {name: {"model": {"personal": "mlp"}, "data": {"name": "digits"}} for name in NAMES}
FEDERATION = COMMON | {
    "rounds": 2,
    "privacy": {"nets": "both", "sigma": 2.0},
    "share": {"metrics": "none"},
    "server": {"sum": "masked"},
}
FAULTS = ("lost", "repeated", "budget shrank", "mask twice", "not in the ledger")
FORK = multiprocessing.get_context("fork")
KILLED = 137
Kill = tuple[int, str]
"""Number of a commit of the killed process, from 1, and "before" or "after"."""


def arm(kill: Kill | None, log: Path | None = None) -> None:
    """End this process at a commit; write the name of the function behind each commit into a log."""
    count, commit = 0, journal.commit

    def counted(database: Any) -> None:
        nonlocal count
        count += 1
        if log is not None:
            with log.open("a") as file:
                file.write(find_caller() + "\n")
        if kill == (count, "before"):
            os._exit(KILLED)
        commit(database)
        if kill == (count, "after"):
            os._exit(KILLED)

    journal.commit = counted


def find_caller() -> str:
    """Return the function of fedmutual.sites whose transaction ends."""
    frame = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename == journal.__file__ or "contextlib" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else "?"


class Remote:
    """A site in a process of its own, which starts again where it was killed."""

    def __init__(self, name: str, start: Callable[[], SiteRuntime], kill: Kill | None, log: Path | None) -> None:
        self.name, self._start = name, start
        self.note_kill: Callable[[], None] = lambda: None  # called when the site was killed
        self._launch(kill, log)

    def _launch(self, kill: Kill | None, log: Path | None = None) -> None:
        self._connection, there = FORK.Pipe()
        self.process = FORK.Process(target=self._serve, args=(there, kill, log), daemon=True)
        self.process.start()
        there.close()

    def _serve(self, there: Connection, kill: Kill | None, log: Path | None) -> None:
        arm(kill, log)
        half = self._start()
        while True:
            try:
                there.send_bytes(half.carry_out(there.recv_bytes()))
            except EOFError:
                return

    def carry_out(self, order: bytes) -> bytes:
        """Return the answer to an order, which is sent again to a site that was killed."""
        try:
            self._connection.send_bytes(order)
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self.process.join()
            assert self.process.exitcode == KILLED, f"{self.name} failed"
            self.note_kill()
            self._launch(None)
            return self.carry_out(order)

    def stop(self) -> None:
        self._connection.close()
        self.process.terminate()
        self.process.join()


class Transport:
    """Sends orders to the sites, and writes each answer that arrives into a log."""

    def __init__(self, sites: Mapping[str, Remote], log: Path) -> None:
        self._sites, self._log = sites, log

    def list_connected(self) -> tuple[str, ...]:
        return tuple(self._sites)

    def list_late(self) -> tuple[str, ...]:
        return ()

    def ask(self, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        for name, content in orders.items():
            answer, (order, _) = self._sites[name].carry_out(content), read_order(content)
            line = {"site": name, "kind": order.kind, "round": order.round, "phase": order.phase, "attempt": order.attempt}
            message = read_answer(answer)[1]
            if order.kind == WORK and order.phase == Stage.KEYS and message:
                line["key"] = read_content(ANSWERS[Stage.KEYS], message, name).mask_key
            with self._log.open("a") as file:
                file.write(json.dumps(line | {"sha256": hashlib.sha256(answer).hexdigest()}) + "\n")
            yield name, answer


def federate(folder: Path, victim: str = "", kill: Kill | None = None, log: Path | None = None) -> dict[str, Any]:
    """Run a federation in a folder with one kill, and return its faults and its results."""
    agreed = contracts.read_contract(contract(folder, FEDERATION, TABLES))
    budgets: list[dict[str, int]] = []
    files = {}
    for name in NAMES:
        files[name] = site(folder, name, TABLES[name], privacy={"epsilon": 100.0})
        secret = files[name].parent / "state" / "privacy" / "secret"
        secret.parent.mkdir(parents=True)
        secret.touch(mode=0o600)
        secret.write_bytes(derive_simulation_secret(0, name))

    def start(name: str) -> Callable[[], SiteRuntime]:
        return lambda: SiteRuntime(agreed, read_site_file(files[name]), startup=KITS[name])

    sites = {i: Remote(i, start(i), kill if i == victim else None, log if i == victim else None) for i in NAMES}
    for remote in sites.values():
        remote.note_kill = lambda: budgets.append(count_steps(folder))

    def coordinate(kill: Kill | None) -> None:
        if victim == "server":
            arm(kill, log)
        Coordinator(agreed, folder / "server", KITS["server"]).run(Transport(sites, folder / "answers.jsonl"))

    try:
        if victim != "server":  # only the process that started a site can start it again
            coordinate(None)
        while victim == "server":
            server = FORK.Process(target=coordinate, args=(kill,))
            server.start()
            server.join()
            budgets.append(count_steps(folder))
            if server.exitcode == 0:
                break
            assert server.exitcode == KILLED, "the server failed"
            kill = None
    finally:
        for remote in sites.values():
            remote.stop()
    return {"models": read_models(folder), "steps": count_steps(folder), "budgets": budgets, "faults": find_faults(folder)}


def count_steps(folder: Path) -> dict[str, int]:
    """Return the noised steps that the ledger of each site has."""
    paths = {name: (folder / name / "state" / "privacy").glob("*.jsonl") for name in NAMES}
    texts = {name: [line for path in of for line in path.read_text().splitlines()] for name, of in paths.items()}
    return {name: sum(json.loads(line)["steps"] for line in lines) for name, lines in texts.items()}


def read_models(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    own = {i: fedmutual.Run(folder / i / "state" / "wards").personal_model(i).state_dict() for i in NAMES}
    return own | {"server": fedmutual.Run(folder / "server").global_model().state_dict()}


def find_faults(folder: Path) -> Counter[str]:
    """Count the faults that the answers, and the ledgers of the sites, show."""
    faults, lines = Counter[str](), [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    for name in NAMES:
        sent = read_ledger(folder / name / "state" / "wards")
        known = {line["sha256"] for line in sent}
        mine = [line for line in lines if line["site"] == name]
        faults["not in the ledger"] += sum(line["sha256"] not in known for line in mine)
        unmasked, covered = dict[int, set[str]](), dict[str, set[str]]()
        for line in sent:
            if "unmasked_sha256" in line:
                unmasked.setdefault(line["round"], set()).add(line["unmasked_sha256"])
        key = ""
        for line in mine:
            key = line.get("key", key)
            if line["kind"] == WORK and line["phase"] == Stage.UPLOAD:
                covered.setdefault(key, set()).add(line["sha256"])
        faults["repeated"] += sum(len(words) > 1 for words in unmasked.values())
        faults["mask twice"] += sum(len(answers) > 1 for answers in covered.values())
        faults["lost"] += FEDERATION["rounds"] - len(covered)
    return faults


def try_kill(folder: Path, victim: str, kill: Kill, expected: Mapping[str, Any]) -> dict[str, int]:
    """Return the faults of a federation with one kill."""
    folder.mkdir()
    result = federate(folder, victim, kill)
    faults = result["faults"]
    if not all(same(model, expected["models"][name]) for name, model in result["models"].items()):
        faults["lost"] += 1
    faults["repeated"] += sum(steps > expected["steps"][i] for i, steps in result["steps"].items())
    spent = [*result["budgets"], expected["steps"]]
    faults["budget shrank"] += sum(later[i] < before[i] for before, later in pairwise(spent) for i in NAMES)
    shutil.rmtree(folder)
    return {name: faults[name] for name in FAULTS}


KITS: dict[str, Path] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="kill at each Nth commit")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        KITS.update({name: write_startup(work / "kits" / name, name) for name in (*NAMES, "server")})
        warm_up(work / "warm")
        for victim in ("ash", "server"):
            whole, log = work / f"{victim}-whole", work / f"{victim}.txt"
            whole.mkdir()
            expected = federate(whole, victim, None, log)
            assert not sum(expected["faults"].values()), expected["faults"]
            callers = log.read_text().splitlines()
            for number in range(1, len(callers) + 1, args.every):
                for when in ("before", "after"):
                    faults = try_kill(work / f"{victim}-{number}-{when}", victim, (number, when), expected)
                    party = "server" if victim == "server" else "site"
                    trials.append({"party": party, "commit": number, "of": callers[number - 1], "when": when, **faults})
                    print(trials[-1], flush=True)
    print_table(trials)
    about = {"command": command("journal_kills.py"), "machine": machine(), "versions": versions(), "trials": trials}
    args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def warm_up(folder: Path) -> None:
    """Train one phase in this process, so that no process that is forked has to import and compile."""
    folder.mkdir()
    agreed = contracts.read_contract(contract(folder, FEDERATION, TABLES))
    file = site(folder, "ash", TABLES["ash"], privacy={"epsilon": 100.0})
    half = SiteRuntime(agreed, read_site_file(file), startup=KITS["ash"])
    half.carry_out(pack_message(Order(WORK, 0, 0), half.experiment.make_server_state()))


def print_table(trials: list[dict[str, Any]]) -> None:
    """Print a row for each kind of transaction of each party."""
    kinds = dict.fromkeys((trial["party"], trial["of"], trial["when"]) for trial in trials)
    print(f"\n{'party':8}{'transaction of':22}{'killed':8}{'kills':>6}" + "".join(f"{name:>19}" for name in FAULTS))
    for kind in kinds:
        of = [trial for trial in trials if (trial["party"], trial["of"], trial["when"]) == kind]
        counts = "".join(f"{sum(trial[name] for trial in of):>19}" for name in FAULTS)
        print(f"{kind[0]:8}{kind[1]:22}{kind[2]:8}{len(of):>6}{counts}")
    print(f"{len(trials)} kills, faults: {sum(trial[name] for trial in trials for name in FAULTS)}")


if __name__ == "__main__":
    main()
