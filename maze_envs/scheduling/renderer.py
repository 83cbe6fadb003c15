"""Schedules as Gantt charts."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer

_COLORS = 20


class GanttRenderer(Renderer):
    """Draw what each machine does when: a colour and a number for each job.

    The operation of the action is outlined. Lines mark the present and the lower bound on the makespan; lighter, behind
    the present, is what has been started and goes on.
    """

    @override(Renderer)
    def render(
        self, maze_state: dict[str, np.ndarray], maze_action: Any | None, events: StepEventLog | None, **kwargs: Any
    ) -> None:
        import matplotlib.pyplot as plt

        n_jobs, n_machines = (int(size) for size in maze_state["size"])
        starts, durations = maze_state["starts"], maze_state["durations"]
        open_jobs = maze_state["next_operation"][:n_jobs] < n_machines
        end = int(maze_state["job_ready"].max())
        now = int(maze_state["earliest"][:n_jobs][open_jobs].min()) if open_jobs.any() else end
        horizon = max(end, int(maze_state["bound"]))
        chosen = None if maze_action is None else int(maze_action["job"])
        colors = plt.get_cmap("tab20")(np.arange(_COLORS))
        plt.clf()
        axes = plt.gca()
        for job, operation in np.argwhere(starts >= 0).tolist():
            machine = int(maze_state["machines"][job, operation])
            begin, length = int(starts[job, operation]), int(durations[job, operation])
            red, green, blue = colors[job % _COLORS][:3]
            axes.barh(
                machine,
                length,
                left=begin,
                height=0.82,
                color=(red, green, blue, 1.0 if begin + length <= now else 0.55),
                edgecolor="white",
                linewidth=0.6,
            )
            if length * 45 > horizon:  # wide enough for its number
                is_dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
                axes.text(
                    begin + length / 2,
                    machine,
                    str(job),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if is_dark and begin + length <= now else "black",
                )
        if chosen is not None and chosen < n_jobs and open_jobs[chosen]:
            operation = int(maze_state["next_operation"][chosen])
            machine, length = (int(maze_state[name][chosen, operation]) for name in ("machines", "durations"))
            begin = int(maze_state["earliest"][chosen])
            axes.barh(machine, length, left=begin, height=0.82, fill=False, edgecolor="black", linewidth=1.8)
            axes.text(begin + length / 2, machine, str(chosen), ha="center", va="center", fontsize=8, weight="bold")
        axes.axvline(now, color="black", linewidth=1.0)
        axes.axvline(int(maze_state["bound"]), color="tab:red", linewidth=1.2, linestyle="--")
        axes.set_yticks(range(n_machines), [f"machine {machine}" for machine in range(n_machines)], fontsize=7)
        axes.set_ylim(n_machines - 0.5, -0.5)
        axes.set_xlim(0, horizon * 1.02)
        axes.set_xlabel("time")
        axes.spines[["top", "right"]].set_visible(False)
        share = (starts >= 0).sum() / (n_jobs * n_machines)
        bounds = f"lower bound {int(maze_state['bound'])} (at first {int(maze_state['initial_bound'])})"
        if not open_jobs.any():
            bounds = f"lower bound at first {int(maze_state['initial_bound'])}"
        state = f"time {now}, {share:.0%} started" if open_jobs.any() else f"makespan {end}"
        axes.set_title(f"{state}, {bounds}", fontsize=9)
        plt.tight_layout()
