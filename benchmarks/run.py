"""Run all benchmarks, or the named sections; each prints its lines and writes RESULTS/<section>.json.

    uv run python benchmarks/run.py [SECTION ...] [--pairs 11]

docs/performance.md says what each section measures, and how. Nothing else should run on the machine meanwhile.
"""

import argparse
import importlib
from pathlib import Path

from common import Options, Others, adopt_orphans, command, machine, write

from fedmutual import DataError

# section: the module that has it, as a function `measure(options) -> results, None where it cannot be measured here`
SECTIONS = {
    "engines": "engines",
    "steps": "steps",
    "short": "short",
    "clients": "scaling",
    "scale": "scale",
    "growth": "growth",
    "commands": "commands",
    "disk": "disk",
    "fedh2l": "fedh2l",
    "peers": "peers",
    "memory": "memory",
    "bytes": "traffic",
    "precision": "precision",
    "precision-speed": "precision_speed",
    "gpu": "gpu",
    "secure-sum": "secure_sum",
    "secure-sum-sites": "secure_sum_sites",
    "privacy": "private_steps",
    "sensitivity": "sensitivity",
}


def split_peer(text: str) -> tuple[str, Path]:
    """Return the name and the path of NAME=PYTHON."""
    name, _, python = text.partition("=")
    if not python:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON")
    return name, Path(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; none: all")
    parser.add_argument("--pairs", type=int, default=11, help="turns of interleaved contestants")
    parser.add_argument("--seeds", type=int, default=3, help="of the section precision")
    parser.add_argument("--device", default="cuda", help="of the section gpu; cpu: only to see that it runs")
    parser.add_argument("--pflib", type=Path, metavar="PATH", help="of the section peers: a clone of PFLlib")
    parser.add_argument("--htfl", type=Path, metavar="PATH", help="of the section peers: a clone of HtFLlib")
    parser.add_argument(
        "--peer",
        action="append",
        type=split_peer,
        default=[],
        metavar="NAME=PYTHON",
        help="of the section peers: a library (flower, fedlab, blazefl) and the Python that has it; may be repeated",
    )
    parser.add_argument("--setting", metavar="MODEL-K", help="of the section peers: one setting only, for example mlp-5")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="of the section peers: local epochs of a round")
    parser.add_argument("--before", type=Path, metavar="PATH", help="of disk and commands: a clone of an earlier version")
    parser.add_argument("--tiny", action="store_true", help="only see that it runs: the numbers mean nothing")
    parser.add_argument("--json-dir", type=Path, help="benchmarks/results; with --tiny, nowhere")
    args = parser.parse_args()
    folder = args.json_dir or (None if args.tiny else Path(__file__).parent / "results")
    for name in args.sections:
        if name not in SECTIONS:
            parser.error(f"there is no section {name!r}; there are {', '.join(SECTIONS)}")
    options = Options(
        args.pairs,
        args.tiny,
        args.device,
        args.seeds,
        args.pflib,
        args.htfl,
        args.setting,
        args.epochs,
        dict(args.peer),
        args.before,
    )
    adopt_orphans()
    for name in args.sections or SECTIONS:
        about = {"command": command("run.py"), "tiny": args.tiny, "machine": machine()}
        print(f"== {name}", flush=True)
        others = Others()
        try:
            results = importlib.import_module(SECTIONS[name]).measure(options)
        except DataError as problem:
            print(problem)
            continue
        if results is None:
            continue
        share = others.share()
        if share is not None and share > 0.05:
            print(f"note: {share:.0%} of the machine went to other work meanwhile; figures from a quiet one are worth more")
        if folder:
            file = name
            if name == "peers":
                file += (f"-{args.setting}" if args.setting else "") + (f"-epochs-{args.epochs}" if args.epochs > 1 else "")
            write(folder, file, {**about, "others_share": share}, results)


if __name__ == "__main__":
    main()
