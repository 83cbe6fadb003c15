"""Environments whose every observation, reward and episode end is known beforehand."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.structured_env import ActorID


class PassOn(ActionConversionInterface):
    def __init__(self, space: spaces.Dict) -> None:
        self._space = space

    def space_to_maze(self, action: Any, maze_state: Any) -> Any:
        return action

    def maze_to_space(self, maze_action: Any) -> Any:
        return maze_action

    def space(self) -> spaces.Dict:
        return self._space


class Observe(ObservationConversionInterface):
    """Takes the state's entries of the space; scalars become arrays."""

    def __init__(self, space: spaces.Dict) -> None:
        self._space = space

    def maze_to_space(self, maze_state: Any) -> Any:
        return {key: np.asarray(maze_state[key], sub.dtype) for key, sub in self._space.items()}

    def space(self) -> spaces.Dict:
        return self._space


class ToyCoreEnv(CoreEnv):
    """A state dictionary, an actor, and random numbers of its own."""

    step_keys: tuple[Any, ...] = (0,)

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.actor = ActorID(self.step_keys[0], 0)
        self.is_over = True

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def actor_id(self) -> ActorID:
        return self.actor

    @property
    def agent_counts_dict(self) -> dict[Any, int]:
        return dict.fromkeys(self.step_keys, 1)


class CountingCoreEnv(ToyCoreEnv):
    """Observes the step number and the episode number; the reward of step t is t.

    :param endings: Length and way of ending of the episodes, over and over.
    :param fault: What goes wrong, and in which step of the first episode.
    """

    def __init__(self, endings: tuple[tuple[int, str], ...], fault: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.endings = endings
        self.fault = fault
        self.episode = -1
        self.received: list[int] = []

    def reset(self) -> Any:
        self.episode += 1
        self.time = 0
        self.is_over = False
        if self.fault == ("reset", self.episode):
            raise ValueError("the reset went wrong")
        return self.get_maze_state()

    def step(self, maze_action: Any) -> Any:
        assert not self.is_over, "an action was given to a finished episode"
        self.received.append(int(maze_action["move"]))
        self.time += 1
        reward = float(self.time)
        if self.fault is not None and self.fault[1] == self.time and self.episode == 0:
            cause_fault(self.fault[0])
            if self.fault[0] == "nan":
                reward = float("nan")
        length, way = self.endings[self.episode % len(self.endings)]
        self.is_over = self.time == length
        info = {"TimeLimit.truncated": True} if self.is_over and way == "truncated" else {}
        if self.is_over and way == "both":  # an environment that reports termination and denies truncation
            info = {"TimeLimit.truncated": False}
        return self.get_maze_state(), reward, self.is_over, info

    def get_maze_state(self) -> Any:
        return {"count": [self.time, self.episode], "flag": self.time % 2}


class UnpicklableError(RuntimeError):
    def __init__(self, resource: Any, text: str) -> None:
        super().__init__(text)
        self.resource = resource


def cause_fault(name: str) -> None:
    if name == "raise":
        raise ValueError("the simulator lost its marbles")
    if name == "unpicklable":
        raise UnpicklableError(lambda: None, "with a lambda inside")
    if name == "exit":
        sys.exit(3)
    if name == "hard_exit":
        os._exit(4)
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hang":
        time.sleep(60)


def counting_env(endings: tuple[tuple[int, str], ...] = ((3, "terminated"),), fault: Any = None) -> MazeEnv[Any]:
    observation = spaces.Dict({"count": spaces.Box(0, 1000, (2,), np.float32), "flag": spaces.Discrete(2)})
    action = spaces.Dict({"move": spaces.Discrete(5)})
    return MazeEnv(CountingCoreEnv(endings, fault), {0: PassOn(action)}, {0: Observe(observation)})


class SlowThirdCoreEnv(CountingCoreEnv):
    """Observes its seed and the step number; with the seed 3, a step takes its time."""

    def __init__(self) -> None:
        super().__init__(((100_000, "terminated"),))

    def seed(self, seed: int) -> None:
        self.number = seed

    def step(self, maze_action: Any) -> Any:
        time.sleep(0.02 if self.number == 3 else 0)
        return super().step(maze_action)

    def get_maze_state(self) -> Any:
        return {"count": [self.number, self.time]}


def slow_third_env() -> MazeEnv[Any]:
    observation = spaces.Dict({"count": spaces.Box(0, 100_000, (2,), np.float32)})
    return MazeEnv(
        SlowThirdCoreEnv(), {0: PassOn(spaces.Dict({"move": spaces.Discrete(5)}))}, {0: Observe(observation)}
    )


class RandomWalkCoreEnv(ToyCoreEnv):
    """Continuous observations and actions; the noise comes from the seeded generator."""

    def reset(self) -> Any:
        self.position = self.rng.normal(size=3)
        return self.get_maze_state()

    def step(self, maze_action: Any) -> Any:
        self.position = self.position + 0.1 * maze_action["push"] + self.rng.normal(size=3)
        done = bool(self.rng.random() < 0.2)
        info = {"TimeLimit.truncated": True} if done and self.rng.random() < 0.5 else {"noise": self.position[0]}
        return self.get_maze_state(), float(self.position.sum()), done, info

    def get_maze_state(self) -> Any:
        return {"position": self.position}


def random_walk_env() -> MazeEnv[Any]:
    observation = spaces.Dict({"position": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
    action = spaces.Dict({"push": spaces.Box(-1, 1, (3,), np.float32)})
    return MazeEnv(RandomWalkCoreEnv(), {0: PassOn(action)}, {0: Observe(observation)})


class TwoStepCoreEnv(ToyCoreEnv):
    """Choose, then cut: two sub-steps make a step, whose reward comes with the second.

    :param length: Steps of an episode.
    :param breaks_at: Step in whose first sub-step an episode is cut off instead; None: never.
    """

    step_keys = ("choose", "cut")

    def __init__(self, length: int, breaks_at: int | None = None) -> None:
        super().__init__()
        self.length = length
        self.breaks_at = breaks_at

    def reset(self) -> Any:
        self.time = 0
        self.choice = 0
        self.actor = ActorID("choose", 0)
        return self.get_maze_state()

    def step(self, maze_action: Any) -> Any:
        if self.actor.step_key == "choose":
            self.choice = int(maze_action["item"])
            self.actor = ActorID("cut", 0)
            done = self.time == self.breaks_at
            return self.get_maze_state(), 0.0, done, {"TimeLimit.truncated": True} if done else {}
        self.actor = ActorID("choose", 0)
        self.time += 1
        return self.get_maze_state(), float(10 * self.time + self.choice), self.time == self.length, {}

    def get_maze_state(self) -> Any:
        return {"time": [self.time], "choice": [self.time, self.choice]}

    def get_actor_rewards(self) -> np.ndarray:
        return np.array([self.choice, 10.0 * self.time])


def two_step_env(length: int = 3, breaks_at: int | None = None) -> MazeEnv[Any]:
    return MazeEnv(
        TwoStepCoreEnv(length, breaks_at),
        {
            "choose": PassOn(spaces.Dict({"item": spaces.Discrete(4)})),
            "cut": PassOn(spaces.Dict({"where": spaces.Box(0, 1, (2,), np.float32)})),
        },
        {
            "choose": Observe(spaces.Dict({"time": spaces.Box(0, 100, (1,), np.float32)})),
            "cut": Observe(spaces.Dict({"choice": spaces.Box(0, 100, (2,), np.float32)})),
        },
    )


class HierarchicalCoreEnv(ToyCoreEnv):
    """Picks the sub-policy that acts next from its (random) state; every action is a step."""

    step_keys = ("walk", "grasp")

    def is_step_complete(self) -> bool:
        return True

    def reset(self) -> Any:
        self.time = 0
        return self._move_on()

    def step(self, maze_action: Any) -> Any:
        assert ("direction" in maze_action) == (self.actor.step_key == "walk")
        self.time += 1
        done = bool(self.rng.random() < 0.1)
        reward = float(self.value)
        state = self._move_on()
        return state, reward, done, {"TimeLimit.truncated": True} if done and self.value < 0.5 else {}

    def _move_on(self) -> Any:
        self.value = self.rng.random()
        self.actor = ActorID("walk" if self.value < 0.6 else "grasp", 0)
        return self.get_maze_state()

    def get_maze_state(self) -> Any:
        return {"position": [self.time, self.value], "pressure": [self.value] * 3}


def hierarchical_env() -> MazeEnv[Any]:
    return MazeEnv(
        HierarchicalCoreEnv(),
        {
            "walk": PassOn(spaces.Dict({"direction": spaces.Discrete(4)})),
            "grasp": PassOn(spaces.Dict({"force": spaces.Box(-1, 1, (2,), np.float32)})),
        },
        {
            "walk": Observe(spaces.Dict({"position": spaces.Box(0, 100, (2,), np.float32)})),
            "grasp": Observe(spaces.Dict({"pressure": spaces.Box(0, 1, (3,), np.float32)})),
        },
    )


class ComingAndGoingCoreEnv(ToyCoreEnv):
    """Agents join and leave; in every step each of those present acts once."""

    step_keys = ("agent",)

    @property
    def agent_counts_dict(self) -> dict[Any, int]:
        return {"agent": -1}

    def is_step_complete(self) -> bool:
        return self.position == 0

    def reset(self) -> Any:
        self.time = 0
        self.present = [0, 1]
        self.position = 0
        self.actor = ActorID("agent", 0)
        return self.get_maze_state()

    def step(self, maze_action: Any) -> Any:
        self.acted = getattr(self, "acted", []) if self.position else []
        self.acted.append(self.present[self.position])
        self.position = (self.position + 1) % len(self.present)
        done = False
        reward = 0.0
        if self.position == 0:
            self.time += 1
            reward = float(len(self.present))
            done = self.time == 5
            self.present = sorted(self.rng.choice(4, size=int(self.rng.integers(1, 5)), replace=False).tolist())
        self.actor = ActorID("agent", self.present[self.position])
        return self.get_maze_state(), reward, done, {}

    def get_maze_state(self) -> Any:
        return {"self": [self.time, self.actor.agent_id]}

    def get_actor_rewards(self) -> np.ndarray:
        return np.array(self.acted, np.float32)


def coming_and_going_env() -> MazeEnv[Any]:
    return MazeEnv(
        ComingAndGoingCoreEnv(),
        {"agent": PassOn(spaces.Dict({"signal": spaces.Discrete(2)}))},
        {"agent": Observe(spaces.Dict({"self": spaces.Box(0, 100, (2,), np.float32)}))},
    )


def sampled_actions(env: Any, rng: np.random.Generator) -> dict[Any, dict[str, np.ndarray]]:
    """Random actions by sub-step key, for all environments of a vector environment."""
    actions: dict[Any, dict[str, np.ndarray]] = {}
    for step_key, space in env.action_spaces_dict.items():
        actions[step_key] = {}
        for key, sub in space.items():
            if isinstance(sub, spaces.Discrete):
                actions[step_key][key] = rng.integers(0, sub.n, env.n_envs)
            else:
                actions[step_key][key] = rng.uniform(-1, 1, (env.n_envs, *sub.shape)).astype(sub.dtype)
    return actions
