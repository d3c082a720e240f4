"""The distribution fedmutual-papers beside fedmutual: one version, its command, and what is said without it."""

import tomllib
from pathlib import Path

import pytest
import typer

from fedmutual.cli import app as command_line
from fedmutual_papers.command import app

ROOT = Path(__file__).parents[2]


def test_the_two_distributions_have_one_version():
    library, papers = (tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in ("", "papers"))
    assert papers["version"] == library["version"]
    assert f"fedmutual=={library['version']}" in papers["dependencies"]


def test_the_list_of_commands_has_the_help_of_the_command():
    listed = typer.main.get_command(command_line.app).commands["reproduce"].help
    assert typer.main.get_command(app).help.startswith(f"{listed}\n")


@pytest.mark.parametrize("arguments", [("reproduce", "table1", "--seeds", "1"), ("list", "experiments")])
def test_without_the_distribution_one_sentence_says_how_to_install_it(cli, monkeypatch, arguments):
    monkeypatch.setattr(command_line, "entry_points", lambda **chosen: ())
    code, output, error = cli(*arguments)
    assert (code, output) == (2, "")
    assert error == (
        "error: the papers' experiments come with the distribution fedmutual-papers; "
        "run `pip install CLONE/papers`, with the path of a clone of fedmutual\n"
    )
