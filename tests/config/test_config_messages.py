"""Every way to get a configuration wrong: one sentence with the file, the key and the fix."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import load_config, make_algorithm
from fedmutual.errors import ConfigError

NAME = "a run's name names its folder, so it is not empty and has no slash or control character"
IDLE = "has no effect with"
SCHEDULE = 'a schedule is { start = 0.9, end = 0.3, shape = "linear" } of finite numbers'

WRONG = [
    # Unknown keys: the nearest in the same table, then the same name elsewhere, then a like one elsewhere, then all.
    ("[optimiser]\nlr = 0.1", "unknown key 'optimiser'; did you mean 'optimizer'?"),
    ("[algorithm]\naplha = 0.3", "unknown key 'algorithm.aplha'; did you mean 'algorithm.alpha'? (of algorithm 'fml')"),
    ("[algorithm]\nlr = 0.3", "unknown key 'algorithm.lr'; did you mean 'optimizer.lr'? (of algorithm 'fml')"),
    ("lr = 0.1", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
    ("alpha = 0.1", "unknown key 'alpha'; did you mean 'partition.alpha' or 'algorithm.alpha'?"),
    ("[data]\nclients = 3", "unknown key 'data.clients'; did you mean 'partition.clients'?"),
    ("[share]\nsecrets = 1", "unknown key 'share.secrets'; there is 'metrics'"),
    ("[training]\nsteps = 1", "unknown key 'training.steps'; did you mean 'training.local_steps'?"),
    (
        "[training]\nfloat16 = true",
        "unknown key 'training.float16'; there are 'clip_norm', 'clip_value', 'accumulate', 'class_weights', "
        "'label_smoothing', 'focal', 'patience', 'loss', 'local_epochs', 'local_steps', 'batch_size', 'task'",
    ),
    (
        "[clients.0.training]\nbatchsize = 1",
        "unknown key 'clients.0.training.batchsize'; did you mean 'clients.0.training.batch_size'?",
    ),
    (
        "[clients.0.algorithm]\nname = 'fedavg'",
        "unknown key 'clients.0.algorithm.name'; did you mean 'algorithm.name'? (of algorithm 'fml')",
    ),
    ("[algorithm]\nmu = 0.1", "key 'algorithm.mu' is a setting of fedprox, and the algorithm is 'fml'; remove it"),
    (
        "[algorithm]\nname = 'independent'\n[clients.0.algorithm]\nalpha = 0.1",
        "key 'clients.0.algorithm.alpha' is a setting of fml and proxyfl, and the algorithm is 'independent'; remove it",
    ),
    ("[optimizer]\nname = 'rmsporp'", "key 'optimizer.name': there is no optimiser 'rmsporp'; did you mean 'rmsprop'?"),
    (
        "[optimizer]\nname = 'LBFGS'",
        "key 'optimizer.name': 'lbfgs' computes a loss several times in a step, and cannot train here; use 'adam' or 'sgd'",
    ),
    ("[optimizer]\nname = 'rmsprop'\nalhpa = 0.9", "unknown key 'optimizer.alhpa'; did you mean 'optimizer.alpha'?"),
    ("[optimizer]\nnesterof = true", "unknown key 'optimizer.nesterof'; did you mean 'optimizer.nesterov'?"),
    (
        "[optimizer]\nname = 'rmsprop'\nalpha = -1",
        "key 'optimizer.name': 'rmsprop' cannot be made: ValueError: Invalid alpha value: -1",
    ),
    (
        "[optimizer]\nname = 'adagrad'\nmomentum = 0.5",
        "key 'optimizer.momentum' has no effect with optimizer.name = 'adagrad'; remove it",
    ),
    (
        "[training]\ntask = 'regression'\nfocal = 2.0",
        "key 'training.focal' has no effect with training.task = 'regression'; remove it",
    ),
    (
        "[training]\nclass_weights = 'even'",
        "key 'training.class_weights': a list of numbers, or 'balanced', not 'even'",
    ),
    # Types: a boolean is no number, a number no boolean, 3.0 no whole number, text neither.
    ("rounds = 3.0", "key 'rounds' must be a whole number, not 3.0"),
    ("seed = '3'", "key 'seed' must be a whole number, not \"3\""),
    ("data = 'mnist'", "key 'data' must be a table, not \"mnist\""),
    ("[clients]\n0 = 3", "key 'clients.0' must be a table, not 3"),
    ("[data]\nresident = 1", "key 'data.resident' must be true or false, not 1"),
    ("[data]\nroot = 3", "key 'data.root' must be a path, not 3"),
    ("[data]\nlabels = { float = 1 }", "key 'data.labels.float' must be text, not 1"),
    ("[data]\nsize = [28, 1.5]", "key 'data.size.1' must be a whole number, not 1.5"),
    ("[data]\nmean = [true]", "key 'data.mean.0' must be a number, not true"),
    ("[optimizer]\nlr = true", "key 'optimizer.lr' must be a number, not true"),
    ("[algorithm]\nalpha = true", "key 'algorithm.alpha' must be a number, not true"),
    # Ranges and choices.
    ("rounds = 0", "key 'rounds' must be greater than or equal to 1, not 0"),
    ("name = '../x'", f"key 'name': {NAME}: '../x'"),
    ('name = "a\\u0007b"', f"key 'name': {NAME}: 'a\\x07b'"),
    (
        "[training]\nbatch_size = 100000000000000000000",
        "key 'training.batch_size' must be less than or equal to 1000000000, not 100000000000000000000",
    ),
    (
        "[clients.0.training]\nbatch_size = 1000000001",
        "key 'clients.0.training.batch_size' must be less than or equal to 1000000000, not 1000000001",
    ),
    ("[engine]\nparticipation = 0", "key 'engine.participation' must be greater than 0, not 0"),
    ("[data]\nstd = [0.5, 0.0]", "key 'data.std.1' must be greater than 0, not 0.0"),
    ("[optimizer]\nlr = -1", "key 'optimizer.lr': a learning rate must be at least 0, not -1"),
    ("[optimizer]\nlr = nan", "key 'optimizer.lr' must be a finite number, not NaN"),
    ("[clients.a.optimizer]\nlr = -0.5", "key 'clients.a.optimizer.lr': a learning rate must be at least 0, not -0.5"),
    ("[optimizer]\nname = 'sdg'", "key 'optimizer.name': there is no optimiser 'sdg'; did you mean 'sgd'?"),
    ("[algorithm]\nalpha = 1.5", "key 'algorithm.alpha' must be between 0 and 1, not 1.5"),
    ("[algorithm]\nalpha = nan", "key 'algorithm.alpha' must be a finite number, not NaN"),
    ("[algorithm]\nbeta = { start = 0.5, end = -0.5 }", "key 'algorithm.beta' must be between 0 and 1, not -0.5"),
    ("[clients.4.algorithm]\nalpha = 2", "key 'clients.4.algorithm.alpha' must be between 0 and 1, not 2"),
    ("[algorithm]\nname = 'fedavg'\nweighting = 'n'", "key 'algorithm.weighting' must be 'samples' or 'uniform', not \"n\""),
    (
        "[server]\nsum = 'fixed'\naggregate = 'median'",
        "key 'server.sum' has no effect with server.aggregate = 'median'; remove it",
    ),
    (
        "[server]\nsum = 'fixed'\n[partition]\nclients = 8192",
        "server.sum = 'fixed' adds at most 8191 clients, and partition.clients is 8192; remove 'server.sum'",
    ),
    ("[server]\ntrim = 0.1", "key 'server.trim' has no effect with server.aggregate = 'mean'; remove it"),
    # Algorithms.
    ("[algorithm]\nname = 'fmll'", "key 'algorithm.name': there is no algorithm 'fmll'; did you mean 'fml'?"),
    (
        "[algorithm]\nname = 'zzz'",
        f"key 'algorithm.name': there is no algorithm 'zzz'; there are {', '.join(ALGORITHMS)}, "
        "and your own as 'module:Class'",
    ),
    ("[algorithm]\nname = 3", f"key 'algorithm.name' must name an algorithm: {', '.join(ALGORITHMS)}"),
    (
        "[algorithm]\nname = 'math:pi'",
        "key 'algorithm.name': 'math:pi' is not an algorithm: it must be a frozen dataclass derived "
        "from fedmutual.core.Phase",
    ),
    ("[model]\npart = '.'", "key 'model.part' has an entry that names no module"),
    ("[model]\npart = []", "key 'model.part' must have at least 1 item, not []"),
    ("[model]\npart = ['']", "key 'model.part.0' must have at least 1 character, not \"\""),
    # Schedules.
    ("[optimizer]\nlr = { start = 0.1 }", f"key 'optimizer.lr': {SCHEDULE}, not {{'start': 0.1}}"),
    (
        "[optimizer]\nlr = { start = 0.1, end = 0.2, shap = 'step' }",
        f"key 'optimizer.lr': {SCHEDULE}, not {{'start': 0.1, 'end': 0.2, 'shap': 'step'}}",
    ),
    (
        "[algorithm]\nalpha = { start = 0.1, end = true }",
        f"key 'algorithm.alpha': {SCHEDULE}, not {{'start': 0.1, 'end': True}}",
    ),
    (
        "[algorithm]\nalpha = { start = 0.1, end = nan }",
        f"key 'algorithm.alpha': {SCHEDULE}, not {{'start': 0.1, 'end': nan}}",
    ),
    (
        "[optimizer]\nlr = { start = 0.1, end = 0.2, shape = 'cubic' }",
        "key 'optimizer.lr': a schedule's shape is 'linear', 'cosine', 'step' or 'one-cycle', not 'cubic'",
    ),
    (
        "[optimizer]\nlr = { start = 0.1, end = 0.2, shape = 'step', at = 5 }",
        "key 'optimizer.lr': the at of a schedule must be between 0 and 1, not 5",
    ),
    (
        "[clients.0.optimizer]\nlr = { start = 0.1, end = -0.2 }",
        "key 'clients.0.optimizer.lr': a learning rate must be at least 0, not -0.2",
    ),
    ("[data]\nroot = '~nobody-of-this-name/x'", "key 'data.root': there is no home folder for '~nobody-of-this-name/x'"),
    # Keys that need one another.
    ("[partition]\nkind = 'shards'", "partition.kind = 'shards' needs the key 'partition.classes_per_client'"),
    ("[partition]\nkind = 'dirichlet'", "partition.kind = 'dirichlet' needs the key 'partition.alpha'"),
    ("[partition]\nalpha = 0.5", "key 'partition.alpha' has no effect with partition.kind = 'iid'; remove it"),
    (
        "[model]\npersonal = ['mlp', 'lenet5']",
        "key 'model.personal' names 2 networks for 5 clients; name one for all, or one for each",
    ),
    ("[optimizer]\nname = 'adam'\nmomentum = 0.5", f"key 'optimizer.momentum' {IDLE} optimizer.name = 'adam'; remove it"),
    (
        "[optimizer]\nname = 'adamw'\n[clients.1.optimizer]\nmomentum = 0.9",
        f"key 'clients.1.optimizer.momentum' {IDLE} optimizer.name = 'adamw'; remove it",
    ),
    (
        "[records]\nbest_by = 'holdout'",
        "records.best_by = 'holdout' needs rows to choose by; set 'split.holdout', for example to 0.1, or remove "
        "'records.best_by'",
    ),
    (
        "[records]\nevaluate_on = 'holdout'",
        "records.evaluate_on = 'holdout' needs rows to score on; set 'split.holdout', for example to 0.1, or remove "
        "'records.evaluate_on'",
    ),
    (
        "[split]\nholdout = 0.1\n[records]\nevaluate_on = 'holdout'\nbest_by = 'test'",
        "records.best_by = 'test' chooses by rows that records.evaluate_on = 'holdout' leaves unscored; "
        "remove one of the two",
    ),
    ("[algorithm]\nname = 'fedh2l'\npairs = 0.5", f"key 'algorithm.pairs' {IDLE} algorithm.peers = 'all'; remove it"),
    (
        "[algorithm]\nname = 'fedh2l'\nkl = false\nconfidence = false",
        f"key 'algorithm.confidence' {IDLE} algorithm.kl = false; remove it",
    ),
    (
        "[algorithm]\nname = 'fedh2l'\n[clients.20.training]\nlocal_epochs = 3",
        f"key 'clients.20.training.local_epochs' {IDLE} training.local_steps; remove it",
    ),
    # What only the federation sets.
    (
        "[algorithm]\nname = 'fedavg'\n[clients.0]\nalgorithm.weighting = 'uniform'",
        "key 'clients.0.algorithm.weighting' is for the whole federation only; remove it",
    ),
    (
        "[clients.0.algorithm]\ntemperature = 2.0",
        "key 'clients.0.algorithm.temperature' is for the whole federation only; remove it",
    ),
    # Client names that look like steps of the library that checks types.
    (
        "[clients.union.training]\nlocal_epochs = 0",
        "key 'clients.union.training.local_epochs' must be greater than or equal to 1, not 0",
    ),
    ("[clients.'tuple[x'.model]\npersonal = 3", "key 'clients.tuple[x.model.personal' must be text, not 3"),
]


def refusal(path: Path, **overrides: object) -> str:
    with pytest.raises(ConfigError) as problem:
        load_config(path, **overrides)
    message = str(problem.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("text", "sentence"), WRONG, ids=[text.replace("\n", " ") for text, _ in WRONG])
def test_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    assert refusal(path) == f"{path}: {sentence}"


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert refusal(path) == f"{path}: there is no such file"
    assert refusal(path.parent) == f"{path.parent}: is a folder; name a TOML file"
    path.write_text("x = ", encoding="utf-8")
    assert refusal(path).startswith(f"{path}: not valid TOML: ")
    path.write_bytes(b"name = '\xff'")
    assert refusal(path).startswith(f"{path}: cannot be read (")
    assert refusal(tmp_path) == f"{tmp_path}: is a folder; name a TOML file"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write classes derived from FML into a module `own_NAME`; return a file that names the class NAME."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str, decorator: str = "@dataclass(frozen=True, kw_only=True)\n") -> Path:
        name = source.split()[1].split("(")[0]
        head = (
            "from dataclasses import dataclass\nfrom typing import ClassVar\nfrom fedmutual.algorithms.fml import FML\n\n\n"
        )
        (tmp_path / f"own_{name}.py").write_text(f"{head}{decorator}{source}", encoding="utf-8")
        path = tmp_path / f"{name}.toml"
        path.write_text(f"algorithm = {{ name = 'own_{name}:{name}' }}", encoding="utf-8")
        return path

    return write


def test_an_algorithm_of_ones_own_that_needs_a_key(own) -> None:
    path = own("class Needy(FML):\n    gamma: float")
    assert refusal(path) == f"{path}: key 'algorithm.gamma' is missing: 'own_Needy:Needy' has no default for it"
    assert "must be a number" in refusal(path, **{"algorithm.gamma": True})
    assert load_config(path, **{"algorithm.gamma": 2}).algorithm["gamma"] == 2
    path.write_text("[algorithm]\nname = 'no_such_module_here:Needy'", encoding="utf-8")
    assert refusal(path).startswith("key 'algorithm.name': there is no module 'no_such_module_here'; put ")


def test_algorithms_of_ones_own_that_are_not_whole(own) -> None:
    path = own("class Untyped(FML):\n    gamma: 'Nowhere' = 1.0")
    fault = "the fields of 'own_Untyped:Untyped' have a type that cannot be resolved: name 'Nowhere' is not defined"
    assert refusal(path) == f"{path}: key 'algorithm.name': {fault}"
    path = own("class Other(FML):\n    def algorithm(self):\n        return 'fml'")
    fault = "algorithm() of 'own_Other:Other' returned str, but must return a fedmutual.core.Algorithm"
    with pytest.raises(ConfigError, match=re.escape(f"key 'algorithm.name': {fault}")):
        make_algorithm(load_config(path))
    load_config(own("class Plain(FML):\n    terms: ClassVar[tuple] = ('meme',)", decorator=""))
    fault = "'own_Lost:Lost' has a field 'step' that no key can set, because the class lacks its decorator"
    assert fault in refusal(own("class Lost(FML):\n    step: float = 0.5", decorator=""))


@pytest.mark.parametrize("root", [r"C:\Users\x", r"C:\data", r"C:\temp", "C:\\", r"\\server\share"])
def test_a_path_of_windows_between_double_quotes(tmp_path, root):
    path = tmp_path / "mine.toml"
    path.write_text(f'data.root = "{root}"\n')
    assert "write a path of Windows in single quotes" in refusal(path)
    path.write_text(f"data.root = '{root}'\n")
    assert str(load_config(path).data.root) == root
    path.write_text(f"data.root = '{root}'\nname = \"open\nrounds = 1\n")
    assert "Windows" not in refusal(path), "the fault is in another line"
