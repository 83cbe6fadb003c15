"""The worker process of :class:`SubprocDistributedActors`."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from maze.core.wrappers.return_normalization_reward_wrapper import load_statistics_states, statistics_states
from maze.train.parallelization.distributed_actors.env_groups import EnvGroup, EpisodeRelay, RolloutPlan
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket
from maze.train.parallelization.distributed_actors.shared_policy import PolicyCopy, SharedPolicyWeights
from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.channel import Channel, Outbox, failure_of
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.stats_codec import EncodedStats, StatsEncoder
from maze.train.parallelization.vector_env.worker import close_quietly, open_channel

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.log_stats.log_stats import LogStats
    from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv


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


class Fragment(NamedTuple):
    """What the learner is told."""

    packet: RolloutPacket | None
    """`None`: episodes were played, and nothing was collected."""
    episodes: list[EncodedStats]
    wrappers: list[Any]
    """What the wrappers of each environment have learned; empty: nothing learns."""
    generators: Any = None
    """State of the policy's generators afterwards, if it is of interest."""


class ActingGroup:
    """Environments that are stepped by a copy of the learner's policy, and what there is to tell of them.

    :param env: The environments.
    :param name: What messages call them.
    :param seeds: A seed for each of them; empty: they are told later.
    :param wrappers: What the wrappers of each have learned before; empty: nothing.
    :param encoder: Encodes statistics for one who is told everything; `None`: each fragment can be decoded by itself.
    """

    def __init__(
        self,
        env: StructuredVectorEnv,
        name: str,
        seeds: Sequence[Any] = (),
        wrappers: Sequence[Any] = (),
        encoder: StatsEncoder | None = None,
    ) -> None:
        self.env = env
        self._group = EnvGroup(env, name)
        self._encoder = encoder
        self._episodes: list[LogStats] = []
        env.epoch_stats = EpisodeRelay(self._episodes.append)
        if seeds:
            env.seed(seeds)
        if any(wrappers):
            env.load_state_dict({"environments": [{"wrappers": learned, "problem": ""} for learned in wrappers]})

    def spaces(self) -> ActorSpaces:
        """The spaces of the environments."""
        return ActorSpaces.of(self.env)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the vector environment."""
        return getattr(self.env, method)(*arguments)

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()

    def collect(self, policy: Policy, plan: RolloutPlan) -> Fragment:
        """Collects a rollout; see :meth:`EnvGroup.collect`."""
        return self._told(self._group.collect(policy, plan))

    def play(self, policy: Policy, quota: np.ndarray, deterministic: bool) -> Fragment:
        """Plays episodes; see :meth:`EnvGroup.play`."""
        self._episodes.clear()
        self._group.play(policy, quota, deterministic)
        return self._told(None)

    def _told(self, packet: RolloutPacket | None) -> Fragment:
        encoder = self._encoder or StatsEncoder()
        episodes = [encoder.encode(stats) for stats in self._episodes]
        self._episodes.clear()
        learned = [statistics_states(env) for env in getattr(self.env, "envs", ())]
        return Fragment(packet, episodes, learned if any(learned) else [])
