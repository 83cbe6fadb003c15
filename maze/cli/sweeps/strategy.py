"""Which sets of values a sweep tries, and in what order."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from maze.cli.errors import UsageError
from maze.cli.sweeps.space import SearchSpace
from maze.core.errors import install_command


class Strategy(ABC):
    """Proposes sets of values and hears what came of them."""

    name: ClassVar[str]
    retries_failed: ClassVar[bool] = False
    """Whether a resumed sweep runs failed trials again."""
    needs_objective: ClassVar[bool] = True
    may_change: ClassVar[tuple[str, ...]] = ()
    """Settings that may differ when a sweep is resumed."""
    prunes: bool = False
    """Whether it wants to hear of trials that still run."""

    fixed: Sequence[str]
    """Overrides that all trials have in common."""
    maximize: bool
    n_parallel: int | None
    """How many trials it wants to have running at the same time; None: any number."""
    n_trials: int
    """How many there will be."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What makes a sweep another one when it is changed; JSON."""

    @abstractmethod
    def examples(self) -> Iterable[Mapping[str, str]]:
        """Sets of values with which the configuration is composed before anything is started."""

    @abstractmethod
    def propose(self) -> dict[str, str] | None:
        """The next set of values; None: there are no more."""

    @abstractmethod
    def report(self, trial: int, objective: float | None) -> None:
        """Tells what came of a proposal; None: it failed.

        :param trial: Number of the proposal, counted from 0.
        :param objective: See :meth:`TrialResult.told`.
        """

    def should_stop(self, trial: int, epoch: int, objective: float) -> bool:
        """Whether a trial is not worth being continued.

        :param trial: Number of the proposal.
        :param epoch: How many epochs it has had.
        :param objective: What it has reached so far.
        """
        return False

    @abstractmethod
    def restore(self, events: Sequence[RestoredEvent]) -> None:
        """Goes on where an earlier process was stopped."""


RestoredEvent = tuple[str, int, Mapping[str, str], float | None]
"""("proposed" or "told", number of the trial, its values, its objective)"""


class Grid(Strategy):
    """All combinations.

    :param values: Keys mapped to the values to try, as they are written in overrides.
    """

    name = "grid"
    retries_failed = True
    needs_objective = False
    may_change = ("seeds",)

    def __init__(self, values: Mapping[str, Sequence[str]], fixed: Sequence[str], maximize: bool) -> None:
        self.values = {key: list(texts) for key, texts in values.items()}
        self.fixed = list(fixed)
        self.maximize = maximize
        self.n_parallel = None
        combinations = itertools.product(*self.values.values())
        self._waiting = [dict(zip(self.values, texts, strict=True)) for texts in combinations]
        self.n_trials = len(self._waiting)

    def settings(self) -> dict[str, Any]:
        return {}

    def examples(self) -> Iterable[Mapping[str, str]]:
        longest = max(map(len, self.values.values()), default=1)
        for index in range(longest):
            yield {key: texts[index % len(texts)] for key, texts in self.values.items()}

    def propose(self) -> dict[str, str] | None:
        return self._waiting.pop(0) if self._waiting else None

    def report(self, trial: int, objective: float | None) -> None:
        """Results change nothing."""

    def restore(self, events: Sequence[RestoredEvent]) -> None:
        known = [dict(params) for kind, _, params, _ in events if kind == "proposed"]
        self._waiting = [params for params in self._waiting if params not in known]


class Search(Strategy):
    """Proposals that depend on results.

    A resumed search asks and tells everything again in the order of the journal; with the same random seed it is then
    in the state in which it was stopped. Where it proposes something else than it did (another version of the
    package), it is only told the results.

    :param budget: Number of trials.
    :param num_workers: Number of trials at the same time.
    :param seed: Of the search's random numbers.
    """

    may_change = ("budget", "num_workers")

    def __init__(self, space: SearchSpace, budget: int, num_workers: int, maximize: bool, seed: int) -> None:
        self.space = space
        self.fixed = list(space.fixed)
        self.n_trials = budget
        self.n_parallel = num_workers
        self.maximize = maximize
        self.seed = seed
        self._handles: dict[int, Any] = {}
        self._n_proposed = 0

    def settings(self) -> dict[str, Any]:
        return {
            "space": [[type(parameter).__name__, vars(parameter)] for parameter in self.space.parameters],
            "maximize": self.maximize,
            "budget": self.n_trials,
            "num_workers": self.n_parallel,
            "random_seed": self.seed,
        }

    def examples(self) -> Iterable[Mapping[str, str]]:
        return self.space.examples()

    def propose(self) -> dict[str, str] | None:
        if self._n_proposed >= self.n_trials:
            return None
        self._handles[self._n_proposed], params = self._ask()
        self._n_proposed += 1
        return params

    def report(self, trial: int, objective: float | None) -> None:
        handle = self._handles.pop(trial)
        if isinstance(handle, _Unasked):
            self._tell_unasked(handle.params, objective)
        else:
            self._tell(handle, objective)

    def restore(self, events: Sequence[RestoredEvent]) -> None:
        for kind, trial, params, objective in events:
            if kind == "told":
                self.report(trial, objective)
                continue
            self._handles[trial], proposed = self._ask()
            if proposed != dict(params):
                self._restore_results_only(events)
                break
        self._n_proposed = sum(kind == "proposed" for kind, *_ in events)

    def _restore_results_only(self, events: Sequence[RestoredEvent]) -> None:
        print(f"{self.name} proposes other values than before: the search goes on from the results alone.")
        self.seed += 1  # the same numbers would only repeat what was tried
        self._reset()
        self._handles.clear()
        told = {trial for kind, trial, _, _ in events if kind == "told"}
        for kind, trial, params, objective in events:
            if kind == "told":
                self._tell_unasked(params, objective)
            elif trial not in told:
                self._handles[trial] = _Unasked(dict(params))

    @abstractmethod
    def _reset(self) -> None:
        """Starts over."""

    @abstractmethod
    def _ask(self) -> tuple[Any, dict[str, str]]:
        """A proposal in the optimizer's form and as overrides."""

    @abstractmethod
    def _tell(self, handle: Any, objective: float | None) -> None:
        """Passes on what came of a proposal."""

    @abstractmethod
    def _tell_unasked(self, params: Mapping[str, str], objective: float | None) -> None:
        """Passes on a result for values that the optimizer did not propose."""


class _Unasked:
    """Stands for a proposal of an earlier process."""

    def __init__(self, params: dict[str, str]) -> None:
        self.params = params


class MissingPackageError(UsageError, ImportError):
    """A package is not installed that only some uses of Maze need."""


def required(package: str, purpose: str) -> Any:
    """Imports a package of the extra `hpo`.

    :param purpose: What needs it.
    :raises MissingPackageError: It is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which is not installed: {install_command('hpo')}"
        ) from error
