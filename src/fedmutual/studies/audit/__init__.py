"""The audit of a run: membership inference and the imprint attack, against the run's own data."""

from fedmutual.report.audit import Audit, Imprint, Membership
from fedmutual.studies.audit.audit import AUDIT, audit

__all__ = ["AUDIT", "Audit", "Imprint", "Membership", "audit"]
