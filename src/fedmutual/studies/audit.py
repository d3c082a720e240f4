"""What attackers gain from a trained run, measured against the run's own data."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedmutual import data
from fedmutual.core import At, Client, Diverged, Message, Phase
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.loop import federate
from fedmutual.errors import RunError, UserError
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.federation.networks import POOLED
from fedmutual.files import write_json
from fedmutual.report.audit import Attack, Audit, Guarantee, Imprint, Membership, Model
from fedmutual.rundir import folder as folders
from fedmutual.rundir.checkpoint import load_client, make_file_name, read_checkpoint, read_server_state
from fedmutual.rundir.file_names import CONFIG, client_folder
from fedmutual.rundir.record_files import is_finished, read_model_environment, read_summary
from fedmutual.stepping import work
from fedmutual.studies.attacks import (
    FEWEST,
    Mask,
    Pools,
    Scores,
    attack_by_imprint,
    compute_confidence,
    draw_splits,
    is_member,
    make_pools,
    measure_strength,
    score_against_shadows,
)
from fedmutual.studies.trained_run import Run
from fedmutual.user_code import plugins
from fedmutual.user_code.recorded_code import RecordedCode, check_tables, set_trust

AUDIT = "audit.json"
LEVEL = 0.95
SEED_STEP = 1_000_003  # between the seeds of shadow runs: not a seed that other runs of the user have

Key = tuple[Model, str | None]
"""An audited model: (which, client); the shared model has no client."""


def audit(
    run: str | Path,
    shadows: int = 0,
    out: str | Path | None = None,
    trust_code: bool = False,
    report: Callable[[str], None] = lambda step: None,
) -> Audit:
    """Attack the models of a finished run; return the results, which are also written to audit.json.

    run: a run's folder; its data must still be at the place that its configuration names.
    shadows: the number of shadow runs to train for the stronger membership attack; 0: none.
    out: the folder of audit.json; None: the run's folder.
    trust_code: import any code that the run's folder names.
    report: is called with a sentence before each long step.

    Raises:
        UserError: the run is not finished, its data are gone or have changed, its task is no classification, or its code may
            not be imported; `shadows` is below 0; a further training diverges; or audit.json cannot be written.
    """
    if shadows < 0:
        raise RunError(f"shadows = {shadows}: cannot be below 0")
    folder = Path(run)
    with set_trust(trust_code), plugins.use_rule(RecordedCode(folder)):
        result = _Auditor(folder, shadows, report).audit()
    target = folder if out is None else Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{target}: cannot be made ({problem.strerror}); name another folder with --out") from None
    write_json(target / AUDIT, result.model_dump(mode="json"))
    return result


class _Auditor:
    """The attacks on one finished run, with its data."""

    def __init__(self, folder: Path, shadows: int, report: Callable[[str], None]) -> None:
        """Open the run and its data. Raises UserError as `audit`."""
        if not (folder / CONFIG).is_file():
            raise RunError(f"{folder}: is not a run's folder; name the folder that `fedmutual run` made")
        self.run, self.shadows, self.report, self.notes = Run(folder), shadows, report, list[str]()
        config, summary = self.run.config, read_summary(folder)
        if summary is None or not is_finished(summary, config.rounds):
            raise RunError(f"{folder}: the run is not finished; finish it with `fedmutual run FILE --resume`, then audit it")
        if config.records.patience is not None:
            raise RunError(
                f"{folder}: records.patience may have ended the run early, and not its shadow runs; audit another run"
            )
        self.summary = summary
        tasks = {client.task for client in read_model_environment(folder).clients.values()}
        if tasks != {"classification"}:
            raise RunError(f"{folder}: its clients learn {', '.join(sorted(tasks))}; only classification is audited")
        check_tables(config.model_dump(), folder)
        self.prepared = data.prepare(config)
        weights = folders.read_initial_weights(folder)
        self.experiment = build.build(
            config, prepared=self.prepared, begun=folders.find_source_weights(folder), pretrained=weights
        )
        if self.experiment.data.partition["fingerprint"] != summary.fingerprint:
            raise RunError(f"{folder}: the data are not those that the run was trained on; restore them, then audit")
        self.pools = make_pools(self.experiment.data)

    def audit(self) -> Audit:
        """Return the results of all attacks."""
        run = self.run
        confidence = {key: self._score(net, key) for key, net in self._list_models()}
        attacks: list[tuple[Key, Attack, Scores, Mask]] = []
        for key, (loss, answers, _) in confidence.items():
            mask = is_member(self._choose_pools(key))
            attacks += [(key, "loss", loss, mask), (key, "answers", answers, mask)]
        if self.shadows:
            attacks += self._attack_with_shadows({key: margin for key, (_, _, margin) in confidence.items()})
        level = 1 - (1 - LEVEL) / max(len(attacks), 1)
        memberships = [self._measure(*attack, level=level) for attack in attacks]
        return Audit(
            run=str(run.folder),
            algorithm=run.config.algorithm["name"],
            round=run.round,
            level=LEVEL,
            shadows=self.shadows,
            privacy=self._get_guarantee(),
            memberships=tuple(m for m in memberships if m is not None),
            imprints=tuple(self._attack_by_imprint()),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _list_models(self) -> Iterator[tuple[Key, nn.Module]]:
        """Yield the models that somebody may attack: shared, returned, personal."""
        run, experiment = self.run, self.experiment
        if experiment.pooled or experiment.nets.complete:
            yield ("shared", None), run.global_model()
        for i in experiment.clients if not experiment.pooled else ():
            returned = _train_meme(experiment, *self._restore(i))
            if returned is not None:
                yield ("returned", i), returned
            if i in read_model_environment(run.folder).models.personal:
                yield ("personal", i), run.personal_model(i)

    def _choose_pools(self, key: Key) -> Pools:
        """Return the rows that an audited model is attacked with: one client's, or those of all clients."""
        return self.pools if key[1] is None else {key[1]: self.pools[key[1]]}

    def _score(self, net: nn.Module, key: Key) -> tuple[Scores, Scores, Scores]:
        self.report(f"membership: the {_format_key(key)}")
        placed = self.experiment.nets.place_on_device(net).eval()
        confidence = compute_confidence(placed, self._choose_pools(key), self.experiment.device)
        if np.isnan(confidence[1]).any():
            raise RunError(f"{self.run.folder}: the {_format_key(key)} gives outputs that are not finite")
        return confidence

    def _restore(self, client: str) -> tuple[Client, Message]:
        """Return a client and the server's state, as the run's last round left them."""
        folder, saved = self.run.folder, read_checkpoint(self.run.folder)
        assert saved is not None  # the run is finished
        made = self.experiment.build_client(client)
        load_client(made, client_folder(folder, client) / make_file_name(saved.round), saved.run, saved.round)
        return made, read_server_state(folder, saved, self.experiment.make_server_state())

    def _attack_with_shadows(self, observed: Mapping[Key, Scores]) -> Iterator[tuple[Key, Attack, Scores, Mask]]:
        """Train shadow runs, and compare each model's margins [n] with those of the models of shadow runs."""
        margins: dict[Key, list[Scores]] = {key: [] for key in observed}
        masks: dict[Key, list[Mask]] = {key: [] for key in observed}
        splits = draw_splits(self.pools, self.shadows, np.random.default_rng(self.run.config.seed))
        for number, split in enumerate(splits, 1):
            self.report(f"shadow run {number} of {len(splits)}")
            experiment, clients, server = self._train_shadow(number, split)
            trained = {i: np.isin(np.arange(len(rows)), split[i]) for i, (rows, _) in self.pools.items()}
            for key in observed:
                pools = self._choose_pools(key)
                net = experiment.nets.place_on_device(_take_model(experiment, clients, server, key)).eval()
                margins[key].append(compute_confidence(net, pools, self.experiment.device)[2])
                masks[key].append(np.concatenate([trained[client] for client in pools]))
        for key, margin in observed.items():
            ratios = score_against_shadows(margin, np.stack(margins[key]), np.stack(masks[key]))
            judged = ~np.isnan(ratios)
            if not judged.all():
                self.notes.append(
                    f"{self.shadows} shadow runs cannot judge {int((~judged).sum())} of {len(judged)} rows of the "
                    f"{_format_key(key)}, because all or none of these runs were trained on them; more --shadows judge more."
                )
            yield key, "shadows", ratios[judged], is_member(self._choose_pools(key))[judged]

    def _train_shadow(
        self, number: int, split: Mapping[str, npt.NDArray[np.int64]]
    ) -> tuple[Experiment, dict[str, Client], Message]:
        """Train the run's configuration with another seed on other rows -> experiment, clients, the server's state.

        split: client -> the positions of its training rows in its pool.
        """
        audited = self.experiment
        config = audited.config.model_copy(update={"seed": audited.config.seed + SEED_STEP * number})
        weights = audited.nets.pretrained or None
        built = build.build(config, str(audited.device), self.prepared, audited.nets.begun, weights)
        shares = {
            i: replace(audited.data.clients[i], private=rows.with_index(rows.index[split[i]]))
            for i, (rows, _) in self.pools.items()
        }
        shadow = replace(built, data=replace(audited.data, clients=shares))
        clients = {i: shadow.build_client(i) for i in shadow.clients}
        plan = replace(shadow.make_plan({}), evaluations={}, evaluate_every=config.rounds)
        try:
            with torch.random.fork_rng(devices=[]), closing(InProcess(clients.__getitem__, tuple(clients))) as engine:
                return shadow, clients, federate(plan, engine, shadow.make_server_state(), None, [], None)
        except Diverged as problem:
            raise RunError(f"shadow run {number}: {problem}; audit without --shadows") from None

    def _measure(self, key: Key, attack: Attack, scores: Scores, mask: Mask, level: float) -> Membership | None:
        members, others = scores[mask], scores[~mask]
        if min(len(members), len(others)) < FEWEST:
            self.notes.append(
                f"The {_format_key(key)} was not attacked by {attack}: {len(members)} training rows and {len(others)} "
                f"held-out rows are left, and {FEWEST} of each are needed."
            )
            return None
        rng = np.random.default_rng([self.run.config.seed, len(members), len(others)])
        strength = measure_strength(members, others, level, rng)
        return Membership(model=key[0], client=key[1], attack=attack, members=len(members), others=len(others), **strength)

    def _attack_by_imprint(self) -> Iterator[Imprint]:
        """Yield the results of the imprint attack on each client whose meme leaves."""
        experiment = self.experiment
        if experiment.pooled or "meme" not in experiment.build_networks(experiment.clients[0]):
            self.notes.append("The imprint attack was not tried: no client takes a shared model from the server.")
            return
        for i, (rows, members) in self.pools.items():
            if len(rows) > members:
                self.report(f"imprint attack on client {i!r}")
                client, server = self._restore(i)
                private, held_out = rows.with_index(rows.index[:members]), rows.with_index(rows.index[members:])
                phase, at = _find_training_phase(experiment)
                with torch.random.fork_rng(devices=[]):
                    yield attack_by_imprint(client, phase, at, server, experiment.nets.shared, private, held_out)

    def _get_guarantee(self) -> Guarantee | None:
        stated = self.summary.privacy
        if stated is None:
            return None
        return Guarantee(nets=stated.nets, unit=stated.unit, epsilon=stated.epsilon, delta=stated.delta)


def _train_meme(experiment: Experiment, client: Client, server: Message) -> nn.Module | None:
    """Train a client's meme in a further round like the last one -> the meme as the client returns it.

    None where the client has no meme, or returns nothing of it. The client is changed.
    """
    if "meme" not in client.nets:
        return None
    phase, at = _find_training_phase(experiment)
    try:
        with torch.random.fork_rng(devices=[]):
            reply, _ = work(phase, client, server, at)
    except Diverged as problem:
        raise RunError(f"the meme cannot be trained further: {problem}") from None
    return client.nets["meme"] if reply.keys() & {*client.shared} else None


def _find_training_phase(experiment: Experiment) -> tuple[Phase, At]:
    """Return the phase in which a client trains the shared model, and the last round."""
    config = experiment.config
    return experiment.algorithm.phases[0], At(config.seed, config.rounds - 1, config.rounds, 0)


def _format_key(key: Key) -> str:
    model, client = key
    name = "meme returned" if model == "returned" else f"{model} model"
    return name if client is None else f"{name} of client {client!r}"


def _take_model(experiment: Experiment, clients: Mapping[str, Client], server: Message, key: Key) -> nn.Module:
    """Return the model of a shadow run that corresponds to an audited model."""
    model, client = key
    if client is None and experiment.pooled:
        return clients[POOLED].nets["personal"]
    if client is None:
        net = experiment.nets.make_shared()
        net.load_state_dict({k: server[k] for k in experiment.nets.crossing})
        return net
    if model == "personal":
        return clients[client].nets["personal"]
    returned = _train_meme(experiment, clients[client], server)
    if returned is None:
        raise UserError(f"client {client!r} returns no meme in a shadow run")
    return returned
