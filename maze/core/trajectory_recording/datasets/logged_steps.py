"""Logged decisions as columns: one source for estimates and for offline training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.base_env import is_truncated
from maze.core.env.space_values import rows_outside
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.records.spaces_record import ACTED_BY, PROPENSITY, SpacesRecord

Array = np.ndarray[Any, Any]
_HINT = "Was it recorded in another environment, or with other wrappers?"


@dataclass
class SubstepTable:
    """Observations and actions of the decisions of one sub-step key.

    :param observations: `[n_rows, *shape]` by key, action masks included. Rows beyond those of the actions are
        observations after the last decision of truncated episodes.
    :param actions: `[n_actions, *shape]` by action head.
    """

    observations: dict[str, Array]
    actions: dict[str, Array]

    @property
    def n_actions(self) -> int:
        """Number of decisions."""
        return len(next(iter(self.actions.values())))


@dataclass
class LoggedSteps:
    """Decisions of complete episodes in the order in which they were taken.

    Sub-steps of an environment step are decisions of their own. All arrays but `episode_starts` are `[n_decisions]`.

    :param tables: Observations and actions by step key.
    :param step_keys: Step key of each decision.
    :param agent_ids: Acting agent.
    :param rows: Row of each decision in the table of its step key.
    :param next_rows: Row of the observation that follows, in the table of `next_step_keys`; -1: the episode
        terminated, or no observation of its first actor was recorded after its end.
    :param next_step_keys: Step key of what follows; that of the decision itself where nothing follows.
    :param steps: Number of the environment step in its episode.
    :param rewards: Reward between this decision and the next one.
    :param terminated: The episode ended by its own rules.
    :param truncated: The episode was truncated.
    :param propensities: Probability (density) of the action under the policy that acted, NaN where unknown.
    :param episode_starts: First decision of each episode, and the number of decisions at the end, `[n_episodes + 1]`.
    :param acted_by: Name of the policy that acted in each episode, where the log has it.
    """

    tables: dict[StepKeyType, SubstepTable]
    step_keys: list[StepKeyType]
    agent_ids: Array
    rows: Array
    next_rows: Array
    next_step_keys: list[StepKeyType]
    steps: Array
    rewards: Array
    terminated: Array
    truncated: Array
    propensities: Array
    episode_starts: Array
    acted_by: list[str] = field(default_factory=list)
    _positions: dict[StepKeyType, Array] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def n_episodes(self) -> int:
        """Number of episodes."""
        return len(self.episode_starts) - 1

    @property
    def lengths(self) -> Array:
        """Number of decisions of each episode, `[n_episodes]`."""
        return np.diff(self.episode_starts)

    def positions(self, step_key: StepKeyType) -> Array:
        """Return the indices of the decisions of a step key, in the order of its table's rows.

        :param step_key: The step key.
        :return: `[n_actions]`; empty for an unknown step key.
        """
        if step_key not in self._positions:
            found = np.array([index for index, key in enumerate(self.step_keys) if key == step_key], np.int64)
            self._positions[step_key] = found[np.argsort(self.rows[found], kind="stable")]
        return self._positions[step_key]

    @property
    def has_target(self) -> Array:
        """Whether the successor of a decision is known, `[n_decisions]`: not where an episode was truncated without a
        recorded observation after it."""
        return np.asarray(self.terminated | (self.next_rows >= 0))

    def followed_by(self, step_key: StepKeyType) -> Array:
        """Return the indices of the decisions that an observation of a step key follows, in ascending order.

        :param step_key: Step key of the observation. Decisions without a recorded successor are left out.
        :return: `[n]`.
        """
        is_key = np.fromiter((key == step_key for key in self.next_step_keys), np.bool_, len(self))
        return np.flatnonzero(is_key & (self.next_rows >= 0))

    def ended_by_truncations(self) -> LoggedSteps:
        """Return the log with truncated episodes as terminated ones."""
        ended, next_rows = self.terminated | self.truncated, np.where(self.truncated, -1, self.next_rows)
        return replace(self, terminated=ended, truncated=np.zeros_like(ended), next_rows=next_rows)

    def discounts(self, gamma: float) -> Array:
        """Discount from each decision to what follows it: `gamma` where an environment step ends, 1 between sub-steps.

        :param gamma: Discount per environment step, in [0, 1].
        :return: `[n_decisions]`; 0 where the episode terminated.
        """
        return np.where(self.terminated, 0.0, np.where(self._ends_step, gamma, 1.0))

    def returns(self, gamma: float = 1.0) -> Array:
        """Return the discounted sum of the rewards of each episode, `[n_episodes]`.

        :param gamma: Discount per environment step, in [0, 1].
        """
        return np.add.reduceat(self.rewards * gamma**self.steps, self.episode_starts[:-1])

    def largest_return(self, gamma: float) -> float:
        """Return a bound of the absolute value of discounted returns of any length with rewards as in the log.

        :param gamma: Discount per environment step, in [0, 1].
        :return: The largest sum of absolute rewards of an environment step, divided by `1 - gamma`; infinite for 1.
        """
        totals = np.cumsum(np.abs(self.rewards))[self._ends_step]
        return float(np.diff(totals, prepend=0.0).max()) / (1.0 - gamma) if gamma < 1.0 else np.inf

    def padded(self, values: Array, fill: float) -> Array:
        """Return values of decisions by episode.

        :param values: `[n_decisions]`.
        :param fill: Value after the end of shorter episodes.
        :return: `[n_episodes, longest]`.
        """
        lengths = self.lengths
        arranged = np.full((self.n_episodes, int(lengths.max())), fill, np.result_type(values, type(fill)))
        arranged[np.arange(arranged.shape[1]) < lengths[:, None]] = values
        return arranged

    def require_spaces(
        self, observation_spaces: Mapping[StepKeyType, spaces.Dict], action_spaces: Mapping[StepKeyType, spaces.Dict]
    ) -> None:
        """Refuse logs of another environment, or of other wrappers, and probabilities above 1.

        Bounds of boxes are not compared.

        :param observation_spaces: Observation spaces by step key.
        :param action_spaces: Action spaces by step key.
        :raises ConfigError: Names the sub-step and the entry that does not fit, or the decision with that probability.
        """
        for key, table in self.tables.items():
            if key not in action_spaces:
                raise ConfigError(f"Logged data: sub-step {key!r} is unknown; there are {list(action_spaces)}. {_HINT}")
            fields = (("observation", table.observations, observation_spaces), ("action", table.actions, action_spaces))
            for kind, columns, spaces_dict in fields:
                space = spaces_dict[key].spaces
                if set(columns) != set(space):
                    raise ConfigError(
                        f"Logged data, sub-step {key!r}: expected the {kind} entries {sorted(space)}, found "
                        f"{sorted(columns)}. {_HINT}"
                    )
                for name, values in columns.items():
                    if problem := _column_problem(values, space[name]):
                        raise ConfigError(f"Logged data, sub-step {key!r}, {kind} `{name}`: {problem}. {_HINT}")
            if any(isinstance(part, spaces.Box) for part in action_spaces[key].spaces.values()):
                continue  # a density
            positions = self.positions(key)
            for decision in positions[self.propensities[positions] > 1.0 + 1e-6][:1]:
                episode = int(np.searchsorted(self.episode_starts, decision, "right")) - 1
                raise ConfigError(
                    f"Logged data, episode {episode}, decision {decision - self.episode_starts[episode]}: expected a "
                    f"probability of at most 1, found {self.propensities[decision]:g}."
                )

    @property
    def _ends_step(self) -> Array:
        """Whether a decision is the last one of its environment step, `[n_decisions]`."""
        episodes = np.repeat(np.arange(self.n_episodes), self.lengths)
        return np.append((np.diff(self.steps) != 0) | (np.diff(episodes) != 0), True)

    @classmethod
    def of_dataset(cls, dataset: InMemoryDataset) -> LoggedSteps:
        """Return decisions of recorded trajectories, Minari data sets and the other sources of a data set.

        :param dataset: Its steps need rewards and done flags; `info["propensity"]` is read where there is one.
        :raises ConfigError: A step has no reward, or there are no steps.
        """
        return cls.of_episodes(
            episode for indices in dataset.trajectory_references for episode in _split(dataset, indices)
        )

    @classmethod
    def of_episodes(cls, episodes: Iterable[Sequence[tuple[int, SpacesRecord]]]) -> LoggedSteps:
        """Return decisions from records of sub-steps.

        :param episodes: For each episode, in their order, the number of the environment step and the record of each
            sub-step.
        :raises ConfigError: A record has no observation, action or reward, or there are none.
        """
        builder = _Builder()
        for episode in episodes:
            builder.add(episode)
        return builder.build()


def _split(dataset: InMemoryDataset, indices: Iterable[int]) -> Iterable[list[tuple[int, SpacesRecord]]]:
    """Yield the episodes of a trajectory; it holds several where the recording went on after an end."""
    episode: list[tuple[int, SpacesRecord]] = []
    for index in indices:
        records = dataset.step_records[index].substep_records
        episode += [(index, record) for record in records]
        if records[-1].done:
            yield episode
            episode = []
    if episode:
        yield episode


class _Builder:
    """Collect records and stack them once."""

    def __init__(self) -> None:
        self._observations: dict[StepKeyType, list[Mapping[str, Any]]] = {}
        self._actions: dict[StepKeyType, list[Mapping[str, Any]]] = {}
        self._closing: dict[StepKeyType, list[tuple[int, Mapping[str, Any]]]] = {}
        self._decisions: list[tuple[StepKeyType, int, int, int, float, bool, bool, float]] = []
        self._starts = [0]
        self._acted_by: list[str] = []

    def add(self, episode: Sequence[tuple[int, SpacesRecord]]) -> None:
        first_step, truncated = episode[0][0], False
        names: dict[str, None] = {}
        for position, (step, record) in enumerate(episode):
            place = f"episode {len(self._starts) - 1}, decision {position}"
            reward = np.nan if record.reward is None else float(record.reward)
            if record.observation is None or record.action is None or not np.isfinite(reward):
                raise ConfigError(
                    f"Logged data, {place}: expected an observation, an action and a finite reward of actor "
                    f"{tuple(record.actor_id)}, found the reward {record.reward}. Record episodes with "
                    f"`runner.record_trajectory=true`, or report the outcomes of a server's decisions."
                )
            key, info = record.actor_id.step_key, record.info if isinstance(record.info, Mapping) else {}
            names[str(info.get(ACTED_BY, ""))] = None
            actions = self._actions.setdefault(key, [])
            self._observations.setdefault(key, []).append(record.observation)
            is_last = position == len(episode) - 1
            truncated = is_last and (not record.done or is_truncated(bool(record.done), info))
            propensity = float(info.get(PROPENSITY, np.nan))
            if not np.isnan(propensity) and propensity <= 0:
                raise ConfigError(
                    f"Logged data, {place}: expected the probability of the taken action to be positive, found "
                    f"{propensity}."
                )
            row, agent = len(actions), record.actor_id.agent_id
            ended = is_last and not truncated
            self._decisions.append((key, agent, row, step - first_step, reward, ended, truncated, propensity))
            actions.append(record.action)
        if truncated and (following := _first_observation_after(episode)) is not None:
            first_key = episode[0][1].actor_id.step_key
            self._closing.setdefault(first_key, []).append((len(self._decisions) - 1, following))
        self._starts.append(len(self._decisions))
        self._acted_by.append(" and ".join(names))

    def build(self) -> LoggedSteps:
        if not self._decisions:
            raise ConfigError("Logged data: found no decision. Expected at least one episode with one step.")
        keys, agents, rows, steps, rewards, terminated, truncated, propensities = zip(*self._decisions, strict=True)
        next_rows = np.append(np.array(rows[1:], np.int64), -1)
        next_keys = [*keys[1:], keys[-1]]
        for last in np.array(self._starts[1:]) - 1:
            next_rows[last], next_keys[last] = -1, keys[last]
        tables = {}
        for key, observations in self._observations.items():
            closing = self._closing.get(key, [])
            for offset, (decision, _) in enumerate(closing):
                next_rows[decision], next_keys[decision] = len(observations) + offset, key
            stacked = [*observations, *(observation for _, observation in closing)]
            tables[key] = SubstepTable(_stacked(stacked, key), _stacked(self._actions[key], key))
        actors = np.array(agents), np.array(rows), next_rows, next_keys
        ends = np.array(terminated), np.array(truncated), np.array(propensities)
        starts = np.array(self._starts)
        return LoggedSteps(
            tables, list(keys), *actors, np.array(steps), np.array(rewards), *ends, starts, self._acted_by
        )


def _first_observation_after(episode: Sequence[tuple[int, SpacesRecord]]) -> Mapping[str, Any] | None:
    """Return the observation of the first actor after the last step of an episode.

    Records do not name the observing actor. `None`: no observation was recorded, or it is that of another actor: the
    episode was truncated between sub-steps, other actors acted in the last step, or the entries differ.
    """
    ends = (episode[0][0], episode[-1][0])
    acted = [[record.actor_id for number, record in episode if number == step] for step in ends]
    first, last = (
        {key: np.shape(value) for key, value in (seen or {}).items()}
        for seen in (episode[0][1].observation, episode[-1][1].next_observation)
    )
    return episode[-1][1].next_observation if acted[0] == acted[1] and first == last else None


def _stacked(entries: Sequence[Mapping[str, Any]], key: StepKeyType) -> dict[str, Array]:
    try:
        return {name: np.stack([np.asarray(entry[name]) for entry in entries]) for name in entries[0]}
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"Logged data, sub-step {key!r}: expected the same entries with the same shapes in all decisions "
            f"({error}). The log seems to hold decisions of several environments."
        ) from error


def _column_problem(values: Array, space: spaces.Space[Any]) -> str:
    """Return what does not fit; empty: all values are of the space, apart from the bounds of boxes."""
    if values.shape[1:] != space.shape:
        return f"expected values of shape {space.shape}, found {values.shape[1:]}"
    outside = rows_outside(values, space)
    if not outside.any():
        return ""
    row = int(outside.argmax())
    expected = "finite values" if isinstance(space, spaces.Box) else f"values of {space}"
    return f"expected {expected}, found {values[row]} in row {row}"
