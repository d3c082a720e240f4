"""The role of an algorithm in a comparison of methods.

Nothing here imports torch, so that a report can read the role that a run folder records.
"""

from dataclasses import dataclass

LOCAL_ONLY = "independent"  # the algorithm of local-only training
ALONE = "alone"  # the name of its model in the scores of another method's run (`sites.baseline`)
DEFAULT_ALGORITHM = "fml"
DEFAULT_METHODS = (DEFAULT_ALGORITHM, "fedavg", "fedprox", LOCAL_ONLY)  # that `compare` trains beside the file's algorithm


@dataclass(frozen=True, kw_only=True)
class Role:
    """How the tables, plots and findings of a comparison treat an algorithm. A run folder records the role.

    position: the place among the federated methods of a table, lowest first; None: after all methods with a position.
    colour: the number of the colour and mark in plots, from 1; after the last one the numbers begin again. None: any colour
    that is free.
    reference: the method is compared with every other federated method, and not with local-only training alone.
    federates: False: the method is local-only training, with which federated methods are compared.

    Raises:
        ValueError: a field has another type, a colour is below 1, or a reference does not federate.
    """

    position: int | None = None
    colour: int | None = None
    reference: bool = False
    federates: bool = True

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if key in ("position", "colour") and value is not None and type(value) is not int:
                raise ValueError(f"Role: {key} must be a whole number or None, not {value!r}")
            if key in ("reference", "federates") and type(value) is not bool:
                raise ValueError(f"Role: {key} must be True or False, not {value!r}")
        if self.colour is not None and self.colour < 1:
            raise ValueError(f"Role: colour must be at least 1, not {self.colour}")
        if self.reference and not self.federates:
            raise ValueError("Role: a method that does not federate cannot be a reference; remove reference or federates")
