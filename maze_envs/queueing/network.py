"""Multi-class queueing networks: each server chooses which class of waiting jobs it works on.

Arrivals and services take exponentially distributed times; a server may leave a job for another at any time. Watched at
the ticks of one Poisson clock with the sum of all rates (uniformisation), such a network is a Markov chain in discrete
time with the same long-run averages: at each tick one arrival, one completed service, or nothing happens.

Networks and figures of Dai and Gluzman (2022), Queueing network controls via deep reinforcement learning, Stochastic
Systems 12 (1).
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze_envs.common.array_policy import ArrayPolicy
from maze_envs.queueing.renderer import QueueRenderer

SCALE = 10.0
"""Observed numbers of jobs are divided by it."""


class Network(NamedTuple):
    """Classes of jobs, and who works on them.

    :param arrivals: Rate at which jobs of each class arrive from outside.
    :param services: Rate at which a job of each class is served.
    :param servers: Which server serves each class: 0, 1, ..., in rising order.
    :param following: Which class a job is of after its service; -1: it leaves.
    """

    arrivals: tuple[float, ...]
    services: tuple[float, ...]
    servers: tuple[int, ...]
    following: tuple[int, ...]

    @property
    def n_servers(self) -> int:
        """Number of servers."""
        return self.servers[-1] + 1

    def classes_of(self, server: int) -> list[int]:
        """Return the classes that a server serves."""
        return [index for index, other in enumerate(self.servers) if other == server]


CRISS_CROSS = {
    "I.L.": (0.3, 1.5),
    "B.L.": (0.3, 1.0),
    "I.M.": (0.6, 1.5),
    "B.M.": (0.6, 1.0),
    "I.H.": (0.9, 1.5),
    "B.H.": (0.9, 1.0),
}
"""Load regimes of the criss-cross network: rate of both arrivals, rate of the second server."""


def criss_cross(regime: str = "I.M.") -> Network:
    """Return the criss-cross network: jobs of one kind pass both servers, those of another kind the first one only.

    The first server serves new jobs of both kinds (classes 0 and 1), the second one those of the first kind (class 2).

    :param regime: One of `I.L.`, `B.L.`, `I.M.`, `B.M.`, `I.H.`, `B.H.`: balanced or not, light, medium or heavy load.
    :raises ConfigError: There is no such regime.
    """
    if regime not in CRISS_CROSS:
        raise ConfigError(f"env.network: expected a load regime of {', '.join(CRISS_CROSS)}, found {regime!r}.")
    arrival, second = CRISS_CROSS[regime]
    return Network((arrival, arrival, 0.0), (2.0, 2.0, second), (0, 0, 1), (2, -1, -1))


def extended(n_stations: int = 2) -> Network:
    """Return the extended six-class network or a larger one: two flows through all stations, one of them twice.

    :param n_stations: Number of servers, each with three classes; 2 make six classes.
    """
    n_classes = 3 * n_stations
    means = [mean for station in range(n_stations) for mean in ((8.0, 2.0, 4.0), (6.0, 7.0, 1.0))[station % 2]]
    following = [index + 3 if index + 3 < n_classes else -1 for index in range(n_classes)]
    following[n_classes - 3] = 1  # the first flow comes back as the second class of each station
    arrivals = [9 / 140 if index in (0, 2) else 0.0 for index in range(n_classes)]
    return Network(
        tuple(arrivals),
        tuple(1 / mean for mean in means),
        tuple(index // 3 for index in range(n_classes)),
        tuple(following),
    )


def network_of(name: str) -> Network:
    """Return a network by name: a load regime of the criss-cross network (`B.M.`), or `extended_6`, `extended_9`, ...

    :raises ConfigError: There is none of that name.
    """
    kind, _, n_classes = name.partition("_")
    if kind == "extended" and n_classes.isdigit() and int(n_classes) >= 6 and int(n_classes) % 3 == 0:
        return extended(int(n_classes) // 3)
    if name in CRISS_CROSS:
        return criss_cross(name)
    raise ConfigError(
        f"env.network: expected a load regime of the criss-cross network ({', '.join(CRISS_CROSS)}) or extended_6, "
        f"extended_9, ..., found {name!r}."
    )


class QueueingEvents(ABC):
    """Events of a queueing network."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(np.mean)
    @define_step_stats(sum)
    def waiting(self, jobs: int) -> None:
        """How many jobs there are, those in service included.

        :param jobs: Their number.
        """

    @define_epoch_stats(np.mean, output_name="mean_per_episode")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def turned_away(self, jobs: int) -> None:
        """A job found its buffer full.

        :param jobs: One.
        """


class Queues(BatchedCoreEnv):
    """Queueing networks.

    Observed are `jobs` `[n_classes]` (numbers divided by 10), and for each server with several classes the mask
    `server_<i>_mask` of those that wait; the action `server_<i>` is the position of the class among the server's.
    The reward is minus the number of jobs, above `reference_jobs` where it is given, divided by 10.

    :param n_envs: Number of networks.
    :param network: Name of the network, see :func:`network_of`.
    :param buffer: A job that finds so many of its class is turned away.
    :param reference_jobs: Subtracted from the number of jobs in rewards.
    :param warm_up: Ticks of an episode that its average (a KPI) leaves out.
    :param max_episode_steps: Ticks of an episode.
    """

    row_arrays = ("jobs", "counted_jobs", "elapsed")
    event_interfaces = (QueueingEvents,)

    def __init__(
        self,
        n_envs: int,
        network: str = "I.M.",
        buffer: int = 1000,
        reference_jobs: float = 0.0,
        warm_up: int = 0,
        max_episode_steps: int = 1000,
    ) -> None:
        self.network = net = network_of(network)
        n_classes = len(net.services)
        self.choosing = {
            f"server_{server}": net.classes_of(server)
            for server in range(net.n_servers)
            if len(net.classes_of(server)) > 1
        }
        """The classes of the servers that have a choice, by action key."""
        seen: dict[str, spaces.Space[Any]] = {"jobs": spaces.Box(0.0, np.inf, (n_classes,), np.float32)}
        for head, classes in self.choosing.items():
            seen[f"{head}_mask"] = spaces.Box(0.0, 1.0, (len(classes),), np.float32)
        actions = spaces.Dict({head: spaces.Discrete(len(classes)) for head, classes in self.choosing.items()})
        super().__init__(n_envs, {0: actions}, {0: spaces.Dict(seen)}, max_episode_steps)
        rates = np.array(net.arrivals + net.services)
        self._cumulative = np.cumsum(rates) / rates.sum()
        self._following = np.array(net.following)
        self.buffer, self.reference_jobs, self.warm_up = buffer, reference_jobs, warm_up
        self.jobs = np.zeros((n_envs, n_classes), np.int64)
        self.counted_jobs = np.zeros(n_envs)

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        """Begin with empty queues."""
        self.jobs[rows] = 0
        self.counted_jobs[rows] = 0.0

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        n_classes = self.jobs.shape[1]
        waiting = self.jobs.sum(axis=1)
        self.counted_jobs += np.where(self.elapsed >= self.warm_up, waiting, 0)
        drawn = np.minimum(np.searchsorted(self._cumulative, self.random.uniform(), side="right"), 2 * n_classes - 1)
        served = np.ones((self.n_envs, n_classes), np.bool_)
        for head, classes in self.choosing.items():
            served[:, classes] = np.arange(len(classes)) == actions[head][:, None]
        rows = np.arange(self.n_envs)
        cls = drawn % n_classes
        is_arrival = drawn < n_classes
        is_completed = ~is_arrival & served[rows, cls] & (self.jobs[rows, cls] > 0)
        self.jobs[rows[is_completed], cls[is_completed]] -= 1
        joining = np.where(is_arrival, cls, np.where(is_completed, self._following[cls], -1))
        joins = joining >= 0
        is_full = joins & (self.jobs[rows, joining] >= self.buffer)
        joins &= ~is_full
        self.jobs[rows[joins], joining[joins]] += 1
        self.fire(QueueingEvents.waiting, jobs=waiting)
        if is_full.any():
            self.fire(QueueingEvents.turned_away, is_full, jobs=1)
        return (self.reference_jobs - waiting) / SCALE, np.zeros(self.n_envs, np.bool_)

    @override(BatchedCoreEnv)
    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        out["jobs"][:] = self.jobs / SCALE
        for head, classes in self.choosing.items():
            mask = self.jobs[:, classes] > 0
            mask |= ~mask.any(axis=1, keepdims=True)  # a server without waiting jobs may choose any action
            out[f"{head}_mask"][:] = mask

    @override(BatchedCoreEnv)
    def kpis(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"average_jobs": self.counted_jobs[rows] / np.maximum(self.elapsed[rows] - self.warm_up, 1)}


class QueueingEnv(BatchedMazeEnv):
    """One queueing network; see :class:`Queues` for the arguments."""

    def __init__(self, network: str = "I.M.", **arguments: Any) -> None:
        make = functools.partial(Queues, network=network, **arguments)
        super().__init__(make, QueueRenderer(network_of(network).servers))


class PriorityPolicy(ArrayPolicy):
    """Each server works on the waiting class of the highest priority.

    :param network: Name of the network, see :func:`network_of`.
    :param rule: `last_buffer_first`: the class with the highest number; `c_mu`: the one that is served fastest;
        `longest_queue`: the one with the most jobs.
    :raises ConfigError: There is no such rule.
    """

    def __init__(self, network: str = "I.M.", rule: str = "longest_queue") -> None:
        if rule not in ("last_buffer_first", "c_mu", "longest_queue"):
            raise ConfigError(f"policy.rule: expected last_buffer_first, c_mu or longest_queue, found {rule!r}.")
        net = network_of(network)
        self.rule = rule
        self._choosing = Queues(1, network).choosing
        self._priorities = np.array(net.services) if rule == "c_mu" else np.arange(len(net.services))

    @override(ArrayPolicy)
    def choose(self, observation: Mapping[str, np.ndarray], step_key: object) -> dict[str, np.ndarray]:
        actions = {}
        for head, classes in self._choosing.items():
            jobs = observation["jobs"][:, classes]
            scores = jobs if self.rule == "longest_queue" else np.where(jobs > 0, self._priorities[classes], -np.inf)
            actions[head] = scores.argmax(axis=1)
        return actions
