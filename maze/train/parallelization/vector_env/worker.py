"""The worker process of :class:`~maze.train.parallelization.vector_env.subproc_vector_env.SubprocVectorEnv`."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.acting_worker import ActingWorker
from maze.train.parallelization.vector_env.channel import Channel, failure_of
from maze.train.parallelization.vector_env.env_batch import EnvBatch
from maze.train.parallelization.vector_env.shared_arrays import SharedArrays, rows_of
from maze.train.parallelization.vector_env.stats_codec import StatsEncoder
from maze.utils.process import depend_on_parent, use_one_thread

_GRACE_SECONDS = 2.0
"""How long a worker whose parent is gone may take to notice it by itself."""


def run_worker(connection: Any, factories: bytes, first_index: int, inherited: list[Any]) -> None:
    """Builds environments and serves them until told to close or until the other side is gone.

    :param connection: End of the pipe to the vector environment.
    :param factories: The pickled list of environment factories.
    :param first_index: Index of the first environment among all of the vector environment.
    :param inherited: Connections that came along when the process was forked, and must not be held open.
    """
    channel = open_channel(connection, inherited)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        worker = _Worker(channel, first_index)
        try:
            if worker.build(factories):
                worker.serve()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # SystemExit of an environment included: the parent hears of everything
            channel.send(messages.FAILED, failure_of(error, worker.current_env()))
            if isinstance(error, SystemExit):
                raise
        finally:
            close_quietly(worker.close)


def open_channel(connection: Any, inherited: list[Any]) -> Channel:
    """A worker's end of its pipe. From now on the process leaves interrupts to its parent, and ends with it.

    :param connection: End of the pipe to the parent.
    :param inherited: Connections that came along when the process was forked, and must not be held open.
    """
    depend_on_parent()
    for other in inherited:
        other.close()
    channel = Channel(connection)
    threading.Thread(target=_leave_with_parent, args=(channel.fd,), daemon=True).start()
    return channel


def _leave_with_parent(fd: int) -> None:
    """End the process soon after the other side of the pipe is closed, even if an environment hangs."""
    poll = select.poll()
    poll.register(fd, 0)  # only asks for the hang-up
    poll.poll()
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def close_quietly(close: Callable[[], None]) -> None:
    """Closes the environments of a worker that ends, also after a failure: they may hold files, sockets or processes.

    :param close: Closes them; what else goes wrong then is of no interest.
    """
    with contextlib.suppress(Exception):
        close()


class _Worker:
    """State of a worker process.

    :param channel: Channel to the vector environment.
    :param first_index: Index of its first environment among all.
    """

    def __init__(self, channel: Channel, first_index: int) -> None:
        self._channel = channel
        self._batch = EnvBatch(first_index)
        self._is_building = False
        self._encoder = StatsEncoder()
        self._acting: ActingWorker | None = None

    def current_env(self) -> int | None:
        """Index of the environment that was being stepped or reset, if any."""
        return self._batch.first_index + self._batch.current_index if self._is_building else None

    def build(self, factories: bytes) -> bool:
        """Makes the environments, tells their spaces and takes the shared memory.

        :return: Whether there is something to serve.
        """
        batch = self._batch
        env_factories = cloudpickle.loads(factories)
        self._is_building = True
        batch.build(env_factories)
        use_one_thread()
        spaces = (batch.observation_spaces_dict, batch.action_spaces_dict, batch.agent_counts_dict, batch.is_flat)
        self._channel.send(messages.RESULT, spaces)
        code, message = self._channel.receive()
        if code == messages.CLOSE:  # another worker failed
            self.close()
            return False
        n_envs, start, stop = message
        rows = self._rows = slice(start, stop)
        shared = self._shared = SharedArrays.receive(
            self._channel.connection, n_envs, batch.observation_spaces_dict, batch.action_spaces_dict
        )
        self._observations = rows_of(shared.observations, rows)
        self._actions = rows_of(shared.actions, rows)
        batch.attach(shared.rewards[rows], shared.terminated[rows], shared.truncated[rows], shared.step_complete[rows])
        self._channel.send(messages.DONE)
        return True

    def close(self) -> None:
        """Closes the environments."""
        self._batch.close()

    def serve(self) -> None:
        """Does what the vector environment asks for, until it asks to close."""
        batch, channel = self._batch, self._channel
        while True:
            code, payload = channel.receive()
            if code == messages.STEP:
                infos = batch.step(self._actions, self._observations)
                self._report(infos)
            elif code == messages.RESET:
                batch.reset(self._observations)
                self._report([])
            elif code == messages.ROLL_OUT:
                channel.send(messages.RESULT, self._roll_out(payload))
            elif code == messages.CALL:
                method, arguments = payload
                channel.send(messages.RESULT, getattr(batch, method)(*arguments))
            else:
                self.close()
                return

    def _roll_out(self, order: Any) -> Any:
        if self._acting is None:
            self._acting = ActingWorker(self._batch, self._rows, len(self._shared.rewards))
        current = self._observations[self._batch.actor_ids[0].step_key]
        return self._acting.roll_out(order, current, self._encoder.encode)

    def _report(self, infos: list[dict[Any, Any]]) -> None:
        batch = self._batch
        if not batch.is_flat or not infos:
            self._shared.write_actors(self._rows, batch.actor_ids)
        told = {index: info for index, info in enumerate(infos, batch.first_index) if info}
        finished = [(index, self._encoder.encode(stats)) for index, stats in batch.finished_episodes.items()]
        if not (told or finished or batch.final_observations or batch.actor_rewards):
            self._channel.send(messages.DONE)
            return
        finals = {index: tuple(final) for index, final in batch.final_observations.items()}
        self._channel.send(messages.RESULT, (finished, told, finals, batch.actor_rewards))
