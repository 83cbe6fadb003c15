"""The worker process of :class:`SubprocDistributedActors`."""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any

import cloudpickle
import torch

from maze.core.wrappers.return_normalization_reward_wrapper import load_statistics_states
from maze.train.parallelization.distributed_actors.acting_group import ActingGroup
from maze.train.parallelization.distributed_actors.env_groups import RolloutPlan
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces
from maze.train.parallelization.distributed_actors.shared_policy import PolicyCopy, SharedPolicyWeights
from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.channel import Channel, Outbox, failure_of
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.stats_codec import StatsEncoder
from maze.train.parallelization.vector_env.worker import close_quietly, open_channel


def run_actor(connection: Any, factories: bytes, first_index: int, inherited: list[Any]) -> None:
    """Collects rollouts until told to close or until the other side is gone.

    :param connection: End of the pipe to the learner.
    :param factories: The pickled list of environment factories.
    :param first_index: Index of the first environment among those of all actors.
    :param inherited: Connections that came along when the process was forked, and must not be held open.
    """
    channel = open_channel(connection, inherited)
    outbox = Outbox(channel)
    environments = contextlib.ExitStack()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            torch.set_num_threads(1)  # several processes with several threads each get in one another's way
            env = SequentialVectorEnv(cloudpickle.loads(factories))
            environments.callback(env.close)
            _Actor(channel, outbox, env).run()
            env.close()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # SystemExit of an environment included: the learner hears of everything
            outbox.send(messages.FAILED, failure_of(error, None))
            outbox.flush()
            if isinstance(error, SystemExit):
                raise
        finally:
            close_quietly(environments.close)


class _Actor:
    """State of a worker process.

    :param channel: What the learner says.
    :param outbox: What the learner is told: rollouts go on while it is busy with something else.
    :param env: The environments.
    """

    def __init__(self, channel: Channel, outbox: Outbox, env: SequentialVectorEnv) -> None:
        self._channel = channel
        self._outbox = outbox
        self._env = env
        self._n_tickets = 0
        self._version = 0
        self._loaded_version = 0
        self._weights: SharedPolicyWeights | None = None

    def run(self) -> None:
        """Does what the learner asks for until it asks to close."""
        self._outbox.send(messages.RESULT, tuple(ActorSpaces.of(self._env)))
        if self._take_messages(until=lambda: self._weights is not None):
            self._outbox.send(messages.RESULT, None)
            while self._take_messages(until=lambda: self._n_tickets > 0):
                self._collect()

    def _take_messages(self, until: Any) -> bool:
        """Takes in all messages, and waits for more as long as needed; False: the learner asks to close."""
        poll = select.poll()
        poll.register(self._channel.fd, select.POLLIN)
        while poll.poll(0) or not until():
            code, payload = self._channel.receive()
            if code == messages.CLOSE:
                return False
            method, arguments = payload
            getattr(self, f"_call_{method}")(*arguments)
        return True

    def _collect(self) -> None:
        assert self._weights is not None
        if self._version != self._loaded_version:
            self._weights.read(self._version, self._copy.live_weights)
            self._loaded_version = self._version
        start = time.perf_counter()
        packet, episodes, learned, _ = self._group.collect(self._copy.policy, self._plan)
        seconds = time.perf_counter() - start
        self._n_tickets -= 1
        self._outbox.send(messages.RESULT, (tuple(packet or ()), self._version, episodes, learned, seconds))

    def _call_start(
        self, index: int, pickled_policy: bytes, n_slots: int, n_steps: int, agent_seed: Any, env_seeds: list[Any]
    ) -> None:
        """Takes the policy and the memory with its weights."""
        self._group = ActingGroup(self._env, f"Actor {index}", env_seeds, encoder=StatsEncoder())
        self._plan = RolloutPlan(n_steps, with_logits=True, keeps_terminal=False, begins=False)
        self._copy = PolicyCopy(pickled_policy)
        self._copy.policy.seed(agent_seed)
        self._weights = SharedPolicyWeights.receive(self._channel.connection, self._copy.live_weights, n_slots)

    def _call_rollouts(self, n_more: int) -> None:
        """Collects more rollouts."""
        self._n_tickets += n_more

    def _call_version(self, version: int) -> None:
        """The policy has a new version."""
        self._version = version

    def _call_wrapper_statistics(self, states: list[Any]) -> None:
        """Takes over what wrappers had learned."""
        for env, state in zip(self._env.envs, states, strict=True):
            load_statistics_states(env, state)
