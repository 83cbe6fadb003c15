"""Normalization of observations."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.simulated_env_mixin import Future
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import CheckpointError, ConfigError, did_you_mean
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory, plain_container
from maze.core.utils.targets import locate
from maze.core.wrappers.observation_normalization.normalization_strategies.base import (
    ObservationNormalizationStrategy,
    StrategyRegistry,
    StructuredStatisticsType,
    load_statistics,
    save_statistics,
)
from maze.core.wrappers.substep_wrappers import (
    Observation,
    SubstepObservationWrapper,
    entry_names,
    is_mask,
    spaces_of_entry,
)
from maze.core.wrappers.wrapper import ObservationWrapper

logger = logging.getLogger(__name__)

_MANUAL_KEYS = ("strategy", "strategy_config", "statistics")
_PLACE = "ObservationNormalizationWrapper"


class ObservationNormalizationWrapper(SubstepObservationWrapper):
    """Normalizes observations, each with a strategy and statistics of its own.

    An observation that several sub-steps share is normalized alike in all of them. Action masks (`..._mask`) and
    observations without a Box space pass unchanged. Statistics come from the configuration, from
    :meth:`set_normalization_statistics`, from an estimation
    (:func:`~maze.core.wrappers.observation_normalization.observation_normalization_utils.obtain_normalization_statistics`)
    or from the file `statistics_dump`, if it exists when the wrapper is made.

    :param env: The environment to wrap.
    :param default_strategy: Strategy of all observations without one of their own: path, registered name or class.
    :param default_strategy_config: Its arguments, `clip_range` and `axis`.
    :param default_statistics: Statistics of all observations without a configuration of their own; None: estimated.
    :param statistics_dump: File that estimated statistics are written to and read from.
    :param sampling_policy: Acts while statistics are estimated; a policy or the configuration of one.
    :param exclude: Names of observations that stay as they are.
    :param manual_config: By name of the observation its `strategy`, `strategy_config` and `statistics`.
    :raises ConfigError: The configuration names an unknown observation, or the environment has such a wrapper already.
    """

    _registry: ClassVar[StrategyRegistry] = StrategyRegistry()

    def __init__(
        self,
        env: MazeEnv[Any],
        default_strategy: str | type[ObservationNormalizationStrategy] | ObservationNormalizationStrategy,
        default_strategy_config: Mapping[str, Any] | None = None,
        default_statistics: Mapping[str, Any] | None = None,
        statistics_dump: str = "statistics.pkl",
        sampling_policy: ConfigType = None,
        exclude: list[str] | None = None,
        manual_config: Mapping[str | int, Mapping[str, Any]] | None = None,
    ) -> None:
        inner: Any = env
        if isinstance(inner, ObservationNormalizationWrapper):
            raise ConfigError(f"{_PLACE}: the environment has one already; configure observations in `manual_config`.")
        super().__init__(env)
        self.default_strategy = default_strategy
        self.default_strategy_config = dict(plain_container(default_strategy_config or {}))
        self.default_statistics = plain_container(default_statistics)
        self.statistics_dump = Path(statistics_dump or "").absolute() if statistics_dump else None
        """The file; relative names refer to the working directory in which the wrapper was made."""
        self.sampling_policy = plain_container(sampling_policy)
        self.exclude = list(exclude or ())
        self.manual_config = {str(key): entry or {} for key, entry in (plain_container(manual_config) or {}).items()}
        self._seed: int | None = None
        self._is_collecting = False
        self._samples: dict[str, list[np.ndarray]] = {}
        self.strategies = self._build_strategies()
        """By normalised observation."""
        self._configured = [name for name, strategy in self.strategies.items() if strategy.is_initialized()]
        self._file_error: CheckpointError | None = None
        self._normalizers: dict[StepKeyType, list[tuple[str, Any]]] | None = None
        self._read_dump_if_there_is_one()
        self._update()

    @classmethod
    def register_new_observation_normalization_strategy(cls, containing_submodule: Any) -> None:
        """Makes the strategies of a module known by their class names alone.

        :param containing_submodule: The module, a package of modules, or the path of either.
        """
        cls._registry.register(containing_submodule)

    def seed(self, seed: Any) -> None:
        """Seeds the environment and the sampling policy, with different streams of random numbers."""
        self.env.seed(seed)
        self._seed = int(seed) if isinstance(seed, (int, np.integer)) else None
        self._seed_policy(self.sampling_policy)

    @override(SubstepObservationWrapper)
    def convert(self, observation: Observation, step_key: StepKeyType) -> Observation:
        if self._is_collecting:
            self._collect(observation)
            return observation
        normalizers = self._normalizers
        if normalizers is None:
            raise self._missing_statistics()
        normalized = dict(observation)
        for name, normalize in normalizers[step_key]:
            normalized[name] = normalize(observation[name])
        return normalized

    def set_observation_collection(self, status: bool) -> None:
        """Switches on and off the collection of samples. Meanwhile observations are passed on as they are.

        :param status: Whether to collect; switching on forgets what was collected before.
        """
        self._is_collecting = bool(status)
        if status:
            self._samples = {name: [] for name in self.names_to_estimate()}

    def names_to_estimate(self) -> list[str]:
        """Names of the observations whose statistics the configuration leaves to an estimation."""
        return [name for name in self.strategies if name not in self._configured]

    def estimate_statistics(self) -> None:
        """Calculates statistics from the samples collected, and drops these.

        :raises ConfigError: An observation was never seen.
        """
        estimated = {}
        for name in self.names_to_estimate():
            samples = self._samples.get(name)
            if not samples:
                raise ConfigError(
                    f"{_PLACE}: no samples of the observation `{name}` were collected. Increase the number of samples, "
                    f"or configure its statistics in `manual_config`, or name it in `exclude`."
                )
            estimated[name] = self._estimate(name, samples)
        self._samples = {}
        self._set(estimated)

    def get_statistics(self) -> StructuredStatisticsType:
        """The statistics of all normalized observations, by name.

        :raises CheckpointError: There are none yet.
        """
        if self._normalizers is None:
            raise self._missing_statistics()
        return {name: dict(strategy.get_statistics() or {}) for name, strategy in self.strategies.items()}

    def set_normalization_statistics(self, stats: StructuredStatisticsType) -> None:
        """Sets statistics.

        :param stats: By name of the observation, as :meth:`get_statistics` gives them.
        """
        self._check_names(stats)
        self._set(stats)

    def has_statistics(self) -> bool:
        """Whether there are statistics of all observations to normalize."""
        return self._normalizers is not None

    def dump_statistics(self) -> None:
        """Writes the statistics to the configured file."""
        if self.statistics_dump is not None:
            save_statistics(self.statistics_dump, self.get_statistics())

    def load_statistics(self, path: str | Path) -> None:
        """Sets statistics from a file, except those that the configuration gives.

        :param path: The file, written by :meth:`dump_statistics` of an environment like this.
        :raises CheckpointError: The file cannot be read, or does not fit the environment.
        """
        loaded = load_statistics(Path(path))
        try:
            self._check_names(loaded)
            self._set({name: entry for name, entry in loaded.items() if name not in self._configured})
        except ConfigError as error:
            raise CheckpointError(f"`{path}` does not fit the environment: {error}") from error

    def build_sampling_policy(self, action_spaces_dict: dict[StepKeyType, spaces.Dict]) -> Any:
        """The policy that acts while statistics are estimated.

        :param action_spaces_dict: Action spaces of the environment that it acts in, for policies that ask for them.
        :raises ConfigError: What is configured is no policy.
        """
        config, where = self.sampling_policy, f"{_PLACE}: sampling_policy"
        arguments = {}
        if isinstance(config, Mapping) and TARGET_KEY in config:
            target = config[TARGET_KEY]
            target = locate(target, where) if isinstance(target, str) else target
            if _takes_action_spaces(target):
                arguments["action_spaces_dict"] = action_spaces_dict
        policy = Factory(object).instantiate(config, config_path=where, **arguments)
        if not hasattr(policy, "compute_action"):
            raise ConfigError(
                f"{where}: expected a policy or its configuration, for instance "
                f"{{_target_: maze.core.agent.random_policy.RandomPolicy}}, got {config!r}."
            )
        self._seed_policy(policy)
        return policy

    @override(ObservationWrapper)
    def clone_from(self, env: ObservationNormalizationWrapper, future: Future = "same") -> None:
        super().clone_from(env, future)
        if env._normalizers is not None:
            self._set(env.get_statistics())

    def _build_strategies(self) -> dict[str, ObservationNormalizationStrategy]:
        """The strategy of each observation that is to be normalized."""
        inner_spaces = self.env.observation_spaces_dict
        known = entry_names(inner_spaces)
        for name in (*self.exclude, *self.manual_config):
            if name not in known and not is_mask(name):
                raise ConfigError(f"{_PLACE}: there is no observation `{name}`.{did_you_mean(name, known)}")
        strategies = {}
        for name in known:
            step_spaces = spaces_of_entry(inner_spaces, name)
            space = next(iter(step_spaces.values()))
            if name in self.manual_config:
                _check_is_normalizable(name, space)
            elif name in self.exclude or is_mask(name) or not isinstance(space, spaces.Box):
                continue
            if any(other.shape != space.shape or other.dtype != space.dtype for other in step_spaces.values()):
                raise ConfigError(
                    f"{_PLACE}: the observation `{name}` has other shapes or types in other sub-steps, {step_spaces}, "
                    "but its statistics are common to them. Rename it in one of them, or `exclude` it."
                )
            strategies[name] = self._build_strategy(name, space)
        return strategies

    def _build_strategy(self, name: str, space: spaces.Space[Any]) -> ObservationNormalizationStrategy:
        manual = self.manual_config.get(name)
        where = f"{_PLACE}: default_strategy" if manual is None else f"{_PLACE}: manual_config.{name}"
        for key in manual or ():
            if key not in _MANUAL_KEYS:
                raise ConfigError(f"{where}: unknown key `{key}`.{did_you_mean(key, _MANUAL_KEYS)}")
        choice = {} if manual is None else manual
        strategy_type = self._registry.type_of(choice.get("strategy") or self.default_strategy, where)
        config = choice.get("strategy_config")
        config = self.default_strategy_config if config is None else config
        statistics = self.default_statistics if manual is None else manual.get("statistics")
        target = {TARGET_KEY: strategy_type, "clip_range": (None, None), "axis": None, **config}
        try:
            strategy = self._registry.instantiate(target, observation_space=space)
        except ConfigError as error:
            raise ConfigError(f"{where}, observation `{name}`: {error}") from error
        if statistics is not None:
            _set_statistics(strategy, statistics, f"{where}, observation `{name}`")
        return strategy

    def _read_dump_if_there_is_one(self) -> None:
        if self.statistics_dump is None or not self.names_to_estimate() or not self.statistics_dump.is_file():
            return
        try:
            self.load_statistics(self.statistics_dump)
        except CheckpointError as error:
            # The file may belong to something else, as long as nobody asks for statistics before they are estimated.
            self._file_error = error

    def _check_names(self, stats: Mapping[str, Any]) -> None:
        missing = [name for name in self.names_to_estimate() if name not in stats]
        unknown = [name for name in stats if name not in self.strategies]
        if missing or unknown:
            raise ConfigError(
                f"{_PLACE}: statistics are needed of the observations {list(self.strategies)}, found those of "
                f"{list(stats)}."
            )

    def _set(self, stats: StructuredStatisticsType) -> None:
        """Sets all of the statistics or, if there is a fault in any, none of them."""
        before = {name: self.strategies[name].get_statistics() for name in stats}
        try:
            for name, entry in stats.items():
                _set_statistics(self.strategies[name], entry, f"{_PLACE}: observation `{name}`")
        except ConfigError:
            for name, earlier in before.items():
                self.strategies[name].restore_statistics(earlier)
            raise
        self._update()

    def _update(self) -> None:
        """Prepares normalization and spaces for the present statistics."""
        inner_spaces = self.env.observation_spaces_dict
        strategies = self.strategies
        self._normalizers = None
        if all(strategy.is_initialized() for strategy in strategies.values()):
            self._normalizers = {
                key: [(name, strategies[name].normalize_and_process_value) for name in space if name in strategies]
                for key, space in inner_spaces.items()
            }
        self._observation_spaces = {
            key: spaces.Dict({name: self._space_of(name, entry) for name, entry in space.spaces.items()})
            for key, space in inner_spaces.items()
        }

    def _space_of(self, name: str, space: spaces.Space[Any]) -> spaces.Space[Any]:
        strategy = self.strategies.get(name)
        if strategy is None or not isinstance(space, spaces.Box):
            return space
        return strategy.normalized_box(space)

    def _collect(self, observation: Observation) -> None:
        for name, samples in self._samples.items():
            if name in observation:
                samples.append(np.array(observation[name]))

    def _estimate(self, name: str, samples: list[np.ndarray]) -> dict[str, np.ndarray]:
        not_finite = next((index for index, sample in enumerate(samples) if not np.isfinite(sample).all()), None)
        if not_finite is not None:
            raise ConfigError(
                f"{_PLACE}: sample {not_finite} of the observation `{name}` contains NaN or infinite values: "
                f"{samples[not_finite]}. Correct the environment, or `exclude` the observation."
            )
        return self.strategies[name].estimate_stats(samples)

    def _seed_policy(self, policy: Any) -> None:
        if self._seed is not None and hasattr(policy, "seed"):
            # The environment draws from a generator with the seed itself: the same stream would correlate with it.
            policy.seed(int(np.random.SeedSequence([self._seed, 1]).generate_state(1)[0] >> 1))

    def _missing_statistics(self) -> CheckpointError:
        missing = [name for name, strategy in self.strategies.items() if not strategy.is_initialized()]
        looked = f" There are none in `{self.statistics_dump}`." if self.statistics_dump is not None else ""
        if self._file_error is not None:
            looked = f" {self._file_error}"
        return CheckpointError(
            f"{_PLACE}: statistics of the observations {missing} are missing.{looked} Rollouts take them from the "
            "training run that `input_dir=outputs/<name>/<time>` names; in Python, estimate them "
            "(`obtain_normalization_statistics(env, n_samples=...)`) or pass them to `set_normalization_statistics`."
        )


def _check_is_normalizable(name: str, space: spaces.Space[Any]) -> None:
    if is_mask(name):
        raise ConfigError(f"{_PLACE}: manual_config.{name}: action masks are never normalized. Rename what is none.")
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"{_PLACE}: manual_config.{name}: only Box spaces can be normalized, found {space}.")


def _set_statistics(strategy: ObservationNormalizationStrategy, statistics: Mapping[str, Any], where: str) -> None:
    """Sets statistics and tries them out: what a user's strategy needs is known to the strategy only."""
    try:
        strategy.set_statistics(statistics)
        strategy.normalized_space()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except KeyError as error:
        raise ConfigError(
            f"{where}: {type(strategy).__name__} needs the statistic {error}, found {sorted(statistics)}."
        ) from error


def _takes_action_spaces(target: Any) -> bool:
    try:
        return "action_spaces_dict" in inspect.signature(target).parameters
    except (TypeError, ValueError):  # of extension types nobody knows the arguments
        return False
