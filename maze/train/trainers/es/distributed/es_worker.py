"""The worker process of evolution strategies."""

from __future__ import annotations

import contextlib
import select
from typing import Any

import cloudpickle
import torch

from maze.core.env.faults import closed
from maze.train.parallelization.distributed_actors.shared_policy import SharedPolicyWeights
from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.channel import Channel, failure_of
from maze.train.parallelization.vector_env.stats_codec import StatsEncoder
from maze.train.parallelization.vector_env.vector_env_utils import with_stats
from maze.train.parallelization.vector_env.worker import close_quietly, open_channel
from maze.train.trainers.es.distributed.episode_batch import EpisodePlayer
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import Players
from maze.train.trainers.es.distributed.rollout_schedule import Episode
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_utils import get_flat_weights

N_PARAMETER_SLOTS = 2
"""Versions of the parameters that are kept: workers may still be reading those of the update before."""


def run_es_worker(connection: Any, factories: bytes, index: int, inherited: list[Any]) -> None:
    """Plays episodes until told to close or until the other side is gone.

    :param connection: End of the pipe to the trainer.
    :param factories: The pickled list of one environment factory.
    :param index: Index of the worker.
    :param inherited: Connections that came along when the process was forked, and must not be held open.
    """
    channel = open_channel(connection, inherited)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        worker = _ESWorker(channel)
        try:
            if worker.build(factories):
                worker.serve()
            worker.close()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # SystemExit of an environment included: the parent hears of everything
            channel.send(messages.FAILED, failure_of(error, None))
            if isinstance(error, SystemExit):
                raise
        finally:
            close_quietly(worker.close)


class _ESWorker:
    """State of a worker process.

    :param channel: Channel to the trainer.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._encoder = StatsEncoder()
        self._env: Any = None
        self._players: Players | None = None
        self._player: EpisodePlayer | None = None
        self._waiting: list[Episode] = []
        self._n_playing = 0
        self._update = 0

    def build(self, factories: bytes) -> bool:
        """Makes the first environment and takes the noise table.

        :return: Whether there is something to serve.
        """
        torch.set_num_threads(1)  # several processes with several threads each get in one another's way
        (env_factory,) = cloudpickle.loads(factories)
        self._env = with_stats(env_factory())
        self._channel.send(messages.DONE)
        code, _ = self._channel.receive()
        if code == messages.CLOSE:  # another worker failed
            return False
        self._players = Players(self._env, env_factory, SharedNoiseTable.receive(self._channel.connection))
        self._channel.send(messages.DONE)
        return True

    def close(self) -> None:
        """Closes all environments; nothing happens the second time."""
        env, self._env = self._env, None
        if self._players is not None:
            self._players.close()
        elif env is not None:
            closed(env.close, "environment")

    def serve(self) -> None:
        """Does what the trainer asks for, and plays on in between, until it asks to close."""
        poll = select.poll()
        poll.register(self._channel.fd, select.POLLIN)
        while True:
            while self._n_playing == 0 or poll.poll(0):
                code, payload = self._channel.receive()
                if code == messages.CLOSE:
                    return
                name, argument = payload
                getattr(self, f"_call_{name}")(*argument)
            self._advance()

    def _advance(self) -> None:
        assert self._player is not None
        finished = self._player.play_on(self._waiting)
        if finished:
            self._n_playing -= len(finished)
            encoded = [(episode, *outcome.encoded(self._encoder)) for episode, outcome in finished]
            self._channel.send(messages.RESULT, (self._update, encoded))

    def _call_policy(self, pickled: bytes, normalization_stats: Any, n_slots: int) -> None:
        """Takes another policy, and the memory with its parameters."""
        policy = cloudpickle.loads(pickled)
        self._parameters = get_flat_weights(policy)
        self._shared = SharedPolicyWeights.receive(
            self._channel.connection, {"parameters": self._parameters}, N_PARAMETER_SLOTS
        )
        assert self._players is not None
        self._player = self._players.make(policy, normalization_stats, n_slots)

    def _call_update(self, update: int, noise_stddev: float, max_steps: int | None) -> None:
        """Forget the update before, and begin with the next one."""
        assert self._player is not None
        self._update = update
        self._waiting.clear()
        self._n_playing = 0
        self._shared.read(update, {"parameters": self._parameters})
        self._player.configure(self._parameters.numpy(), noise_stddev, max_steps)

    def _call_play(self, episodes: list[tuple[Any, ...]]) -> None:
        """Plays more episodes of the current update."""
        self._waiting += [Episode(*episode) for episode in episodes]
        self._n_playing += len(episodes)

    def _call_stop(self) -> None:
        """Nobody waits for the episodes that are being played."""
        self._waiting.clear()
        self._n_playing = 0
