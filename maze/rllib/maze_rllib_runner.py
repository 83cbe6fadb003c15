"""Runner of `maze-run -cn conf_rllib`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import EnvFactory, whole_number
from maze.core.utils.factory import plain_container
from maze.core.utils.seeding import MazeSeeding, set_seeds_globally
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import estimated_statistics
from maze.perception.models.space_config import SpacesConfig
from maze.rllib.algorithms import TuneParameters, configured, find_algorithm, require_ray
from maze.runner import Runner
from maze.utils.log_stats_utils import setup_logging

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class MazeRLlibRunner(Runner):
    """Train a policy with an algorithm of RLlib: Maze environment, model and action distributions, RLlib's learner.

    :param spaces_config_dump_file: File for the action and observation spaces of the model.
    :param normalization_samples: Number of observations from which normalization statistics are estimated.
    :param num_workers: Number of Ray workers that step environments; 0: this process steps them.
    :param tune_config: Stop conditions and checkpoints; see :class:`TuneParameters`.
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
    trainer: Any = field(init=False, repr=False, compare=False)
    """The :class:`~maze.rllib.training.RLlibTraining` with the algorithm of RLlib; available after :meth:`setup`."""

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
        from maze.rllib.training import TrainingSetup

        parameters = TuneParameters.from_config(self.tune_params)
        hyperparameters = plain_container(cfg.algorithm.get("config") or {}, "algorithm.config")
        rllib_config = configured(algorithm, hyperparameters)
        if self.num_learners is not None:
            rllib_config.learners(num_learners=self.num_learners)
        if "restart_failed_env_runners" not in hyperparameters:
            # by default RLlib restarts a worker repeatedly with the same error, and continues without its samples
            rllib_config.fault_tolerance(restart_failed_env_runners=False)
        seeding = self.maze_seeding = MazeSeeding.configured(cfg.get("seeding"))
        set_seeds_globally(seeding.agent_global_seed, seeding.cudnn_determinism_flag, "of the training run")
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
            samples, input_dir = self.normalization_samples, cfg.get("input_dir")
            normalized_factory, env = estimated_statistics(env, factory, samples, input_dir)[1:]
            names = ("action_spaces_dict", "observation_spaces_dict", "agent_counts_dict")
            spaces_dicts = {name: getattr(env, name) for name in names}
        finally:
            env.close()
        return normalized_factory, spaces_dicts
