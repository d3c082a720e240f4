"""Put the curves of a `fedmutual compare` folder into one small JSON file, with the command and machine that made them.

uv run python experiments/collect.py OUT "fedmutual compare ..." > experiments/results/NAME.json
"""

import json
import sys
from pathlib import Path

import fedmutual
from fedmutual.records.logs import METRICS, read_lines


def curves(folder: Path) -> dict[str, object]:
    """Accuracies by round: the shared model on the test set; clients' own model on their validation data, mean and worst."""
    summary = fedmutual.Run(folder).summary
    model = summary["personal"]["model"]
    test, mean, worst = [], [], []
    for line in read_lines(folder / METRICS):
        test += [s["accuracy"] for s in line["scores"] if s["model"] == "global" and s["client"] is None]
        own = [s["accuracy"] for s in line["scores"] if s["model"] == model and s["data"] == "validation"]
        mean.append(sum(own) / len(own))
        worst.append(min(own))
    found = {"global_test": test, "own_validation_mean": mean, "own_validation_worst": worst}
    return {
        "algorithm": summary["algorithm"],
        "seed": summary["seed"],
        "rounds": summary["rounds"],
        "seconds": summary["seconds"],
        "fingerprint": summary["fingerprint"],
        **{name: [round(v, 5) for v in values] for name, values in found.items()},
    }


def main() -> None:
    """Read the folder, print the JSON."""
    out, command = Path(sys.argv[1]), sys.argv[2]
    folders = sorted(p.parent for p in out.rglob("summary.json"))
    about = json.loads((folders[0] / "environment.json").read_text())
    machine = {k: about[k] for k in ("fedmutual", "python", "torch", "torchvision", "platform", "cpus", "threads", "device")}
    rows = ",\n".join(f"  {json.dumps(curves(folder))}" for folder in folders)
    print(f'{{\n "command": {json.dumps(command)},\n "machine": {json.dumps(machine)},\n "runs": [\n{rows}\n ]\n}}')


if __name__ == "__main__":
    main()
