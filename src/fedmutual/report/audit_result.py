"""The content of audit.json: what each attack achieved."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Attack = Literal["loss", "answers", "shadows"]
Model = Literal["shared", "returned", "personal"]


class _AuditRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Membership(_AuditRecord):
    """What one membership attack achieved against one model; see `studies.audit.statistics.Strength`."""

    model: Model  # the shared model; the meme as a client returns it; a client's personal model
    client: str | None  # None: the shared model, and the rows of all clients
    attack: Attack  # by the loss of the true class; by the answer alone; by the loss beside that of shadow runs
    members: int  # rows that the model was trained on
    others: int  # held-out rows
    advantage: float  # true positives - false positives, as shares, on rows that did not choose the threshold
    low: float  # the interval of the advantage
    high: float
    auc: float  # 0.5: the attack is as good as chance
    auc_low: float
    auc_high: float

    @property
    def is_detected(self) -> bool:
        """Whether the attack distinguishes training rows from held-out rows: the interval of the advantage is above 0."""
        return self.low > 0


class Imprint(_AuditRecord):
    """What a server reads out of one client's meme by a crafted shared model."""

    client: str
    rows: int  # the client's training rows
    records: int  # training rows that were read
    coincidences: int  # held-out rows that the same test counts as read: nobody trained on them
    skipped: str | None = None  # why the attack was not possible


class Guarantee(_AuditRecord):
    """The differential privacy that the run states."""

    nets: str  # "meme" or "both"
    unit: str  # "example" or "group"
    epsilon: float | None  # the largest of any client; None: infinite
    delta: float


class Audit(_AuditRecord):
    """The content of audit.json. It is not an upper bound: another attack may achieve more."""

    format: Literal[1] = 1
    run: str
    algorithm: str
    round: int
    level: float  # with which all intervals of `memberships` hold together
    shadows: int
    privacy: Guarantee | None
    memberships: tuple[Membership, ...]
    imprints: tuple[Imprint, ...]
    notes: tuple[str, ...]
