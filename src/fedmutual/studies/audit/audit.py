"""What attackers gain from a trained run, measured against the run's own data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedmutual import data
from fedmutual.core import At, Client, Diverged, Message, Phase
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
from fedmutual.studies.audit import imprint
from fedmutual.studies.audit.rows import Confidence, Pool, compute_confidence, is_member, make_pools
from fedmutual.studies.audit.shadows import Shadow, draw_splits, train_shadows
from fedmutual.studies.audit.statistics import FEWEST, Scores, measure_strength, score_against_shadows
from fedmutual.studies.trained_run import Run
from fedmutual.user_code import plugins
from fedmutual.user_code.recorded_code import RecordedCode, check_tables, set_trust

AUDIT = "audit.json"
LEVEL = 0.95

Key = tuple[Model, str | None]  # an audited model: (which, client); (shared, None)
Mask = npt.NDArray[np.bool_]
Scored = tuple[Key, Attack, Scores, Mask]  # an attack: its scores of rows, and which rows are training rows


def _keep_silent(message: str) -> None:
    pass


def audit(
    run: str | Path,
    shadows: int = 0,
    out: str | Path | None = None,
    trust_code: bool = False,
    report: Callable[[str], None] = _keep_silent,
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
        result = _open(folder, shadows, report).audit()
    write_json(_make_folder(folder if out is None else Path(out)) / AUDIT, result.model_dump(mode="json"))
    return result


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: cannot be made ({problem.strerror}); name another folder with --out") from None
    return folder


def _open(folder: Path, shadows: int, report: Callable[[str], None]) -> "_Auditor":
    """Return the auditor of a finished run. Raises UserError as `audit`."""
    if not (folder / CONFIG).is_file():
        raise RunError(f"{folder}: is not a run's folder; name the folder that `fedmutual run` made")
    run = Run(folder)
    summary = read_summary(folder)
    if summary is None or not is_finished(summary, run.config.rounds):
        raise RunError(f"{folder}: the run is not finished; finish it with `fedmutual run FILE --resume`, then audit it")
    tasks = {client.task for client in read_model_environment(folder).clients.values()}
    if tasks != {"classification"}:
        raise RunError(f"{folder}: its clients learn {', '.join(map(repr, sorted(tasks)))}; only classification is audited")
    check_tables(run.config.model_dump(), folder)
    prepared = data.prepare(run.config)
    weights = folders.read_initial_weights(folder)
    experiment = build.build(run.config, prepared=prepared, begun=folders.find_source_weights(folder), pretrained=weights)
    if experiment.data.partition["fingerprint"] != summary.fingerprint:
        raise RunError(
            f"{folder}: the data are not those that the run was trained on; audit it where its data are, unchanged, with "
            "the same split"
        )
    return _Auditor(run, experiment, prepared, shadows, report)


@dataclass
class _Auditor:
    """The attacks on one finished run, with its data."""

    run: Run
    experiment: Experiment
    prepared: Mapping[str, data.Prepared]
    shadows: int
    report: Callable[[str], None]
    notes: list[str] = field(default_factory=list)

    def audit(self) -> Audit:
        run = self.run
        pools = make_pools(self.experiment.data)
        audited = {key: self._score(net, key, pools) for key, net in self._list_models()}
        attacks: list[Scored] = []
        for key, confidence in audited.items():
            mask = is_member(_choose_pools(pools, key))
            attacks += [(key, "loss", confidence.loss, mask), (key, "answers", confidence.answers, mask)]
        if self.shadows:
            attacks += self._attack_with_shadows(audited, pools)
        level = 1 - (1 - LEVEL) / max(len(attacks), 1)
        memberships = [self._measure(*attack, level=level) for attack in attacks]
        return Audit(
            run=str(run.folder),
            algorithm=run.config.algorithm["name"],
            round=run.round,
            level=LEVEL,
            shadows=self.shadows,
            privacy=self._read_guarantee(),
            memberships=tuple(m for m in memberships if m is not None),
            imprints=tuple(self._attack_by_imprint(pools)),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _list_models(self) -> Iterator[tuple[Key, nn.Module]]:
        """The models that somebody may attack: shared, returned, personal."""
        run, experiment = self.run, self.experiment
        if experiment.pooled or experiment.nets.complete:
            yield ("shared", None), run.global_model()
        for i in experiment.clients if not experiment.pooled else ():
            returned = self._return_meme(i)
            if returned is not None:
                yield ("returned", i), returned
            if i in read_model_environment(run.folder).models.personal:
                yield ("personal", i), run.personal_model(i)

    def _score(self, net: nn.Module, key: Key, pools: list[Pool]) -> Confidence:
        self.report(f"membership: the {_format_key(key)}")
        placed = self.experiment.nets.place_on_device(net).eval()
        confidence = compute_confidence(placed, _choose_pools(pools, key), self.experiment.device)
        if np.isnan(confidence.answers).any():
            raise RunError(f"{self.run.folder}: the {_format_key(key)} gives outputs that are not finite")
        return confidence

    def _restore(self, client: str) -> tuple[Client, Message]:
        """A client and the server's state, as the run's last round left them."""
        folder, saved = self.run.folder, read_checkpoint(self.run.folder)
        assert saved is not None  # the run is finished
        made = self.experiment.build_client(client)
        load_client(made, client_folder(folder, client) / make_file_name(saved.round), saved.run, saved.round)
        return made, read_server_state(folder, saved, self.experiment.make_server_state())

    def _return_meme(self, client: str) -> nn.Module | None:
        """Return the meme that a client would send in a further round; None if no meme leaves."""
        made, server = self._restore(client)
        return train_meme(self.experiment, made, server)

    def _attack_with_shadows(self, audited: Mapping[Key, Confidence], pools: list[Pool]) -> list[Scored]:
        rng = np.random.default_rng(self.run.config.seed)
        splits = draw_splits(pools, self.shadows, rng)
        margins: dict[Key, list[Scores]] = {key: [] for key in audited}
        masks: dict[Key, list[Mask]] = {key: [] for key in audited}
        for shadow in train_shadows(self.experiment, pools, splits, self.prepared, self.report):
            for key in audited:
                chosen = _choose_pools(pools, key)
                net = shadow.experiment.nets.place_on_device(_take_model(shadow, key)).eval()
                margins[key].append(compute_confidence(net, chosen, self.experiment.device).margin)
                masks[key].append(np.concatenate([shadow.trained[pool.client] for pool in chosen]))
        attacks: list[Scored] = []
        for key, confidence in audited.items():
            ratios = score_against_shadows(confidence.margin, np.stack(margins[key]), np.stack(masks[key]))
            judged, mask = ~np.isnan(ratios), is_member(_choose_pools(pools, key))
            if not judged.all():
                self.notes.append(
                    f"{self.shadows} shadow runs cannot judge {int((~judged).sum())} of {len(judged)} rows of "
                    f"the {_format_key(key)}, because all or none of these runs were trained on them; more --shadows judge "
                    "more."
                )
            attacks.append((key, "shadows", ratios[judged], mask[judged]))
        return attacks

    def _measure(self, key: Key, attack: Attack, scores: Scores, mask: Mask, level: float) -> Membership | None:
        members, outside = scores[mask], scores[~mask]
        if min(len(members), len(outside)) < FEWEST:
            self.notes.append(
                f"The {_format_key(key)} was not attacked by {attack}: {len(members)} training rows and {len(outside)} "
                f"held-out rows are left, and {FEWEST} of each are needed."
            )
            return None
        rng = np.random.default_rng([self.run.config.seed, len(members), len(outside)])
        strength = measure_strength(members, outside, level, rng)
        model, client = key
        return Membership(
            model=model, client=client, attack=attack, members=len(members), others=len(outside), **strength._asdict()
        )

    def _attack_by_imprint(self, pools: list[Pool]) -> Iterator[Imprint]:
        """Return the results of the imprint attack on each client whose meme leaves."""
        experiment = self.experiment
        if experiment.pooled or "meme" not in experiment.build_networks(experiment.clients[0]):
            self.notes.append("The imprint attack was not tried: no client takes a shared model from the server.")
            return
        for pool in pools:
            if len(pool.rows) == pool.members:
                continue
            self.report(f"imprint attack on client {pool.client!r}")
            client, server = self._restore(pool.client)
            held_out = pool.rows.with_index(pool.index[pool.members :])
            private = pool.rows.with_index(pool.index[: pool.members])
            with torch.random.fork_rng(devices=[]):
                yield imprint.attack(
                    client, *_find_training_phase(experiment), server, experiment.nets.shared, private, held_out
                )

    def _read_guarantee(self) -> Guarantee | None:
        summary = read_summary(self.run.folder)
        if summary is None or summary.privacy is None:
            return None
        stated = summary.privacy
        spent = [client.epsilon for client in stated.clients.values()]
        finite = [epsilon for epsilon in spent if epsilon is not None]
        largest = max(finite) if len(finite) == len(spent) else None
        return Guarantee(nets=stated.nets, unit=stated.unit, epsilon=largest, delta=stated.delta)


def train_meme(experiment: Experiment, client: Client, server: Message) -> nn.Module | None:
    """Train a client's meme in a further round like the last one -> the meme as the client returns it.

    None where the client has no meme, or returns nothing of it. The client is changed.

    Raises:
        RunError: the client's training diverges.
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
    """The phase in which a client trains the shared model, and the last round."""
    config = experiment.config
    return experiment.algorithm.phases[0], At(config.seed, config.rounds - 1, config.rounds, 0)


def _choose_pools(pools: list[Pool], key: Key) -> list[Pool]:
    """The rows that an audited model is attacked with: one client's, or those of all clients."""
    return pools if key[1] is None else [pool for pool in pools if pool.client == key[1]]


def _format_key(key: Key) -> str:
    model, client = key
    return (
        f"{'meme returned' if model == 'returned' else f'{model} model'}{'' if client is None else f' of client {client!r}'}"
    )


def _take_model(shadow: Shadow, key: Key) -> nn.Module:
    """The model of a shadow run that corresponds to an audited model."""
    model, client = key
    experiment = shadow.experiment
    if client is None and experiment.pooled:
        return shadow.clients[POOLED].nets["personal"]
    if client is None:
        net = experiment.nets.make_shared()
        net.load_state_dict({k: shadow.server[k] for k in experiment.nets.crossing})
        return net
    if model == "personal":
        return shadow.clients[client].nets["personal"]
    net_or_none = train_meme(experiment, shadow.clients[client], shadow.server)
    if net_or_none is None:
        raise UserError(f"client {client!r} returns no meme in a shadow run")
    return net_or_none
