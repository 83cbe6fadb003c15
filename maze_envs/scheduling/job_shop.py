"""Job shops: each job passes the machines in an order of its own, each machine works on one job at a time.

Schedules are built by dispatching on a clock (non-delay): at the earliest moment at which anything can start, one of
the waiting jobs is chosen and its next operation starts. With `may_wait` machines can wait for jobs. What counts is the
makespan, the time at which the last operation ends.

Instances and bounds of Taillard (1993), Benchmarks for basic scheduling problems, European Journal of Operational
Research 64 (2). One policy for instances of all sizes as of Zhang et al. (2020), Learning to dispatch for job shop
scheduling via deep reinforcement learning, NeurIPS 33.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.env.context import InstanceSource
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze_envs.scheduling.renderer import GanttRenderer
from maze_envs.scheduling.taillard import LONGEST, Instance, instance_set, lower_bound

REWARD_SCALE = 10.0
"""A makespan of 10 % above the lower bound is a return of -1."""
FEATURES = (
    "duration",
    "work_left",
    "operations_left",
    "until_it_can_start",
    "waited",
    "work_of_machine",
    "jobs_of_machine",
    "next_duration",
    "until_next_machine_is_free",
    "work_of_next_machine",
    "flow_due",
    "slack",
    "slack_of_machine",
    "rivals",
    "shorter_than_rivals",
    "more_work_than_rivals",
    "can_start",
)
"""Features of each job, in this order; times in the longest duration (99) or shares of the shop's usual work."""
_NEVER = np.iinfo(np.int64).max // 4
_MEAN = (1 + LONGEST) / 2


class JobShopEvents(ABC):
    """Events of a job shop."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(np.mean)
    @define_step_stats(sum)
    def choices(self, jobs: int) -> None:
        """Jobs could be selected.

        :param jobs: Number of jobs.
        """

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def delay(self, time: float) -> None:
        """The lower bound on the makespan of the schedule so far rose.

        :param time: By how much.
        """

    @define_epoch_stats(np.mean, output_name="mean_per_episode")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def invalid_choice(self, jobs: int) -> None:
        """A job was chosen that cannot start; another one started instead.

        :param jobs: One.
        """


class JobShops(BatchedCoreEnv):
    """Job shops.

    A job is chosen with the action `job`. Candidates are `job_candidates` `[n_jobs, 17]` (see :data:`FEATURES`), of
    which `job_candidates_mask` tells those with operations left and `job_mask` those that can start now; `shop` `[2]`
    is the share of jobs that are not done and the work that is left. Everything is relative to the size of the
    instance, so that a policy acts on larger ones than it was trained on. Where a job is chosen that cannot start,
    another one does.

    The reward is minus the rise of a lower bound on the makespan (the longest job or the busiest machine, given what
    has started), as a share of its initial value, times 10: potential-based shaping (Ng et al. 1999) of the makespan
    at the end, which leaves the optimum where it is with `gamma=1`.

    :param n_envs: Number of shops.
    :param n_jobs: Number of jobs of random instances, or of jobs that there is room for; a pair: drawn anew for each
        instance, both included.
    :param n_machines: The same for machines. Durations of random instances are uniform from 1 to 99, as Taillard's.
    :param instances: Instances that are played once each and in order: names of published ones (`ta01`), sizes
        (`15x15`: all of them), or a file or set with the arrays `durations` and `machines`
        `[n_instances, n_jobs, n_machines]`, and optionally `best_known` makespans `[n_instances]`. Shops may be smaller
        than the arrays: durations are 0 where there is no operation. `None`: random instances.
    :param only_choices: Whether jobs start by themselves that have their machine for themselves. The schedules that
        can be made are the same, with a quarter of the decisions.
    :param may_wait: Whether a machine may be kept idle for a job that arrives later. The next operation is then one of
        those that could start before the earliest possible completion of all, on the machine of that completion: all
        active schedules can be made, of which one is optimal (Giffler and Thompson 1960, Algorithms for solving
        production-scheduling problems, Operations Research 8). Operations are not chosen in the order of their starts.
    """

    row_arrays = (
        "instance",
        "size",
        "durations",
        "machines",
        "next_operation",
        "machine",
        "job_ready",
        "work",
        "work_left",
        "machine_free",
        "machine_work",
        "machine_jobs",
        "earliest",
        "initial_bound",
        "bound",
        "starts",
    )
    event_interfaces = (JobShopEvents,)
    instance_arrays = ("durations", "machines")

    def __init__(
        self,
        n_envs: int,
        n_jobs: int | Sequence[int] = 10,
        n_machines: int | Sequence[int] = 10,
        instances: InstanceSource | Sequence[str] | Sequence[Instance] | None = None,
        only_choices: bool = False,
        may_wait: bool = False,
    ) -> None:
        given = instance_set(instances)
        if given is not None:
            given.require(self.instance_arrays, type(self).__name__)
            shape, shape_of_machines = (given.arrays[name].shape for name in self.instance_arrays)
            if len(shape) != 3 or shape != shape_of_machines:
                raise ConfigError(
                    f"{given.origin}: expected `durations` and `machines` of the shape [n_instances, n_jobs, "
                    f"n_machines], found {shape} and {shape_of_machines}."
                )
            _, n_jobs, n_machines = shape
            if (np.sort(given.arrays["machines"]) != np.arange(shape[2])).any():
                raise ConfigError(f"{given.origin}: `machines` of a job: expected each of 0 to {shape[2] - 1} once.")
        self._jobs, self._machines = _range("n_jobs", n_jobs), _range("n_machines", n_machines)
        jobs, machines = self._jobs[1], self._machines[1]
        seen = spaces.Dict(
            job_candidates=spaces.Box(-10.0, 10.0, (jobs, len(FEATURES)), np.float32),
            job_candidates_mask=spaces.Box(0.0, 1.0, (jobs,), np.float32),
            job_mask=spaces.Box(0.0, 1.0, (jobs,), np.float32),
            shop=spaces.Box(0.0, 10.0, (2,), np.float32),
        )
        super().__init__(n_envs, {0: spaces.Dict(job=spaces.Discrete(jobs))}, {0: seen})
        self.only_choices, self.may_wait = only_choices, may_wait
        self.size = np.ones((n_envs, 2), np.int64)
        """Numbers of jobs and machines."""
        self.durations = np.zeros((n_envs, jobs, machines), np.int64)
        self.machines = np.zeros((n_envs, jobs, machines), np.int64)
        """Of each operation of each job in their order."""
        self.next_operation = np.ones((n_envs, jobs), np.int64)
        self.machine = np.zeros((n_envs, jobs), np.int64)
        """The one that the next operation needs."""
        self.job_ready = np.zeros((n_envs, jobs), np.int64)
        """When the last operation that has started ends."""
        self.work = np.zeros((n_envs, jobs), np.int64)
        """Durations of all operations of a job."""
        self.work_left = np.zeros((n_envs, jobs), np.int64)
        """Durations of those that have not started."""
        self.machine_free = np.zeros((n_envs, machines), np.int64)
        self.machine_work = np.zeros((n_envs, machines), np.int64)
        """Durations of operations that have not started."""
        self.machine_jobs = np.zeros((n_envs, machines), np.int64)
        self.earliest = np.full((n_envs, jobs), _NEVER)
        """When the next operation can start; far beyond all times where there is none."""
        self.initial_bound = np.ones(n_envs, np.int64)
        self.bound = np.ones(n_envs, np.int64)
        self.starts = np.full((n_envs, jobs, machines), -1)
        """When each operation starts; -1: not yet."""
        self._rows = np.arange(n_envs)
        self._has_gaps = given is not None and bool((given.arrays["durations"] == 0).any())
        """Whether jobs may lack operations."""
        self._first_operation = np.arange(n_envs * jobs).reshape(n_envs, jobs) * machines
        self.use_instances(given)

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        """Begin with empty machines."""
        n_jobs, n_machines = self._jobs[1], self._machines[1]
        drawn = self.random.uniform(rows, 2) if len({*self._jobs}) + len({*self._machines}) > 2 else None
        for axis, (low, high) in enumerate((self._jobs, self._machines)):
            self.size[rows, axis] = high if drawn is None else low + drawn[:, axis] * (high - low + 1)
        count = n_jobs * n_machines
        numbers = np.concatenate(
            [self.random.uniform(rows, min(512, 2 * count - first)) for first in range(0, 2 * count, 512)], axis=1
        ).reshape(len(rows), 2, n_jobs, n_machines)
        there = np.arange(n_machines) < self.size[rows, 1, None, None]
        exists = there & (np.arange(n_jobs)[:, None] < self.size[rows, 0, None, None])
        self.durations[rows] = np.where(exists, 1 + numbers[:, 0] * LONGEST, 0)
        self.machines[rows] = np.where(there, numbers[:, 1], np.inf).argsort(axis=-1, kind="stable")
        self._clear(rows)

    @override(BatchedCoreEnv)
    def load_instances(self, rows: np.ndarray, instances: Mapping[str, np.ndarray]) -> None:
        durations, machines = instances["durations"], instances["machines"]
        for axis in (0, 1):
            is_used = np.asarray((durations > 0).any(axis=2 - axis))
            self.size[rows, axis] = is_used.shape[1] - is_used[:, ::-1].argmax(axis=1)
        self.durations[rows], self.machines[rows] = durations, machines
        self._clear(rows)

    def _clear(self, rows: np.ndarray) -> None:
        """Empty the machines of shops with a new instance."""
        self.starts[rows] = -1
        self.job_ready[rows] = self.machine_free[rows] = 0
        n_jobs = self._jobs[1]
        exists = np.arange(n_jobs) < self.size[rows, 0, None]
        self.next_operation[rows] = np.where(exists, 0, self.size[rows, 1, None])
        self.work[rows] = self.work_left[rows] = self.durations[rows].sum(axis=-1)
        of_machines = np.take_along_axis(self.durations[rows], self.machines[rows].argsort(axis=-1), axis=-1)
        self.machine_work[rows], self.machine_jobs[rows] = of_machines.sum(axis=1), (of_machines > 0).sum(axis=1)
        self.initial_bound[rows] = lower_bound(self.durations[rows], self.machines[rows])
        self.bound[rows] = self.initial_bound[rows]
        self.machine[rows] = self.machines[rows, :, 0]
        self._pass_gaps(np.repeat(rows, n_jobs), np.tile(np.arange(n_jobs), len(rows)))
        self._look_ahead(rows)
        self._let_start(rows)

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        rows, jobs, before = self._rows, actions["job"], self.bound.copy()
        can_start = self._choices(slice(None))
        n_choices = can_start.sum(axis=1)
        self.fire(JobShopEvents.choices, jobs=n_choices)
        is_valid = can_start[rows, jobs]
        if not is_valid.all():
            self.fire(JobShopEvents.invalid_choice, ~is_valid & (n_choices > 0), jobs=1)
            jobs = np.where(is_valid, jobs, can_start.argmax(axis=1))
        if not n_choices.all():  # nothing is left to start where an instance is done
            rows = rows[n_choices > 0]
            jobs = jobs[rows]
        self._start(rows, jobs)
        self._look_ahead(rows)
        self._let_start(rows)
        rise = self.bound - before
        if rise.any():
            self.fire(JobShopEvents.delay, rise > 0, time=rise.astype(float))
        is_over = np.logical_and.reduce(self.next_operation >= self.size[:, 1, None], axis=1)
        return -REWARD_SCALE * rise / self.initial_bound, is_over

    def _start(self, rows: np.ndarray, jobs: np.ndarray) -> None:
        """Start the next operation of some jobs, no two of them on the same machine."""
        job, n_machines = rows * self._jobs[1] + jobs, self._machines[1]
        operation, machine = self.next_operation.take(job), rows * n_machines + self.machine.take(job)
        at, start = job * n_machines + operation, self.earliest.take(job)
        duration = self.durations.take(at)
        end = start + duration
        self.starts.put(at, start)
        self.job_ready.put(job, end)
        self.machine_free.put(machine, end)
        self.work_left.put(job, self.work_left.take(job) - duration)
        self.machine_work.put(machine, self.machine_work.take(machine) - duration)
        self.machine_jobs.put(machine, self.machine_jobs.take(machine) - 1)
        self._advance_to(job, operation + 1)
        self._pass_gaps(rows, jobs)

    def _pass_gaps(self, rows: np.ndarray, jobs: np.ndarray) -> None:
        """Pass operations that some jobs do not have, without waiting for their machines."""
        while self._has_gaps and len(rows):
            operation = self.next_operation[rows, jobs]
            is_gap: np.ndarray = operation < self.size[rows, 1]
            is_gap[is_gap] = self.durations[rows[is_gap], jobs[is_gap], operation[is_gap]] == 0
            rows, jobs, operation = rows[is_gap], jobs[is_gap], operation[is_gap]
            self.starts[rows, jobs, operation] = self.job_ready[rows, jobs]
            self._advance_to(rows * self._jobs[1] + jobs, operation + 1)

    def _advance_to(self, job: np.ndarray, operation: np.ndarray) -> None:
        n_machines = self._machines[1]
        self.next_operation.put(job, operation)
        self.machine.put(job, self.machines.take(job * n_machines + np.minimum(operation, n_machines - 1)))

    def _look_ahead(self, rows: np.ndarray) -> None:
        """Return when jobs can start next."""
        machine = rows[:, None] * self._machines[1] + self.machine.take(rows, axis=0)
        start = np.maximum(self.job_ready.take(rows, axis=0), self.machine_free.take(machine))
        is_open = self.next_operation.take(rows, axis=0) < self.size.take(rows, axis=0)[:, 1:]
        self.earliest[rows] = np.where(is_open, start, _NEVER)

    def _choices(self, rows: np.ndarray | slice) -> np.ndarray:
        """Return which jobs can be chosen, bool `[n, n_jobs]`."""
        earliest = self.earliest[rows]
        can_start: np.ndarray = earliest < _NEVER
        if not self.may_wait:
            can_start &= earliest == earliest.min(axis=1, keepdims=True)
            return can_start
        ends = self._ends(rows, earliest)
        machine, first = self.machine[rows], ends.argmin(axis=1)[:, None]
        can_start &= machine == np.take_along_axis(machine, first, 1)
        can_start &= earliest < np.take_along_axis(ends, first, 1)
        return can_start

    def _ends(self, rows: np.ndarray | slice, start: np.ndarray) -> np.ndarray:
        """Return when the next operations end if they start at given times, `[n, n_jobs]`."""
        position = np.minimum(self.next_operation[rows], self._machines[1] - 1)
        ends: np.ndarray = start + self.durations.take(self._first_operation[rows] + position)
        return ends

    def _let_start(self, rows: np.ndarray) -> None:
        """Start jobs without a rival for their machine, unless the policy decides on them, and raise the bounds."""
        everyone, n_machines = rows, self._machines[1]
        while self.only_choices and len(rows):
            earliest, machine = self.earliest.take(rows, axis=0), self.machine.take(rows, axis=0)
            if self.may_wait:
                candidates, starts = np.flatnonzero(self._choices(rows)), np.zeros(earliest.size, np.int64)
            else:  # before the first of all operations ends, no other rivals can arrive
                horizon = np.minimum(self._ends(rows, earliest).min(axis=1), _NEVER)
                candidates, starts = np.flatnonzero(earliest < horizon[:, None]), earliest
            start, which = starts.take(candidates), candidates // earliest.shape[1]
            place = which * n_machines + machine.take(candidates)
            first, decision = np.full(len(rows) * n_machines, _NEVER), np.full(len(rows), _NEVER)
            np.minimum.at(first, place, start)
            is_first = start == first.take(place)
            is_alone = np.bincount(place[is_first], minlength=1).take(place) == 1
            has_rivals = is_first & ~is_alone
            np.minimum.at(decision, which[has_rivals], start[has_rivals])
            is_started = is_first & is_alone & (start <= decision.take(which))
            which = which[is_started]
            self._start(rows.take(which), candidates[is_started] % earliest.shape[1])
            self._look_ahead(rows)
            rows = rows[(decision == _NEVER) & (np.bincount(which, minlength=len(rows)) > 0)]
        done = self.job_ready[everyone]
        start = self.earliest[everyone]
        of_jobs = (np.where(start < _NEVER, start, done) + self.work_left[everyone]).max(axis=1)
        of_machines = (self.machine_free[everyone] + self.machine_work[everyone]).max(axis=1)
        self.bound[everyone] = np.maximum(np.maximum(of_jobs, of_machines), self.bound[everyone])

    @override(BatchedCoreEnv)
    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        n_jobs, n_machines = (self.size[:, axis, None].astype(float) for axis in (0, 1))
        machine = self.machine
        is_open = self.next_operation < self.size[:, 1, None]
        position = np.where(is_open, self.next_operation, 0)
        can_start = self._choices(slice(None))
        operation = self._first_operation + position
        duration = self.durations.take(operation)
        has_next = position + 1 < self.size[:, 1, None]
        following = operation + has_next
        next_duration, next_machine = self.durations.take(following), self.machines.take(following)
        now = self.earliest.min(axis=1, keepdims=True)
        start = np.where(is_open, self.earliest, now)
        of_row = self._rows[:, None] * self._machines[1]
        needed, needed_next = of_row + machine, of_row + next_machine
        work, free = self.machine_work.take(needed), self.machine_free.take(needed)
        n_rivals, of_rivals, most_work = self._rivals(can_start, duration)
        shortest = of_rivals / np.maximum(n_rivals, 1)
        of_job, of_machine = 1 / (_MEAN * n_machines), 1 / (_MEAN * n_jobs)
        features = (
            duration / LONGEST,
            self.work_left * of_job,
            (self.size[:, 1, None] - position) / n_machines,
            np.minimum(start - now, 5 * LONGEST) / LONGEST,
            np.clip((start if self.may_wait else now) - self.job_ready, 0, 5 * LONGEST) / LONGEST,
            work * of_machine,
            self.machine_jobs.take(needed) / n_jobs,
            next_duration * has_next / LONGEST,
            np.clip(self.machine_free.take(needed_next) - start - duration, -3 * LONGEST, 3 * LONGEST)
            * has_next
            / LONGEST,
            self.machine_work.take(needed_next) * has_next * of_machine,
            (self.work - self.work_left + duration) * of_job,
            np.clip((self.bound[:, None] - start - self.work_left) * of_job * 5, -5, 5),
            np.clip((self.bound[:, None] - np.maximum(free, now) - work) * of_job * 5, -5, 5),
            n_rivals / n_jobs,
            (shortest - duration) * (n_rivals > 0) / LONGEST,
            (self.work_left - most_work) * (n_rivals > 0) * of_job,
            can_start,
        )
        seen = out["job_candidates"]
        for index, feature in enumerate(features):
            np.multiply(feature, is_open, out=seen[..., index], casting="unsafe")
        out["job_candidates_mask"][:] = is_open
        out["job_mask"][:] = can_start | ~can_start.any(axis=1, keepdims=True)  # there is nothing to choose at the end
        out["shop"][:, 0] = is_open.sum(axis=1) / n_jobs[:, 0]
        out["shop"][:, 1] = self.work_left.sum(axis=1) * of_job[:, 0] / n_jobs[:, 0]

    def _rivals(self, can_start: np.ndarray, duration: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return of each job's rivals, which can start now on its machine: number, sum of durations, most work left."""
        n_machines = self._machines[1]
        place = self._rows[:, None] * n_machines + self.machine
        jobs = np.flatnonzero(can_start)
        at, work = place.take(jobs), self.work_left.take(jobs)
        number, total = (np.bincount(at, of, len(place) * n_machines) for of in (None, duration.take(jobs)))
        order = np.argsort(at * (1 + work.max(initial=0)) + work)
        at, jobs, work = at[order], jobs[order], work[order]
        is_last = np.diff(at, append=-1) != 0
        most, second = np.zeros(len(number), np.int64), np.zeros(len(number), np.int64)
        most[at[is_last]] = work[is_last]
        follows = ~is_last[:-1] & is_last[1:]
        second[at[:-1][follows]] = work[:-1][follows]
        most_work = most.take(place)
        most_work.put(jobs[is_last], second[at[is_last]])
        return number.take(place) - can_start, total.take(place) - np.where(can_start, duration, 0), most_work

    @override(BatchedCoreEnv)
    def kpis(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        makespan = self.job_ready[rows].max(axis=1)
        busy = self.durations[rows].sum(axis=(1, 2))
        found = {
            "makespan": makespan.astype(float),
            "gap_to_bound": makespan / self.initial_bound[rows] - 1.0,
            "idle": 1.0 - busy / np.maximum(makespan * self.size[rows, 1], 1),
        }
        if self.instance_set is not None and "best_known" in self.instance_set.arrays:
            best_known = self.instance_set.arrays["best_known"][self.instance[rows]]
            found["gap_to_best_known"] = makespan / best_known - 1.0
        return found


class JobShopEnv(BatchedMazeEnv):
    """One job shop; see :class:`JobShops` for the arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(functools.partial(JobShops, **arguments), GanttRenderer())


def _range(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    ends = np.ravel(value)
    low, high = int(ends[0]), int(ends[-1])
    if not 1 <= low <= high:
        raise ConfigError(f"env.{name}: expected a number from 1 on or a pair [smallest, largest], found {value}.")
    return low, high
