"""Durations of steps and resets by layer: environment and wrappers."""

from __future__ import annotations

from abc import ABC
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_stats_grouping,
    define_step_stats,
)
from maze.core.wrappers.wrapper import Wrapper


class StepTimingEvents(ABC):
    """Time spent in an environment and in each of its wrappers, without the layers below."""

    @define_epoch_stats(np.mean, input_name="mean", output_name="mean_ms")
    @define_epoch_stats(sum, input_name="sum", output_name="total_ms")
    @define_episode_stats(np.mean, output_name="mean")
    @define_episode_stats(sum, output_name="sum")
    @define_step_stats(sum)
    @define_stats_grouping("layer")
    def step_time(self, layer: str, value: float) -> None:
        """A step was taken.

        :param layer: The wrapper or environment; 0 is the environment itself, as in "1_TimeLimitWrapper".
        :param value: Milliseconds.
        """

    @define_epoch_stats(np.mean, output_name="mean_ms")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    @define_stats_grouping("layer")
    def reset_time(self, layer: str, value: float) -> None:
        """The environment was reset.

        :param layer: The wrapper or environment.
        :param value: Milliseconds.
        """


class _Probe(Wrapper[Any]):
    """Measure the time spent in a layer of a stack and in all layers below it.

    :param env: The inner layer.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: Any) -> None:
        self.seconds = 0.0
        super().__init__(env)

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        start = perf_counter()
        result = self._env_step(action)
        self.seconds += perf_counter() - start
        return result

    @override(Wrapper)
    def reset(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = self._env_reset(*args, **kwargs)
        self.seconds += perf_counter() - start
        return result


class StepTimingWrapper(Wrapper[MazeEnv[Any]]):
    """Fire :class:`StepTimingEvents` for the environment and every wrapper that it is put around.

    The time of a layer excludes the layers below it. Layers are subclasses of `Wrapper`; the Maze environment with its
    conversions is one layer. The overhead is a few microseconds per layer.

    :param env: The environment with all wrappers to measure.
    """

    keeps_observations_and_actions = True

    TRANSIENT: ClassVar[tuple[str, ...]] = (*Wrapper.TRANSIENT, "_probes", "_layers")

    def __init__(self, env: MazeEnv[Any]) -> None:
        super().__init__(_probed(env))
        self.timing_events = self._context.event_service.create_event_topic(StepTimingEvents)

    @override(Wrapper)
    def _bind(self) -> None:
        super()._bind()
        self._probes: list[Any] = [self.env]
        while not issubclass(type(self._probes[-1].env), MazeEnv):
            self._probes.append(self._probes[-1].env.env)
        n_layers = len(self._probes)
        self._layers = [f"{n_layers - 1 - i}_{type(probe.env).__name__}" for i, probe in enumerate(self._probes)]

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        return self._timed(self.timing_events.step_time, self._env_step, action)  # type: ignore[no-any-return]

    @override(Wrapper)
    def reset(self) -> Any:
        return self._timed(self.timing_events.reset_time, self._env_reset)

    def _timed(self, event: Any, call: Any, *arguments: Any) -> Any:
        for probe in self._probes:
            probe.seconds = 0.0
        result = call(*arguments)
        below = [*(probe.seconds for probe in self._probes[1:]), 0.0]
        for layer, probe, inner in zip(self._layers, self._probes, below, strict=True):
            event(layer=layer, value=1000.0 * max(0.0, probe.seconds - inner))
        return result


def _probed(env: Any) -> Any:
    """Put a probe around each layer of an environment; return the outermost one."""
    if not issubclass(type(env), MazeEnv):
        env.env = _probed(env.env)
    return _Probe(env)
