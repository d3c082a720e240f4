"""Tables at real sites: the contract may name the columns, and every site's file is held to them."""

import pytest

from wards import contract, joined, refused, site

pytestmark = pytest.mark.sites

COMMON = {"rounds": 1, "data": {"classes": ["well", "ill"]}, "algorithm": {"name": "fml"}, "model": {"shared": "mlp"}}


@pytest.mark.parametrize(
    ("header", "difference"),
    [
        ("age,pulse,heat", None),
        ("heat,pulse,age", "the same columns in another order ('heat', 'pulse', 'age')"),
        ("age,pulse,salt", "other columns ('salt')"),
    ],
)
def test_a_sites_columns_are_those_of_the_contract(tmp_path, header, difference):
    rows = (f"{i},{i % 7},3,{'ill' if i % 2 else 'well'}" for i in range(40))
    (tmp_path / "a.csv").write_text("\n".join([f"{header},label", *rows, ""]))
    tables = {"data": {"name": "csv", "root": str(tmp_path / "a.csv")}}
    contract(tmp_path, COMMON, {"north": tables}, input=[3], columns=["age", "pulse", "heat"])
    site(tmp_path, "north", tables)
    if difference is None:
        assert joined(tmp_path).data.space.columns == ("age", "pulse", "heat")
    else:
        refused(
            tmp_path,
            f"site.toml: the examples have {difference}, and the federation agreed on 'age', 'pulse', 'heat' (sites",
        )
