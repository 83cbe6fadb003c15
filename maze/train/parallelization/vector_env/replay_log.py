"""Replay log for exact resume: seeds of environments and their actions since the last seeding.

The internal state of an environment cannot be saved without pickling code. It is restored by replaying: with the same
seed and the same actions, a deterministic environment reaches the same state. Seeding takes as long as a few steps;
therefore an environment is seeded before the first episode that starts `RESEED_AFTER` ticks after the last seeding, not
before every episode.
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
"""Number of ticks after which an environment is seeded again before its next episode."""

MAX_TICKS = 100_000
"""Maximum number of ticks since the last seeding (in a long episode) for which an environment can be restored."""

_MIN_DROPPED = 256

Actions = Mapping[str, np.ndarray]
"""Actions of a sub-step by action key, `[n_envs, ...]`; never modified."""

Tick = Actions | tuple[Sequence[StepKeyType], Mapping[StepKeyType, Actions]]
"""Actions if there is a single step key; otherwise the step key of each environment, and actions by step key."""

EpisodeState = dict[str, Any]
"""State of an environment: seed, number of seedings, actions, statistics and digest for the replay, and the learned
statistics of its wrappers (`wrappers`). With a `problem` (the reason), the environment starts a new episode instead."""


def derived_seed(seed: int, n_seedings: int) -> int:
    """Return the seed of the next seeding of an environment.

    :param seed: Seed of the environment.
    :param n_seedings: Number of earlier seedings; the first one uses the seed itself.
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
        """Seed of each environment; `None`: it was not seeded with an integer and cannot be restored."""
        self.n_seedings = [0] * n_envs
        """Number of seedings of each environment derived from its seed."""
        self.statistics: list[list[dict[str, float]]] = [[] for _ in range(n_envs)]
        """Learned statistics of the wrappers of each environment at its last seeding."""
        self._starts = [0] * n_envs
        # Derived seed and tick of each seeding, by environment.
        self._seedings: list[list[tuple[int, int]]] = [[] for _ in range(n_envs)]
        self._earlier: list[EpisodeState | None] = [None] * n_envs
        self._ticks: list[Tick] = []
        self._first_tick = 0
        self._n_ticks = 0
        self._is_recording = False

    def set_seeds(self, seeds: Sequence[Any]) -> None:
        """Record the seeds of all environments."""
        self.seeds = [
            int(seed) if isinstance(seed, int | np.integer) and not isinstance(seed, bool) else None for seed in seeds
        ]
        self.n_seedings = [0] * len(self.seeds)
        self._seedings = [[] for _ in self.seeds]
        self._is_recording = any(seed is not None for seed in self.seeds)

    def append(self, tick: Tick) -> None:
        """Record the actions of a tick."""
        if self._is_recording:
            self._ticks.append(tick)
            self._n_ticks += 1
            if len(self._ticks) > MAX_TICKS + _MIN_DROPPED:
                self._drop_before(self._n_ticks - MAX_TICKS)

    def is_seed_due(self, index: int) -> bool:
        """Return whether an environment has to be seeded before its next episode."""
        return self._n_ticks - self._starts[index] >= RESEED_AFTER and self.seeds[index] is not None

    def next_seed(self, index: int) -> int | None:
        """Record a seeding and return its seed; `None`: the environment has no seed."""
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
        """Return the seed of a recent tick of an environment.

        :param index: Index of the environment.
        :param ticks_ago: 1: the latest tick, 0: the next one.
        :return: `None`: the environment was not seeded with an integer.
        """
        tick = self._n_ticks - ticks_ago
        for seed, first_tick in reversed(self._seedings[index]):
            if first_tick <= tick:
                return Seeding(seed, tick - first_tick)
        return None

    def state(self, index: int) -> EpisodeState:
        """Return the state of an environment, without digest."""
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
        """Drop all ticks, before the environments are restored."""
        self._ticks.clear()
        self._first_tick = self._n_ticks = 0
        self._starts = [0] * len(self._starts)
        self._seedings = [[] for _ in self._starts]
        self._earlier = [None] * len(self._starts)

    def restore(self, index: int, state: EpisodeState) -> None:
        """Record that an environment was restored by replaying this state."""
        self.adopt_seed(index, state)
        self.statistics[index] = state["statistics"]
        self._earlier[index] = state
        self._starts[index] = -len(state["sequence"])
        seed = derived_seed(state["seed"], state["n_seedings"] - 1)
        self._seedings[index] = [(seed, self._starts[index])]

    def adopt_seed(self, index: int, state: EpisodeState) -> None:
        """Continue with the seeds of a state, in another episode."""
        self.seeds[index], self.n_seedings[index] = state["seed"], state["n_seedings"]
        self._is_recording = True

    def _actions(self, index: int, start: int) -> EpisodeState:
        """Return the actions of an environment by step key, and the sequence of step keys."""
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
    """Yield the actions of a state in their order, each with its step key."""
    by_step_key = [
        zip(*by_key.values(), strict=True) if by_key else itertools.repeat(()) for by_key in state["actions"]
    ]
    keys = [list(by_key) for by_key in state["actions"]]
    for turn in state["sequence"].tolist():
        yield state["step_keys"][turn], dict(zip(keys[turn], next(by_step_key[turn]), strict=True))


def digest_of(observation: Mapping[str, Any]) -> str:
    """Return a hash of an observation."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(observation):
        value = np.ascontiguousarray(observation[key])
        digest.update(f"{key}{value.dtype.str}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def begun_anew(state: EpisodeState, reason: str) -> EpisodeState:
    """Return the state of an environment that begins a new episode, not one that it has played before.

    :param state: The state.
    :param reason: Why its episode is not continued.
    """
    kept: dict[str, Any] = {key: state[key] for key in ("seed", "n_seedings", "wrappers") if key in state}
    return {"problem": reason, "begins_anew": True, **kept}


def states_for(state_dict: Mapping[str, Any], n_envs: int) -> list[EpisodeState]:
    """Return one state for each environment.

    :param state_dict: State of a vector environment. If it had another number of environments, all start new episodes,
        additional ones with learned statistics of wrappers in turn.
    :param n_envs: Number of environments.
    """
    states: list[EpisodeState] = list(state_dict["environments"])
    if len(states) == n_envs:
        return states
    reason = f"the interrupted run had {len(states)} environments, this one has {n_envs}"
    learned = [state["wrappers"] for state in states] or [[]]
    kept = [begun_anew(state, reason) for state in states[:n_envs]]
    more = range(len(kept), n_envs)
    return kept + [begun_anew({"wrappers": learned[index % len(learned)]}, reason) for index in more]
