"""Runner of `maze-run -cn conf_rllib`: supported algorithms, their hyperparameters, and stop conditions."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean, first_line, install_command, unknown_key_error
from maze.core.utils.config_utils import CheckedConfig, EnvFactory, whole_number
from maze.core.utils.factory import plain_container
from maze.core.utils.seeding import MazeSeeding, set_seeds_globally
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import estimated_statistics
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.utils.log_stats_utils import setup_logging

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.rllib.training import RLlibTraining


SET_BY_RUNNER: Mapping[str, str] = {
    "num_env_runners": "runner.num_workers",
    "seed": "seeding.agent_base_seed and seeding.env_base_seed",
    "env": "env",
    "env_config": "env",
    "observation_space": "env and wrappers",
    "action_space": "env and wrappers",
    "model": "the group model (model=rllib for RLlib's own)",
    "log_level": "runner.log_level",
}
"""Keys of RLlib that are not allowed in `algorithm.config`, and the keys of Maze that replace them."""


@dataclass(frozen=True)
class RLlibAlgorithm:
    """An algorithm of RLlib.

    :param name: RLlib's name.
    :param needs_single_action: Whether it needs a single `Discrete` or `Box` action, not a dictionary.
    """

    name: str
    needs_single_action: bool = False


ALGORITHMS: Mapping[str, RLlibAlgorithm] = {
    name: RLlibAlgorithm(name, needs_single_action=name in ("DQN", "SAC"))
    for name in ("PPO", "APPO", "IMPALA", "DQN", "SAC")
}


def find_algorithm(name: Any) -> RLlibAlgorithm:
    """Return the algorithm with a name; Ray is not needed.

    :raises ConfigError: It is not supported; lists the supported ones.
    """
    if str(name).upper() not in ALGORITHMS:
        raise unknown_key_error("algorithm.algorithm", str(name), ALGORITHMS)
    return ALGORITHMS[str(name).upper()]


def require_ray() -> None:
    """Raise a `ConfigError` that names the extra if Ray or a package that RLlib needs is not installed."""
    try:
        importlib.import_module("ray.rllib.algorithms.algorithm_config")
    except ImportError as error:
        raise ConfigError(
            f"-cn conf_rllib: RLlib cannot be imported ({error}). It comes with an extra: {install_command('rllib')}"
        ) from error


def configured(algorithm: RLlibAlgorithm, values: Mapping[str, Any]) -> Any:
    """Return RLlib's configuration with the hyperparameters of `algorithm.config`.

    :param values: Hyperparameters by RLlib's names; missing ones keep RLlib's defaults.
    :raises ConfigError: RLlib has no such hyperparameter, or does not accept its value.
    """
    module = importlib.import_module(f"ray.rllib.algorithms.{algorithm.name.lower()}")
    config = getattr(module, f"{algorithm.name}Config")()
    known = known_hyperparameters(config)
    for key, value in values.items():
        where = f"algorithm.config.{key}"
        if key in SET_BY_RUNNER:
            raise ConfigError(f"{where}: set {SET_BY_RUNNER[key]} instead.")
        if key not in known:
            raise ConfigError(f"{where}: {algorithm.name} has no such hyperparameter.{did_you_mean(key, known)}")
        try:
            config.update_from_dict({key: value})
        except Exception as error:  # RLlib's checks raise any type
            raise ConfigError(f"{where}: RLlib does not accept {value!r}: {first_line(error)}") from error
    return config


def known_hyperparameters(config: Any) -> list[str]:
    """Return the names of all settings of a configuration of RLlib."""
    removed = -1  # RLlib's marker of deprecated settings, which are not valid defaults of others
    own = [name for name, value in vars(config).items() if not name.startswith("_") and value is not removed]
    return [*own, "train_batch_size_per_learner"]


def is_number(value: Any) -> bool:
    """Return whether a value is a single number, which includes arrays without dimensions."""
    if isinstance(value, bool | np.bool_):
        return False
    return isinstance(value, int | float | np.number) or (isinstance(value, np.ndarray) and value.shape == ())


def value_at(result: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a path of a result, such as `env_runners/episode_return_mean`; `None`: there is none."""
    found: Any = result
    for part in path.split("/"):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return float(found) if is_number(found) else None


_SHORT_NAMES = {
    "episode_return_mean": "env_runners/episode_return_mean",
    "timesteps_total": "env_runners/num_env_steps_sampled_lifetime",
}


@dataclass
class TuneParameters(CheckedConfig):
    """The settings of Ray Tune that a single run needs.

    :param stop: The run stops when one of these values of a result is reached: `training_iteration`,
        `timesteps_total`, `time_total_s`, `episode_return_mean` or any path such as
        `env_runners/episode_len_mean`. Empty: only an interrupt stops it.
    :param checkpoint_freq: Number of iterations between checkpoints of Ray; 0: only at the end.
    """

    section = "runner.tune_config"

    stop: Mapping[str, float] = field(default_factory=dict)
    checkpoint_freq: int = 0

    def __post_init__(self) -> None:
        stop: Mapping[str, float | None] = self.stop or {}
        self.stop = {key: value for key, value in stop.items() if value is not None}
        for key, value in self.stop.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{self.section}.stop.{key}: expected a number, found {value!r}.")
        self.require_integer("checkpoint_freq", minimum=0)

    def reason_to_stop(self, result: Mapping[str, Any], iteration: int) -> str:
        """Return the stop condition that holds, or an empty text.

        :param result: Result of an iteration.
        :param iteration: Number of the iteration.
        :raises ConfigError: A condition names an unknown value.
        """
        for name, limit in self.stop.items():
            if name == "training_iteration":
                value: float | None = iteration
            else:
                value = value_at(result, _SHORT_NAMES.get(name, name))
            if value is None and name not in _SHORT_NAMES:
                available = [*_SHORT_NAMES, *(key for key in result if value_at(result, key) is not None)]
                raise unknown_key_error(f"{self.section}.stop.{name}: number of RLlib", name, available)
            if value is not None and value >= limit:
                return f"{name} has reached {limit:g}"
        return ""


@dataclass
class MazeRLlibRunner(Runner):
    """Train a policy with an algorithm of RLlib: Maze environment, model and action distributions, RLlib's learner.

    :param spaces_config_dump_file: File for the action and observation spaces of the model.
    :param normalization_samples: Number of observations from which normalization statistics are estimated.
    :param num_workers: Number of Ray workers that step environments; 0: this process steps them.
    :param tune_config: Stop conditions and checkpoints; see
        :class:`TuneParameters`.
    :param ray_config: Arguments of `ray.init`; an `address` joins a running cluster.
    :param state_dict_dump_file: File for the weights of the best policy.
    :param num_learners: Number of learner processes; 0: the learner is in this process, `None`:
        `algorithm.config.num_learners`.
    :param eval_episodes: Number of evaluation episodes after each iteration, with deterministic actions; 0: the best
        policy is the one with the highest mean return of RLlib's training episodes.
    :param log_level: Level of Ray's and RLlib's messages: DEBUG, INFO, WARN or ERROR.
    :param iteration_timeout: Timeout of an iteration in seconds; 0: none.
    """

    spaces_config_dump_file: str
    normalization_samples: int
    num_workers: int
    tune_config: InitVar[Mapping[str, Any] | None]
    ray_config: dict[str, Any]
    state_dict_dump_file: str
    num_learners: int | None = None
    eval_episodes: int = 8
    log_level: str = "WARN"
    iteration_timeout: float = 1800.0

    tune_params: dict[str, Any] = field(init=False)
    """The values of `tune_config`."""
    trainer: RLlibTraining = field(init=False, repr=False, compare=False)
    """The training loop, with the algorithm of RLlib; available after :meth:`setup`."""

    def __post_init__(self, tune_config: Mapping[str, Any] | None) -> None:
        self.tune_params = dict(tune_config or {})
        self.ray_config = dict(self.ray_config or {})
        for name, minimum in (("num_workers", 0), ("normalization_samples", 1), ("eval_episodes", 0)):
            whole_number(f"runner.{name}", getattr(self, name), minimum)
        if self.log_level not in ("DEBUG", "INFO", "WARN", "ERROR"):
            raise ConfigError(f"runner.log_level: expected DEBUG, INFO, WARN or ERROR, found {self.log_level!r}.")
        self._resources = ExitStack()

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        algorithm = find_algorithm(cfg.algorithm.get("algorithm"))
        require_ray()
        from maze.rllib.setup import TrainingSetup

        parameters = TuneParameters.from_config(self.tune_params)
        hyperparameters = plain_container(cfg.algorithm.get("config") or {}, "algorithm.config")
        rllib_config = configured(algorithm, hyperparameters)
        if self.num_learners is not None:
            rllib_config.learners(num_learners=self.num_learners)
        if "restart_failed_env_runners" not in hyperparameters:
            # by default RLlib restarts a worker repeatedly with the same error, and continues without its samples
            rllib_config.fault_tolerance(restart_failed_env_runners=False)
        self.maze_seeding = MazeSeeding.configured(cfg.get("seeding"))
        set_seeds_globally(
            self.maze_seeding.agent_global_seed, self.maze_seeding.cudnn_determinism_flag, "of the training run"
        )
        env_factory, spaces_dicts = self._environment(cfg)
        SpacesConfig(**spaces_dicts).save(self.spaces_config_dump_file)
        setup_logging(job_config=cfg)
        model = plain_container(cfg.model, "model")
        setup = TrainingSetup(self, algorithm, rllib_config, model, spaces_dicts, env_factory)
        input_dir = cfg.get("input_dir")
        input_file = Path(str(input_dir)) / Path(self.state_dict_dump_file).name if input_dir else None
        try:
            self.trainer = setup.build(self._resources, parameters, input_file)
        except BaseException:
            self.close()
            raise

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        try:
            self.trainer.train()
        finally:
            self.close()

    def close(self) -> None:
        """Close workers and environments, and Ray if this runner has started it."""
        self._resources.close()

    def _environment(self, cfg: DictConfig) -> tuple[Any, dict[str, Any]]:
        """Return a factory of environments with estimated normalization statistics, and their spaces."""
        factory = EnvFactory(cfg.env, cfg.get("wrappers") or {})
        env = factory()
        try:
            env.seed(self.maze_seeding.generate_env_instance_seed())
            normalized_factory = estimated_statistics(env, factory, self.normalization_samples, cfg.get("input_dir"))[1]
            spaces_dicts = {
                "action_spaces_dict": env.action_spaces_dict,
                "observation_spaces_dict": env.observation_spaces_dict,
                "agent_counts_dict": env.agent_counts_dict,
            }
        finally:
            env.close()
        return normalized_factory, spaces_dicts
