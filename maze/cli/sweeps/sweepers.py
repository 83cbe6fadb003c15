"""The sweepers of Maze: grid search, Nevergrad, Optuna."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from maze.cli.errors import UsageError, suggestion
from maze.cli.sweeps.results import write_optimum
from maze.cli.sweeps.space import override_text, parse_space, swept_texts
from maze.cli.sweeps.strategy import Grid, Search, Strategy
from maze.cli.sweeps.sweeper import MazeSweeper
from maze.cli.sweeps.trials import UNFINISHED, TrialResult
from maze.core.annotations import override


class GridSweep(MazeSweeper):
    """All combinations of the values that the command line and `params` list.

    :param params: Keys mapped to values as on the command line, for instance `"0.1,0.2"`.
    :param max_batch_size: Number of runs given to a launcher at once, where it knows batches only.
    :param maximize: Whether a larger objective is better.
    """

    def __init__(
        self,
        params: Mapping[str, str] | None = None,
        max_batch_size: int | None = None,
        maximize: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**_plain(common))
        self.params = dict(params or {})
        self.batch_size = max_batch_size
        self.maximize = maximize

    @override(MazeSweeper)
    def make_strategy(self, arguments: list[str], parser: OverridesParser, seed: int) -> Strategy:
        values: dict[str, list[str]] = {}
        fixed: dict[str, str] = {}
        listed = [f"{key}={text}" for key, text in self.params.items()]
        for parsed in itertools.chain(parser.parse_overrides(listed), parser.parse_overrides(arguments)):
            key = parsed.get_key_element()
            values.pop(key, None)
            fixed.pop(key, None)
            if parsed.is_sweep_override():
                values[key] = swept_texts(parsed)
            else:
                fixed[key] = override_text(parsed)
        return Grid(values, list(fixed.values()), self.maximize)


class SearchSweep(MazeSweeper):
    """A search for good values.

    :param optim: Options of the search: `budget`, `num_workers`, `maximize`, `seed` and those of its kind.
    :param parametrization: What is searched.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]]
    """Options of `optim` and their defaults."""

    def __init__(
        self, optim: Mapping[str, Any] | None = None, parametrization: Mapping[str, Any] | None = None, **common: Any
    ) -> None:
        super().__init__(**_plain(common))
        self.optim = {**self.options, **_plain(dict(optim or {}))}
        self.parametrization = _plain(dict(parametrization or {}))

    @override(MazeSweeper)
    def check_options(self) -> None:
        super().check_options()
        for name, value in self.optim.items():
            if name not in self.options:
                raise UsageError(f"hydra.sweeper.optim.{name}: unknown key.{suggestion(name, self.options)}")
            if name in ("budget", "num_workers") and (type(value) is not int or value < 1):
                raise UsageError(f"hydra.sweeper.optim.{name}: expected a whole number of at least 1, got {value!r}.")
            if name in ("maximize", "noisy") and not isinstance(value, bool):
                raise UsageError(f"hydra.sweeper.optim.{name}: expected true or false, got {value!r}.")

    @override(MazeSweeper)
    def make_strategy(self, arguments: list[str], parser: OverridesParser, seed: int) -> Strategy:
        space = parse_space(self.parametrization, arguments, parser)
        options = {name: value for name, value in self.optim.items() if name != "seed"}
        given_seed = self.optim["seed"]
        return self.make_search(space=space, seed=seed if given_seed is None else int(given_seed), **options)

    @abstractmethod
    def make_search(self, **options: Any) -> Search:
        """The search with these options."""

    @override(MazeSweeper)
    def on_results(self, directory: Path, results: Sequence[TrialResult], maximize: bool) -> None:
        write_optimum(directory, self.name, results, maximize)


class NevergradSweep(SearchSweep):
    """Search with an optimizer of Nevergrad."""

    name = "nevergrad"
    options: ClassVar[Mapping[str, Any]] = {
        "optimizer": "OnePlusOne",
        "budget": 100,
        "num_workers": 1,
        "noisy": False,
        "maximize": True,
        "seed": None,
    }

    @override(SearchSweep)
    def make_search(self, **options: Any) -> Search:
        from maze.cli.sweeps.nevergrad_search import NevergradSearch

        return NevergradSearch(**options)


class OptunaSweep(SearchSweep):
    """Search with a sampler of Optuna."""

    name = "optuna"
    options: ClassVar[Mapping[str, Any]] = {
        "sampler": "tpe",
        "pruner": None,
        "budget": 100,
        "num_workers": 1,
        "maximize": True,
        "seed": None,
    }

    @override(SearchSweep)
    def make_search(self, **options: Any) -> Search:
        from maze.cli.sweeps.optuna_search import OptunaSearch

        self._search = OptunaSearch(**options)
        return self._search

    @override(MazeSweeper)
    def on_results(self, directory: Path, results: Sequence[TrialResult], maximize: bool) -> None:
        super().on_results(directory, results, maximize)
        self._search.write_study(directory, [result for result in results if result.status != UNFINISHED])


def _plain(node: Any) -> Any:
    """Hydra hands configurations over; what is made of them are plain Python values."""
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=True)
    return {name: _plain(value) for name, value in node.items()} if isinstance(node, dict) else node
