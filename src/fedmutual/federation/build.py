"""Build an experiment from a configuration, and check that the configuration fits its data, before anything is trained."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from fedmutual import data, tasks
from fedmutual.calling import Inputs, Shape, Shapes, call_network, find_image_shape, format_shape, map_inputs
from fedmutual.config import Config, make_algorithm
from fedmutual.core import Message, Public, find_head
from fedmutual.data.examples import list_names
from fedmutual.data.federation import Federation, Gather
from fedmutual.data.statistics import Moments
from fedmutual.errors import ConfigError
from fedmutual.federation.experiment import Experiment
from fedmutual.federation.networks import Networks, Pretrained
from fedmutual.models.splice import find_shape_difference
from fedmutual.privacy import rules
from fedmutual.rundir import trackers
from fedmutual.rundir.checkpoint import read_shared_state
from fedmutual.scores import is_disclosed


def build(
    config: Config,
    device: str | None = None,
    prepared: Mapping[str, data.Prepared] | None = None,
    begun: Message | None = None,
    pretrained: Pretrained | None = None,
    gathered: Gather | None = None,
    moments: Moments | None = None,
) -> Experiment:
    """Return the experiment of a configuration: read the data, build the networks, and check that the parts fit.

    device: a name that replaces `engine.device`.
    prepared: data that are read already; None: the data are read.
    begun: the first weights that a resumed run began with; None: they are read from `model.weights`, if that key is set.
    pretrained: the pretrained weights that a resumed run began with; missing weights are read from `model.pretrained`.
    gathered: the public seed set, as for `data.load`.
    moments: sums over all clients' training rows, as for `data.load`.

    Raises:
        UserError: the data cannot be read, or a part cannot be built or does not fit.
    """
    federation = data.load(config, prepared, gathered, moments)
    if begun is None and config.model.weights is not None:
        begun = read_shared_state(config.model.weights)
    algorithm, place = make_algorithm(config), pick_device(device or config.engine.device)
    check_clients(config, federation)
    nets = Networks(config, federation, algorithm.scores, place, begun).begin_with(pretrained or {})
    experiment = Experiment(config, federation, algorithm, nets)
    check_experiment(experiment)
    return experiment


def pick_device(name: str) -> torch.device:
    """Return the device by its name; "auto" is a CUDA GPU if there is one, else Apple's GPU, else the CPU.

    Raises:
        ConfigError: this machine lacks the device.
    """
    if name == "auto":
        accelerators = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        return torch.device(next((kind for kind, is_available in accelerators.items() if is_available), "cpu"))
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise ConfigError(f"key 'engine.device': {name!r} cannot be used here ({reason}); try 'auto' or 'cpu'") from None
    return device


_TRIED_ROWS = 5  # on which an own task is tried
LATER = "of network 'mlp': model.part = 'features.fc2', with model.adaptor = 'rest'"


def check_clients(config: Config, data: Federation) -> None:
    """Raise ConfigError if a key names an unknown client, or if the number of personal networks does not fit."""
    clients = data.partition["clients"]  # also of those that do not take part
    unknown = [i for i in config.clients if i not in clients]
    if unknown:
        raise ConfigError(f"key 'clients.{unknown[0]}': there is no such client; there are {', '.join(clients)}")
    personal = config.model.personal or ()
    if len(personal) not in (0, 1, len(clients)):
        raise ConfigError(
            f"key 'model.personal' names {len(personal)} networks for {len(clients)} clients; "
            "name one for all, or one for each"
        )


def check_experiment(experiment: Experiment) -> None:
    """Raise ConfigError if an extra is not installed, or if the parts of an experiment do not fit.

    The parts are the networks, the shared model, the public data, the hold-out rows and the settings of privacy.
    """
    trackers.check_installed(experiment.config.records)
    engine, has_gpu = experiment.config.engine, experiment.device.type == "cuda"
    if engine.precision == "fp16" and not has_gpu:
        raise ConfigError("engine.precision = 'fp16' needs an NVIDIA GPU; on a CPU use 'bf16' or 'float32'")
    if engine.graphs and not has_gpu:
        raise ConfigError("engine.graphs = true needs an NVIDIA GPU; leave it out")
    if engine.graphs and experiment.device.index:  # torch captures on a stream of the first GPU
        fix = "set engine.device = 'cuda', and choose the GPU by the environment variable CUDA_VISIBLE_DEVICES"
        raise ConfigError(f"engine.graphs = true takes the first GPU; {fix}")
    _check_targets(experiment)
    _check_holdout(experiment)
    _check_ensemble(experiment)
    _check_public(experiment)
    _check_weights(experiment)
    _check_shared(experiment)
    _check_equal_networks(experiment)
    _check_features(experiment)
    _check_classes(experiment)
    if experiment.noised:  # refuses settings that would make the reported epsilon invalid
        config, algorithm = experiment.config, experiment.algorithm
        rules.check_algorithm(config, algorithm, experiment.noised, experiment.make_server_state(), experiment.clients)
    experiment.choose_products()  # raises if this machine lacks the library


def _check_targets(experiment: Experiment) -> None:
    """Check that the algorithm takes rows without a label, if there are any, and that the user's own tasks take the targets.

    Raises AlgorithmError if a loss of an own task cannot be computed for the first targets of a client.
    """
    use, unlabelled = experiment.algorithm.public, (own.data.unlabelled for own in experiment.config.clients.values())
    needs_labels = experiment.algorithm.needs_labels or (use is not None and use.labelled)
    if needs_labels and (experiment.config.data.unlabelled or any(unlabelled)):
        raise ConfigError(
            f"key 'data.unlabelled': algorithm {experiment.config.algorithm['name']!r} needs the label of every row; choose "
            "an algorithm whose networks teach each other on private rows, such as fml, or drop these rows"
        )
    spaces = {space.task: (client, space) for client, space in reversed(experiment.data.spaces.items())}
    for client, space in spaces.values():
        targets = torch.from_numpy(experiment.data.clients[client].private.labels[:_TRIED_ROWS])
        shape = (len(targets), space.outputs, *(find_image_shape(space.shape)[1:] if space.of_pixels else ()))
        outputs = torch.full(shape, 1 / space.outputs, requires_grad=True)  # a loss may take probabilities
        tasks.try_losses(tasks.make_task(space.task), outputs, targets)


def _check_holdout(experiment: Experiment) -> None:
    """Check that each setting that uses hold-out rows has rows, and that the server receives the scores that it needs."""
    records, clients = experiment.config.records, experiment.data.clients
    without = next((i for i, shares in clients.items() if shares.holdout is None), None)
    keys = [f"records.{k}" for k in ("best_by", "evaluate_on") if getattr(records, k) == "holdout"]
    keys += ["records.ensemble"] if records.ensemble and not experiment.pooled else []
    if keys and without is not None:
        file = experiment.config.partition.file
        fix = (
            "set 'split.holdout', for example to 0.1"
            if file is None
            else f"{file} has none; use the file of a run with hold-out rows"
        )
        raise ConfigError(f"key {keys[0]!r} needs hold-out rows, which client {without!r} lacks; {fix}, or remove the key")
    shared = experiment.nets.complete and not experiment.pooled
    has_scores = any(is_disclosed(experiment.config.disclosure(i), len(rows.holdout or ())) for i, rows in clients.items())
    if records.keep_best and records.evaluate_on == "holdout" and shared and not has_scores:
        raise ConfigError(
            "records.keep_best: no client sends its hold-out scores, and no other rows are scored, so the server cannot "
            "know the shared model's best round; set share.metrics = 'all', or remove records.keep_best"
        )


def _check_ensemble(experiment: Experiment) -> None:
    """Check that every client learns classes, whose probabilities an ensemble averages."""
    if not experiment.config.records.ensemble or experiment.pooled:
        return
    other = next((i for i, space in experiment.data.spaces.items() if space.task != "classification"), None)
    if other is not None:
        raise ConfigError(
            f"key 'records.ensemble': client {other!r} learns {experiment.data.spaces[other].task!r}, and an ensemble "
            "averages probabilities of classes; remove the key"
        )


def _check_public(experiment: Experiment) -> None:
    """Check that there are enough public examples for an algorithm that uses public data."""
    config, public, use = experiment.config, experiment.data.public, experiment.algorithm.public
    if use is None:
        return
    if public is None:
        raise ConfigError(
            f"algorithm {config.algorithm['name']!r} needs a public seed set; set split.public, the fraction of its "
            "data that each client gives to all, or split.public_file"
        )
    if not public.has_labels and (use.labelled or use.own_labels):
        raise ConfigError(
            f"{public.file}: algorithm {config.algorithm['name']!r} learns from labels of public data, and these have none; "
            "add them, choose feddf, for fedmd set algorithm.labels = false, or for fedh2l algorithm.labels = false, "
            "algorithm.confidence = false and algorithm.local_data = 'private'"
        )
    check_enough(use, {i: len(rows) for i, rows in public.owners.items()})
    if config.engine.participation < 1 and use.pairs:
        raise ConfigError(
            "engine.participation below 1 and algorithm.peers = 'pairs' both choose the participants of a round; set one of "
            "them"
        )


def check_enough(use: Public, rows: Mapping[str, int]) -> None:
    """Raise ConfigError if there are fewer public examples than algorithm.public_batch. rows: client -> its examples."""
    owner, count = "there are", sum(rows.values())
    if use.of_sender:
        least = min(rows, key=lambda i: rows[i])
        owner, count = f"client {least!r} has", rows[least]
    if (use.batch or 0) > count:
        raise ConfigError(
            f"{owner} {count} public examples, and algorithm.public_batch is {use.batch}; increase split.public, or reduce "
            "algorithm.public_batch"
        )


def _check_weights(experiment: Experiment) -> None:
    """Check that `model.weights` has an effect."""
    config = experiment.config
    if config.model.weights is not None and not experiment.nets.shares:
        raise ConfigError(
            f"key 'model.weights' has no effect: algorithm {config.algorithm['name']!r} shares no model, and personal "
            "networks start from their own weights; set model.start = 'server', or remove model.weights"
        )


def _check_shared(experiment: Experiment) -> None:
    """Check that the shared tensors have one shape at all clients."""
    config, spaces = experiment.config, experiment.data.spaces
    if not experiment.nets.forks or experiment.pooled:
        return
    first = experiment.data.space
    first_id = next(iter(spaces))
    for client, space in spaces.items():
        columns = space.compare_columns(first)
        if columns is not None and _depends_on_columns(experiment):
            raise ConfigError(
                f"client {client!r} has {columns}, and client {first_id!r} {list_names(first.columns or (), 3)}; the shared "
                "part takes the input by position: give all files equal columns in one order, or share a later part "
                f"({LATER})"
            )
        if space.is_compatible(first):
            continue
        if config.model.part is None and not (space.numbers or first.numbers) and space.classes != first.classes:
            raise ConfigError(
                f"client {client!r} has {len(space.classes)} classes ({list_names(space.classes, 3)}) and client "
                f"{first_id!r} {len(first.classes)} ({list_names(first.classes, 3)}), and the complete shared network has "
                "one output for each class; name all classes in data.classes, which matches labels by name, or share a part "
                "('model.part')"
            )
        nets = experiment.nets
        different = find_shape_difference(nets.shared, nets.build_shared(space), nets.crossing)
        if different is not None:
            shapes = f"{format_shape(first.shape)} and {format_shape(space.shape)}"
            raise ConfigError(
                f"the shared part differs in shape between clients {first_id!r} and {client!r}: {different!r} of network "
                f"{config.model.shared!r}; their inputs have the shapes {shapes}, and "
                f"their networks {first.outputs} and {space.outputs} outputs: share another part ({LATER}), or give all "
                "clients equal columns or images ('data.size') and classes"
            )


def _check_equal_networks(experiment: Experiment) -> None:
    """Check that personal networks equal the shared one and that the shared model is complete, if the method needs this."""
    algorithm, name, shared = experiment.algorithm, experiment.config.algorithm["name"], experiment.config.model.shared
    other = next((i for i in experiment.clients if experiment.nets.name_personal(i) != shared), None)
    if algorithm.alike and other is not None:
        raise ConfigError(
            f"algorithm {name!r} needs the shared network {shared!r} as every personal network, and client {other!r} has "
            f"{experiment.nets.name_personal(other)!r}; remove 'model.personal', or choose an algorithm for networks of "
            "different design (fml, fedproto)"
        )
    if algorithm.public is not None and algorithm.public.server and not experiment.nets.complete:
        raise ConfigError(
            f"algorithm {name!r} trains the complete shared model at the server; remove 'model.part' and 'model.batchnorm'"
        )


def _check_features(experiment: Experiment) -> None:
    """Check that networks end in a linear layer if the algorithm reads the input of that layer."""
    networks, checked = experiment.algorithm.features, set[tuple[str, str, Shape, int]]()
    expected = _describe_head(experiment.nets.shared) if experiment.algorithm.same_heads else ""
    for client in experiment.clients if networks else ():
        space, named = experiment.nets.get_space(client), experiment.nets.name_architectures(client)
        unchecked = {(net, named[net][0], space.shape, space.outputs) for net in networks} - checked
        nets = experiment.nets.build_for(client) if unchecked else {}
        for net, *_ in sorted(unchecked):
            examples = map_inputs(lambda x: x.to(experiment.device), space.make_examples())
            if count_features(nets[net], examples) is None:
                network, key = named[net]
                raise ConfigError(
                    f"key {key!r}: network {network!r} does not end in a linear layer, and algorithm "
                    f"{experiment.config.algorithm['name']!r} uses the input of that layer; choose another network"
                )
            if experiment.algorithm.same_heads and (shape := _describe_head(nets[net])) != expected:
                raise ConfigError(
                    f"key {named[net][1]!r}: algorithm {experiment.config.algorithm['name']!r} shares the last layer, which "
                    f"is {shape} in network {named[net][0]!r} and {expected} in {experiment.config.model.shared!r}; choose "
                    "networks whose last layers have one shape"
                )
        checked |= unchecked


def _describe_head(net: nn.Module) -> str:
    """Return the shapes of the tensors of a network's last linear layer as text."""
    head = find_head(net)
    return "" if head is None else ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in head.state_dict().items())


def count_features(net: nn.Module, examples: Inputs) -> int | None:
    """Return the number of input features of a network's last linear layer; None if the output is not a linear layer's.

    examples: inputs [B, ...].
    """
    head, calls = find_head(net), list[tuple[torch.Tensor, torch.Tensor]]()
    if head is None:
        return None
    with torch.no_grad(), head.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output))):
        output = call_network(net.eval(), examples)
    if len(calls) != 1 or calls[0][1] is not output or calls[0][0].dim() != 2:
        return None
    return calls[0][0].shape[1]


def _check_classes(experiment: Experiment) -> None:
    """Check that all clients have equal classes if the server starts with a state for each class."""
    if experiment.algorithm.begins is None:
        return
    experiment.make_server_state()  # raises ConfigError if a setting is missing
    first, first_id = experiment.data.space, next(iter(experiment.data.spaces))
    for client, space in experiment.data.spaces.items():
        if space.targets != "classes" or space.classes != first.classes:
            learned = list_names(space.classes, 3) if space.targets == "classes" else space.targets
            raise ConfigError(
                f"algorithm {experiment.config.algorithm['name']!r} needs equal classes at all clients, but client "
                f"{client!r} has {learned}, and client {first_id!r} has {list_names(first.classes, 3)}; "
                "name all classes in data.classes, which matches labels by name"
            )


def _depends_on_columns(experiment: Experiment) -> bool:
    """Return whether the shared tensors depend on a table's columns: their shapes then change with one more column."""
    space = experiment.data.space
    if isinstance(space.shape, Shapes):
        return True
    wider, nets = replace(space, shape=(space.shape[0] + 1,)), experiment.nets
    return (
        experiment.config.model.part is None
        or find_shape_difference(nets.shared, nets.build_shared(wider), nets.crossing) is not None
    )
