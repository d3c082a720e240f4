"""Cells of a CSV that a spreadsheet would take for a formula: names come from other people."""

import csv
import io

import pytest

from fedmutual.report.cells import format_csv

FORMULAS = ("=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", "\n=1", '=HYPERLINK("http://x")', "-1-1", "＝1", "-", "+1 2")
NUMBERS = ("-1", "-0.5", "+2", "-1e-05", "-.5", "3")


@pytest.mark.parametrize("text", FORMULAS)
def test_text_that_begins_a_formula_is_escaped_in_heads_and_cells(text):
    assert read(format_csv([text, "b"], [["a", text]])) == [[f"'{text}", "b"], ["a", f"'{text}"]]


@pytest.mark.parametrize("text", [*NUMBERS, "", "a=b", "mnist", " ", "1-2"])
def test_numbers_and_other_text_stay_as_they_are(text):
    assert read(format_csv(["a"], [[text]])) == [["a"], [text] if text else []] or not text


@pytest.mark.parametrize("text", ["\r=1+1", "a\r=1+1", "a\r\n=1+1"])
def test_a_carriage_return_does_not_start_a_row(text):
    rows = read(format_csv(["a", "b"], [[text, "c"]]))
    assert len(rows) == 2
    assert rows[1] == [("'" if text[0] == "\r" else "") + text.replace("\r", "\n"), "c"]


def test_negative_numbers_are_numbers():
    text = format_csv(["a", "b", "c", "d"], [[-0.25, -3, None, float("-inf")]])
    assert text.splitlines()[1] == "-0.25,-3,,-inf"


def read(text):
    return list(csv.reader(io.StringIO(text, newline="")))
