"""Rollouts in the process of the trainer: episodes of differently perturbed policies, a step of each at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.acting import ActionHeads
from maze.core.agent.policy import acting_in
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.faults import (
    LONG_EPISODE,
    USER_CODE_ERRORS,
    Place,
    check_episode_ends,
    closed,
    fail,
    failure_of_acting,
)
from maze.core.env.space_arrays import array_specs, check_observation, split_rows, zeros
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.batched_acting import Row, act_by_actor
from maze.core.utils.update_profile import COLLECTING, timed
from maze.perception.program.network_program import TorchPopulation
from maze.perception.program.numpy_networks import Rows, population_in_numpy
from maze.train.parallelization.vector_env.env_batch import is_flat_env
from maze.train.parallelization.vector_env.vector_env_utils import with_stats
from maze.train.trainers.common.observation_statistics import ObservationStatistics, ObservedRows
from maze.train.trainers.es.distributed.es_distributed_rollouts import (
    Episode,
    EpisodeSeeds,
    ESDistributedRollouts,
    ESRolloutResult,
    Outcome,
    ScheduledRollouts,
)
from maze.train.trainers.es.es_utils import (
    get_flat_weights,
    n_trained_parameters,
    set_flat_parameters,
    set_flat_statistics,
    trained_parameters,
)

if TYPE_CHECKING:
    from maze.core.env.structured_env import StepKeyType
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable

logger = logging.getLogger(__name__)

MAX_NUMBERS = 1 << 25
"""The parameters of a population take up at most 128 MiB, unless there is only a single policy in it."""


class Population:
    """The parameters of perturbed policies in the rows of one matrix; a forward pass is a batched matrix product.

    Actions are the most probable ones. Networks run in NumPy where they can be read as programs, and there a policy's
    result is the same in any company; others are mapped over the rows by `torch.func.vmap`.

    :param policy: The policy; its networks are used for their structure only.
    :param n_rows: Number of perturbed policies.
    """

    def __init__(self, policy: TorchPolicy, n_rows: int) -> None:
        policy.eval()
        parameters = trained_parameters(policy)
        offsets = np.cumsum([0, *(parameter.numel() for parameter in parameters)]).tolist()
        self.parameters = np.zeros((n_rows, offsets[-1]), np.float32)
        """float32 `[n_rows, n_parameters]`, in the order of `trained_parameters(policy)`."""
        stacked = {
            id(parameter): self.parameters[:, start:end].reshape(n_rows, *parameter.shape)
            for parameter, start, end in zip(parameters, offsets[:-1], offsets[1:], strict=True)
        }
        self._policy = policy
        rng, generator = np.random.default_rng(0), torch.Generator()  # nothing is drawn: actions are deterministic
        mapper = policy.distribution_mapper
        self._heads = {key: ActionHeads(mapper, rng, generator, str(key)) for key in policy.networks}
        self._networks = {
            key: _network_function(network, stacked, self._heads[key]) for key, network in policy.networks.items()
        }

    def act(self, actor_id: ActorID, observations: Mapping[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
        """Actions of some of the policies, each for an observation of its own.

        :param actor_id: Who acts.
        :param observations: Arrays `[len(rows), ...]`.
        :param rows: The policies.
        """
        key = self._policy.network_key(actor_id)
        network = self._networks[key]
        return self._heads[key].act(lambda x: network(x, rows), observations, deterministic=True)


def population_size(policy: TorchPolicy, n_wanted: int) -> int:
    """How many policies are evaluated together at most.

    :param policy: The policy.
    :param n_wanted: Number that would be welcome.
    """
    return max(1, min(n_wanted, MAX_NUMBERS // max(1, n_trained_parameters(policy))))


def obstacle_to_batching(policy: Any, observation_spaces_dict: Mapping[StepKeyType, Any]) -> str | None:
    """Why perturbed versions of this policy cannot be asked together; `None`: they can.

    :param policy: Any policy.
    :param observation_spaces_dict: Observation spaces by sub-step key.
    """
    if type(policy) is not TorchPolicy:
        return f"{type(policy).__name__} chooses actions in its own way"
    if policy.device != "cpu":
        return f"its networks are on {policy.device}"
    population = Population(policy, 1)
    try:
        for key in policy.networks:
            actor = ActorID(*key) if isinstance(key, tuple) else ActorID(key, 0)
            spaces_of_step = observation_spaces_dict[actor.step_key]
            observation = {name: _usual_row(space) for name, space in spaces_of_step.items()}
            population.act(actor, observation, slice(0, 1))
    except RuntimeError as error:  # vmap's way of saying that an operation cannot be mapped
        return f"torch.func.vmap cannot map one of its networks: {str(error).splitlines()[0]}"
    return None


def _usual_row(space: spaces.Space[Any]) -> np.ndarray:
    """One row of ones as far as they are in the space: a mask of zeros would permit no action."""
    row = np.ones((1, *(space.shape or ())), space.dtype)
    if isinstance(space, spaces.Box):
        return np.clip(row, space.low, space.high)
    if isinstance(space, spaces.MultiBinary):
        return row
    return row * getattr(space, "start", 0)  # Discrete and MultiDiscrete


def _network_function(
    network: nn.Module, stacked: Mapping[int, np.ndarray], heads: ActionHeads
) -> Callable[[Mapping[str, np.ndarray], Rows], Mapping[str, Any]]:
    """From observations and the rows of their policies to logits."""
    in_numpy = population_in_numpy(network, stacked)
    if in_numpy is not None:
        return in_numpy
    in_torch = TorchPopulation(network, stacked)
    return lambda observations, rows: heads.as_arrays(in_torch(observations, rows))


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
        self._normalized = ObservationStatistics(policy).names
        self.current_env = 0
        """The environment at work when an exception left this object."""
        self._noise_stddev = 0.0
        self._max_steps: int | None = None

    def configure(self, parameters: np.ndarray, noise_stddev: float, max_steps: int | None) -> None:
        """Prepares for an update; episodes that are still being played are forgotten.

        :param parameters: Parameters of the policy, `[n_parameters]`, and what follows them in
            :func:`~maze.train.trainers.es.es_utils.get_flat_weights`.
        :param noise_stddev: Standard deviation of the perturbations.
        :param max_steps: Episodes are cut off after this number of environment steps; `None`: never.
        """
        self._parameters = parameters
        if self._normalized:
            self._parameters, statistics = np.split(parameters, [n_trained_parameters(self.policy)])
            set_flat_statistics(self.policy, statistics)
        self._noise_stddev = noise_stddev
        self._max_steps = max_steps

    def start(self, episode: Episode) -> None:
        """Begins an episode."""
        raise NotImplementedError

    def close(self, keep: Any = None) -> None:
        """Closes the environments.

        :param keep: One that somebody else goes on with.
        """
        raise NotImplementedError

    def advance(self) -> list[tuple[Episode, Outcome]]:
        """Goes on with all episodes that have begun; returns those that ended."""
        raise NotImplementedError

    def play_on(self, waiting: list[Episode]) -> list[tuple[Episode, Outcome]]:
        """Begins as many episodes as there is room for, and goes on with all.

        :param waiting: Episodes that have not begun; those that begin are taken out.
        :return: Those that ended.
        """
        while waiting and self.n_free:
            self.start(waiting.pop(0))
        return self.advance()

    def perturbed(self, episode: Episode, out: np.ndarray) -> None:
        """Writes the parameters with which an episode is played.

        :param out: `[n_parameters]`.
        """
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

    @override(EpisodePlayer)
    def configure(self, parameters: np.ndarray, noise_stddev: float, max_steps: int | None) -> None:
        super().configure(parameters, noise_stddev, max_steps)
        self._waiting.clear()

    def close(self, keep: Any = None) -> None:
        if self._env is not keep:
            closed(self._env.close, "environment")

    def start(self, episode: Episode) -> None:
        self._waiting.append(episode)

    @timed(COLLECTING)
    def advance(self) -> list[tuple[Episode, Outcome]]:
        played = [(episode, self._play(episode)) for episode in self._waiting]
        self._waiting.clear()
        return played

    def _play(self, episode: Episode) -> Outcome:
        perturbed = np.empty_like(self._parameters)
        self.perturbed(episode, perturbed)
        set_flat_parameters(self.policy, torch.from_numpy(perturbed))
        try:
            if episode.env_seed is not None:
                self._env.seed(episode.env_seed)
                self.policy.seed(episode.env_seed)
            return play_episode(self._env, self.policy, self._max_steps, episode, self._normalized)
        except NonFiniteError:
            raise
        except USER_CODE_ERRORS as error:
            fail(error, Place.of(self._env, str(episode)), "step")
        finally:
            set_flat_parameters(self.policy, torch.from_numpy(self._parameters))


def play_episode(
    env: Any, policy: Any, max_steps: int | None, episode: Episode, normalized: Sequence[str] = ()
) -> Outcome:
    """Plays one episode with the policy as it is.

    :param env: An environment with statistics.
    :param policy: The policy.
    :param max_steps: Cut off after this number of environment steps; `None`: never.
    :param episode: Which episode it is, for messages.
    :param normalized: Names of the observations that are normalized; what was seen of them is told where the policy is
        perturbed.
    :raises NonFiniteError: A reward or observation is NaN or infinite.
    """
    float_keys = _float_keys(env.observation_spaces_dict)
    act = acting_in(env, policy, deterministic=True)
    step, acting_now, context = env.step, env.actor_id, env.context  # looked up through all wrappers once
    observed = ObservedRows(normalized if episode.sign else (), env.observation_spaces_dict, 1)
    observation, done = env.reset(), False
    episode_return, n_steps = 0.0, 0
    while not done and n_steps != max_steps:
        actor_id = acting_now()
        for key in float_keys[actor_id.step_key]:
            if not np.isfinite(observation[key]).all():
                raise _non_finite(episode, n_steps, _observation_name(key, actor_id), observation[key])
        if observed:
            observed.add(actor_id, {key: np.asarray(value)[None] for key, value in observation.items()}, slice(0, 1))
        observation, reward, done, _ = step(act(observation, actor_id))
        if not abs(reward) < math.inf:
            raise _non_finite(episode, n_steps, f"the reward of sub-step {actor_id.step_key!r}", reward)
        episode_return += float(reward)
        n_steps += bool(done or context.is_step_complete)
        if n_steps % LONG_EPISODE == 0:
            check_episode_ends(n_steps, str(episode))
    return Outcome(_published_stats(env), episode_return, n_steps, observed.of(0))


class _Slot:
    """A place for an episode that is being played: an environment, a perturbed policy and a row of the arrays."""

    def __init__(self, env: Any) -> None:
        self.env = with_stats(env)
        # looked up once: every wrapper around an environment takes part in finding an attribute
        self.step = self.env.step
        self.context = self.env.context
        self.actor_id = self.env.actor_id
        self.is_flat = is_flat_env(self.env)
        self.episode = Episode.unperturbed()
        self.actor: Any = None
        self.episode_return = 0.0
        self.n_steps = 0


class EpisodeBatch(EpisodePlayer):
    """Plays episodes side by side, asking the perturbed policies together.

    :param env_factory: Makes an environment; called when one more is needed.
    :param policy: The policy.
    :param shared_noise: The noise table.
    :param n_slots: Number of episodes side by side.
    :param first_env: An environment that is there already.
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
        first = _Slot(env_factory() if first_env is None else first_env)
        self._slots = [first]
        """Those at [0, n_active) are playing."""
        self._n_active = 0
        self._n_slots = n_slots
        self._population = Population(policy, n_slots)
        self._specs = array_specs(first.env.observation_spaces_dict, "observation")
        self._observations = zeros(first.env.observation_spaces_dict, (n_slots,), "observation")
        self._action_specs = array_specs(first.env.action_spaces_dict, "action")
        self._float_keys = _float_keys(first.env.observation_spaces_dict)
        self._observed = ObservedRows(self._normalized, first.env.observation_spaces_dict, n_slots)

    @property
    def n_free(self) -> int:  # type: ignore[override]
        """Number of episodes that can be started."""
        return self._n_slots - self._n_active

    def close(self, keep: Any = None) -> None:
        for index, slot in enumerate(self._slots):
            if slot.env is not keep:
                closed(slot.env.close, f"environment {index}")

    @override(EpisodePlayer)
    def configure(self, parameters: np.ndarray, noise_stddev: float, max_steps: int | None) -> None:
        super().configure(parameters, noise_stddev, max_steps)
        for slot in self._slots[: self._n_active]:
            slot.env.get_stats(LogStatsLevel.EPISODE).clear_inputs()
        self._n_active = 0

    def start(self, episode: Episode) -> None:
        row = self.current_env = self._n_active
        if row == len(self._slots):
            self._slots.append(_Slot(self._env_factory()))
        slot = self._slots[row]
        self.perturbed(episode, self._population.parameters[row])
        try:
            if episode.env_seed is not None:
                slot.env.seed(episode.env_seed)
            observation = slot.env.reset()
            slot.actor = slot.actor_id()
            check_observation(observation, slot.actor, self._specs, row)
            self._store(row, slot, observation)
        except USER_CODE_ERRORS as error:
            fail(error, Place.of(slot.env, str(episode)), "reset")
        slot.episode, slot.episode_return, slot.n_steps = episode, 0.0, 0
        self._observed.begin(row)
        self._n_active += 1

    @timed(COLLECTING)
    def advance(self) -> list[tuple[Episode, Outcome]]:
        if self._n_active == 0:
            return []
        actions = self._chosen_actions()
        try:
            return self._stepped(actions)
        except NonFiniteError:
            raise
        except USER_CODE_ERRORS as error:
            fail(error, self._place(self.current_env), "step")

    def _stepped(self, actions: list[dict[str, Any]]) -> list[tuple[Episode, Outcome]]:
        max_steps = self._max_steps
        finished = []
        for row, (slot, action) in enumerate(zip(self._slots, actions, strict=False)):
            self.current_env = row
            observation, reward, done, _ = slot.step(action)
            if not abs(reward) < math.inf:
                name = f"the reward of sub-step {slot.actor.step_key!r}"
                raise _non_finite(slot.episode, slot.n_steps, name, reward)
            slot.episode_return += reward
            if slot.is_flat:
                slot.n_steps += 1
            else:
                slot.n_steps += bool(done or slot.context.is_step_complete)
                slot.actor = slot.actor_id()
            if done or slot.n_steps == max_steps:
                finished.append(row)
            else:
                if slot.n_steps % LONG_EPISODE == 0:
                    check_episode_ends(slot.n_steps, str(slot.episode))
                self._store(row, slot, observation)
        # from the last one down: a place that becomes free is filled up with an episode that goes on
        return [self._finish(row) for row in reversed(finished)]

    def _store(self, row: int, slot: _Slot, observation: Any) -> None:
        try:
            for key, column in self._observations[slot.actor[0]].items():
                column[row] = observation[key]
        except (KeyError, IndexError, TypeError, ValueError):
            check_observation(observation, slot.actor, self._specs, row)
            raise

    def _chosen_actions(self) -> list[dict[str, Any]]:
        """One action for each active slot."""
        actors = [slot.actor for slot in self._slots[: self._n_active]]
        n_active = self._n_active
        observations = {
            step_key: {key: column[:n_active] for key, column in row.items()}
            for step_key, row in self._observations.items()
        }
        actions = {  # new ones: environments may keep them
            step_key: {key: np.empty((n_active, *shape), dtype) for key, (shape, dtype) in specs.items()}
            for step_key, specs in self._action_specs.items()
        }
        chosen = act_by_actor(self._act, actors, observations, actions)
        if self._slots[0].is_flat:
            return split_rows(next(iter(chosen.values())))
        by_key = {step_key: split_rows(columns) for step_key, columns in chosen.items()}
        return [by_key[actor.step_key][row] for row, actor in enumerate(actors)]

    def _act(
        self, observation: Row, actor: ActorID, out: Row, logits_out: Row | None, env_indices: Sequence[int] | None
    ) -> None:
        rows = range(self._n_active) if env_indices is None else env_indices
        self._check_finite(observation, actor, rows)
        which = slice(0, self._n_active) if env_indices is None else np.array(env_indices)
        self._observed.add(actor, observation, which)
        try:
            actions = self._population.act(actor, observation, which)
        except EnvironmentContractError as error:
            raise failure_of_acting(error, observation, lambda row: self._place(rows[row])) from error
        for key, column in actions.items():
            out[key][...] = column

    def _place(self, row: int) -> Place:
        slot = self._slots[row]
        return Place.of(slot.env, str(slot.episode))

    def _check_finite(self, observations: dict[str, np.ndarray], actor: ActorID, rows: Sequence[int]) -> None:
        for key in self._float_keys[actor.step_key]:
            column = observations[key]
            if not np.isfinite(column).all():
                position = int(np.argwhere(~np.isfinite(column))[0][0])
                slot = self._slots[rows[position]]
                raise _non_finite(slot.episode, slot.n_steps, _observation_name(key, actor), column[position])

    def _finish(self, row: int) -> tuple[Episode, Outcome]:
        """Takes the outcome of an episode, and moves the last active one to its place."""
        slot = self._slots[row]
        observed = self._observed.of(row) if slot.episode.sign else None
        outcome = Outcome(_published_stats(slot.env), float(slot.episode_return), slot.n_steps, observed)
        self._n_active -= 1
        last = self._n_active
        if row != last:
            moved = self._slots[last]
            self._slots[row], self._slots[last] = moved, slot
            self._population.parameters[row] = self._population.parameters[last]
            self._observed.move(last, row)
            for column in self._observations[moved.actor[0]].values():
                column[row] = column[last]
        return slot.episode, outcome


def _float_keys(observation_spaces_dict: Mapping[StepKeyType, Any]) -> dict[StepKeyType, list[str]]:
    """Keys of observations that could be NaN or infinite, by sub-step."""
    return {
        step_key: [key for key, subspace in space.items() if subspace.dtype is not None and subspace.dtype.kind == "f"]
        for step_key, space in observation_spaces_dict.items()
    }


def _observation_name(key: str, actor_id: ActorID) -> str:
    return f"observation `{key}` of sub-step {actor_id.step_key!r}"


def _non_finite(episode: Episode, n_steps: int, name: str, value: Any) -> NonFiniteError:
    number = np.ravel(value)[~np.isfinite(np.ravel(value))][0]
    return NonFiniteError(
        f"{episode}, environment step {n_steps}: {name} is {number}. Training stops before any parameter changes; look "
        "at what the environment and its wrappers compute there."
    )


def _published_stats(env: Any) -> Any:
    env.publish_episode()
    return env.get_stats(LogStatsLevel.EPISODE).last_stats


class ESDummyDistributedRollouts(ScheduledRollouts):
    """Plays all episodes in this process: side by side where environments can be made, else one after another.

    :param env: An environment; it is used as the first one.
    :param n_eval_rollouts: Number of episodes of the policy itself for each update.
    :param shared_noise: The noise table.
    :param agent_instance_seed: Seed of the perturbations.
    :param env_factory: Makes further environments; `None`: there is only the one.
    :param env_seed: Each episode begins with a seed derived from this one; `None`: the environment is not seeded.
    :param concurrency: Number of episodes side by side; 0: as many as an update has, up to 64.
    """

    def __init__(
        self,
        env: Any,
        n_eval_rollouts: int,
        shared_noise: SharedNoiseTable,
        agent_instance_seed: int,
        *,
        env_factory: Callable[[], Any] | None = None,
        env_seed: int | None = None,
        concurrency: int = 0,
    ) -> None:
        super().__init__(EpisodeSeeds(shared_noise, agent_instance_seed, env_seed), n_eval_rollouts)
        self.shared_noise = shared_noise
        self.players = Players(with_stats(env), env_factory, shared_noise)
        """Makes the player of the policy; `players.current` is the present one."""
        self._concurrency = concurrency

    @property
    def env(self) -> Any:
        """The first environment."""
        return self.players.env

    @override(ESDistributedRollouts)
    def generate_rollouts(
        self, policy: Any, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        schedule, player = self._next_schedule(), self.players.current
        if player is None or player.policy is not policy:
            n_wanted = min(MAX_ENVS, self.n_eval_rollouts + (self._n_rollouts or MAX_ENVS))
            player = self.players.make(policy, normalization_stats, self._concurrency or n_wanted)
        player.configure(get_flat_weights(policy).numpy(), noise_stddev, max_steps)
        while True:
            while player.n_free and (episode := schedule.next_episode()) is not None:
                player.start(episode)
            for episode, outcome in player.advance():
                schedule.record(episode, outcome)
            yield from schedule.results()

    @override(ESDistributedRollouts)
    def close(self) -> None:
        self.players.close()


class Players:
    """Makes what plays episodes, anew for each policy, around an environment that stays.

    :param env: The environment.
    :param env_factory: Makes further ones; `None`: there is only the one.
    :param shared_noise: The noise table.
    """

    def __init__(self, env: Any, env_factory: Callable[[], Any] | None, shared_noise: SharedNoiseTable) -> None:
        self.env = env
        self._env_factory, self._shared_noise = env_factory, shared_noise
        self.current: EpisodePlayer | None = None
        """The one of the latest policy."""

    def make(self, policy: Any, normalization_stats: Any, n_wanted: int) -> EpisodePlayer:
        """Makes the player of a policy; the one before is closed.

        :param policy: The policy.
        :param normalization_stats: Statistics for observation normalization, for environments that want them.
        :param n_wanted: Number of episodes side by side.
        """
        self._close_current()
        normalize(self.env, normalization_stats)
        factory = self._env_factory

        def new_env() -> Any:
            assert factory is not None, "it is asked for further ones where there is one"
            env = factory()
            normalize(env, normalization_stats)
            return env

        self.current = make_player(self.env, None if factory is None else new_env, policy, self._shared_noise, n_wanted)
        return self.current

    def close(self) -> None:
        """Closes all environments; nothing happens the second time."""
        self._close_current()
        env, self.env = self.env, None
        if env is not None:
            closed(env.close, "environment")

    def _close_current(self) -> None:
        player, self.current = self.current, None
        if player is not None:
            player.close(keep=self.env)


def make_player(
    env: Any, env_factory: Callable[[], Any] | None, policy: Any, shared_noise: SharedNoiseTable, n_wanted: int
) -> EpisodePlayer:
    """Plays episodes side by side if environments can be made and the policy allows it, else one after another.

    :param env: The first environment.
    :param env_factory: Makes further ones.
    :param policy: The policy.
    :param shared_noise: The noise table.
    :param n_wanted: Number of episodes side by side.
    """
    obstacle = obstacle_to_batching(policy, env.observation_spaces_dict)
    if obstacle is not None:
        logger.info("Perturbed policies are evaluated one after another: %s.", obstacle)
        return SingleEpisodePlayer(env, policy, shared_noise)
    n_slots = 1 if env_factory is None else population_size(policy, n_wanted)
    return EpisodeBatch(env_factory or (lambda: env), policy, shared_noise, n_slots, first_env=env)


def normalize(env: Any, normalization_stats: Any) -> None:
    """Gives an environment that wants them the statistics for observation normalization."""
    if normalization_stats is not None and hasattr(env, "set_normalization_statistics"):
        env.set_normalization_statistics(normalization_stats)
