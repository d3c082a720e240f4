"""`fedmutual ledger`: what left a site, by hand and after a federation."""

import json

import pytest

from fedmutual.errors import RunError
from fedmutual.sites import ledger
from fedmutual.sites.journal import OLD_LEDGER
from wards import site

pytestmark = pytest.mark.sites

WEIGHT = {"name": "w", "dtype": "float32", "shape": [2, 3], "bytes": 24, "sha256": "ab" * 32}
ONE = {"name": "n", "dtype": "int64", "shape": [], "bytes": 8, "sha256": "cd" * 32}


def line(round, phase=1, what="work", to="server", tensors=(WEIGHT, ONE), header=None, bytes=100):
    return {"round": round, "phase": phase, "what": what, "to": to, "tensors": list(tensors), "told": header or {}} | {
        "bytes": bytes,
        "sha256": "ef" * 32,
    }


def write(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OLD_LEDGER).write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def letters(round):
    """A round of a site that sends to two others, and tells the server that it did."""
    facts = {"train": {"loss": 0.5 / round}}
    work = [line(round, k, tensors=(), header=facts, bytes=200 + round % 7) for k in (1, 2)]
    return [
        *work,
        line(round, to="south"),
        line(round, to="west"),
        line(round, 1, "exam", tensors=(), header={"scores": [{}]}),
    ]


def test_equal_rounds_are_one_row_however_many(tmp_path):
    lines = ledger.read_ledger(write(tmp_path, [one for round in range(1, 201) for one in letters(round)]))
    rows = ledger.summarise_ledger(lines)
    assert [(row["first"], row["last"], row["messages"]) for row in rows] == [(1, 200, 200)] * 5
    assert [(row["what"], row["to"], row["size"]) for row in rows] == [
        ("phase 1, done", "server", 0),
        ("phase 2, done", "server", 0),
        ("phase 1", "south", 32),
        ("phase 1", "west", 32),
        ("scores", "server", 0),
    ]
    assert rows[0]["bytes"] == sum(200 + round % 7 for round in range(1, 201))
    assert ledger.count_totals(lines)["south"] == {"messages": 200, "tensors": 6400, "bytes": 20000}


def test_a_round_with_other_messages_has_its_own_row(tmp_path):
    repeated = [line(3), line(3)]  # asked again, and answered as before
    refused = [line(5, tensors=(), header={"problem": "it diverged"})]
    anew = [line(7) | {"attempt": 1}]
    lines = [line(0), line(1), line(2), *repeated, line(4), *refused, line(6), *anew]
    rows = ledger.summarise_ledger(ledger.read_ledger(write(tmp_path, lines)))
    places = [(row["first"], row["last"], row["messages"]) for row in rows]
    assert places == [(0, 2, 3), (3, 3, 2), (4, 4, 1), (5, 5, 1), (6, 6, 1), (7, 7, 1)]
    assert rows[3]["what"] == "no message: it diverged"
    assert rows[5]["what"] == "phase 1, attempt 1"


def test_the_tables(tmp_path, cli):
    folder = write(tmp_path / "state" / "wards", [line(0, header={"train": {"loss": 1.0}}), line(1), line(2)])
    code, out, _ = cli("ledger", tmp_path / "state")
    rows = [text.split() for text in out.splitlines()]
    assert code == 0
    assert rows[2] == ["start", "phase", "1", "server", "1", "2", "32", "losses", "100"]
    assert rows[3] == ["1-2", "phase", "1", "server", "2", "2", "32", "-", "200"]
    assert out.splitlines()[-1] == "to server: 3 messages of 300 bytes, of which tensors 96"
    code, out, _ = cli("ledger", folder, "--full")
    assert [text.split() for text in out.splitlines()][2:4] == [
        ["0", "1", "server", "w", "float32", "2x3", "24", "ab" * 32],
        ["0", "1", "server", "n", "int64", "one", "8", "cd" * 32],
    ]
    code, out, _ = cli("ledger", folder, "--json")
    recorded = json.loads(out)
    assert (code, recorded["left"][2]["round"], recorded["totals"]["server"]["bytes"]) == (0, 2, 300)


def test_a_site_names_its_ledger_by_its_own_file(tmp_path, cli):
    path = site(tmp_path, "north")
    write(path.parent / "state" / "wards", [line(1)])
    assert cli("ledger", path)[0] == 0
    write(path.parent / "state" / "others", [line(1)])
    code, _, err = cli("ledger", path)
    assert (code, "took part in 2 federations; name one" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}\n", "line 1 does not have the form"),
        ('{"round": 1\n{}\n', "line 1 does not have the form"),
        (json.dumps(line(1)) + "\n" + json.dumps(line(2) | {"tensors": 5}) + "\n", "line 2 does not have the form"),
        (json.dumps(line(1)) + "\n\xff\n", "line 2 does not have the form"),
        ("[" * 200_000 + "\n", "line 1 does not have the form"),
    ],
)
def test_a_damaged_ledger_line_is_named(tmp_path, cli, text, why):
    (tmp_path / OLD_LEDGER).write_bytes(text.encode("latin1"))
    code, out, err = cli("ledger", tmp_path)
    assert (code, out, why in err) == (2, "", True)


@pytest.mark.parametrize("method", ["is_dir", "is_file", "read_bytes"])
def test_an_unreadable_ledger_gives_one_sentence(tmp_path, monkeypatch, method):
    """The server and the sites close their state folders to other users."""

    def forbidden(*args, **named):
        raise PermissionError(13, "Permission denied")

    folder = write(tmp_path, [line(1)])
    monkeypatch.setattr(f"pathlib.Path.{method}", forbidden)  # a superuser may read any file
    with pytest.raises(RunError, match=rf"{tmp_path}.*: cannot be read \(Permission denied\)"):
        ledger.read_ledger(ledger.find_ledger(folder))


def test_no_ledger_and_one_that_a_kill_cut_short(tmp_path, cli):
    code, _, err = cli("ledger", tmp_path)
    assert (code, "nothing left this site, or it is not the state folder of a site" in err) == (2, True)
    code, _, err = cli("ledger", tmp_path / "nowhere.toml")
    assert (code, "nowhere.toml" in err) == (2, True)
    write(tmp_path, [line(1)])
    with (tmp_path / OLD_LEDGER).open("a") as file:
        file.write(json.dumps(line(2))[:40])
    code, out, _ = cli("ledger", tmp_path)
    assert (code, out.splitlines()[-1]) == (0, "to server: 1 message of 100 bytes, of which tensors 32")
