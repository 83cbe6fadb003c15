"""What it takes to bring environments back to where they are: their seeds, and the actions since they were seeded.

The state of an environment cannot be written to a file that runs no code when it is read. It can be played again: an
environment whose seed is known repeats itself under the same actions. Seeding takes as long as a few steps, so it is
not done for every episode, but for the first one that begins `RESEED_AFTER` ticks after the last seeding.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maze.core.env.faults import Seeding
from maze.core.env.structured_env import StepKeyType

RESEED_AFTER = 1000
"""An environment is seeded anew when an episode begins so many ticks after its last seeding."""

MAX_TICKS = 100_000
"""An environment that was not seeded for so long (its episode does not end) is not played again."""

_MIN_DROPPED = 256

Actions = Mapping[str, np.ndarray]
"""Actions of a sub-step by action key, `[n_envs, ...]`; nobody changes them."""

Tick = Actions | tuple[Sequence[StepKeyType], Mapping[StepKeyType, Actions]]
"""Actions where there is a single step key; otherwise the step key of each environment, and actions by step key."""

EpisodeState = dict[str, Any]
"""Where an environment is: seed, number of seedings, and, to be played again, actions, statistics and a digest; besides
what its wrappers have learned (`wrappers`). With a `problem`, which says why, it begins a new episode instead."""


def derived_seed(seed: int, n_seedings: int) -> int:
    """The seed of an environment's next seeding.

    :param seed: The environment's own seed.
    :param n_seedings: How often it was seeded before; the first time it is its own seed.
    """
    if n_seedings == 0:
        return seed
    sequence = np.random.SeedSequence((seed % 2**64, n_seedings))
    return int(sequence.generate_state(1)[0]) >> 1  # 31 bits: every generator takes them


class ReplayLog:
    """Seeds and actions of environments that are stepped together.

    :param n_envs: Number of environments.
    :param only_step_key: The step key where there is only one.
    """

    def __init__(self, n_envs: int, only_step_key: StepKeyType) -> None:
        self._only_step_key = only_step_key
        self.seeds: list[int | None] = [None] * n_envs
        """Own seed of each environment; `None`: it was not seeded with an integer, and cannot be played again."""
        self.n_seedings = [0] * n_envs
        """How often each was seeded from its own seed."""
        self.statistics: list[list[dict[str, float]]] = [[] for _ in range(n_envs)]
        """What the wrappers of each had learned when it was seeded."""
        self._starts = [0] * n_envs
        self._seedings: list[list[tuple[int, int]]] = [[] for _ in range(n_envs)]
        """With what each was seeded, and after how many ticks: one entry for every thousand of them."""
        self._earlier: list[EpisodeState | None] = [None] * n_envs
        self._ticks: list[Tick] = []
        self._first_tick = 0
        self._n_ticks = 0
        self._is_recording = False

    def set_seeds(self, seeds: Sequence[Any]) -> None:
        """The environments have been given these seeds."""
        self.seeds = [
            int(seed) if isinstance(seed, int | np.integer) and not isinstance(seed, bool) else None for seed in seeds
        ]
        self.n_seedings = [0] * len(self.seeds)
        self._seedings = [[] for _ in self.seeds]
        self._is_recording = any(seed is not None for seed in self.seeds)

    def append(self, tick: Tick) -> None:
        """Keeps the actions of a tick."""
        if self._is_recording:
            self._ticks.append(tick)
            self._n_ticks += 1
            if len(self._ticks) > MAX_TICKS + _MIN_DROPPED:
                self._drop_before(self._n_ticks - MAX_TICKS)

    def is_seed_due(self, index: int) -> bool:
        """Whether the environment is to be seeded before its next episode."""
        return self._n_ticks - self._starts[index] >= RESEED_AFTER and self.seeds[index] is not None

    def next_seed(self, index: int) -> int | None:
        """The seed that the environment is seeded with now, where it has one."""
        seed = self.seeds[index]
        if seed is None:
            return None
        number = self.n_seedings[index]
        self.n_seedings[index] += 1
        self._starts[index] = self._n_ticks
        self._earlier[index] = None
        oldest = max(0, min(self._starts))
        if oldest - self._first_tick >= _MIN_DROPPED:
            self._drop_before(oldest)
        derived = derived_seed(seed, number)
        self._seedings[index].append((derived, self._n_ticks))
        return derived

    def seeding_at(self, index: int, ticks_ago: int) -> Seeding | None:
        """The seed that a recent tick of an environment followed from.

        :param index: The environment.
        :param ticks_ago: 1 means the latest tick, 0 what follows it.
        :return: `None` where the environment was not seeded with an integer.
        """
        tick = self._n_ticks - ticks_ago
        for seed, first_tick in reversed(self._seedings[index]):
            if first_tick <= tick:
                return Seeding(seed, tick - first_tick)
        return None

    def state(self, index: int) -> EpisodeState:
        """Where an environment is, without digest."""
        seed = self.seeds[index]
        if seed is None:
            return {"problem": "it was not seeded with an integer"}
        state: EpisodeState = {"seed": seed, "n_seedings": self.n_seedings[index]}
        start = max(0, self._starts[index])
        if start < self._first_tick:
            state["problem"] = f"its episode has more than {MAX_TICKS} steps"
            return state
        return {**state, **self._actions(index, start), "statistics": self.statistics[index]}

    def forget_ticks(self) -> None:
        """Ticks are counted from here: the environments are about to be brought somewhere else."""
        self._ticks.clear()
        self._first_tick = self._n_ticks = 0
        self._starts = [0] * len(self._starts)
        self._seedings = [[] for _ in self._starts]
        self._earlier = [None] * len(self._starts)

    def restore(self, index: int, state: EpisodeState) -> None:
        """The environment has been played again from this state."""
        self.adopt_seed(index, state)
        self.statistics[index] = state["statistics"]
        self._earlier[index] = state
        self._starts[index] = -len(state["sequence"])
        seed = derived_seed(state["seed"], state["n_seedings"] - 1)
        self._seedings[index] = [(seed, self._starts[index])]

    def adopt_seed(self, index: int, state: EpisodeState) -> None:
        """Goes on with the seeds of a state; the episode is another one."""
        self.seeds[index], self.n_seedings[index] = state["seed"], state["n_seedings"]
        self._is_recording = True

    def _actions(self, index: int, start: int) -> EpisodeState:
        """The actions of an environment: which step key had which turn, and by step key what was done."""
        earlier = self._earlier[index]
        step_keys: list[StepKeyType] = []
        actions: list[dict[str, list[np.ndarray]]] = []
        sequence: list[int] = []
        if earlier is not None:
            step_keys += earlier["step_keys"]
            actions += [{key: list(rows) for key, rows in by_key.items()} for by_key in earlier["actions"]]
            sequence += earlier["sequence"].tolist()
        for tick in self._ticks[start - self._first_tick :]:
            step_key, columns = self._only_step_key, tick
            if isinstance(tick, tuple):
                step_key = tick[0][index]
                columns = tick[1][step_key]
            assert isinstance(columns, Mapping)
            if step_key not in step_keys:
                step_keys.append(step_key)
                actions.append({key: [] for key in columns})
            turn = step_keys.index(step_key)
            sequence.append(turn)
            for key, column in columns.items():
                actions[turn][key].append(column[index])
        return {
            "step_keys": step_keys,
            "sequence": np.array(sequence, np.int16),
            "actions": [{key: np.stack(rows) for key, rows in by_key.items()} for by_key in actions],
        }

    def _drop_before(self, tick: int) -> None:
        del self._ticks[: tick - self._first_tick]
        self._first_tick = tick


def replayed_actions(state: EpisodeState) -> Iterator[tuple[StepKeyType, dict[str, Any]]]:
    """The actions of a state in their order, each with its step key."""
    by_step_key = [
        zip(*by_key.values(), strict=True) if by_key else itertools.repeat(()) for by_key in state["actions"]
    ]
    keys = [list(by_key) for by_key in state["actions"]]
    for turn in state["sequence"].tolist():
        yield state["step_keys"][turn], dict(zip(keys[turn], next(by_step_key[turn]), strict=True))


def digest_of(observation: Mapping[str, Any]) -> str:
    """Tells observations apart, bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(observation):
        value = np.ascontiguousarray(observation[key])
        digest.update(f"{key}{value.dtype.str}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def states_for(state_dict: Mapping[str, Any], n_envs: int) -> list[EpisodeState]:
    """The states of as many environments as there are.

    :param state_dict: State of a vector environment. Where it had another number of environments, they begin new
        episodes, and what wrappers have learned is shared out by turns.
    :param n_envs: Number of environments.
    """
    states: list[EpisodeState] = list(state_dict["environments"])
    if len(states) == n_envs:
        return states
    reason = f"the training had {len(states)} environments, now there are {n_envs}"
    learned = [state["wrappers"] for state in states] or [[]]
    return [{"problem": reason, "wrappers": learned[index % len(learned)]} for index in range(n_envs)]
