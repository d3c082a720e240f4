"""Check that the measures, arms and cells that an index.toml names exist."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from fedmutual.errors import ConfigError
from fedmutual_papers import measures
from fedmutual_papers.schema import Index


def check_measures(index: Index, path: Path) -> None:
    """Raise ConfigError if a named measure does not exist, or if a claim about clients uses a measure without clients."""
    for name in (*index.measures, *index.figures, *(c.measure for c in index.claims)):
        try:
            measures.find(name)
        except LookupError as problem:
            raise ConfigError(f"{path}: {problem}{suggest_near(name, list(measures.MEASURES))}") from None
        except ValueError as problem:
            raise ConfigError(f"{path}: {problem}") from None
    for name in index.figures:
        if not measures.find(name)[0].curve:
            raise ConfigError(f"{path}: {name!r} has no curve that could be drawn; remove it from 'figures'")
    for claim in index.claims:
        if claim.per == "client" and not measures.find(claim.measure)[0].nodes:
            raise ConfigError(
                f'{path}: {claim.measure!r} is no measure of each client; remove per = "client" from its claim'
            )
        if claim.per == "client" and claim.scope != "every":
            raise ConfigError(f"{path}: the claim {claim.text!r} is of every client; remove 'of', or per = \"client\"")
        if not (claim.than or claim.less) or (claim.times and (claim.less or not claim.than)):
            what = "'than' without 'less', because it has 'times'" if claim.times else "'than' or 'less'"
            raise ConfigError(f"{path}: the claim {claim.text!r} needs {what}")


def check_claims(index: Index, arms: Mapping[str, Collection[str]], path: Path) -> None:
    """Raise ConfigError if no cell can decide a claim, because the claim names an unknown arm or cell.

    arms: cell name -> the names of its arms.
    """
    known = list(dict.fromkeys(arm for of_cell in arms.values() for arm in of_cell))
    for claim in (read for of_index in index.claims for read in (of_index, *of_index.read_otherwise)):
        (than, elsewhere), claim_text = claim.other, f"{path}: the claim {claim.text!r}"
        matching_cells = [name for name in arms if fnmatch(name, claim.cells)]
        for cell in [claim.cells] * (not matching_cells) + [c for c in (claim.less, elsewhere) if c and c not in arms]:
            raise ConfigError(f"{claim_text} matches no cell {cell!r}{suggest_near(cell, list(arms))}")
        for arm in (claim.arm, than):
            if arm and arm not in known:
                raise ConfigError(f"{claim_text} has no arm {arm!r}{suggest_near(arm, known)}")
        needed = [
            (claim.arm, ""),
            (claim.arm, claim.less),
            *([(than, elsewhere), (than, elsewhere or claim.less)] if than else []),
        ]
        if not any(all(arm in arms[place or cell_name] for arm, place in needed) for cell_name in matching_cells):
            together = " and ".join(repr(arm) for arm in (claim.arm, than) if arm)
            raise ConfigError(f"{claim_text} has {together} in no cell of the claim; name others")


def suggest_near(word: str, known: Sequence[str]) -> str:
    """Return the end of an error message: "; did you mean ...?" with the nearest known word, else all known words."""
    matches = get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; there are {', '.join(known)}"
