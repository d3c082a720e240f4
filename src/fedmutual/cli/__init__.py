"""The command line."""

from fedmutual.cli.app import main

__all__ = ["main"]
