"""Environments stepped in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from maze.core.annotations import override
from maze.core.env.space_arrays import action_column, copy_rows, zeros
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats.log_stats import LogStats
from maze.core.rollout.rollout_columns import FinalObservationEntry
from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.acting_worker import Order, WorkerRollout, acts_alike, set_numpy_state
from maze.train.parallelization.vector_env.env_batch import check_same_spaces
from maze.train.parallelization.vector_env.shared_arrays import SharedArrays
from maze.train.parallelization.vector_env.stats_codec import StatsDecoder
from maze.train.parallelization.vector_env.structured_vector_env import (
    BatchVectorEnv,
    FinalObservation,
    StructuredVectorEnv,
)
from maze.train.parallelization.vector_env.worker_pool import WorkerPool

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.maze_env import MazeEnv
    from maze.core.rollout.rollout_columns import RolloutColumns


class CloudpickleWrapper:
    """Makes anything picklable for another process: closures, lambdas and classes of scripts included.

    :param var: What is sent.
    """

    def __init__(self, var: Any) -> None:
        self.var = var

    def __getstate__(self) -> bytes:
        return bytes(cloudpickle.dumps(self.var))

    def __setstate__(self, state: bytes) -> None:
        self.var = cloudpickle.loads(state)


class SubprocVectorEnv(BatchVectorEnv):
    """Steps its environments in worker processes, several environments in each, through shared memory.

    Worth it where an environment's step takes longer than about a tenth of a millisecond; for cheaper ones
    :class:`~maze.train.parallelization.vector_env.sequential_vector_env.SequentialVectorEnv` is faster. With the same
    seeds both give the same trajectories.

    :param env_factories: Each makes one environment, in the worker.
    :param logging_prefix: Where epoch statistics are logged (`train`, `eval`); None: nowhere.
    :param start_method: `forkserver` (default where there is one), `spawn` or `fork`. A forked worker inherits the
        state of this process, with everything that threads hold at that moment.
    :param n_workers: Number of processes; by default one per CPU core, but not more than environments.
    :param timeout: Seconds that a call may take in a worker before it counts as hanging; None: any time.
    :param acts: Whether policies that can may act in the workers, where nothing limits the time of a call. Workers
        import torch then.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], MazeEnv[Any]]],
        logging_prefix: str | None = None,
        start_method: str | None = None,
        n_workers: int | None = None,
        timeout: float | None = None,
        *,
        acts: bool = False,
    ) -> None:
        self._acts = acts and timeout is None
        self._acting_policy: Policy | None = None
        preloads = ["maze.core.agent.torch_policy"] if self._acts else []
        self._pool = pool = WorkerPool(env_factories, start_method, n_workers, timeout, preloads)
        try:
            replies = pool.gather("building the environments")
            observation_spaces, action_spaces, agent_counts, _ = replies[0]
            super().__init__(len(env_factories), action_spaces, observation_spaces, agent_counts, logging_prefix)
            for worker, (observations, actions, agents, _) in zip(pool.workers, replies, strict=True):
                check_same_spaces(self, _Spaces(observations, actions, agents), worker.rows.start)
            self.is_flat = all(is_flat for *_, is_flat in replies)
            self._shared = shared = SharedArrays(self.n_envs, observation_spaces, action_spaces)
            pool.share(shared)
        except BaseException:
            pool.close()
            raise
        # what the workers write is what users of this object read
        self.rewards, self.step_complete = shared.rewards, shared.step_complete
        self.terminated, self.truncated = shared.terminated, shared.truncated
        self._decoders = [StatsDecoder() for _ in pool.workers]
        self._actor_ids: list[ActorID] = []
        self._is_keeping_terminal_observations = False

    @override(StructuredVectorEnv)
    def step(  # type: ignore[override]
        self, actions: Any, out: Mapping[StepKeyType, Mapping[str, np.ndarray]] | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, list[dict[Any, Any]]]:
        if not self._actor_ids:
            raise EnvironmentContractError("`reset` has to be called before the first `step`.")
        if self.keep_terminal_observations != self._is_keeping_terminal_observations:
            self._is_keeping_terminal_observations = self.keep_terminal_observations
            self._pool.call("keep_terminal", self.keep_terminal_observations)
        self._write_actions(actions)
        infos = self._take(self._pool.run(messages.STEP, "step"))
        observations = self._read_observations(out)
        if out is None:
            return self._returned(observations, infos)
        return out, self.rewards, self.terminated | self.truncated, infos

    @override(StructuredVectorEnv)
    def reset(self, out: Mapping[StepKeyType, Mapping[str, np.ndarray]] | None = None) -> Any:
        self._actor_ids = []
        self._take(self._pool.run(messages.RESET, "reset"))
        observations = self._read_observations(out)
        return out if out is not None else self._fresh(observations)

    @override(StructuredVectorEnv)
    def collects(self, policy: Policy, columns: RolloutColumns) -> bool:
        records_more = columns.infos is not None or any(part.logits for part in columns.substeps.values())
        is_plain = self.is_flat and not records_more and not self.keep_terminal_observations
        is_known = policy is self._acting_policy
        return self._acts and is_plain and columns.n_ticks > 1 and (is_known or acts_alike(policy))

    @override(StructuredVectorEnv)
    def collect(self, policy: TorchPolicy, columns: RolloutColumns) -> None:
        order = Order.of(policy, columns.n_ticks, is_new=policy is not self._acting_policy)
        replies: list[WorkerRollout] = self._pool.run(messages.ROLL_OUT, "step", order)
        self._acting_policy = policy
        set_numpy_state(policy, replies[0].numpy_state)
        step_key = self._actor_ids[0].step_key
        of_step: dict[int, dict[int, LogStats]] = {}
        for worker, decoder, reply in zip(self._pool.workers, self._decoders, replies, strict=True):
            rows, substep = worker.rows, columns.substeps[step_key]
            for target, source in ((substep.observations, reply.observations), (substep.actions, reply.actions)):
                for key, array in source.items():
                    target[key][: len(array), rows] = array
            columns.rewards[:, rows] = reply.rewards
            columns.terminated[:, rows], columns.truncated[:, rows] = reply.terminated, reply.truncated
            for step, finished, finals in reply.events:
                of_step.setdefault(step, {}).update((index, decoder.decode(encoded)) for index, encoded in finished)
                columns.final_observations += [
                    FinalObservationEntry(step, index, ActorID(*actor), last) for index, (actor, last) in finals.items()
                ]
        columns.final_observations.sort(key=lambda entry: entry[:2])
        for step in sorted(of_step):
            self._count_episodes(of_step[step])

    @override(StructuredVectorEnv)
    def close(self) -> None:
        """Closes all environments and ends the workers; returns within five seconds, whatever state they are in."""
        self._pool.close()

    @override(StructuredVectorEnv)
    def actor_ids(self) -> list[ActorID]:
        if not self._actor_ids:
            return [ActorID(*actor) for actor in self._of_each("actor_id")]
        return list(self._actor_ids)

    @override(StructuredVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        self._actor_ids = []  # until the next reset, workers know
        return super().load_state_dict(state_dict)

    @override(BatchVectorEnv)
    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        return self._pool.call(method, *arguments)

    @override(BatchVectorEnv)
    def _tell(self, method: str, by_env: list[Any]) -> list[Any]:
        return self._pool.call_each(method, [(by_env[worker.rows],) for worker in self._pool.workers])

    def _write_actions(self, actions: Mapping[Any, Any]) -> None:
        step_keys = {actor.step_key for actor in self._actor_ids} if not self.is_flat else {self._actor_ids[0].step_key}
        for step_key in step_keys:
            given = actions.get(step_key)
            if not isinstance(given, Mapping):
                given = actions
                if len(step_keys) > 1:
                    raise EnvironmentContractError(
                        f"Environments stand at different sub-steps, one of them at {step_key!r}; expected actions by "
                        f"sub-step key, found the keys {list(actions)}."
                    )
            for key, shared in self._shared.actions[step_key].items():
                shared[...] = action_column(given, step_key, key, shared.shape, shared.dtype)

    def _take(self, replies: list[Any]) -> list[dict[Any, Any]]:
        """Takes in what the workers report besides what is in the shared memory."""
        self.final_observations = {}
        self.actor_rewards = None
        finished_episodes: dict[int, LogStats] = {}
        infos: list[dict[Any, Any]] = [{} for _ in range(self.n_envs)]
        if not self.is_flat or not self._actor_ids:
            self._actor_ids = self._shared.read_actors()
        for worker, decoder, reply in zip(self._pool.workers, self._decoders, replies, strict=True):
            if reply is None:
                continue
            finished, told, finals, actor_rewards = reply
            finished_episodes.update((index, decoder.decode(encoded)) for index, encoded in finished)
            for index, info in told.items():
                infos[index] = info
            for index, (actor, observation) in finals.items():
                self.final_observations[index] = FinalObservation(ActorID(*actor), observation)
            if actor_rewards is not None:
                self.actor_rewards = self.actor_rewards or [None] * self.n_envs
                self.actor_rewards[worker.rows] = actor_rewards
        self._count_episodes(finished_episodes)
        return infos

    def _read_observations(self, out: Any) -> Any:
        target = out if out is not None else zeros(self._observation_spaces_dict, (self.n_envs,), "observation")
        copy_rows(self._shared.observations, target, self._actor_ids[:1] if self.is_flat else self._actor_ids)
        return target


class _Spaces:
    """The spaces that one worker reports.

    :param observation_spaces_dict: Observation spaces.
    :param action_spaces_dict: Action spaces.
    :param agent_counts_dict: Numbers of agents.
    """

    def __init__(self, observation_spaces_dict: Any, action_spaces_dict: Any, agent_counts_dict: Any) -> None:
        self.observation_spaces_dict = observation_spaces_dict
        self.action_spaces_dict = action_spaces_dict
        self.agent_counts_dict = agent_counts_dict
