"""Whether joining a federation of real sites pays: the same federation once more, with every site on its own."""

from statistics import fmean

import pytest

from fedmutual.report.provenance import make_subtitle
from fedmutual.results.comparison import make_comparisons
from fedmutual.results.frame import read_runs
from fedmutual.rundir.file_names import METRICS
from log_lines import read_lines
from run_folders import list_findings
from wards import COMMON, SITES, Federation

pytestmark = pytest.mark.sites

PLAIN = {i: {"model": {"personal": "mlp"}, "data": tables["data"]} for i, tables in SITES.items()}


def personal(folder):
    return [score for score in read_lines(folder / METRICS)[-1]["scores"] if score["model"] == "personal"]


def submitted(folder, algorithm):
    """The server's folder of a federation that came to its end."""
    common = {**COMMON, "name": folder.name, "algorithm": {"name": algorithm}}
    federation = Federation(folder, common, PLAIN)
    assert bool(federation["north"].list_leaves()[algorithm]) == (algorithm == "fml")  # on its own, nothing leaves a site
    return federation.run().server


def test_two_federations_tell_whether_joining_pays(tmp_path, cli):
    joined, alone = submitted(tmp_path / "wards", "fml"), submitted(tmp_path / "wards-alone", "independent")
    disclosed = {key for line in read_lines(joined / METRICS) for score in line["scores"] for key in score}
    assert disclosed == {"model", "client", "data", "accuracy"}  # no more than that is needed
    out, _ = cli.run("report", joined, alone, "-o", tmp_path / "page.html")
    assert f"{100 * fmean(score['accuracy'] for score in personal(joined)):.1f}" in out
    (compared,) = make_comparisons(read_runs([joined]))
    assert make_subtitle(compared).startswith(
        "real sites, 10 classes · each with data of its own, which nobody else knows · 3 sites · 3 rounds"
    )
    sentences = list_findings([joined])
    fix = "submit the federation under another name with `sites.baseline = true`, at sites that disclose scores."
    assert sentences[0].endswith(fix)
    assert "submitting the federation under another name with sites.seeds = 3 gives more" in sentences[-1]

    sentences = " ".join(list_findings([joined, alone]))
    assert "local-only (95 % interval" in sentences
    assert "Of 3 clients" in sentences

    at_home = [tmp_path / name / "north" / "state" / name for name in ("wards", "wards-alone")]
    sentences = list_findings(at_home[:1])
    assert "is not among these runs; this site only scores, or cannot train alone, or the federation has" in sentences[0]
    assert "submitting the federation under another name with sites.seeds = 3 gives more" in sentences[-1]
    sentences = " ".join(list_findings(at_home))  # a site finds out for itself
    assert "unfinished" not in sentences
    assert "one client, so no interval" in sentences


def test_under_differential_privacy_the_advice_can_be_followed(tmp_path):
    """No site may then disclose scores: the server's page says where the gain is, and the site's page has it."""
    private = {"privacy": {"nets": "both", "sigma": 2.0}, "share": {"metrics": "none"}, "rounds": 2}
    budget = {"privacy": {"epsilon": 50.0}}
    federation = Federation(tmp_path / "wards", COMMON | private, PLAIN, site_tables=budget, baseline=True).run()
    fix = "with privacy.nets no site discloses scores; each site sees its gain: `fedmutual report STATE/NAME`."
    assert list_findings([federation.server])[0].endswith(fix)
    assert "local-only" in " ".join(list_findings([federation["north"].folder]))
