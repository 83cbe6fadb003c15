"""The trainable pick-and-place environments."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from maze.core.env.action_conversion import DictActionConversion
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import DictObservationConversion
from maze_envs.robotics.pick_and_place.core_env import (
    DIRECTIONS,
    GRASP,
    MOVE,
    NO_MOVE,
    PLACE,
    REACH,
    TASKS,
    FlatPickAndPlaceCoreEnv,
    PickAndPlaceCoreEnv,
)


def pick_and_place_env(**kwargs: Any) -> MazeEnv[PickAndPlaceCoreEnv]:
    """Return an environment with four policies, one for each task; each sees what matters for it.

    :param kwargs: Parameters of :class:`PickAndPlaceCoreEnv`.
    """
    core_env = PickAndPlaceCoreEnv(**kwargs)
    drive = spaces.Dict({"direction": spaces.Discrete(len(DIRECTIONS))})
    grip = spaces.Dict({"orientation": spaces.Discrete(core_env.n_orientations)})
    offset = spaces.Dict({"offset": spaces.Box(-1, 1, (2,))})
    orientation = spaces.Dict({"orientation": spaces.Box(0, 1, (core_env.n_orientations,))})
    actions = {REACH: drive, GRASP: grip, MOVE: drive, PLACE: grip}
    observations = {REACH: offset, GRASP: orientation, MOVE: offset, PLACE: orientation}
    return MazeEnv(
        core_env,
        {task: DictActionConversion(actions[task]) for task in TASKS},
        {task: DictObservationConversion(observations[task]) for task in TASKS},
    )


def flat_pick_and_place_env(**kwargs: Any) -> MazeEnv[FlatPickAndPlaceCoreEnv]:
    """Return an environment with one policy that sees everything, the task included, and always decides on everything.

    :param kwargs: Parameters of :class:`PickAndPlaceCoreEnv`.
    """
    core_env = FlatPickAndPlaceCoreEnv(**kwargs)
    n = core_env.n_orientations
    actions = spaces.Dict({"direction": spaces.Discrete(NO_MOVE + 1), "orientation": spaces.Discrete(n + 1)})
    observations = spaces.Dict(
        {
            "offset": spaces.Box(-1, 1, (2,)),
            "orientation": spaces.Box(0, 1, (n,)),
            "task": spaces.Box(0, 1, (len(TASKS),)),
        }
    )
    return MazeEnv(core_env, {0: DictActionConversion(actions)}, {0: DictObservationConversion(observations)})
