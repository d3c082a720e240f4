"""Section scale: the cost of a round by clients, parameters, workers and Ray nodes, and a model that is fitted to it.

Each setting is a process of its own: FML, MLPs with two hidden layers of h units, clients of 64 rows in batches of 32, of
which at most RESIDENT of a worker are in memory at a time; no evaluation, no checkpoint. Seconds are those of processors, so
that other work on the machine disturbs them less than the clock's, which are recorded too. Memory is the greatest sum
of the proportional set sizes of all processes, read every 0.3 s. `uv run python benchmarks/scale.py --page` draws
docs/scale.svg and writes the tables of docs/scale.md from the results; with --setting the script measures one setting.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import psutil
from common import Options, figure, read_children_seconds

HERE = Path(__file__).parent
RESULTS, PAGE, PICTURE = (
    HERE / "results" / "scale.json",
    HERE.parent / "docs" / "scale.md",
    HERE.parent / "docs" / "scale.svg",
)
MARKS = "<!-- tables: benchmarks/scale.py --page -->\n", "<!-- end of tables -->\n"
ROWS, RESIDENT, ROUNDS, CORES = 64, 32, 6, 2
MIB = 2**20


class Setting(NamedTuple):
    """A federation that is measured."""

    clients: int
    participants: int  # of a round
    hidden: int
    epochs: int
    engine: str = "processes"
    workers: int = 2  # of the cluster: nodes with one worker each

    @property
    def parameters(self) -> int:
        """Return the parameters of one of a client's two networks."""
        return 784 * self.hidden + self.hidden + self.hidden * self.hidden + self.hidden + self.hidden * 10 + 10

    @property
    def steps(self) -> int:
        """Return the gradient steps of a client in a round."""
        return ROWS // 32 * self.epochs

    @property
    def has_states_on_disk(self) -> bool:
        return self.clients > RESIDENT * self.workers


FITTED = (
    Setting(5, 5, 200, 4),
    Setting(5, 5, 800, 2),
    Setting(20, 20, 50, 1),
    Setting(20, 20, 50, 10),
    Setting(20, 20, 400, 4),
    Setting(50, 50, 200, 2),
    Setting(200, 200, 200, 1),
    Setting(200, 50, 400, 1),
    Setting(500, 100, 100, 4),
    Setting(500, 25, 800, 1),
    Setting(2000, 100, 50, 1),
    Setting(2000, 100, 200, 2),
    Setting(50, 50, 200, 2, "cluster", 1),
    Setting(50, 50, 200, 2, "cluster", 2),
    Setting(20, 20, 800, 1, "cluster", 2),
    Setting(200, 50, 200, 2, "cluster", 3),
    Setting(50, 50, 100, 4, "cluster", 4),
)
UNSEEN = (Setting(60, 60, 100, 3), Setting(1000, 100, 200, 1), Setting(100, 50, 200, 2, "cluster", 4))


def measure(options: Options) -> dict[str, Any]:
    """Return the measurements, the models and their errors."""
    fitted, unseen = (s[:3] if options.tiny else s for s in (FITTED, UNSEEN))
    rows = [_measure_in_child(setting) for setting in (*fitted, *unseen)]
    about = {"rows_of_a_client": ROWS, "resident": RESIDENT, "rounds": ROUNDS, "measured": rows}
    return about | summarise(rows, [*fitted, *unseen], len(fitted))


def summarise(rows: list[dict[str, Any]], settings: list[Setting], fitted: int) -> dict[str, Any]:
    """Return the model of each quantity with its predictions and relative errors."""
    models = {}
    for name, features in QUANTITIES.items():
        values = [row[name] for row in rows]
        weights = fit([features(s) for s in settings[:fitted]], values[:fitted])
        terms = dict(zip(features(settings[0]), weights, strict=True))
        models[name] = _describe_errors(terms, [predict(terms, features(s)) for s in settings], values, fitted)
    for name, model in models.items():
        errors = ", ".join(f"{e:+.0%}" for e in model["errors_unseen"])
        print(f"{name}: {model['terms']}; errors of settings that were not fitted: {errors}", flush=True)
    return {"models": models, "forecast": forecast({name: model["terms"] for name, model in models.items()})}


def _describe_errors(terms: dict[str, float], predicted: list[float], values: list[float], fitted: int) -> dict[str, Any]:
    errors = [figure(p / v - 1, 2) for p, v in zip(predicted, values, strict=True)]
    return {
        "terms": {name: figure(weight) for name, weight in terms.items()},
        "predicted": [figure(p) for p in predicted],
        "errors_fitted": errors[:fitted],
        "errors_unseen": errors[fitted:],
    }


def client_features(s: Setting) -> dict[str, float]:
    """Return the terms of the processor seconds of all workers in a round."""
    n, p = s.participants, s.parameters / 1e6
    on_disk = n if s.has_states_on_disk else 0
    return {
        "participant": n,
        "participant, million parameters": n * p,
        "step": n * s.steps,
        "step, million parameters": n * s.steps * p,
        "state on disk": on_disk,
        "state on disk, million parameters": on_disk * p,
        "Ray node": s.workers if s.engine == "cluster" else 0,
    }


def server_features(s: Setting) -> dict[str, float]:
    """Return the terms of the processor seconds of the process that sends, receives and averages."""
    n, p, is_ray = s.participants, s.parameters / 1e6, s.engine == "cluster"
    return {
        "round": 1.0,
        "participant": n,
        "participant, million parameters": n * p,
        "Ray node": s.workers if is_ray else 0,
        "Ray, participant": n if is_ray else 0,
        "Ray, participant, million parameters": n * p if is_ray else 0,
    }


def memory_features(s: Setting) -> dict[str, float]:
    """Return the terms of the peak memory of all processes."""
    p, in_memory = s.parameters / 1e6, min(s.clients, RESIDENT * s.workers)
    return {
        "process": 1 + s.workers,
        "Ray node": s.workers if s.engine == "cluster" else 0,
        "client": s.clients,
        "client, Ray node": s.clients * s.workers if s.engine == "cluster" else 0,
        "client in memory": in_memory,
        "client in memory, million parameters": in_memory * p,
        "participant, million parameters": s.participants * p,
    }


QUANTITIES: dict[str, Callable[[Setting], dict[str, float]]] = {
    "client_seconds": client_features,
    "server_seconds": server_features,
    "memory_mib": memory_features,
}


def fit(features: list[dict[str, float]], values: list[float]) -> list[float]:
    """Return the weights, none negative, with the least sum of squared relative errors."""
    import numpy as np
    from scipy.optimize import nnls

    scale = np.array(values)
    return [float(w) for w in nnls(np.array([list(f.values()) for f in features]) / scale[:, None], np.ones(len(scale)))[0]]


def predict(terms: dict[str, float], features: dict[str, float]) -> float:
    return sum(terms[name] * value for name, value in features.items())


def forecast(terms: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return what a round would take on machines that nobody has measured, from the models and from the speed of a link."""
    rows = []
    for machines, clients, participants in ((10, 2000, 100), (10, 20_000, 1000), (100, 2000, 100), (100, 20_000, 1000)):
        s = Setting(clients, participants, 200, 2, "cluster", machines * CORES)
        down, up = machines * CORES * 4 * s.parameters, participants * 4 * s.parameters  # each worker gets the model once
        rows.append(_forecast(terms, s, f"{machines} machines", s.workers, (down + up) / (1e9 / 8), "1 Gbit/s"))
    for hidden in (200, 800):
        s = Setting(50, 50, hidden, 2, "cluster", 50)
        rows.append(_forecast(terms, s, "50 sites", 50, 2 * 50 * 4 * s.parameters / (1e8 / 8), "100 Mbit/s"))
    return rows


def _forecast(
    terms: dict[str, dict[str, float]], s: Setting, where: str, cores: int, transfer: float, link: str
) -> dict[str, Any]:
    server, clients = (predict(terms[k], QUANTITIES[k](s)) for k in ("server_seconds", "client_seconds"))
    share = max(clients / cores, clients / s.participants)  # a client is trained by one core
    seconds = {"server": figure(server, 2), "clients_seconds": figure(share, 2), f"transfer at {link}": figure(transfer, 2)}
    about = {"where": where, "clients": s.clients, "participants": s.participants, "parameters": s.parameters}
    return {**about, **seconds, "round": figure(server + share + transfer, 2)}


UNITS = {"client_seconds": 1e3, "server_seconds": 1e3, "memory_mib": 1.0}  # milliseconds, MiB


def render_tables(results: dict[str, Any]) -> str:
    """Return the tables of docs/scale.md: settings that were not fitted, the terms of the models, the forecast."""
    models, measured = results["models"], results["measured"]
    fitted = len(models["memory_mib"]["errors_fitted"])
    lines = [
        "| Not fitted | clients: processor s | server: processor s | memory, MiB |",
        "|---|---|---|---|",
    ]
    for n, row in enumerate(measured[fitted:], start=fitted):
        cells = [
            f"{row[name]:.4g}, model {models[name]['predicted'][n]:.4g} ({row_error:+.0%})"
            for name in QUANTITIES
            for row_error in [models[name]["errors_unseen"][n - fitted]]
        ]
        where = f"{row['workers']} {'Ray nodes' if row['engine'] == 'cluster' else 'processes'}"
        about = f"{row['clients']:,} clients, {row['participants']} a round, {row['parameters']:,} parameters, {where}"
        lines.append(f"| {about} | {' | '.join(cells)} |")
    lines += ["", "| Term | clients, ms | server, ms | memory, MiB |", "|---|---|---|---|"]
    for term in dict.fromkeys(term for name in QUANTITIES for term in models[name]["terms"]):
        values = [models[name]["terms"].get(term) for name in QUANTITIES]
        scaled = ["" if v is None else f"{v * unit:.3g}" for v, unit in zip(values, UNITS.values(), strict=True)]
        lines.append(f"| {term} | {' | '.join(scaled)} |")
    lines += [
        "",
        "| Forecast | clients | participants | parameters | server, s | clients, s | transfer, s | round, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["forecast"]:
        (link,) = (key for key in row if key.startswith("transfer"))
        numbers = " | ".join(f"{row[key]:g}" for key in ("server", "clients_seconds", link, "round"))
        about = f"{row['where']}, {link.removeprefix('transfer at ')} | {row['clients']:,} | {row['participants']:,}"
        lines.append(f"| {about} | {row['parameters']:,} | {numbers} |")
    return "\n".join(lines) + "\n"


def _measure_in_child(setting: Setting) -> dict[str, Any]:
    measured, peak = measure_process([sys.executable, __file__, "--setting", ",".join(map(str, setting))])
    row = measured | {"memory_mib": figure(peak / MIB)}
    print(row, flush=True)
    return row


def measure_process(words: list[str], environment: Mapping[str, str] | None = None) -> tuple[dict[str, Any], int]:
    """Run a command -> (the JSON object in its last line, the peak memory in bytes of the process and its descendants)."""
    peak = 0
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(words, stdout=output, env=environment)
        while process.poll() is None:
            peak = max(peak, read_memory(process))
            time.sleep(0.3)
        if process.returncode:
            raise SystemExit(process.returncode)
        output.seek(0)
        return json.loads(output.read().splitlines()[-1]), peak


def read_memory(process: psutil.Process) -> int:
    """Return the proportional set sizes of a process and its descendants together, in bytes."""
    total = 0
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def measure_setting(setting: Setting) -> dict[str, Any]:
    """Return the seconds and bytes of a round: processor seconds as a mean, the clock as a median, without round 1."""
    import torch
    from ours import noisy, train

    from fedmutual.engines import allocator
    from fedmutual.events import Event, PhaseDone, RoundDone
    from fedmutual.federation.build import build
    from fedmutual.studies.run import EngineHandle

    times: list[tuple[float, float, float]] = []
    sent = [0, 0]

    def observe(event: Event) -> None:
        if isinstance(event, PhaseDone):
            sent[:] = sum(event.down.values()), sum(event.up.values())
        elif isinstance(event, RoundDone):
            times.append((time.process_time(), read_children_seconds(), time.monotonic()))

    allocator.keep_freed_memory()
    torch.set_num_threads(1)
    engine = {"participation": setting.participants / setting.clients, "resident": RESIDENT, "workers": setting.workers}
    with (
        ray_nodes(setting.workers if setting.engine == "cluster" else 0) as address,
        noisy(
            f"wide:h{setting.hidden}",
            setting.clients,
            ROWS,
            1,
            epochs=setting.epochs,
            batch_size=32,
            **engine,
            **address,
            name=setting.engine,
        ) as config,
        tempfile.TemporaryDirectory() as folder,
        closing(EngineHandle(build(config), None, Path(folder))) as handle,
    ):
        train(handle, ROUNDS, [observe])
    rounds = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(times)]
    server, clients, clock = zip(*rounds, strict=True)
    return {
        **setting._asdict(),
        "parameters": setting.parameters,
        "steps": setting.steps,
        "has_states_on_disk": setting.has_states_on_disk,
        "server_seconds": figure(mean(server)),
        "client_seconds": figure(mean(clients)),
        "clock_seconds": figure(median(clock)),
        "down": sent[0],
        "up": sent[1],
    }


@contextmanager
def ray_nodes(count: int) -> Iterator[dict[str, str]]:
    """Yield the address of a Ray cluster of so many nodes on this machine; nothing if there are none."""
    if not count:
        yield {}
        return
    from fedmutual.engines.ray import import_ray

    import_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=1)
        yield {"address": cluster.address}
    finally:
        import_ray().shutdown()
        cluster.shutdown()


def insert_tables(page: str, tables: str) -> str:
    """Return the page with these tables between the two marks."""
    before, _, rest = page.partition(MARKS[0])
    return before + MARKS[0] + tables + MARKS[1] + rest.partition(MARKS[1])[2]


def draw(results: dict[str, Any]) -> None:
    """Draw docs/scale.svg: measured against modelled, of seconds and memory."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scale"
    from matplotlib import pyplot, ticker

    picture, axes = pyplot.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    titles = {
        "client_seconds": "clients: processor seconds",
        "server_seconds": "server: processor seconds",
        "memory_mib": "memory, MiB",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        measured, predicted = [row[name] for row in results["measured"]], results["models"][name]["predicted"]
        fitted = len(results["models"][name]["errors_fitted"])
        low, high = min(measured + predicted) * 0.8, max(measured + predicted) * 1.25
        axis.plot([low, high], [low, high], color="0.6", linewidth=1, label="model = measurement")
        for engine, marker in (("processes", "o"), ("cluster", "s")):
            at = [n for n, row in enumerate(results["measured"]) if row["engine"] == engine]
            for label, color, part in (
                ("fitted", "#1f5fa8", [n for n in at if n < fitted]),
                ("not fitted", "#c8501e", [n for n in at if n >= fitted]),
            ):
                x, y = [measured[n] for n in part], [predicted[n] for n in part]
                axis.scatter(x, y, label=f"{engine}, {label}", color=color, marker=marker, s=28)
        axis.set(xscale="log", yscale="log", title=f"{title} of a round" if "seconds" in name else f"peak {title}")
        axis.set(xlabel="measured", ylabel="model", xlim=(low, high), ylim=(low, high))
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            scale.set_major_formatter(ticker.FormatStrFormatter("%g"))
            scale.set_minor_formatter(ticker.NullFormatter())
    axes[0].legend(fontsize="small")
    picture.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", help="CLIENTS,PARTICIPANTS,HIDDEN,EPOCHS,ENGINE,WORKERS")
    parser.add_argument("--page", action="store_true", help="write docs/scale.svg, and the tables of docs/scale.md")
    args = parser.parse_args()
    if args.page:
        results = json.loads(RESULTS.read_text())["results"]
        draw(results)
        PAGE.write_text(insert_tables(PAGE.read_text(), render_tables(results)))
    elif args.setting:
        *numbers, engine, workers = args.setting.split(",")
        print(json.dumps(measure_setting(Setting(*map(int, numbers), engine, int(workers)))))  # type: ignore[call-arg]
    else:
        parser.error("give --setting or --page; all settings: uv run python benchmarks/run.py scale")


if __name__ == "__main__":
    main()
