"""What tests of the control core share."""

import pytest
from control_play import Play


@pytest.fixture
def play() -> Play:
    """Two nodes whose first generation, the fifth, has just been told to start."""
    play = Play()
    play.start()
    return play
