"""Queues as bars, side by side for each server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer


class QueueRenderer(Renderer):
    """Draw how many jobs of each class wait; those that are worked on are orange.

    :param servers: By class, who serves it.
    """

    def __init__(self, servers: Sequence[int]) -> None:
        self._servers = list(servers)

    @override(Renderer)
    def render(
        self, maze_state: dict[str, np.ndarray], maze_action: Any | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        import matplotlib.pyplot as plt

        jobs = maze_state["jobs"]
        names = [f"class {index}\nserver {server}" for index, server in enumerate(self._servers)]
        colors = []
        for index, server in enumerate(self._servers):
            position = self._servers[:index].count(server)
            chosen = (maze_action or {}).get(f"server_{server}")
            is_served = maze_action is not None and (chosen is None or int(chosen) == position) and jobs[index] > 0
            colors.append("tab:orange" if is_served else "tab:blue")
        plt.cla()
        plt.bar_label(plt.bar(names, jobs, color=colors))
        plt.ylabel("jobs")
        plt.title(f"Tick {int(maze_state['elapsed'])}: {int(jobs.sum())} jobs")
