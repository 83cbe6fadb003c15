"""Normalization of observations: the wrapper, estimation and reuse of its statistics."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.simulated_env_mixin import Future
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import CheckpointError, ConfigError, did_you_mean
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory, locate, plain_container
from maze.core.wrappers import wrapper
from maze.core.wrappers.observation_normalization.normalization_strategies import base
from maze.core.wrappers.wrapper_factory import subclasses_of

_PLACE = "ObservationNormalizationWrapper"
# Statistics of an environment that is made: wrappers around this one derive their spaces from the normalized ones.
_GIVEN: ContextVar[base.StructuredStatisticsType | None] = ContextVar("normalization_statistics", default=None)


class ObservationNormalizationWrapper(wrapper.SubstepObservationWrapper):
    """Normalize observations, each with a strategy and statistics of its own.

    An observation that several sub-steps share is normalized alike in all of them. Action masks (`..._mask`) and
    observations without a Box space pass unchanged. Statistics come from the configuration, from
    :meth:`set_normalization_statistics`, from an estimation
    (:func:`~maze.core.wrappers.observation_normalization.observation_normalization_utils.obtain_normalization_statistics`)
    or from the file `statistics_dump`, if it exists when the wrapper is made.

    :param env: The environment to wrap.
    :param default_strategy: Strategy of all observations without one of their own: path, class, or name of a class that
        is built in or imported.
    :param default_strategy_config: Its arguments, `clip_range` and `axis`.
    :param default_statistics: Statistics of all observations without a configuration of their own; None: estimated.
    :param statistics_dump: File that estimated statistics are written to and read from.
    :param sampling_policy: Policy that acts while statistics are estimated, or its configuration.
    :param exclude: Names of observations that stay as they are.
    :param manual_config: By name of the observation its `strategy`, `strategy_config` and `statistics`.
    :raises ConfigError: The configuration names an unknown observation, or the environment has such a wrapper already.
    """

    def __init__(
        self,
        env: MazeEnv[Any],
        default_strategy: str | type[base.ObservationNormalizationStrategy] | base.ObservationNormalizationStrategy,
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
        """The strategy of each normalized observation."""
        self._configured = [name for name, strategy in self.strategies.items() if strategy.is_initialized()]
        self._normalizers: dict[StepKeyType, list[tuple[str, Any]]] | None = None
        self._update()
        if (given := _GIVEN.get()) is not None:
            self.set_normalization_statistics(given)
        elif self.statistics_dump is not None and self.names_to_estimate() and self.statistics_dump.is_file():
            with contextlib.suppress(CheckpointError):  # it may belong to another environment, and is replaced then
                self.load_statistics(self.statistics_dump)

    @classmethod
    def register_new_observation_normalization_strategy(cls, containing_submodule: Any) -> None:
        """Import the strategies of a module, so that their class names alone identify them.

        :param containing_submodule: The module, a package of modules, or the path of either.
        """
        module = containing_submodule
        module = importlib.import_module(module) if isinstance(module, str) else module
        for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
            importlib.import_module(f"{module.__name__}.{found.name}")

    def seed(self, seed: Any) -> None:
        """Seed the environment and the sampling policy, with different random streams."""
        self.env.seed(seed)
        self._seed = int(seed) if isinstance(seed, (int, np.integer)) else None
        self._seed_policy(self.sampling_policy)

    @override(wrapper.SubstepObservationWrapper)
    def substep_observation(self, observation: wrapper.Observation, step_key: StepKeyType) -> wrapper.Observation:
        if self._is_collecting:
            for name, samples in self._samples.items():
                if name in observation:
                    samples.append(np.array(observation[name]))
            return observation
        if self._normalizers is None:
            raise self._missing_statistics()
        normalized = dict(observation)
        for name, normalize in self._normalizers[step_key]:
            normalized[name] = normalize(observation[name])
        return normalized

    def set_observation_collection(self, status: bool) -> None:
        """Switch the collection of samples on or off. While it is on, observations are not normalized.

        :param status: Whether to collect; switching on drops earlier samples.
        """
        self._is_collecting = bool(status)
        if status:
            self._samples = {name: [] for name in self.names_to_estimate()}

    def names_to_estimate(self) -> list[str]:
        """Return the names of the observations whose statistics are to be estimated."""
        return [name for name in self.strategies if name not in self._configured]

    def estimate_statistics(self) -> None:
        """Calculate statistics from the collected samples, and drop the samples.

        :raises ConfigError: There are no samples of an observation.
        """
        estimated = {}
        for name in self.names_to_estimate():
            samples = self._samples.get(name)
            if not samples:
                raise ConfigError(
                    f"{_PLACE}: no samples of `{name}` were collected. Increase their number, or `exclude` it."
                )
            not_finite = next((index for index, sample in enumerate(samples) if not np.isfinite(sample).all()), None)
            if not_finite is not None:
                raise ConfigError(
                    f"{_PLACE}: sample {not_finite} of the observation `{name}` is not finite: {samples[not_finite]}."
                )
            estimated[name] = self.strategies[name].estimate_stats(samples)
        self._samples = {}
        self.set_normalization_statistics(estimated)

    def get_statistics(self) -> base.StructuredStatisticsType:
        """Return the statistics of all normalized observations, by name.

        :raises CheckpointError: There are none yet.
        """
        if self._normalizers is None:
            raise self._missing_statistics()
        return {name: dict(strategy.get_statistics() or {}) for name, strategy in self.strategies.items()}

    def set_normalization_statistics(self, stats: base.StructuredStatisticsType) -> None:
        """Set statistics.

        :param stats: By name of the observation, as :meth:`get_statistics` returns them.
        """
        if not {*self.names_to_estimate()} <= {*stats} <= {*self.strategies}:
            raise ConfigError(
                f"{_PLACE}: expected statistics of {list(self.strategies)}, found those of {list(stats)}."
            )
        strategies = copy.deepcopy(self.strategies)  # none is changed if one of them fails
        for name, entry in stats.items():
            _set_statistics(strategies[name], entry, f"{_PLACE}: observation `{name}`")
        self.strategies = strategies
        self._update()

    def dump_statistics(self) -> None:
        """Write the statistics to the configured file."""
        if self.statistics_dump is not None:
            base.save_statistics(self.statistics_dump, self.get_statistics())

    def load_statistics(self, path: str | Path) -> None:
        """Set statistics from a file, except those in the configuration.

        :param path: The file, written by :meth:`dump_statistics` of an environment of the same kind.
        :raises CheckpointError: The file cannot be read, or does not fit the environment.
        """
        loaded = base.load_statistics(Path(path))
        try:
            self.set_normalization_statistics(
                {name: entry for name, entry in loaded.items() if name not in self._configured}
            )
        except ConfigError as error:
            raise CheckpointError(f"`{path}` does not fit the environment: {error}") from error

    def build_sampling_policy(self, action_spaces_dict: dict[StepKeyType, spaces.Dict]) -> Any:
        """Return the policy that acts while statistics are estimated.

        :param action_spaces_dict: Action spaces of the environment, for policies that take them as an argument.
        :raises ConfigError: The configured object is not a policy.
        """
        config, where = self.sampling_policy, f"{_PLACE}: sampling_policy"
        arguments = {}
        if isinstance(config, Mapping) and TARGET_KEY in config:
            target = config[TARGET_KEY]
            target = locate(target, where) if isinstance(target, str) else target
            with contextlib.suppress(TypeError, ValueError):  # extension types have no signature
                if "action_spaces_dict" in inspect.signature(target).parameters:
                    arguments["action_spaces_dict"] = action_spaces_dict
        policy = Factory(object).instantiate(config, config_path=where, **arguments)
        if not hasattr(policy, "compute_action"):
            raise ConfigError(f"{where}: expected a policy or its configuration with `_target_`, found {config!r}.")
        self._seed_policy(policy)
        return policy

    @override(wrapper.ObservationWrapper)
    def clone_from(self, env: ObservationNormalizationWrapper, future: Future = "same") -> None:
        super().clone_from(env, future)
        if env._normalizers is not None:
            self.set_normalization_statistics(env.get_statistics())

    def _build_strategies(self) -> dict[str, base.ObservationNormalizationStrategy]:
        """Return the strategy of each observation that is to be normalized."""
        inner_spaces = self.env.observation_spaces_dict
        known = wrapper.entry_names(inner_spaces)
        for name in (*self.exclude, *self.manual_config):
            if name not in known and not wrapper.is_mask(name):
                raise ConfigError(f"{_PLACE}: there is no observation `{name}`.{did_you_mean(name, known)}")
        strategies = {}
        for name in known:
            step_spaces = wrapper.known_spaces(inner_spaces, name, _PLACE, "observation")
            space = next(iter(step_spaces.values()))
            if name not in self.manual_config:
                if name in self.exclude or wrapper.is_mask(name) or not isinstance(space, spaces.Box):
                    continue
            elif wrapper.is_mask(name):
                raise ConfigError(
                    f"{_PLACE}: manual_config.{name}: action masks are never normalized. Rename other observations."
                )
            if any(other.shape != space.shape or other.dtype != space.dtype for other in step_spaces.values()):
                raise ConfigError(
                    f"{_PLACE}: `exclude` or rename `{name}`, whose shapes or types differ: {step_spaces}."
                )
            strategies[name] = self._build_strategy(name, space)
        return strategies

    def _build_strategy(self, name: str, space: spaces.Space[Any]) -> base.ObservationNormalizationStrategy:
        manual = self.manual_config.get(name)
        where = f"{_PLACE}: default_strategy" if manual is None else f"{_PLACE}: manual_config.{name}"
        choice = wrapper.checked_entry(manual or {}, where, optional=("strategy", "strategy_config", "statistics"))
        strategy_type = _strategy_type(choice.get("strategy") or self.default_strategy, where)
        config = choice.get("strategy_config")
        config = self.default_strategy_config if config is None else config
        statistics = self.default_statistics if manual is None else manual.get("statistics")
        target = {TARGET_KEY: strategy_type, "clip_range": (None, None), "axis": None, **config}
        try:
            strategy = _FACTORY.instantiate(target, observation_space=space)
        except ConfigError as error:
            raise ConfigError(f"{where}, observation `{name}`: {error}") from error
        if statistics is not None:
            _set_statistics(strategy, statistics, f"{where}, observation `{name}`")
        return strategy

    def _update(self) -> None:
        """Prepare normalization and spaces for the current statistics."""
        inner_spaces = self.env.observation_spaces_dict
        strategies = self.strategies
        self._normalizers = None
        if all(strategy.is_initialized() for strategy in strategies.values()):
            self._normalizers = {
                key: [(name, strategies[name].normalize_and_process_value) for name in space if name in strategies]
                for key, space in inner_spaces.items()
            }
        self.observation_spaces_dict = {
            key: spaces.Dict(
                {
                    name: strategies[name].normalized_space(entry) if name in strategies else entry
                    for name, entry in space.spaces.items()
                }
            )
            for key, space in inner_spaces.items()
        }

    def _seed_policy(self, policy: Any) -> None:
        if self._seed is not None and hasattr(policy, "seed"):
            # The environment is seeded with the seed itself: the same random stream would correlate with it.
            policy.seed(int(np.random.SeedSequence([self._seed, 1]).generate_state(1)[0] >> 1))

    def _missing_statistics(self) -> CheckpointError:
        missing = [name for name, strategy in self.strategies.items() if not strategy.is_initialized()]
        return CheckpointError(
            f"{_PLACE}: statistics of the observations {missing} are missing; the file `{self.statistics_dump}` has "
            "none that fit. Rollouts take them from the training run that `input_dir=outputs/<name>/<time>` names; in "
            "Python, estimate them (`obtain_normalization_statistics(env, n_samples=...)`) or pass them to "
            "`set_normalization_statistics`."
        )


_FACTORY = Factory[base.ObservationNormalizationStrategy](
    base.ObservationNormalizationStrategy  # type: ignore[type-abstract]  # subclasses are built
)


def _strategy_type(strategy: Any, where: str) -> type[base.ObservationNormalizationStrategy]:
    """Return the class of a strategy.

    :param strategy: Dotted path, name of a built-in or imported class, class, or an instance.
    :param where: Key of the configuration, for messages.
    """
    if isinstance(strategy, base.ObservationNormalizationStrategy):
        return type(strategy)
    if isinstance(strategy, str) and "." not in strategy:
        known = {klass.__name__: klass for klass in subclasses_of(base.ObservationNormalizationStrategy)}
        if strategy in known:
            return known[strategy]
    return _FACTORY.type_from_name(strategy, config_path=where)


def _set_statistics(strategy: base.ObservationNormalizationStrategy, statistics: Mapping[str, Any], where: str) -> None:
    """Set statistics, and compute the normalized space: user-defined strategies may need further statistics."""
    try:
        strategy.set_statistics(statistics)
        strategy.normalized_space()
    except (ConfigError, KeyError) as error:
        raise ConfigError(f"{where}: {error}; found the statistics {sorted(statistics)}.") from error


def obtain_normalization_statistics(env: Any, n_samples: int) -> base.StructuredStatisticsType | None:
    """Return the statistics for the normalization of an environment's observations.

    Statistics that are not in its configuration are estimated, set in the environment and written to the file
    `statistics_dump`.

    :param env: The environment, with or without normalization.
    :param n_samples: Number of (sub-)steps to take for an estimation.
    :return: The statistics; None where the environment normalizes nothing.
    """
    if not isinstance(env, ObservationNormalizationWrapper):
        return None
    if env.names_to_estimate():
        estimate_observation_normalization_statistics(env, n_samples)
    env.dump_statistics()
    return env.get_statistics()


def estimate_observation_normalization_statistics(env: Any, n_samples: int) -> None:
    """Estimate statistics from the observations of the wrapper's sampling policy.

    :param env: Environment with an observation normalization wrapper somewhere in its stack.
    :param n_samples: Number of (sub-)steps to take.
    :raises ConfigError: The number of samples is not positive.
    """
    whole_number("runner.normalization_samples", n_samples, at_least=1)
    policy = env.build_sampling_policy(env.action_spaces_dict)
    names = ", ".join(env.names_to_estimate())
    print(
        f"-> collecting {n_samples:,} environment steps to estimate normalization statistics of {names} ...", flush=True
    )
    env.set_observation_collection(True)
    needs_state, needs_env = policy.needs_state(), policy.needs_env()
    try:
        observation = env.reset()
        for _ in range(n_samples):
            action = policy.compute_action(
                observation,
                maze_state=env.get_maze_state() if needs_state else None,
                env=env if needs_env else None,
                actor_id=env.actor_id(),
                deterministic=False,
            )
            observation, _, done, _ = env.step(action)
            if done:
                observation = env.reset()
    finally:
        env.set_observation_collection(False)
    env.estimate_statistics()
    env.reset()  # completes the statistics of the last episode, where they are collected
    if isinstance(env, LogStatsEnv):
        env.clear_epoch_stats()


def make_normalized_env_factory(
    env_factory: Callable[[], Any], normalization_statistics: base.StructuredStatisticsType | None
) -> Callable[[], Any]:
    """Return a factory of environments that normalize with given statistics.

    :param env_factory: Makes an environment.
    :param normalization_statistics: The statistics; None where nothing is normalized.
    """
    if normalization_statistics is None:
        return env_factory
    return functools.partial(_normalized_env, env_factory, normalization_statistics)


def _normalized_env(env_factory: Callable[[], Any], statistics: base.StructuredStatisticsType) -> Any:
    context = copy_context()
    context.run(_GIVEN.set, statistics)
    env = context.run(env_factory)
    env.set_normalization_statistics(statistics)  # it may have been copied
    return env


def estimated_statistics(
    env: Any, env_factory: Callable[[], Any], n_samples: int, input_dir: str | None
) -> tuple[base.StructuredStatisticsType | None, Callable[[], Any], Any]:
    """Return the statistics of an environment with observation normalization, and a factory that uses them.

    :param env: One environment, seeded. It is closed if it normalizes observations.
    :param env_factory: Makes such environments.
    :param n_samples: Number of observations to estimate from.
    :param input_dir: Directory of the run to resume, whose statistics are loaded; empty: none.
    :return: The statistics (`None`: nothing is normalized), the factory, and an environment with its spaces.
    """
    if not isinstance(env, ObservationNormalizationWrapper):
        return None, env_factory, env
    if input_dir and env.names_to_estimate():
        statistics = statistics_of_run(env, input_dir)
        env.dump_statistics()
    else:
        statistics = obtain_normalization_statistics(env, n_samples=n_samples)
    env.close()
    factory = make_normalized_env_factory(env_factory, statistics)
    return statistics, factory, factory()


def statistics_of_run(env: Any, directory: str | Path) -> base.StructuredStatisticsType | None:
    """Return the statistics that a run has used, which the environment then uses as well.

    :param env: An environment with the wrappers of the run.
    :param directory: The directory of the run.
    :return: `None`: nothing is normalized.
    :raises CheckpointError: Their file cannot be read, or does not fit the environment.
    """
    if not isinstance(env, ObservationNormalizationWrapper):
        return None
    if env.names_to_estimate():
        env.load_statistics(Path(directory) / (env.statistics_dump or Path("statistics.pkl")).name)
    return env.get_statistics()
