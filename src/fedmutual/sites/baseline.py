"""The baseline of a site: its personal network, trained at the site alone on the minibatches of the federation's rounds.

The result is bit-identical to local-only training by `compare`. Only the scores that `share.metrics` discloses leave the
site, and the server has no part in this training. A site trains a round alone after it has answered, and again after a
crash.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fedmutual.config import make_algorithm, replace_algorithm
from fedmutual.config.schema import PrivacyConfig, ServerConfig
from fedmutual.core import At, Client
from fedmutual.engines.base import participate
from fedmutual.events import Score
from fedmutual.federation.evaluation import compute_scores, select_metrics
from fedmutual.federation.experiment import Experiment
from fedmutual.federation.networks import Networks
from fedmutual.role import ALONE, LOCAL_ONLY
from fedmutual.rundir.checkpoint import load_client, make_file_name, save_client
from fedmutual.sites.private_values import Say, describe_failure
from fedmutual.sites.site_journal import ROUNDS_BACK


class Baseline:
    """A site's personal network that is trained alone, and its states on disk: after each of the last rounds."""

    def __init__(self, federated: Experiment, site: str, folder: Path, run: str, say: Say) -> None:
        """federated: the site's experiment. folder: of the federation at this site. run: the identity of the run.

        say: takes the lines for the operator. Raises ConfigError where local-only training does not fit the configuration.
        """
        config, _ = replace_algorithm(federated.config, LOCAL_ONLY)
        config = config.model_copy(update={"server": ServerConfig(), "privacy": PrivacyConfig()})  # for what leaves
        algorithm, data = make_algorithm(config), federated.data
        nets = Networks(config, data, algorithm.scores, federated.device).begin_with(federated.nets.pretrained)
        self._experiment = Experiment(config, data, algorithm, nets)
        self._site, self._folder, self._run, self._say = site, folder / ALONE, run, say
        self._client: Client | None = None
        self._reached = -1  # the last round of the client in memory, from 0; -1: none
        self._is_over = False

    def _list_saved(self) -> list[int]:
        """Return the rounds after which a state is saved, ascending, from 0."""
        names = [file.stem.removeprefix("round-") for file in self._folder.glob("round-*.safetensors")]
        return sorted(int(name) - 1 for name in names if name.isdigit())

    def _restore(self, round: int) -> Client:
        """Return the client as after a round. Raises RunError as `load_client`."""
        if self._client is None or self._reached != round:
            client = self._experiment.build_client(self._site)
            if round >= 0:
                load_client(client, self._folder / make_file_name(round + 1), self._run, round + 1)
            self._client, self._reached = client, round
        return self._client

    def train(self, rounds: Iterable[int]) -> None:
        """Train the rounds that are not trained yet. rounds: ascending, from 0.

        An error ends the baseline, not the federation: its reason is for the operator alone.
        """
        try:
            last = max(self._list_saved(), default=-1)
            for round in () if self._is_over else rounds:
                if round > last:
                    self._train_round(self._restore(last), round)
                    last = round
        except Exception as problem:  # of any type: the site's own network may raise any
            self._end(f"is not trained further: {describe_failure(problem)}")

    def _train_round(self, client: Client, round: int) -> None:
        self._client = None  # until the round is saved
        config = self._experiment.config
        for number, phase in enumerate(self._experiment.algorithm.phases):
            participate(client, phase, {}, {}, At(config.seed, round, config.rounds, number))
        about = {"format": "1", "run": self._run, "round": str(round + 1)}
        save_client(client, self._folder / make_file_name(round + 1), about)
        self._client, self._reached = client, round
        for old in self._list_saved()[: -(ROUNDS_BACK + 1)]:  # to which a new attempt does not go back
            (self._folder / make_file_name(old + 1)).unlink(missing_ok=True)

    def score(self, round: int) -> tuple[tuple[Score, ...], tuple[Score, ...]]:
        """Return (all scores after a round, those that the site shares), of the model `ALONE`; none after an error."""
        try:
            saved = [done for done in self._list_saved() if done <= round]
            if self._is_over or not saved:
                return (), ()
            client = self._restore(saved[-1])
            evaluations = tuple(self._experiment.list_evaluations(self._site))
            scores = compute_scores(client, evaluations, {}, lambda _, what: self._say(f"round {round + 1}, alone: {what}"))
        except Exception as problem:
            self._end(f"has no scores: {describe_failure(problem)}")
            return (), ()
        every, shared = (
            tuple(replace(one, model=ALONE) for one in of) for of in (scores.values(), select_metrics(client, scores))
        )
        return every, shared

    def _end(self, why: str) -> None:
        self._is_over, self._client = True, None
        self._say(f"the network that this site trains alone {why}; the federation continues, without this site's gain")
