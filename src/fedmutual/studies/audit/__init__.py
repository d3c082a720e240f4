"""What an adversary learns about a run's training data from its models: attacks that are carried out, and their success."""

from fedmutual.studies.audit.audit import Audit, audit, write_audit

__all__ = ["Audit", "audit", "write_audit"]
