"""Rollouts of perturbed policies in the training process, and the episode players that all backends share."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from maze.core.agent.policy import acting_in
from maze.core.agent.torch_policy import ActionHeads, TorchPolicy
from maze.core.annotations import override
from maze.core.env import faults
from maze.core.env.space_values import array_specs, check_observation, split_rows, usual_values, zeros
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError, NonFiniteError
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator, LogStatsLevel
from maze.core.rollout.batched_acting import Row, act_by_actor
from maze.core.utils.update_profile import COLLECTING, timed
from maze.core.utils.worker_pool import LocalPool, Maker, TaskPool, unpublished
from maze.perception.program.network_program import Rows, population_in_numpy
from maze.train.parallelization.vector_env.vector_env_utils import PortableStats, is_flat_env, with_stats
from maze.train.trainers.common.observation_statistics import ObservationStatistics, ObservedRows
from maze.train.trainers.es import es_utils
from maze.train.trainers.es.distributed.es_distributed_rollouts import (
    Episode,
    EpisodeSeeds,
    ESDistributedRollouts,
    ESRolloutResult,
    Outcome,
    RolloutSchedule,
)
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable

MAX_NUMBERS = 1 << 25
"""Maximum size of the parameters of a population with more than one policy (128 MiB)."""


class Population:
    """Perturbed policies as rows of a parameter matrix; a forward pass is a batched matrix product.

    Actions are deterministic. Networks that can be compiled to a network program run in NumPy; there the result of a
    policy does not depend on the other rows. Other networks are mapped over the rows by `torch.func.vmap`.

    :param policy: The policy; only the structure of its networks is used.
    :param n_rows: Number of perturbed policies.
    """

    def __init__(self, policy: TorchPolicy, n_rows: int) -> None:
        policy.eval()
        parameters = es_utils.trained_parameters(policy)
        offsets = np.cumsum([0, *(parameter.numel() for parameter in parameters)]).tolist()
        self.parameters = np.zeros((n_rows, offsets[-1]), np.float32)
        """float32 `[n_rows, n_parameters]`, in the order of `trained_parameters(policy)`."""
        stacked = {
            id(parameter): self.parameters[:, start:end].reshape(n_rows, *parameter.shape)
            for parameter, start, end in zip(parameters, offsets[:-1], offsets[1:], strict=True)
        }
        self._policy = policy
        rng, generator = np.random.default_rng(0), torch.Generator()  # unused: actions are deterministic
        mapper = policy.distribution_mapper
        self._heads = {key: ActionHeads(mapper, rng, generator, str(key)) for key in policy.networks}
        self._networks = {
            key: population_in_numpy(network, stacked)
            or partial(self._run_in_torch, key, TorchPopulation(network, stacked))
            for key, network in policy.networks.items()
        }

    def act(self, actor_id: ActorID, observations: Mapping[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
        """Return the actions of some policies, one observation for each.

        :param actor_id: The actor.
        :param observations: Arrays `[len(rows), ...]`.
        :param rows: Rows of the policies.
        """
        key = self._policy.network_key(actor_id)
        network = self._networks[key]
        return self._heads[key].act(lambda x: network(x, rows), observations, deterministic=True)

    def _run_in_torch(
        self, key: Any, network: TorchPopulation, observations: Mapping[str, np.ndarray], rows: Rows
    ) -> Mapping[str, Any]:
        return self._heads[key].as_arrays(network(observations, rows))


class TorchPopulation:
    """One network of any kind with many sets of parameters, mapped over them by `torch.func.vmap`.

    :param network: The network; it stays unchanged.
    :param stacked: Arrays `[n_rows, *shape]` for parameters, by `id`; their memory is read at every call. Other
        parameters are the network's own.
    """

    def __init__(self, network: nn.Module, stacked: Mapping[int, np.ndarray]) -> None:
        self._network = network
        # each place once, although modules and parameters may be registered under several names
        self._slots: list[tuple[dict[str, Any], str, int]] = [
            (vars(module)["_parameters"], name, id(parameter))
            for module in network.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in stacked
        ]
        self._stacked = {key: torch.from_numpy(stacked[key]) for _, _, key in self._slots}

    def __call__(self, observation: Mapping[str, np.ndarray], rows: Rows) -> dict[str, torch.Tensor]:
        """Return the network's outputs `[batch, ...]`.

        :param observation: Arrays `[batch, ...]`.
        :param rows: Whose parameters are used, for the observation at the same place in the batch.
        :raises RuntimeError: An operation of the network cannot be mapped.
        """
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        parameters = {key: tensor[index] for key, tensor in self._stacked.items()}
        inputs = {key: torch.as_tensor(array, dtype=torch.get_default_dtype()) for key, array in observation.items()}
        outputs: dict[str, torch.Tensor] = torch.func.vmap(self._one)(parameters, inputs)
        return outputs

    def _one(
        self, parameters: dict[int, torch.Tensor], observation: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        replaced = [slots[name] for slots, name, _ in self._slots]
        try:
            for slots, name, key in self._slots:
                slots[name] = parameters[key]
            outputs = self._network({key: value.unsqueeze(0) for key, value in observation.items()})
        finally:
            for (slots, name, _), parameter in zip(self._slots, replaced, strict=True):
                slots[name] = parameter
        return {key: value.squeeze(0) for key, value in outputs.items()}


def is_batchable(policy: Any, observation_spaces_dict: Mapping[StepKeyType, Any]) -> bool:
    """Return whether perturbed versions of a policy can be evaluated as one batch.

    :param policy: Any policy.
    :param observation_spaces_dict: Observation spaces by sub-step key.
    """
    if type(policy) is not TorchPolicy or policy.device != "cpu":
        return False
    population = Population(policy, 1)
    try:
        for key in policy.networks:
            actor = ActorID(*key) if isinstance(key, tuple) else ActorID(key, 0)
            usual = usual_values(observation_spaces_dict[actor.step_key])
            observation = {name: value[np.newaxis] for name, value in usual.items()}
            population.act(actor, observation, slice(0, 1))
    except RuntimeError:  # raised by vmap for operations that it does not support
        return False
    return True


MAX_ENVS = 64
"""Default number of parallel episodes of a process."""


class SinglePolicy:
    """Any policy as a population of one; its own parameters are perturbed during an episode.

    :param policy: The policy.
    :param env: Its environment.
    """

    def __init__(self, policy: Any, env: Any) -> None:
        self.parameters = np.zeros((1, es_utils.n_trained_parameters(policy)), np.float32)
        self._act = acting_in(env, policy, deterministic=True)

    def act(self, actor_id: ActorID, observations: Mapping[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
        """Return the action of the policy, see :meth:`Population.act`."""
        action = self._act({key: values[0] for key, values in observations.items()}, actor_id)
        return {key: np.asarray(value)[None] for key, value in action.items()}


class _Slot:
    """State of a running episode: its environment, perturbed policy and row of the arrays."""

    def __init__(self, env: Any) -> None:
        self.env = with_stats(env)
        self.step = self.env.step  # attribute access through all wrappers is slow
        self.context = self.env.context
        self.actor_id = self.env.actor_id
        self.is_flat = is_flat_env(self.env)
        self.episode = Episode(0, None, 0, None)
        self.actor: Any = None
        self.episode_return = 0.0
        self.n_steps = 0


class Players:
    """Play episodes in parallel and evaluate their perturbed policies as one batch.

    :param env_factory: Makes an environment, when a further one is needed; `None`: episodes are sequential.
    :param shared_noise: The noise table.
    :param concurrency: Maximum number of parallel episodes; 0: at most 64.
    :param first_env: The first environment; `None`: it is made by the factory.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any] | None,
        shared_noise: SharedNoiseTable,
        concurrency: int = 0,
        first_env: Any = None,
    ) -> None:
        self.shared_noise = shared_noise
        self._env_factory, self._concurrency = env_factory, concurrency or MAX_ENVS
        # The first `n_active` slots have a running episode.
        self._slots: list[_Slot] = []
        self._n_active = 0
        self._token = -1
        self._normalization_stats: Any = None
        self._add_slot(first_env)

    @classmethod
    def maker(cls, env_factory: Callable[[], Any], shared_noise: SharedNoiseTable, concurrency: int) -> Maker:
        """Return the maker of players in the actors of a pool; actors on this machine share the noise table."""
        count, seed = shared_noise.count, shared_noise.seed

        def made(fd: int | None = None) -> Players:
            return cls(env_factory, SharedNoiseTable(count, seed=seed, fd=fd), concurrency)

        return lambda *_: made

    def play(
        self,
        episodes: list[Episode],
        token: int,
        policy: Any,
        parameters: np.ndarray,
        noise_stddev: float,
        max_steps: int | None,
    ) -> list[Outcome]:
        """Play episodes.

        :param episodes: The episodes.
        :param token: Number of the policy.
        :param policy: The published policy and statistics for environments with observation normalization.
        :param parameters: Result of :func:`~maze.train.trainers.es.es_utils.get_flat_weights`, float32 `[n_weights]`.
        :param noise_stddev: Standard deviation of the perturbations.
        :param max_steps: Episodes are truncated after this number of environment steps; `None`: never.
        :return: Results of the episodes, in their order.
        """
        if token != self._token:
            self.use(*unpublished(policy))
            self._token = token
        self.configure(parameters.copy(), noise_stddev, max_steps)  # arrays of a pool cannot be written
        waiting, outcomes = list(episodes), dict[int, Outcome]()
        try:
            while len(outcomes) < len(episodes):
                while waiting and self._n_active < self._n_slots:
                    self.start(waiting.pop(0))
                outcomes.update((episode.number, outcome) for episode, outcome in self.advance())
        finally:
            self.stop()
        return [outcomes[episode.number] for episode in episodes]

    def use(self, policy: Any, normalization_stats: Any = None) -> None:
        """Play with a policy from now on.

        :param policy: The policy.
        :param normalization_stats: Statistics for environments with observation normalization; `None`: their own.
        """
        self.policy, self._normalization_stats = policy, normalization_stats
        for slot in self._slots:
            self._normalize(slot.env)
        env = self._slots[0].env
        observation_spaces = env.observation_spaces_dict
        self.is_single = not is_batchable(policy, observation_spaces)
        """Whether the policy cannot be evaluated as a batch; then there is one episode at a time."""
        n_slots = 1
        if not self.is_single and self._env_factory is not None:
            n_slots = max(1, min(self._concurrency, MAX_NUMBERS // max(1, es_utils.n_trained_parameters(policy))))
        self._n_slots = n_slots
        self._population = SinglePolicy(policy, env) if self.is_single else Population(policy, n_slots)
        self._specs = array_specs(observation_spaces, "observation")
        self._observations = zeros(observation_spaces, (n_slots,), "observation")
        self._action_specs = array_specs(env.action_spaces_dict, "action")
        self._float_keys = {
            step_key: [key for key, (_, dtype) in specs.items() if dtype.kind == "f"]
            for step_key, specs in self._specs.items()
        }
        self._normalized = ObservationStatistics(policy).names
        self._observed = ObservedRows(self._normalized, observation_spaces, n_slots)

    def configure(self, parameters: np.ndarray, noise_stddev: float, max_steps: int | None) -> None:
        """Start an update; running episodes are discarded. See :meth:`play` for the parameters."""
        self._parameters = parameters
        if self._normalized:
            self._parameters, statistics = np.split(parameters, [es_utils.n_trained_parameters(self.policy)])
            es_utils.set_flat_statistics(self.policy, statistics)
        self._noise_stddev = noise_stddev
        self._max_steps = max_steps
        self.stop()

    def stop(self) -> None:
        """Discard the running episodes."""
        for slot in self._slots[: self._n_active]:
            slot.env.get_stats(LogStatsLevel.EPISODE).clear_inputs()
        self._n_active = 0
        self._restore_policy()

    def close(self) -> None:
        """Close all environments; a second call does nothing."""
        for index, slot in enumerate(self._slots):
            faults.closed(slot.env.close, f"environment {index}")
        self._slots.clear()

    def _add_slot(self, env: Any = None) -> None:
        if env is None:
            assert self._env_factory is not None, "sequential episodes need a first environment"
            env = faults.made_by(self._env_factory, f"environment {len(self._slots)}")
        self._normalize(env)
        self._slots.append(_Slot(env))

    def _normalize(self, env: Any) -> None:
        if self._normalization_stats is not None and hasattr(env, "set_normalization_statistics"):
            env.set_normalization_statistics(self._normalization_stats)

    def _restore_policy(self) -> None:
        if self.is_single:
            es_utils.set_flat_parameters(self.policy, torch.from_numpy(self._parameters))

    def perturbed(self, episode: Episode, out: np.ndarray) -> None:
        """Write the parameters of the policy of an episode.

        :param episode: The episode.
        :param out: `[n_parameters]`.
        """
        out[:] = self._parameters
        if episode.noise_index is not None:
            noise = self.shared_noise.get(episode.noise_index, len(out))
            out += np.float32(episode.sign * self._noise_stddev) * noise

    def start(self, episode: Episode) -> None:
        """Start an episode."""
        row = self._n_active
        if row == len(self._slots):
            self._add_slot()
        slot, parameters = self._slots[row], self._population.parameters[row]
        self.perturbed(episode, parameters)
        if self.is_single:
            es_utils.set_flat_parameters(self.policy, torch.from_numpy(parameters))
            if episode.env_seed is not None:
                self.policy.seed(episode.env_seed)
        try:
            if episode.env_seed is not None:
                slot.env.seed(episode.env_seed)
            observation = slot.env.reset()
            slot.actor = slot.actor_id()
            check_observation(observation, slot.actor, self._specs, row)
            self._store(row, slot, observation)
        except faults.USER_CODE_ERRORS as error:
            faults.fail(error, faults.Place.of(slot.env, str(episode)), "reset")
        slot.episode, slot.episode_return, slot.n_steps = episode, 0.0, 0
        self._observed.begin(row)
        self._n_active += 1

    @timed(COLLECTING)
    def advance(self) -> list[tuple[Episode, Outcome]]:
        """Advance all running episodes; return those that ended."""
        if self._n_active == 0:
            return []
        finished = []
        for row, (slot, action) in enumerate(zip(self._slots, self._chosen_actions(), strict=False)):
            try:
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
                if done or slot.n_steps == self._max_steps:
                    finished.append(row)
                    continue
                if slot.n_steps % faults.LONG_EPISODE == 0:
                    faults.check_episode_ends(slot.n_steps, str(slot.episode))
                self._store(row, slot, observation)
            except NonFiniteError:
                raise
            except faults.USER_CODE_ERRORS as error:
                faults.fail(error, self._place(row), "step")
        # in descending order: each free row is filled with the last running episode
        return [self._finish(row) for row in reversed(finished)]

    def _store(self, row: int, slot: _Slot, observation: Any) -> None:
        try:
            for key, column in self._observations[slot.actor[0]].items():
                column[row] = observation[key]
        except (KeyError, IndexError, TypeError, ValueError):
            check_observation(observation, slot.actor, self._specs, row)
            raise

    def _chosen_actions(self) -> list[dict[str, Any]]:
        """Return one action for each running episode."""
        n_active = self._n_active
        actors = [slot.actor for slot in self._slots[:n_active]]
        observations = {
            step_key: {key: column[:n_active] for key, column in row.items()}
            for step_key, row in self._observations.items()
        }
        actions = {  # new arrays: environments may keep them
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
        for key in self._float_keys[actor.step_key]:
            if not np.isfinite(observation[key]).all():
                position = int(np.argwhere(~np.isfinite(observation[key]))[0][0])
                slot = self._slots[rows[position]]
                name = f"observation `{key}` of sub-step {actor.step_key!r}"
                raise _non_finite(slot.episode, slot.n_steps, name, observation[key][position])
        which = slice(0, self._n_active) if env_indices is None else np.array(env_indices)
        self._observed.add(actor, observation, which)
        try:
            actions = self._population.act(actor, observation, which)
        except EnvironmentContractError as error:
            raise faults.failure_of_acting(error, observation, lambda row: self._place(rows[row])) from error
        for key, column in actions.items():
            out[key][...] = column

    def _place(self, row: int) -> faults.Place:
        slot = self._slots[row]
        return faults.Place.of(slot.env, str(slot.episode))

    def _finish(self, row: int) -> tuple[Episode, Outcome]:
        """Return the outcome of an episode and move the last running episode to its row."""
        slot = self._slots[row]
        observed = self._observed.of(row) if slot.episode.sign else None
        stats = PortableStats(published_stats(slot.env))
        outcome = Outcome(stats, float(slot.episode_return), slot.n_steps, observed)
        self._restore_policy()
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


def _non_finite(episode: Episode, n_steps: int, name: str, value: Any) -> NonFiniteError:
    number = np.ravel(value)[~np.isfinite(np.ravel(value))][0]
    return NonFiniteError(
        f"{episode}, environment step {n_steps}: {name} is {number}. The run ends before the parameters change. Check "
        "the environment and its wrappers at this step."
    )


def published_stats(env: Any) -> LogStats:
    """Return the statistics of the current episode of an environment, which ends here."""
    env.publish_episode()
    stats: LogStats = env.get_stats(LogStatsLevel.EPISODE).last_stats
    return stats


SMALLEST_SLICE = 16
"""Minimum number of episodes of a slice if the number of episodes depends on their lengths."""

_NAME = "episodes"


class PooledRollouts(ESDistributedRollouts):
    """Rollouts in the actors of a pool, which get slices of the population.

    Episodes are determined by seeds, so that all pools give the same results. If an actor is replaced, its slice is
    played again, with the same result.

    :param pool: The actors.
    :param maker: Makes the :class:`Players` of an actor; called with the arguments of a
        :data:`~maze.core.utils.worker_pool.Maker`.
    :param seeds: Perturbations and environment seeds.
    :param n_eval_rollouts: Number of episodes of the unperturbed policy in each update.
    """

    def __init__(self, pool: TaskPool, maker: Maker, seeds: EpisodeSeeds, n_eval_rollouts: int) -> None:
        self.n_eval_rollouts = n_eval_rollouts
        self.pool, self._seeds = pool, seeds
        self._update = self._n_rollouts = self._n_timesteps = 0
        self._policy: Any = None
        self._token = 0
        pool.host(_NAME, maker, fd=seeds.shared_noise.memory.fd)

    @override(ESDistributedRollouts)
    def prepare_update(self, update: int, n_rollouts: int, n_timesteps: int) -> None:
        self._update, self._n_rollouts, self._n_timesteps = update, n_rollouts, n_timesteps

    @override(ESDistributedRollouts)
    def generate_rollouts(
        self, policy: Any, max_steps: int | None, noise_stddev: float, normalization_stats: Any
    ) -> Generator[ESRolloutResult, None, None]:
        schedule = RolloutSchedule(self._seeds, self._update, self.n_eval_rollouts, self._n_rollouts, self._n_timesteps)
        self._update += 1  # also without `prepare_update`
        if policy is not self._policy:
            self._sent = self.pool.publish((policy, normalization_stats))
            self._policy, self._token = policy, self._token + 1
        parameters = self.pool.put(es_utils.get_flat_weights(policy).numpy())
        common = (self._token, self._sent, parameters, noise_stddev, max_steps)
        share = -(-(self._n_rollouts + self.n_eval_rollouts) // (self.pool.n_ahead * self.pool.n_actors))
        size = max(share, SMALLEST_SLICE if self._n_timesteps else 1)

        def next_slice() -> tuple[Any, ...] | None:
            episodes = list(islice(iter(schedule.next_episode, None), size))
            return (episodes, *common) if episodes else None

        for (episodes, *_), outcomes in self.pool.hand_out(_NAME, "play", next_slice):
            for episode, outcome in zip(episodes, outcomes, strict=True):
                schedule.record(episode, outcome)
            yield from schedule.results()

    @override(ESDistributedRollouts)
    def report_work(self, statistics: LogStatsAggregator) -> None:
        if not isinstance(self.pool, LocalPool):
            self.pool.report_work(statistics)


class ESDummyDistributedRollouts(PooledRollouts):
    """Rollouts in the training process.

    :param env: An environment; it is closed with the rollouts.
    :param n_eval_rollouts: Number of episodes of the unperturbed policy in each update.
    :param shared_noise: The noise table.
    :param agent_instance_seed: Seed of the perturbations.
    :param env_factory: Makes further environments; `None`: episodes are sequential.
    :param env_seed: Seed of the environment seeds; `None`: environments are not seeded.
    :param concurrency: Maximum number of parallel episodes; 0: at most 64.
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
        self.players = Players(env_factory, shared_noise, concurrency, env)
        seeds = EpisodeSeeds(shared_noise, agent_instance_seed, env_seed)
        super().__init__(LocalPool(), lambda *_: lambda: self.players, seeds, n_eval_rollouts)

    @override(ESDistributedRollouts)
    def close(self) -> None:
        self.pool.close()
