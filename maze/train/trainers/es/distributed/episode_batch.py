"""Playing episodes of differently perturbed policies, a step of each at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.train.parallelization.vector_env.space_arrays import array_specs, check_observation, zeros
from maze.train.trainers.es.distributed.population import Population
from maze.train.trainers.es.distributed.rollout_schedule import Episode, Outcome
from maze.train.trainers.es.es_utils import get_flat_parameters, set_flat_parameters

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.structured_env import ActorID
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable

MAX_ENVS = 64
"""How many environments one process steps together where nothing else is said."""


class EpisodePlayer:
    """What all ways of playing episodes have in common.

    :param policy: The policy.
    :param shared_noise: The noise table.
    """

    n_free: int
    """Number of episodes that can be started."""

    def __init__(self, policy: Any, shared_noise: SharedNoiseTable) -> None:
        self.policy = policy
        self.shared_noise = shared_noise
        self.current_env = 0
        """The environment at work when an exception left this object."""
        self._noise_stddev = 0.0
        self._max_steps: int | None = None

    def configure(self, parameters: np.ndarray, noise_stddev: float, max_steps: int | None) -> None:
        """Prepares for an update; episodes that are still being played are forgotten.

        :param parameters: Parameters of the policy.
        :param noise_stddev: Standard deviation of the perturbations.
        :param max_steps: Episodes are cut off after this number of environment steps; ``None``: never.
        """
        self._parameters = parameters
        self._noise_stddev = noise_stddev
        self._max_steps = max_steps

    def start(self, episode: Episode) -> None:
        """Begins an episode."""
        raise NotImplementedError

    def advance(self) -> list[tuple[Episode, Outcome]]:
        """Goes on with all episodes that have begun; returns those that ended."""
        raise NotImplementedError

    def perturbed(self, episode: Episode, out: np.ndarray) -> None:
        """Writes the parameters with which an episode is played."""
        out[:] = self._parameters
        if episode.noise_index is not None:
            noise = self.shared_noise.get(episode.noise_index, len(out))
            out += np.float32(episode.sign * self._noise_stddev) * noise


class SingleEpisodePlayer(EpisodePlayer):
    """Plays one episode after another with the policy itself, whatever kind of policy it is.

    :param env: The environment.
    :param policy: The policy; its parameters are what they were when it is not playing.
    :param shared_noise: The noise table.
    """

    def __init__(self, env: Any, policy: Any, shared_noise: SharedNoiseTable) -> None:
        super().__init__(policy, shared_noise)
        self._env = env
        self._waiting: list[Episode] = []

    @property
    def n_free(self) -> int:  # type: ignore[override]
        """One episode is played at a time."""
        return 1 - len(self._waiting)

    def configure(self, parameters: np.ndarray, noise_stddev: float, max_steps: int | None) -> None:
        super().configure(parameters, noise_stddev, max_steps)
        self._waiting.clear()

    def start(self, episode: Episode) -> None:
        self._waiting.append(episode)

    def advance(self) -> list[tuple[Episode, Outcome]]:
        played = [(episode, self._play(episode)) for episode in self._waiting]
        self._waiting.clear()
        return played

    def _play(self, episode: Episode) -> Outcome:
        before = get_flat_parameters(self.policy)
        vector = np.empty(len(before), np.float32)
        self.perturbed(episode, vector)
        set_flat_parameters(self.policy, torch.from_numpy(vector))
        try:
            if episode.env_seed is not None:
                self._env.seed(episode.env_seed)
                self.policy.seed(episode.env_seed)
            return play_episode(self._env, self.policy, self._max_steps)
        finally:
            set_flat_parameters(self.policy, before)


def play_episode(env: Any, policy: Any, max_steps: int | None) -> Outcome:
    """Plays one episode with the policy as it is.

    :param env: An environment with statistics.
    :param policy: The policy.
    :param max_steps: Cut off after this number of environment steps; ``None``: never.
    """
    needs_state, needs_env = policy.needs_state(), policy.needs_env()
    observation, done = env.reset(), False
    episode_return, n_steps = 0.0, 0
    while not done and n_steps != max_steps:
        action = policy.compute_action(
            observation,
            maze_state=env.get_maze_state() if needs_state else None,
            env=env if needs_env else None,
            actor_id=env.actor_id(),
            deterministic=True,
        )
        observation, reward, done, _ = env.step(action)
        episode_return += float(reward)
        n_steps += bool(done or env.context.is_step_complete)
    return Outcome(_published_stats(env), episode_return, n_steps)


class EpisodeBatch(EpisodePlayer):
    """Plays episodes side by side, asking the perturbed policies together.

    :param env_factory: Makes an environment; called when one more is needed.
    :param policy: The policy.
    :param shared_noise: The noise table.
    :param n_slots: Number of episodes side by side.
    :param normalize: Prepares a new environment.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        shared_noise: SharedNoiseTable,
        n_slots: int,
        first_env: Any = None,
    ) -> None:
        super().__init__(policy, shared_noise)
        self._env_factory = env_factory
        first = with_stats(env_factory() if first_env is None else first_env)
        self.envs = [first]
        self._n_slots = n_slots
        self._population = Population(policy, n_slots)
        self._specs = array_specs(first.observation_spaces_dict, "observation")
        self._observations = zeros(first.observation_spaces_dict, (n_slots,), "observation")
        # slots [0, n_active) are being played; each has an environment, a row of the population and of the arrays
        self._episodes: list[Any] = [None] * n_slots
        self._actors: list[Any] = [None] * n_slots
        self._returns = [0.0] * n_slots
        self._lengths = [0] * n_slots
        self._n_active = 0

    @property
    def n_free(self) -> int:  # type: ignore[override]
        """Number of slots without an episode."""
        return self._n_slots - self._n_active

    def configure(self, parameters: np.ndarray, noise_stddev: float, max_steps: int | None) -> None:
        super().configure(parameters, noise_stddev, max_steps)
        self._n_active = 0
        for env in self.envs:
            env.get_stats(LogStatsLevel.EPISODE).clear_inputs()  # of episodes that were given up

    def start(self, episode: Episode) -> None:
        slot = self.current_env = self._n_active
        if slot == len(self.envs):
            self.envs.append(with_stats(self._env_factory()))
        env = self.envs[slot]
        self.perturbed(episode, self._population.parameters[slot])
        if episode.env_seed is not None:
            env.seed(episode.env_seed)
        observation = env.reset()
        actor = env.actor_id()
        check_observation(observation, actor, self._specs, slot)
        self._store(slot, actor, observation)
        self._episodes[slot] = episode
        self._returns[slot], self._lengths[slot] = 0.0, 0
        self._n_active += 1

    def advance(self) -> list[tuple[Episode, Outcome]]:
        n_active = self._n_active
        if n_active == 0:
            return []
        max_steps = self._max_steps
        finished = []
        for slot, action in enumerate(self._actions()):
            self.current_env = slot
            env = self.envs[slot]
            observation, reward, done, _ = env.step(action)
            self._returns[slot] += float(reward)
            if done or env.context.is_step_complete:
                self._lengths[slot] += 1
            if done or self._lengths[slot] == max_steps:
                finished.append(slot)
            else:
                self._store(slot, env.actor_id(), observation)
        # from the last one down: what a slot is filled up with has not ended in this step
        return [self._finish(slot) for slot in reversed(finished)]

    def _store(self, slot: int, actor: ActorID, observation: Any) -> None:
        self._actors[slot] = actor
        for key, column in self._observations[actor.step_key].items():
            column[slot] = observation[key]

    def _actions(self) -> list[dict[str, Any]]:
        """One action for each active slot."""
        n_active, actors = self._n_active, self._actors[: self._n_active]
        groups = dict.fromkeys(actors)
        if len(groups) == 1:
            observations = {key: column[:n_active] for key, column in self._observations[actors[0].step_key].items()}
            return _split(self._population.act(actors[0], observations, slice(0, n_active)))
        actions: list[Any] = [None] * n_active
        for actor in groups:
            rows = np.flatnonzero([other == actor for other in actors])
            observations = {key: column[rows] for key, column in self._observations[actor.step_key].items()}
            for row, action in zip(rows, _split(self._population.act(actor, observations, rows)), strict=True):
                actions[row] = action
        return actions

    def _finish(self, slot: int) -> tuple[Episode, Outcome]:
        """Takes the outcome of an episode, and moves the last active slot to its place."""
        episode = self._episodes[slot]
        outcome = Outcome(_published_stats(self.envs[slot]), self._returns[slot], self._lengths[slot])
        self._n_active -= 1
        last = self._n_active
        if slot != last:
            for entries in (self.envs, self._episodes, self._actors, self._returns, self._lengths):
                entries[slot], entries[last] = entries[last], entries[slot]
            self._population.parameters[slot] = self._population.parameters[last]
            for column in self._observations[self._actors[slot].step_key].values():
                column[slot] = column[last]
        return episode, outcome


def with_stats(env: Any) -> Any:
    """The environment, with statistics."""
    return env if isinstance(env, LogStatsWrapper) else LogStatsWrapper.wrap(env)


def _published_stats(env: Any) -> Any:
    env.publish_episode()
    return env.get_stats(LogStatsLevel.EPISODE).last_stats


def _split(actions: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """One action dictionary per row."""
    if len(actions) == 1:
        ((key, column),) = actions.items()
        return [{key: action} for action in column]
    return [dict(zip(actions, row, strict=True)) for row in zip(*actions.values(), strict=True)]
