"""The trainable dispatching environments."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from maze.core.env.action_conversion import DictActionConversion
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import DictObservationConversion
from maze_envs.logistics.dispatching.core_env import FlatDispatchingCoreEnv, MultiAgentDispatchingCoreEnv
from maze_envs.logistics.dispatching.simulation import DispatchingSimulation


def dispatching_env(**kwargs: Any) -> MazeEnv[MultiAgentDispatchingCoreEnv]:
    """Return dispatching with an actor for each vehicle; they share a policy.

    :param kwargs: Parameters of :class:`DispatchingSimulation`.
    """
    simulation = DispatchingSimulation(**kwargs)
    n_slots = simulation.n_slots
    actions = spaces.Dict({"order": spaces.Discrete(n_slots + 1)})
    observations = spaces.Dict(
        {
            "orders": spaces.Box(0, 1, (n_slots, 3)),
            "time_left": spaces.Box(0, 1, (2,)),
            "order_mask": spaces.Box(0, 1, (n_slots + 1,)),
        }
    )
    key = MultiAgentDispatchingCoreEnv.STEP_KEY
    return MazeEnv(
        MultiAgentDispatchingCoreEnv(simulation),
        {key: DictActionConversion(actions)},
        {key: DictObservationConversion(observations)},
    )


def flat_dispatching_env(**kwargs: Any) -> MazeEnv[FlatDispatchingCoreEnv]:
    """Return dispatching with one actor that chooses for all vehicles at once.

    :param kwargs: Parameters of :class:`DispatchingSimulation`.
    """
    simulation = DispatchingSimulation(**kwargs)
    n_vehicles, n_slots = simulation.n_vehicles, simulation.n_slots
    actions = spaces.Dict({f"vehicle_{index}": spaces.Discrete(n_slots + 1) for index in range(n_vehicles)})
    observations = spaces.Dict(
        {
            "orders": spaces.Box(0, 1, (n_vehicles, n_slots, 3)),
            "time_left": spaces.Box(0, 1, (n_vehicles, 2)),
            "is_idle": spaces.Box(0, 1, (n_vehicles,)),
        }
    )
    return MazeEnv(
        FlatDispatchingCoreEnv(simulation),
        {0: DictActionConversion(actions)},
        {0: DictObservationConversion(observations)},
    )
