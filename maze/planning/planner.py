"""Values of actions by simulation: common random numbers, paired differences, sequential halving.

The planner depends on states, candidate actions and returns, not on policies or configurations: rollout policies,
labels for learning and batches of states use it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from maze.core.env.faults import in_simulation
from maze.core.errors import NonFiniteError
from maze.core.utils.worker_pool import ProcessPool
from maze.planning.branches import Actions, Branches, Group

_MIN_SCENARIOS = 2
# Scenarios of the first round: few do not estimate the spread; two show that randomness makes no difference.
_ROUND_WITH_CHANCE, _ROUND_WITHOUT = 8, 2
# Scenarios from which on the base policy's action is replaced: fewer miss rare losses, so that their intervals are
# too narrow.
_SCENARIOS_TO_REPLACE = 32
# Parts of the branches for each worker process: branches take uneven time, and a free process takes the next part.
_PARTS = 4

Candidates = Sequence[Mapping[str, Any]]
"""Actions of one actor, by action head."""


class FirstActions(NamedTuple):
    """Actions of branches, which have few different ones.

    :param actions: The different actions.
    :param which: For each branch the index of its action, `[n_rows]`.
    """

    actions: Candidates
    which: np.ndarray

    def of(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the actions of some branches.

        :param rows: Indices of the branches, `[n_rows]`.
        :return: `[n_rows, ...]` by action head.
        """
        which = self.which[rows]
        return {key: np.stack([np.asarray(each[key]) for each in self.actions])[which] for key in self.actions[0]}


class BranchSimulator:
    """Simulate branches whose first actions are given and that a base policy continues up to a horizon.

    :param branches: Copies of the environment.
    :param act: The base policy: chooses the actions of a group.
    :param horizon: Environment steps, the one of the first action included; `None`: to the end of the episode.
    :param value: Estimate of the return after the horizon, `[n_rows]` of a group; `None`: 0.
    """

    def __init__(
        self,
        branches: Branches,
        act: Callable[[Group], Actions],
        horizon: int | None,
        value: Callable[[Group], np.ndarray] | None = None,
    ) -> None:
        self.branches, self.horizon = branches, horizon
        self.limit: int | None = None
        """Environment steps that a time limit outside of the copies leaves; `None`: any number."""
        self._act, self._value = act, value
        self._content, self._source = b"", None

    @property
    def n_decisions(self) -> int:
        """Sub-steps simulated so far."""
        return self.branches.n_decisions

    def __call__(
        self, source: Any, rows: np.ndarray, scenarios: np.ndarray, first: FirstActions, seed: int | None
    ) -> np.ndarray:
        """Return the returns of branches, `[n_rows]`.

        :param source: The states, see :meth:`~maze.planning.branches.Branches.fork`.
        :param rows: For each branch the index of its state.
        :param scenarios: For each branch its scenario.
        :param first: For each branch the action of its first sub-step.
        :param seed: Seed of the scenarios; `None`: the true future, see :meth:`~maze.planning.branches.Branches.fork`.
        """
        return np.asarray(self.at_horizons(source, rows, scenarios, first, seed, [self.horizon])[0])

    def of_part(self, part: slice, source: bytes, *arguments: Any) -> tuple[np.ndarray, int]:
        """Return the returns of branches from pickled states, and the number of sub-steps simulated for them.

        :param part: The branches among all, for the caller.
        :param source: The states, pickled; the latest ones are kept unpickled for further calls.
        :param arguments: Further arguments of :meth:`__call__`.
        """
        if source != self._content:  # the parts of a decision have the same states
            self._content, self._source = source, pickle.loads(source)
        before = self.n_decisions
        return self(self._source, *arguments), self.n_decisions - before

    def close(self) -> None:
        """Release the copies."""
        self.branches.close()

    def at_horizons(
        self,
        source: Any,
        rows: np.ndarray,
        scenarios: np.ndarray,
        first: FirstActions,
        seed: int | None,
        horizons: Sequence[int | None],
    ) -> np.ndarray:
        """Return the returns of branches up to several horizons, `[n_horizons, n_rows]`.

        The other arguments are those of :meth:`__call__`.

        :param horizons: Environment steps, in rising order; `None`, as the last one: to the end of the episode.
        :raises NonFiniteError: A return is NaN.
        """
        returns = np.empty((len(horizons), len(rows)))
        for start in range(0, len(rows), self.branches.most_rows):
            part = slice(start, start + self.branches.most_rows)
            self.branches.fork(source, rows[part], scenarios[part], seed)
            given = FirstActions(first.actions, first.which[part])
            with in_simulation("a simulated future of a candidate action"):
                self.branches.step([(group, given.of(group.rows)) for group in self.branches.observe()])
                for index, horizon in enumerate(horizons):
                    returns[index, part] = self._up_to(horizon)
        return returns

    def _up_to(self, horizon: int | None) -> np.ndarray:
        """Let the base policy act up to a horizon, and return the returns."""
        branches = self.branches
        is_limited = self.limit is not None and (horizon is None or horizon >= self.limit)
        while groups := branches.observe(self.limit if is_limited else horizon):
            branches.step([(group, self._act(group)) for group in groups])
        returns: np.ndarray = branches.returns.copy()
        if self._value is not None and not is_limited:
            for group in branches.observe():
                to_come = branches.gamma ** branches.steps[group.rows] * self._value(group)
                returns[group.rows] += np.where(branches.done[group.rows], 0.0, to_come)
        if np.isnan(returns).any():
            raise NonFiniteError(
                f"planning: {np.isnan(returns).sum()} of {len(returns)} simulated returns are not numbers (NaN). Check "
                "the rewards of the environment, and the value at the horizon if there is one."
            )
        return returns


class ProcessSimulator:
    """Share branches among worker processes.

    :param n_processes: Number of processes.
    :param make: Makes the :class:`BranchSimulator` of a process.
    """

    def __init__(self, n_processes: int, make: Callable[[], BranchSimulator]) -> None:
        self._pool = ProcessPool(n_processes, modules=[__name__])
        self._pool.host("branches", lambda *_: make)
        self.n_decisions = 0

    def __call__(
        self, source: Any, rows: np.ndarray, scenarios: np.ndarray, first: FirstActions, seed: int | None
    ) -> np.ndarray:
        """Return the returns of branches, `[n_rows]`; the arguments are those of a :class:`BranchSimulator`."""
        content, n_parts = pickle.dumps(source), min(len(rows), _PARTS * self._pool.n_actors)
        parts = (slice(index, None, n_parts) for index in range(n_parts))
        pieces = (
            (part, content, rows[part], scenarios[part], FirstActions(first.actions, first.which[part]), seed)
            for part in parts
        )
        returns = np.empty(len(rows))
        for (part, *_), (of_part, n_decisions) in self._pool.hand_out(
            "branches", "of_part", lambda: next(pieces, None)
        ):
            returns[part] = of_part
            self.n_decisions += n_decisions
        return returns

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def gains_by_horizon(returns: np.ndarray) -> np.ndarray:
    """Estimate the gain of choosing an action by its returns up to each horizon, `[n_horizons]`.

    Half of the scenarios choose: the action whose mean difference from the base policy's, less its standard error, is
    the largest. The other half measure it up to the last horizon. Then the halves change places.

    :param returns: `[n_horizons, n_candidates, n_scenarios]`; the base policy's action comes first.
    """
    differences = returns - returns[:, :1]
    n_half = differences.shape[-1] // 2
    halves = differences[..., :n_half], differences[..., n_half : 2 * n_half]
    gains = np.zeros(len(returns))
    for choosing, measuring in (halves, halves[::-1]):
        error = choosing.std(axis=-1, ddof=1) / np.sqrt(n_half)
        chosen = (choosing.mean(axis=-1) - error).argmax(axis=1)
        gains += measuring[-1].mean(axis=-1)[chosen] / 2
    return gains


@dataclass(frozen=True)
class ActionValues:
    """Candidates of one decision with their simulated values.

    :param actions: The candidates; the first one is the base policy's action.
    :param base_return: Mean return of the base policy's action over all its scenarios.
    :param differences: Mean difference of the return from the base's in the same scenarios, `[n_candidates]`.
    :param low: Lower end of its interval.
    :param high: Upper end.
    :param scenarios: Number of scenarios of each candidate.
    :param chosen: Index of the candidate to take: the best that is shown to be better than the base's, or 0.
    """

    actions: Candidates
    base_return: float
    differences: np.ndarray
    low: np.ndarray
    high: np.ndarray
    scenarios: np.ndarray
    chosen: int

    @property
    def action(self) -> Mapping[str, Any]:
        """The action to take."""
        return self.actions[self.chosen]

    @property
    def best(self) -> int:
        """Index of the largest mean difference among the candidates with all scenarios: the others were dropped with
        fewer, and may look better by chance."""
        return int(np.where(self.scenarios == self.scenarios.max(), self.differences, -np.inf).argmax())

    @property
    def values(self) -> np.ndarray:
        """Estimated returns, `[n_candidates]`."""
        return np.asarray(self.base_return + self.differences)

    @property
    def gain(self) -> float:
        """Estimated gain of the chosen action over the base's."""
        return float(self.differences[self.chosen])


class Planner:
    """Compare actions by simulation.

    In each round the candidates of a decision are simulated in new scenarios, the same for all. Then the worse half is
    dropped, by the mean paired difference from the base policy's action (sequential halving, Karnin et al. 2013), and
    the number of scenarios doubles. A decision ends when the remaining candidate is shown to be better or worse than
    the base's action, or when the scenarios or the budget are exhausted.

    :param simulate: Simulates branches.
    :param scenarios: Scenarios of a candidate at most.
    :param confidence: Confidence of the intervals of all candidates of a decision together.
    :param decisions: Budget of simulated decisions for each state; `None`: no limit.
    :param seconds: Budget of seconds for each state; `None`: no limit. Results then depend on the machine.
    :param chance: Whether the environment is stochastic: otherwise two scenarios suffice if they do not differ.
    :param length: Decisions of a branch, as long as none has been simulated; `None`: unknown.
    :param is_for_each: The confidence is that of each candidate by itself: for labels, whose errors average out.
    """

    def __init__(
        self,
        simulate: BranchSimulator | ProcessSimulator,
        scenarios: int = 128,
        confidence: float = 0.95,
        decisions: int | None = None,
        seconds: float | None = None,
        chance: bool = True,
        length: int | None = None,
        is_for_each: bool = False,
    ) -> None:
        self._is_for_each = is_for_each
        self.simulate, self.scenarios, self.confidence = simulate, scenarios, confidence
        self.decisions, self.seconds = decisions, seconds
        self._chance = chance
        # Decisions and seconds of a branch, as far as they are known, so that rounds fit into budgets.
        self._costs = {} if length is None else {"decisions": float(length)}

    def plan(self, source: Any, candidates: Sequence[Candidates], seed: int | None) -> list[ActionValues]:
        """Compare the candidates of some states, all of them at the same sub-step.

        :param source: The states, see :meth:`~maze.planning.branches.Branches.fork`.
        :param candidates: The candidates of each state, the base policy's action first.
        :param seed: Seed of the scenarios; `None`: the true future, see :meth:`~maze.planning.branches.Branches.fork`.
        """
        least = min(_SCENARIOS_TO_REPLACE if self._chance else _ROUND_WITHOUT, self.scenarios)
        # Bonferroni: the best of many estimates is biased upwards
        n_intervals = [1 if self._is_for_each else max(1, len(actions) - 1) for actions in candidates]
        trials = [
            _Trial(row, actions, 1.0 - (1.0 - self.confidence) / n_intervals[row], least)
            for row, actions in enumerate(candidates)
        ]
        started, done_before = time.perf_counter(), self.simulate.n_decisions
        n_rounds = int(np.ceil(np.log2(max(1, max(map(len, candidates)) - 1))))
        n_first = max(_ROUND_WITH_CHANCE, self.scenarios >> max(n_rounds, 2)) if self._chance else _ROUND_WITHOUT
        n_used, n_next = 0, n_first
        while running := [trial for trial in trials if not trial.is_over]:
            n_rows = sum(1 + len(trial.left) for trial in running)
            limits = [n_next, self.scenarios - n_used]
            if self.decisions is not None:
                left = self.decisions * len(trials) - (self.simulate.n_decisions - done_before)
                limits.append(self._affordable(left, "decisions", n_rows))
            if self.seconds is not None:
                left_over = self.seconds * len(trials) - (time.perf_counter() - started)
                limits.append(self._affordable(left_over, "seconds", n_rows))
            if (n_new := min(limits)) < 1:
                break
            round_started, round_before = time.perf_counter(), self.simulate.n_decisions
            self._sample(source, running, n_used, n_new, seed)
            self._costs["decisions"] = (self.simulate.n_decisions - round_before) / (n_rows * n_new)
            self._costs["seconds"] = (time.perf_counter() - round_started) / (n_rows * n_new)
            n_used += n_new
            n_next = n_used
            for trial in running:
                trial.halve()
        return [trial.result() for trial in trials]

    def _affordable(self, left: float, unit: str, n_rows: int) -> int:
        """Return scenarios that a budget allows.

        :param left: Remaining budget.
        :param unit: `decisions` or `seconds`.
        :param n_rows: Branches of each scenario.
        """
        if left <= 0:
            return 0
        if unit not in self._costs:
            return _MIN_SCENARIOS
        n_scenarios = int(left / (self._costs[unit] * n_rows))
        if not n_scenarios and unit == "seconds":
            self._costs[unit] *= 0.8  # it may have been measured at a bad moment: it is measured again
        return n_scenarios

    def _sample(self, source: Any, trials: Sequence[_Trial], n_used: int, n_new: int, seed: int | None) -> None:
        """Simulate new scenarios for the remaining candidates of each decision."""
        rows = [trial.row for trial in trials for _ in (0, *trial.left)]
        actions = [trial.actions[candidate] for trial in trials for candidate in (0, *trial.left)]
        scenarios = np.tile(np.arange(n_used, n_used + n_new), len(rows))
        given = FirstActions(actions, np.repeat(np.arange(len(rows)), n_new))
        returns = self.simulate(source, np.repeat(rows, n_new), scenarios, given, seed).reshape(-1, n_new)
        start = 0
        for trial in trials:
            stop = start + 1 + len(trial.left)
            trial.add(returns[start], returns[start + 1 : stop])
            start = stop


class _Trial:
    """The candidates of one decision with their paired differences so far.

    :param row: Index of the state.
    :param actions: The candidates, the base's first.
    :param confidence: Confidence of the interval of each candidate.
    :param least: Scenarios from which on a candidate can be shown to be better.
    """

    def __init__(self, row: int, actions: Candidates, confidence: float, least: int) -> None:
        self.row, self.actions = row, actions
        self.left = list(range(1, len(actions)))
        """Candidates that are still compared, besides the base's."""
        self.is_over = not self.left
        self._tail, self._least = 0.5 + confidence / 2, least
        self._n = np.zeros(len(actions), np.int64)
        self._sums, self._squares = np.zeros(len(actions)), np.zeros(len(actions))
        self._base_sum = self._base_low = self._base_high = 0.0

    def add(self, of_base: np.ndarray, of_left: np.ndarray) -> None:
        """Take over returns in new scenarios.

        :param of_base: Returns of the base's action, `[n_scenarios]`.
        :param of_left: Returns of the remaining candidates, `[n_left, n_scenarios]`.
        """
        differences = of_left - of_base
        if not self._n[0]:
            self._base_low = self._base_high = float(of_base[0])
        self._base_low = min(self._base_low, float(of_base.min()))
        self._base_high = max(self._base_high, float(of_base.max()))
        self._base_sum += float(of_base.sum())
        self._n[[0, *self.left]] += len(of_base)
        self._sums[self.left] += differences.sum(axis=1)
        self._squares[self.left] += (differences**2).sum(axis=1)

    def halve(self) -> None:
        """Drop the worse half; keep nothing that is shown to be worse than the base's action."""
        means, spread = self._means(), self._spread()
        left = np.array(self.left)
        left = left[np.argsort(-means[left], kind="stable")][: (len(left) + 1) // 2]
        self.left = left[means[left] + spread[left] >= 0].tolist()
        is_shown = len(self.left) == 1 and self._is_better(self.left[0], means, spread)
        self.is_over = not self.left or is_shown or self._is_certain()

    def result(self) -> ActionValues:
        """Return the current estimates."""
        means, spread = self._means(), self._spread()
        spread[0] = 0.0
        better = [index for index in self.left if self._is_better(index, means, spread)]
        chosen = max(better, key=lambda index: means[index]) if better else 0
        base_return = self._base_sum / self._n[0] if self._n[0] else float("nan")
        return ActionValues(self.actions, base_return, means, means - spread, means + spread, self._n.copy(), chosen)

    def _is_better(self, index: int, means: np.ndarray, spread: np.ndarray) -> bool:
        return bool(self._n[index] >= self._least and means[index] - spread[index] > 0)

    def _means(self) -> np.ndarray:
        return np.asarray(self._sums / np.maximum(self._n, 1))

    def _spread(self) -> np.ndarray:
        """Return the half the width of the intervals."""
        n = np.maximum(self._n, 2)
        variances = np.maximum(self._squares - self._n * self._means() ** 2, 0.0) / (n - 1)
        variances[variances < 1e-12 * self._squares / n] = 0.0  # rounding
        spread: np.ndarray = stdtrit(n - 1, self._tail) * np.sqrt(variances / n)
        spread[self._n < (1 if self._is_certain() else 2)] = np.inf
        return spread

    def _is_certain(self) -> bool:
        """Return whether enough scenarios have equal returns: further ones would not change the result."""
        n_left = self._n[0]
        if n_left < self._least or self._base_low != self._base_high:
            return False
        spread = self._squares[self.left] - self._sums[self.left] ** 2 / n_left
        return bool((spread <= 1e-12 * self._squares[self.left]).all())
