"""Near-exact schedules of job shops by OR-Tools' constraint solver CP-SAT: `pip install "maze-rl[ortools]>=1"`."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, ConfigImportError, install_command
from maze.core.rollout.solve import solve
from maze_envs.scheduling.job_shop import JobShopEnv, JobShops
from maze_envs.scheduling.rules import DispatchingRule
from maze_envs.scheduling.taillard import Instance, lower_bound


class CpSatSchedule(NamedTuple):
    """Result of the solver.

    :param makespan: Makespan of the best schedule.
    :param bound: No schedule is shorter; equal to `makespan`: it is optimal.
    :param starts: When operations start, `[n_jobs, n_machines]`.
    """

    makespan: int
    bound: int
    starts: np.ndarray


def cp_sat_schedule(
    durations: np.ndarray,
    machines: np.ndarray,
    seconds: float = 10.0,
    n_workers: int = 0,
    seed: int = 0,
    may_wait: bool = True,
    is_time_over: Callable[[], bool] | None = None,
) -> CpSatSchedule:
    """Search the shortest schedule: an interval for each operation, in the order of its job, none together with
    another on its machine. It begins with the schedule of a dispatching rule, and never ends with a longer one.

    :param durations: Of each job's operations in their order, `[n_jobs, n_machines]`.
    :param machines: Where each of them is done, the same shape.
    :param seconds: Time limit.
    :param n_workers: Number of threads, which try different strategies; 0: one for each CPU core. With one, and enough
        time for a proof of optimality, the result depends on nothing but the seed.
    :param seed: Seed of the search.
    :param may_wait: `False`: no machine is idle while a job waits for it (non-delay schedules).
    :param is_time_over: Ends the search too, for limits of another kind (CPU seconds); polled by a thread.
    :raises ConfigError: OR-Tools is not installed, or there is no time.
    """
    try:
        cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise ConfigImportError(f"CP-SAT needs OR-Tools: {install_command('ortools')} ({error}).") from error
    if not seconds > 0:
        raise ConfigError(f"seconds: expected a time limit above 0 for CP-SAT, found {seconds}.")
    shop = {"durations": durations[None], "machines": machines[None]}
    (found_by_rule,) = solve(DispatchingRule("MWKR"), JobShopEnv(instances=shop, only_choices=True))
    by_rule = found_by_rule.state["starts"]
    model, horizon = cp_model.CpModel(), int((by_rule + durations).max())
    starts: list[list[Any]] = []
    on_machine: dict[int, list[Any]] = {}
    makespan = model.new_int_var(0, horizon, "makespan")
    for job, (times, places) in enumerate(zip(durations.tolist(), machines.tolist(), strict=True)):
        end: Any = 0
        starts.append([])
        for position, (duration, machine) in enumerate(zip(times, places, strict=True)):
            start = model.new_int_var(0, horizon, f"start_{job}_{position}")
            if duration > 0:
                interval = model.new_fixed_size_interval_var(start, duration, f"operation_{job}_{position}")
                on_machine.setdefault(machine, []).append(interval)
            model.add(start >= end if duration > 0 else start == end)  # 0: the job has no operation there
            model.add_hint(start, int(by_rule[job, position]))
            end = start + duration
            starts[-1].append(start)
        model.add(makespan >= end)
    for intervals in on_machine.values():
        model.add_no_overlap(intervals)
    if not may_wait:
        _forbid_waiting(model, starts, durations, machines)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = float(seconds)
    solver.parameters.num_workers = n_workers
    solver.parameters.random_seed = seed
    with _polled(is_time_over, solver.stop_search):
        status = solver.solve(model)
    found = by_rule
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = np.array([[solver.value(start) for start in of_job] for of_job in starts])
    bound = max(int(lower_bound(durations, machines)), round(solver.best_objective_bound))
    return CpSatSchedule(int((found + durations).max()), bound, found)


@contextmanager
def _polled(is_time_over: Callable[[], bool] | None, stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` in the context as soon as the time is over."""
    is_done = threading.Event()

    def poll() -> None:
        while is_time_over is not None and not is_done.wait(0.02):
            if is_time_over():
                stop()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _forbid_waiting(model: Any, starts: list[list[Any]], durations: np.ndarray, machines: np.ndarray) -> None:
    """Constrain a model to non-delay schedules.

    Either a machine is busy up to the start of an operation (or the start is 0), or neither this operation nor one that
    follows on the machine is released earlier.

    :param starts: Variables by job and position.
    """
    for machine in range(durations.shape[1]):
        operations = list(
            zip(*map(np.ndarray.tolist, np.nonzero((machines == machine) & (durations > 0))), strict=True)
        )
        released = {
            (job, position): starts[job][position - 1] + int(durations[job, position - 1]) if position else 0
            for job, position in operations
        }
        for one in operations:
            start, others = starts[one[0]][one[1]], [each for each in operations if each != one]
            begins_at_zero = model.new_bool_var("")
            model.add(start == 0).only_enforce_if(begins_at_zero)
            busy_until_start = [begins_at_zero]
            for other in others:
                follows_at_once = model.new_bool_var("")
                end = starts[other[0]][other[1]] + int(durations[other])
                model.add(start == end).only_enforce_if(follows_at_once)
                busy_until_start.append(follows_at_once)
            is_idle = model.new_bool_var("")
            model.add_bool_or([*busy_until_start, is_idle])
            model.add(released[one] >= start).only_enforce_if(is_idle)
            for other in others:
                is_before = model.new_bool_var("")
                model.add(starts[other[0]][other[1]] < start).only_enforce_if(is_before)
                model.add(released[other] >= start).only_enforce_if(is_idle, is_before.negated())


def dispatched_makespan(instance: Instance, starts: np.ndarray, may_wait: bool = False) -> int:
    """Return the makespan of dispatching in the order of a schedule.

    On the clock of :class:`~maze_envs.scheduling.job_shop.JobShops` no machine waits while a job does. Shortest
    schedules may need just that, so that the dispatched one can be longer.

    :param instance: The instance.
    :param starts: When operations start in the schedule, `[n_jobs, n_machines]`.
    :param may_wait: Whether machines may wait.
    """
    machines = instance.durations.shape[1]
    shops = JobShops(1, instances=[instance], only_choices=True, may_wait=may_wait)
    shops.begin(np.zeros(1, np.int64))
    seen = {key: np.zeros((1, *(space.shape or ())), np.float32) for key, space in shops.observation_spaces[0].items()}
    is_over = shops.next_operation.min() >= machines
    while not is_over:
        shops.observe(seen)
        action = _next_in_schedule(starts, shops.next_operation[0], seen["job_mask"][0])
        is_over = shops.advance({"job": np.array([action])})[1][0]
    return int(shops.job_ready.max())


class CpSatPolicy(Policy):
    """Solve each job shop when it begins, and start the waiting job whose operation begins first in the schedule.

    Unless machines may wait (`env.may_wait=true`), the makespan may be longer than the schedule's, see
    :func:`dispatched_makespan`.

    :param seconds: Time limit for each job shop.
    :param n_workers: Number of threads; 0: one for each CPU core.
    """

    def __init__(self, seconds: float = 10.0, n_workers: int = 0) -> None:
        self.seconds, self.n_workers = seconds, n_workers
        self._solved: tuple[np.ndarray, np.ndarray] | None = None
        self._schedule: CpSatSchedule | None = None

    @override(Policy)
    def needs_state(self) -> bool:
        return True

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        jobs, machines = maze_state["size"].tolist()
        shop = maze_state["durations"][:jobs, :machines], maze_state["machines"][:jobs, :machines]
        if self._solved is None or not all(map(np.array_equal, self._solved, shop)):
            self._solved = shop[0].copy(), shop[1].copy()
            self._schedule = cp_sat_schedule(*shop, seconds=self.seconds, n_workers=self.n_workers)
        assert self._schedule is not None, "it is solved with the first decision"
        next_operation, mask = maze_state["next_operation"][:jobs], observation["job_mask"][:jobs]
        return {"job": _next_in_schedule(self._schedule.starts, next_operation, mask)}


def _next_in_schedule(starts: np.ndarray, next_operation: np.ndarray, mask: np.ndarray) -> int:
    """Return, of the jobs that can start, the one that begins first in the schedule."""
    position = np.minimum(next_operation, starts.shape[1] - 1)
    begins = np.take_along_axis(starts, position[:, None], axis=1)[:, 0]
    return int(np.where(mask > 0, begins, np.iinfo(np.int64).max).argmin())
