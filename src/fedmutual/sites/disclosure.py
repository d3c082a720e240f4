"""A sentence for a site's operator: which losses and scores leave the site."""

from fedmutual.federation.experiment import Experiment
from fedmutual.scores import LEAST_ROWS, is_disclosed


def describe_disclosure(experiment: Experiment, site: str) -> str:
    """Return a sentence on the meaning of `share.metrics` at a site, for the site's rows and task."""
    metrics = experiment.config.disclosure(site)
    if metrics == "all":
        return "All its losses and scores are sent: from these, the operator of the server can compute validation examples."
    if metrics == "none" or "accuracy" not in experiment.make_task(site).tells:
        return "Its losses and scores are not sent."
    rows = experiment.load_rows(site)
    kinds = dict.fromkeys(spec.rows for spec in experiment.list_evaluations(site))
    sent = [kind for kind in kinds if is_disclosed(metrics, len(rows[kind]))]
    if not sent:
        return f"Its losses and scores are not sent: it has fewer than {LEAST_ROWS} {' or '.join(kinds)} rows."
    return f"Accuracies to 1 %, of its {' and '.join(sent)} rows, are sent once a round; other scores and losses are not."
