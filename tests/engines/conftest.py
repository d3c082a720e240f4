import pytest

import fedmutual


@pytest.fixture
def uninterrupted(small):
    """Return the folder of the small experiment's run in one process."""
    return fedmutual.run(fedmutual.load_config(small, **{"engine.name": "inprocess"}), "whole").folder.resolve()
