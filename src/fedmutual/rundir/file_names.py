"""The names of the files in a run's folder."""

from fedmutual.recorded_code import CONFIG as CONFIG
from fedmutual.recorded_code import ENVIRONMENT as ENVIRONMENT

PARTITION = "partition.json"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"  # a line per evaluation
LEDGER = "ledger.jsonl"  # a line per round, phase and client
TUNED = "tuned.json"  # of a run of `compare --tune`
LOG = "log.txt"
LOCK = ".lock"
BEGUN = "begun.safetensors"  # the weights that the run began with, if they are of another run
FINE_TUNE, SCRATCH = "fine-tune", "scratch"  # folders of `adapt`, beside the folder of the newcomer's algorithm
