"""An environment that does everything wrong that an environment can do wrong, one thing at a time."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.structured_env import ActorID
from maze.core.rendering.renderer import Renderer

EPISODE_LENGTH = 30
AT_STEP = 12
"""The step of an episode at which something happens: later than what is checked on the first steps only."""


class OddError(Exception):
    """Cannot be made of its arguments again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lambda")
        self.held = lambda: None


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _raise(error: BaseException) -> Any:
    raise error


def _hang() -> None:
    while True:
        time.sleep(0.01)


def _close_console() -> None:
    print("something", flush=True)


def _hang_in_native_code() -> None:
    """Does not come back to where Python handles signals."""
    sum(itertools.repeat(0))


IN_STEP: dict[str, Callable[[], Any]] = {
    "raise in step": lambda: _raise(RuntimeError("lost its marbles")),
    "out of memory": lambda: _raise(MemoryError()),
    "recursion": lambda: _raise(RecursionError("maximum recursion depth exceeded")),
    "generator exit": lambda: _raise(GeneratorExit()),
    "stop iteration": lambda: _raise(StopIteration(3)),
    "assertion": lambda: _raise(AssertionError()),
    "warning as error": lambda: _raise(DeprecationWarning("use something else")),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "odd exception": lambda: _raise(OddError(1, 2)),
    "unpicklable exception": lambda: _raise(UnpicklableError()),
    "silent exception": lambda: _raise(SilentError()),
    "exit": lambda: _raise(SystemExit(3)),
    "hard exit": lambda: os._exit(4),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": _hang,
    "native hang": _hang_in_native_code,
    "warn": lambda: warnings.warn("something is odd", UserWarning, stacklevel=1),
    "print": _close_console,
}
REWARDS: dict[str, Any] = {
    "reward nan": float("nan"),
    "reward inf": float("inf"),
    "reward none": None,
    "reward text": "much",
    "reward digits": "3",
    "reward array": np.zeros(2),
}
OBSERVATIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "observation nan": lambda seen: {**seen, "position": np.array([0.5, np.nan, 0.5], np.float32)},
    "observation inf": lambda seen: {**seen, "position": np.array([0.5, 0.5, np.inf], np.float32)},
    "observation value none": lambda seen: {**seen, "position": None},
    "observation none": lambda seen: None,
    "observation list": lambda seen: list(seen.values()),
    "observation shape": lambda seen: {**seen, "position": np.zeros(5, np.float32)},
    "observation text": lambda seen: {**seen, "position": np.array(["a", "b", "c"])},
    "observation outside": lambda seen: {**seen, "position": np.full(3, 7.0, np.float32)},
    "missing key": lambda seen: {"mask": seen["mask"]},
    "other key": lambda seen: {"mask": seen["mask"], "place": seen["position"]},
    "empty mask": lambda seen: {**seen, "mask": np.zeros(2, np.float32)},
}


class Blank(Renderer):
    def render(self, maze_state: Any, maze_action: Any, events: Any, **kwargs: Any) -> None:
        return None


class FaultyCoreEnv(CoreEnv):
    """Counts steps, and does something wrong.

    :param fault: What.
    :param at: The step of an episode at which it happens.
    """

    n_made = 0

    def __init__(self, fault: str, at: int) -> None:
        super().__init__()
        self.fault, self.at = fault, at
        self.n_steps = self.n_resets = 0
        self.rng = np.random.default_rng(0)
        type(self).n_made += 1
        is_first = self.n_made == 1 and multiprocessing.parent_process() is None
        if fault == "raise in factory" and not is_first:
            raise RuntimeError("lost its marbles")
        self.size = 4 if fault == "changing spaces" and not is_first else 3

    def is_due(self, fault: str) -> bool:
        return self.fault == fault and self.n_steps == self.at

    def step(self, maze_action: int) -> Any:
        self.n_steps += 1
        if self.n_steps == self.at and self.fault in IN_STEP:
            IN_STEP[self.fault]()
        reward: Any = float(maze_action)
        if self.n_steps == self.at:
            reward = REWARDS.get(self.fault, reward)
        done: Any = self.n_steps >= EPISODE_LENGTH and self.fault != "never done"
        state, info = self.get_maze_state(), {}
        if self.is_due("three values"):
            return state, reward, done
        if self.is_due("info none"):
            return state, reward, True, None
        return state, reward, done, info

    def get_maze_state(self) -> Any:
        return self.rng.random(self.size).astype(np.float32)

    def reset(self) -> Any:
        self.n_resets += 1
        self.n_steps = 0
        if self.fault == "raise in reset" and self.n_resets > 1:
            raise RuntimeError("lost its marbles")
        if self.fault == "hang in reset" and self.n_resets > 1:
            _hang()
        return self.get_maze_state()

    def seed(self, seed: Any) -> None:
        if self.fault == "raise in seed":
            raise RuntimeError("lost its marbles")
        self.rng = np.random.default_rng(seed)

    def close(self) -> None:
        if self.fault == "raise in close":
            raise RuntimeError("lost its marbles")
        if self.fault == "exit in close":
            raise SystemExit(1)

    def actor_id(self) -> ActorID:
        if self.is_due("raise in actor_id"):
            raise RuntimeError("lost its marbles")
        return ActorID("unknown" if self.is_due("wrong actor") else 0, 0)

    def is_actor_done(self) -> bool:
        return False

    @property
    def agent_counts_dict(self) -> dict[Any, int]:
        return {0: 1}

    def get_actor_rewards(self) -> None:
        return None

    def get_renderer(self) -> Renderer:
        if self.fault == "raise in render":
            raise RuntimeError("lost its marbles")
        return Blank()

    def get_serializable_components(self) -> dict[str, Any]:
        return {}


class FaultyObservation(ObservationConversionInterface):
    def __init__(self, env: FaultyCoreEnv) -> None:
        self.env = env

    def maze_to_space(self, maze_state: Any) -> Any:
        seen = {"position": maze_state, "mask": np.ones(2, np.float32)}
        if self.env.is_due("raise in observation conversion"):
            raise RuntimeError("lost its marbles")
        if self.env.n_steps == self.env.at and self.env.fault in OBSERVATIONS:
            return OBSERVATIONS[self.env.fault](seen)
        return seen

    def space_to_maze(self, observation: Any) -> Any:
        raise NotImplementedError

    def space(self) -> spaces.Dict:
        shapes = {"position": (self.env.size,), "mask": (2,)}
        return spaces.Dict({key: spaces.Box(0.0, 1.0, shape, np.float32) for key, shape in shapes.items()})


class FaultyAction(ActionConversionInterface):
    def __init__(self, env: FaultyCoreEnv) -> None:
        self.env = env

    def space_to_maze(self, action: Any, maze_state: Any) -> int:
        if self.env.n_steps == self.env.at and self.env.fault == "raise in action conversion":
            raise RuntimeError("lost its marbles")
        return int(action["move"])

    def maze_to_space(self, maze_action: Any) -> Any:
        raise NotImplementedError

    def space(self) -> spaces.Dict:
        return spaces.Dict({"move": spaces.Discrete(2)})


class FaultyEnv(MazeEnv[FaultyCoreEnv]):
    """See the module.

    :param fault: What goes wrong.
    :param at: The step of an episode at which it happens.
    """

    def __init__(self, fault: str, at: int = AT_STEP) -> None:
        core_env = FaultyCoreEnv(fault, at)
        super().__init__(core_env, {0: FaultyAction(core_env)}, {0: FaultyObservation(core_env)})
