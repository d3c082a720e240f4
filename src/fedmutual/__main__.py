"""`python -m fedmutual`."""

from fedmutual.cli import main

main()
