"""Differential privacy at a real site: noise from the site's secret, and the site's budget."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedmutual.config import Config
from fedmutual.core import Client
from fedmutual.errors import ConfigError, RunError
from fedmutual.federation.experiment import Experiment
from fedmutual.files import read_json
from fedmutual.privacy.accountant import NoisedSteps
from fedmutual.privacy.budget import LedgerDigests, PrivacyBudget, list_ledgers
from fedmutual.privacy.mechanism import Mechanism
from fedmutual.privacy.secret import read_site_secret
from fedmutual.sites.journal import OLD_JOURNAL
from fedmutual.sites.schema import PRIVACY_FOLDER, SiteFile
from fedmutual.sites.site_journal import read_recorded_ledgers
from fedmutual.studies import privacy_plan
from fedmutual.studies.privacy_plan import PrivacyCost

SECRET = "secret"  # file name
_OLD_FOLDER = ".privacy"  # of version 0.2 and before
_DIGESTS = TypeAdapter(dict[str, tuple[int, str]])
Spending = tuple[float, float, float, int]
"""The largest total epsilon that a site allows, the spent epsilon, the epsilon with the planned rounds added, and how many
of these rounds the budget covers, if they have equally many steps."""


def check_site(config: Config, file: SiteFile, source: Path) -> None:
    """Raise ConfigError where the contract and the site.toml together give no guarantee.

    config: the configuration of the site, with the keys of the contract.
    """
    privacy, budget = config.privacy, file.privacy.epsilon
    if privacy.nets == "none":
        if budget is not None:
            raise ConfigError(
                f"{source}: privacy.epsilon = {budget:g} has no effect, because the contract has privacy.nets = 'none'; "
                "remove the key, or ask the lead for a contract with privacy.nets"
            )
        return
    if budget is None:
        raise ConfigError(
            f"{source}: the key 'privacy.epsilon' is missing: the federation trains with noise (privacy.nets = "
            f"{privacy.nets!r}), so each site needs a budget; `fedmutual privacy` prints the epsilon of these rounds"
        )
    if (disclosure := config.disclosure(file.site)) != "none":
        raise ConfigError(
            f"{source}: share.metrics = {disclosure!r} sends scores of this site's rows, which epsilon does not count; set "
            "share.metrics = 'none', and they stay in the site's own folder"
        )


def open_budget(
    experiment: Experiment, site: str, federation: str, state: Path, say: Callable[[str], None] = lambda line: None
) -> PrivacyBudget:
    """Return the privacy budget of a site, which is one for all its data.

    Steps on the data of this experiment are written to the ledger file of these data. say: gets a remark if the site spent
    epsilon on other data. Raises RunError where a ledger of the site is damaged, lacks lines that a journal records, or has
    another unit of privacy; or the state folder is of an older version.
    """
    recorded, folder = read_recorded_ledgers(state), state / PRIVACY_FOLDER
    old = [_read_old_ledgers(path) for path in sorted(state.glob(f"*/{OLD_JOURNAL}"))]
    recorded += filter(None, old)
    if (state / _OLD_FOLDER).exists() or (None in old and not list_ledgers(folder)):
        raise RunError(
            f"{state}: holds federations of version 0.2 of fedmutual, whose privacy budget is in the folder "
            f"{_OLD_FOLDER!r}; stop the sites that use this state folder, and rename that folder to {folder}; or, if no "
            "federation of this site trained with noise, name another state.folder"
        )
    privacy, digest = experiment.config.privacy, experiment.data.digests[site]
    assert privacy.epsilon is not None  # it is checked
    path = folder / f"{hashlib.sha256(digest.encode()).hexdigest()[:32]}.jsonl"
    others = ", ".join(f'"{ledger.name}"' for ledger in list_ledgers(folder) if ledger != path)
    if others:
        say(
            f"privacy: this site has also spent epsilon on other data ({others}), and the budget counts these data too; if "
            "these data are about other people, write another site.toml with another state.folder"
        )
    return PrivacyBudget(path, federation, privacy.unit, privacy.epsilon, privacy.delta, recorded)


def _read_old_ledgers(path: Path) -> LedgerDigests | None:
    """Return the lines of privacy ledgers that a journal of version 0.2 records; None where it records none."""
    fix = "restore a copy of the file"
    ledgers = read_json(path, fix).get("ledgers")
    try:
        return None if ledgers is None else _DIGESTS.validate_python(ledgers)
    except ValidationError:
        raise RunError(f"{path}: is damaged: its key 'ledgers' has another form; {fix}") from None


def plan_site(
    path: Path, site: Path, overrides: Mapping[str, Any]
) -> tuple[Config, dict[str, PrivacyCost], Spending | None]:
    """Return (the site's configuration, site -> cost of the rounds of FEDERATION.toml, its budget). Trains nothing.

    Raises UserError where a file is missing or invalid, or overrides are given, which a contract does not take.
    """
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.site_settings import build_site, read_site_file

    if overrides:
        raise ConfigError(
            f"{next(iter(overrides))!r} cannot be set for a federation of real sites; change FEDERATION.toml or site.toml"
        )
    mine = read_site_file(site)
    experiment = build_site(contracts.read_submitted_contract(path), mine)
    costs, privacy = privacy_plan.plan_privacy(experiment), experiment.config.privacy
    if privacy.epsilon is None:
        return experiment.config, costs, None
    (cost,) = costs.values()
    budget = open_budget(experiment, mine.file.site, experiment.config.name, mine.state)

    def compute_total(steps: int) -> float:
        return budget.compute_epsilon_with(NoisedSteps(cost.sigma, cost.rate, steps))

    covered = bisect_right(range(1, cost.steps + 1), privacy.epsilon, key=compute_total)  # steps
    rounds = covered * experiment.config.rounds // max(cost.steps, 1)
    return experiment.config, costs, (privacy.epsilon, budget.spent, compute_total(cost.steps), rounds)


def protect(client: Client, budget: PrivacyBudget | None, state: Path) -> Client:
    """Return the client with noise from the site's secret, and with steps that spend from the site's budget.

    budget: None for training without noise; then the client is unchanged. Raises RunError where the file of the secret
    cannot be read or written, is damaged, or can be read by other users.
    """
    if budget is not None:
        assert isinstance(client.privacy, Mechanism)
        client.privacy.secret, client.privacy.spend = read_site_secret(state / PRIVACY_FOLDER / SECRET), budget.spend
    return client


def record(experiment: Experiment, site: str, budget: PrivacyBudget | None) -> Mapping[str, Any]:
    """Return the entry `privacy` of the site's summary.json, with the spent epsilon; {} without a budget."""
    if budget is None:
        return {}
    site_budget = budget.sum_up_federation()
    return {"privacy": {**privacy_plan.describe_privacy(experiment.config, {site: site_budget}), "spent": budget.spent}}
