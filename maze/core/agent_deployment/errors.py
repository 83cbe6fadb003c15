"""What can go wrong between a deployed agent and the system that asks it."""

from __future__ import annotations

from maze.core.errors import MazeError


class DeploymentError(MazeError):
    """A deployment cannot be used in this way: it is closed, the order is wrong, two threads use it at once."""


class EpisodeOverError(DeploymentError):
    """A wrapper (a time limit, say) ended the episode, so that there is no action for its last state.

    The episode is finished and counted. The next ``act`` takes the first state of another one.
    """
