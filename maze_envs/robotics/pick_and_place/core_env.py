"""A robot that carries objects to their places, as a hierarchy of tasks and as a flat problem."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.events.pubsub import Pubsub
from maze_envs.common.grid_renderer import GridRenderer
from maze_envs.robotics.pick_and_place.events import PickAndPlaceEvents

REACH, GRASP, MOVE, PLACE = TASKS = ("reach", "grasp", "move", "place")
DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))
NO_MOVE = len(DIRECTIONS)
STEP_COST = 0.02
GRASP_REWARD, PLACE_REWARD = 0.2, 1.0


class PickAndPlaceCoreEnv(CoreEnv):
    """Reach an object, grasp it, move it to its target, place it; then comes the next one.

    Which of the four tasks is on, and with it the policy that acts, follows from the state; each takes one or more
    steps. Every action is an environment step.

    :param size: Cells of the grid along each side.
    :param n_orientations: Ways in which the gripper can be turned.
    :param horizon: Steps of an episode.
    """

    def __init__(self, size: int = 7, n_orientations: int = 8, horizon: int = 100) -> None:
        super().__init__()
        if size < 2 or n_orientations < 1 or horizon < 1:
            raise ConfigError(
                "env: expected size >= 2, n_orientations >= 1 and horizon >= 1, "
                f"found {size}, {n_orientations} and {horizon}."
            )
        self.size = size
        self.n_orientations = n_orientations
        self.horizon = horizon
        self.rng = np.random.default_rng()
        self.pubsub = Pubsub(self.context.event_service)
        self.events = self.pubsub.create_event_topic(PickAndPlaceEvents)
        self.renderer = GridRenderer(size)
        self.n_steps = 0
        self.holds_object = False
        self.robot = self.object = self.target = (0, 0)
        self.object_orientation = self.target_orientation = 0

    @override(CoreEnv)
    def reset(self) -> dict[str, Any]:
        self.n_steps = 0
        self.robot = self._random_cell()
        self._new_object()
        return self.get_maze_state()

    def task(self) -> str:
        """Return the current task."""
        if self.holds_object:
            return PLACE if self.robot == self.target else MOVE
        return GRASP if self.robot == self.object else REACH

    @override(CoreEnv)
    def step(self, maze_action: dict[str, int]) -> tuple[dict[str, Any], float, bool, dict[Any, Any]]:
        reward = -STEP_COST
        if "direction" in maze_action:
            self._move(maze_action["direction"])
        if "orientation" in maze_action:
            reward += self._grip(maze_action["orientation"])
        self.n_steps += 1
        return self.get_maze_state(), reward, self.n_steps >= self.horizon, {}

    def _move(self, direction: int) -> None:
        if direction == NO_MOVE:
            return
        x, y = (position + offset for position, offset in zip(self.robot, DIRECTIONS[direction], strict=True))
        if 0 <= x < self.size and 0 <= y < self.size:
            self.robot = (x, y)
            if self.holds_object:
                self.object = self.robot

    def _grip(self, orientation: int) -> float:
        """Grasp or place, if the gripper is turned the right way."""
        task = self.task()
        wanted = {GRASP: self.object_orientation, PLACE: self.target_orientation}.get(task)
        if orientation != wanted:
            self.events.grip_failed()
            return 0.0
        if task == GRASP:
            self.holds_object = True
            self.events.object_grasped()
            return GRASP_REWARD
        self.events.object_placed()
        self._new_object()
        return PLACE_REWARD

    def _new_object(self) -> None:
        self.holds_object = False
        self.object, self.target = self._random_cell(), self._random_cell()
        self.object_orientation, self.target_orientation = self.rng.integers(self.n_orientations, size=2).tolist()

    def _random_cell(self) -> tuple[int, int]:
        x, y = self.rng.integers(self.size, size=2).tolist()
        return x, y

    @override(CoreEnv)
    def get_maze_state(self) -> dict[str, Any]:
        task = self.task()
        goal = self.target if self.holds_object else self.object
        orientation = self.target_orientation if self.holds_object else self.object_orientation
        return {
            "offset": [(goal[dim] - self.robot[dim]) / self.size for dim in (0, 1)],
            "orientation": np.eye(self.n_orientations)[orientation],
            "task": [float(task == name) for name in TASKS],
            "drawing": {"robot": [self.robot], "object": [self.object], "target": [self.target]},
        }

    @override(CoreEnv)
    def actor_id(self) -> ActorID:
        return ActorID(self.task(), 0)

    @override(CoreEnv)
    def is_step_complete(self) -> bool:
        return True

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return dict.fromkeys(TASKS, 1)

    @override(CoreEnv)
    def seed(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)

    @override(CoreEnv)
    def get_serializable_components(self) -> dict[str, Any]:
        return {"robot": self.robot, "object": self.object, "target": self.target}

    @override(CoreEnv)
    def get_renderer(self) -> GridRenderer:
        return self.renderer

    @override(CoreEnv)
    def clone_from(self, env: CoreEnv) -> None:
        assert isinstance(env, PickAndPlaceCoreEnv)
        for name in (
            "n_steps",
            "holds_object",
            "robot",
            "object",
            "target",
            "object_orientation",
            "target_orientation",
        ):
            setattr(self, name, getattr(env, name))
        self.rng.bit_generator.state = env.rng.bit_generator.state


class FlatPickAndPlaceCoreEnv(PickAndPlaceCoreEnv):
    """The same robot, controlled by a single policy: in each step it moves or not, and grips or not.

    Opening the gripper on the way drops the object; driving and gripping at the same time does not grip.
    """

    actor_id = CoreEnv.actor_id
    agent_counts_dict = CoreEnv.agent_counts_dict

    @override(PickAndPlaceCoreEnv)
    def step(self, maze_action: dict[str, int]) -> tuple[dict[str, Any], float, bool, dict[Any, Any]]:
        is_gripping = maze_action["orientation"] < self.n_orientations
        is_moving = maze_action["direction"] != NO_MOVE
        used = {"direction": maze_action["direction"]}
        if is_gripping and (is_moving or self.task() in (REACH, MOVE)):
            self.holds_object = False
            self.events.grip_failed()
        elif is_gripping:
            used["orientation"] = maze_action["orientation"]
        return super().step(used)
