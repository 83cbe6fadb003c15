"""Single environments of vectorised simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.action_conversion import DictActionConversion
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.space_values import dict_specs
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.events.event_topic_factory import event_methods
from maze.core.log_events.kpi_calculator import KpiCalculator

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze.core.log_events.episode_event_log import EpisodeEventLog
    from maze.core.rendering.renderer import Renderer

_ONLY_ROW = np.zeros(1, np.int64)

MazeState = dict[str, np.ndarray]
"""The arrays of the state by name, without the leading dimension."""


class BatchedMazeEnv(MazeEnv["SingleCoreEnv"]):
    """Single environment of a vectorised simulation; states are arrays by name.

    :param make: Makes the simulation for a number of environments.
    :param renderer: Renderer of states; `None`: there is none.
    """

    def __init__(self, make: Callable[[int], BatchedCoreEnv], renderer: Renderer | None = None) -> None:
        core_env = SingleCoreEnv(make(1), renderer)
        # Conversions also take recorded states, which must not change the running episode: they have a simulation of
        # their own. It is made, not copied: simulations may hold files or connections.
        simulation, scratch = core_env.simulation, make(1)
        super().__init__(
            core_env,
            {key: DictActionConversion(space) for key, space in simulation.action_spaces.items()},
            {key: _Observation(scratch, key) for key in simulation.step_keys},
        )
        self._make, self._scratch = make, scratch

    @override(MazeEnv)
    def close(self) -> None:
        super().close()
        self._scratch.close()

    def batch(self, n_envs: int) -> BatchedCoreEnv:
        """Return a new vectorised simulation of the same problem.

        :param n_envs: Number of its environments, which are neither seeded nor reset.
        """
        return self._make(n_envs)

    @property
    def n_instances(self) -> int:
        """Number of instances of the set that is played, see
        :meth:`~maze.core.env.batched_core_env.BatchedCoreEnv.use_instances`; 0: there is none."""
        return self._scratch.n_instances


class SingleCoreEnv(CoreEnv):
    """Core environment of a vectorised simulation with one instance.

    :param simulation: The simulation, with one instance.
    :param renderer: Renderer of states.
    """

    def __init__(self, simulation: BatchedCoreEnv, renderer: Renderer | None = None) -> None:
        super().__init__()
        self.simulation = simulation
        self._renderer = renderer
        self._actors = [ActorID(key, 0) for key in simulation.step_keys]
        self._topics: dict[str, Callable[..., None]] = {}
        for interface in simulation.event_interfaces:
            topic = self.context.event_service.create_event_topic(interface)
            for name, event in event_methods(interface).items():
                self._topics[event.__qualname__] = getattr(topic, name)

    @override(CoreEnv)
    def step(self, maze_action: dict[str, Any]) -> tuple[MazeState, float, bool, dict[Any, Any]]:
        simulation = self.simulation
        actions = {key: np.asarray(value)[None] for key, value in maze_action.items()}
        rewards, terminated, truncated = simulation.advance(actions)
        for event, where, attributes in simulation.fired:
            if where is None or where[0]:
                # strings and numbers apply to all simulations
                values = {k: v[0].item() if isinstance(v, np.ndarray) else v for k, v in attributes.items()}
                self._topics[event.__qualname__](**values)
        info = {"TimeLimit.truncated": True} if truncated[0] else {}
        return self.get_maze_state(), float(rewards[0]), bool(terminated[0] or truncated[0]), info

    @override(CoreEnv)
    def reset(self) -> MazeState:
        self.simulation.substep = 0
        self.simulation.begin(_ONLY_ROW)
        return self.get_maze_state()

    @override(CoreEnv)
    def seed(self, seed: int) -> None:
        self.simulation.seed_row(0, seed)

    @override(CoreEnv)
    def close(self) -> None:
        self.simulation.close()

    @override(CoreEnv)
    def get_maze_state(self) -> MazeState:
        return {name: np.array(array[0]) for name, array in self.simulation.arrays().items()}

    @override(CoreEnv)
    def actor_id(self) -> ActorID:
        return self._actors[self.simulation.substep]

    @override(CoreEnv)
    def is_step_complete(self) -> bool:
        return self.simulation.is_step_complete

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return dict.fromkeys(self.simulation.step_keys, 1)

    @override(CoreEnv)
    def get_kpi_calculator(self) -> KpiCalculator | None:
        return _Kpis(self.simulation) if self.simulation.has_kpis else None

    @override(CoreEnv)
    def get_renderer(self) -> Renderer | None:
        return self._renderer

    @override(CoreEnv)
    def get_serializable_components(self) -> dict[str, Any]:
        return self.get_maze_state()

    @override(CoreEnv)
    def clone_from(self, env: SingleCoreEnv) -> None:  # type: ignore[override]
        self.simulation.copy_rows(env.simulation, _ONLY_ROW, _ONLY_ROW)

    @override(CoreEnv)
    def load_maze_state(self, maze_state: MazeState, actor_id: ActorID) -> None:
        arrays = self.simulation.arrays()
        for name, value in maze_state.items():
            arrays[name][0] = value
        self.simulation.substep = self.simulation.step_keys.index(actor_id.step_key)

    @override(CoreEnv)
    def new_future(self, seed: int) -> None:
        self.simulation.new_futures(_ONLY_ROW, 0, seed)


class _Observation(ObservationConversionInterface):
    """Conversion of states, including recorded ones, by the simulation.

    :param scratch: A simulation with one instance, which is set to each state.
    :param step_key: The sub-step.
    """

    def __init__(self, scratch: BatchedCoreEnv, step_key: StepKeyType) -> None:
        self._scratch = scratch
        self._position = scratch.step_keys.index(step_key)
        self._space = scratch.observation_spaces[step_key]
        self._specs = [(key, (1, *shape), dtype) for key, (shape, dtype) in dict_specs(self._space).items()]

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: MazeState) -> dict[str, np.ndarray]:
        scratch = self._scratch
        arrays = scratch.arrays()
        for name, value in maze_state.items():
            arrays[name][0] = value
        scratch.substep = self._position
        out = {key: np.zeros(shape, dtype) for key, shape, dtype in self._specs}
        scratch.observe(out)
        return {key: array[0] for key, array in out.items()}

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space


class _Kpis(KpiCalculator):
    def __init__(self, simulation: BatchedCoreEnv) -> None:
        self._simulation = simulation

    @override(KpiCalculator)
    def calculate_kpis(self, episode_event_log: EpisodeEventLog, last_maze_state: MazeState) -> dict[str, float]:
        return {name: float(values[0]) for name, values in self._simulation.kpis(_ONLY_ROW).items()}
