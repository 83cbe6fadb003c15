"""Observations as images, drawn by a user-defined function."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.log_stats import event_decorators
from maze.core.utils.factory import locate
from maze.core.wrappers.monitoring_wrapper import named_values, step_key_name
from maze.core.wrappers.wrapper import PassiveWrapper, Wrapper

PlotFunction = Callable[..., Any]


class ObservationSamples:
    """Observations to draw, and the function that draws them.

    Not a list, so that writers of statistics that draw no figures ignore it.

    Each observation has the shape `[*space.shape]`.

    :param plot_function: Draws a list of observations.
    :param values: The observations.
    """

    def __init__(self, plot_function: PlotFunction, values: list[np.ndarray]) -> None:
        self.plot_function = plot_function
        self.values = values

    def __str__(self) -> str:
        return f"[len:{len(self.values)}]"

    @staticmethod
    def gather(samples: Sequence[ObservationSamples]) -> ObservationSamples:
        """Join the observations of several steps or episodes."""
        values = [value for sample in samples for value in sample.values]
        return ObservationSamples(samples[0].plot_function, values)

    @staticmethod
    def draw(samples: ObservationSamples, groups: tuple[str, str]) -> Any:
        """Return the figure of the user's function; `None`: it draws nothing for this observation."""
        return samples.plot_function(samples.values, groups=groups)


class ObservationVisualizationEvents(ABC):
    """Observations for a plot function."""

    @event_decorators.define_plot(ObservationSamples.draw)
    @event_decorators.define_epoch_stats(ObservationSamples.gather)
    @event_decorators.define_episode_stats(ObservationSamples.gather)
    @event_decorators.define_step_stats(ObservationSamples.gather)
    @event_decorators.define_stats_grouping("step_key", "name")
    def observation_to_visualize(self, step_key: str, name: str, value: ObservationSamples) -> None:
        """An agent acted on an observation.

        :param step_key: Key of the sub-step, as in "step_key_0".
        :param name: Key of the observation in the observation space.
        :param value: The observation and its plot function.
        """


class ObservationVisualizationWrapper(PassiveWrapper[MazeEnv[Any]]):
    """Draw the observations of each epoch and show them among TensorBoard's images.

    The function is called as `plot_function(value=[observation, ...], groups=("step_key_0", "name"))` once for each
    sub-step and observation key and returns a matplotlib figure, or None to show nothing.

    For inspection: all observations of an epoch are kept in memory until its statistics are written.

    :param env: The environment.
    :param plot_function: Dotted path of the function, or the function itself. None: nothing is drawn.
    """

    CLONED = ("_observation",)

    def __init__(self, env: MazeEnv[Any], plot_function: str | PlotFunction | None) -> None:
        where = "ObservationVisualizationWrapper.plot_function"
        self.plot_function = locate(plot_function, where) if isinstance(plot_function, str) else plot_function
        self._observation: Any = None
        super().__init__(env)
        self.observation_events = self._context.event_service.create_event_topic(ObservationVisualizationEvents)

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        if self.plot_function is not None:
            self._context.pre_step()
            step_key = step_key_name(self.env.actor_id().step_key)
            for name, value in named_values(self._observation).items():
                sample = ObservationSamples(self.plot_function, [np.array(value)])
                self.observation_events.observation_to_visualize(step_key=step_key, name=name, value=sample)
        result: tuple[Any, Any, bool, dict[Any, Any]] = self._env_step(action)
        self._observation = result[0]
        return result

    @override(Wrapper)
    def reset(self) -> Any:
        self._observation = self._env_reset()
        return self._observation
