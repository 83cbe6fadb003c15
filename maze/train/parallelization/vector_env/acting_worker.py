"""Whole rollouts in worker processes: copies of a policy step their environments, without a message for each step.

Every copy draws from the policy's own generator, chooses for all environments, and the worker takes what its own get.
So the rollouts are what they are where the policy acts for all of them and every step is a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np

from maze.core.env.space_arrays import zeros
from maze.core.rollout.batched_acting import ActingFunction, Row, acting_function

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.faults import Seeding
    from maze.train.parallelization.vector_env.env_batch import EnvBatch


class Order(NamedTuple):
    """What a worker needs to know for a rollout."""

    n_steps: int
    pickled_policy: bytes | None
    """`None`: that of the rollout before."""
    weights: list[np.ndarray]
    """All tensors of its networks, in their order."""
    numpy_state: dict[str, int]
    """State of the generator that it draws from."""

    @classmethod
    def of(cls, policy: TorchPolicy, n_steps: int, is_new: bool) -> Order:
        """The order to roll a policy out.

        :param policy: The policy, in the mode that it acts in.
        :param n_steps: Number of steps of each environment.
        :param is_new: Whether workers do not have it yet.
        """
        pickled = cloudpickle.dumps(policy) if is_new else None
        return cls(n_steps, pickled, [tensor.numpy() for tensor in _tensors(policy)], policy.rng_state()["numpy"])


class WorkerRollout(NamedTuple):
    """What the environments of one worker have done, arrays `[n_steps, n_own_envs, ...]`."""

    observations: Row
    """One row more: the last one is not answered yet."""
    actions: Row
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    events: list[tuple[int, list[tuple[int, Any]], dict[int, tuple[Any, ...]]]]
    """By step, where there are some: statistics of finished episodes, and final observations, by environment."""
    numpy_state: dict[str, int]
    """State of the generator that the policy draws from next."""


def acts_alike(policy: Policy) -> bool:
    """Whether copies of a policy draw the same, whatever they see in the rows of others, and keep nothing in mind."""
    from maze.core.agent.torch_policy import TorchPolicy

    return type(policy) is TorchPolicy and not policy.is_recurrent and policy.device == "cpu" and policy.draws_by_shape


def set_numpy_state(policy: TorchPolicy, numpy_state: dict[str, int]) -> None:
    """Has a policy draw from where an order or a rollout says; its other generator is not used."""
    policy.set_rng_state({**policy.rng_state(), "numpy": numpy_state})


class ActingWorker:
    """Steps a worker's environments by a policy.

    :param batch: The environments; they are flat.
    :param rows: Which of all environments they are.
    :param n_envs: Number of all environments.
    """

    def __init__(self, batch: EnvBatch, rows: slice, n_envs: int) -> None:
        self._batch = batch
        self._rows = rows
        own = range(rows.start, rows.stop)
        self._places = [index if index in own else rows.start for index in range(n_envs)]
        self._policy: Any = None
        self._act: ActingFunction

    def roll_out(self, order: Order, current: Row, encode: Any) -> WorkerRollout:
        """Takes the steps of a rollout.

        :param order: What to do.
        :param current: What the environments observe, `[n_own_envs, ...]`; afterwards, what they observe then.
        :param encode: Makes something to be sent of the statistics of an episode.
        """
        if order.pickled_policy is not None:
            import torch

            torch.set_num_threads(1)  # several processes with several threads each get in one another's way
            self._policy = cloudpickle.loads(order.pickled_policy)
            self._act = acting_function(self._policy, self)
        _load(self._policy, order)
        batch, rows, n_steps = self._batch, self._rows, order.n_steps
        actor = batch.actor_ids[0]
        n_all, n_own = len(self._places), len(batch.envs)

        def arrays(spaces: Any, kind: str, *shape: int) -> Row:
            return zeros({actor.step_key: spaces[actor.step_key]}, shape, kind)[actor.step_key]

        seen = arrays(batch.observation_spaces_dict, "observation", n_all)
        chosen = arrays(batch.action_spaces_dict, "action", n_all)
        observations = arrays(batch.observation_spaces_dict, "observation", n_steps + 1, n_own)
        actions = arrays(batch.action_spaces_dict, "action", n_steps, n_own)
        rewards = np.empty((n_steps, n_own), np.float32)
        terminated, truncated = np.empty((2, n_steps, n_own), np.bool_)
        events = []
        for key, array in observations.items():
            array[0] = current[key]
        for step in range(n_steps):
            for key, array in seen.items():
                array[:] = observations[key][step, 0]  # the others only have to be something that one can act on
                array[rows] = observations[key][step]
            self._act(seen, actor, chosen, None, self._places)
            for key, array in actions.items():
                array[step] = chosen[key][rows]
            taken = {key: array[step] for key, array in actions.items()}
            batch.step(taken, {actor.step_key: {key: array[step + 1] for key, array in observations.items()}})
            rewards[step], terminated[step], truncated[step] = batch.rewards, batch.terminated, batch.truncated
            if batch.finished_episodes or batch.final_observations:
                finished = [(index, encode(stats)) for index, stats in batch.finished_episodes.items()]
                finals = {index: tuple(final) for index, final in batch.final_observations.items()}
                events.append((step, finished, finals))
        for key, array in observations.items():
            current[key][...] = array[n_steps]
        numpy_state = self._policy.rng_state()["numpy"]
        return WorkerRollout(observations, actions, rewards, terminated, truncated, events, numpy_state)

    # -- what is asked of a vector environment where a policy fails -------------------------------------

    def get_env_time(self) -> dict[int, int]:
        """Number of steps of the running episodes, by environment."""
        return dict(enumerate(self._batch.of_each("get_env_time"), self._rows.start))

    def seeding_at(self, env_index: int, ticks_ago: int) -> Seeding | None:
        """See :meth:`EnvBatch.seeding_at`."""
        return self._batch.seeding_at(env_index, ticks_ago)


def _tensors(policy: TorchPolicy) -> Sequence[Any]:
    return [tensor for network in policy.networks.values() for tensor in network.state_dict().values()]


def _load(policy: TorchPolicy, order: Order) -> None:
    for tensor, values in zip(_tensors(policy), order.weights, strict=True):
        tensor.numpy()[...] = values
    set_numpy_state(policy, order.numpy_state)
