"""The runner of all trainings: environments, spaces, model, logging, trainer, resumption."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import resolve_device
from maze.core.agent.torch_state_action_critic import TorchStateActionCritic
from maze.core.agent.torch_state_critic import TorchStateCritic
from maze.core.annotations import override
from maze.core.env.faults import USER_CODE_ERRORS, Place, closed, fail
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.checkpoint import load_state
from maze.core.utils.config_utils import EnvFactory, whole_number
from maze.core.utils.factory import TARGET_KEY, Factory
from maze.core.utils.files import clean_stale_temporaries
from maze.core.utils.seeding import MazeSeeding, set_seeds_globally
from maze.core.wrappers.call_time_limit_wrapper import checked_time_limit
from maze.core.wrappers.observation_normalization.observation_normalization_utils import estimated_statistics
from maze.core.wrappers.observation_normalization.statistics_file import StructuredStatisticsType
from maze.core.wrappers.running_statistics import FrozenEnvFactory
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.train.parallelization.placement import placement_of
from maze.train.parallelization.vector_env.env_batch import CheckedEnvFactory
from maze.train.trainers.common.config_classes import (
    CRITIC_OPTIONS,
    SUITABLE_CRITICS,
    AlgorithmConfig,
    algorithm_class,
)
from maze.train.trainers.common.epoch_trainer import EpochTrainer
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.trainer import Trainer
from maze.train.utils.resumption import CHECKPOINT_FILE, StoredTraining, resumed_seeds, stored_training
from maze.utils.log_stats_utils import setup_logging

PROBE = "the environment that is asked for its spaces"

ComponentType = TypeVar("ComponentType")

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.agent.torch_model import TorchModel
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
    from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv

MIN_CONCURRENCY = 8
"""Number of environments where neither the user nor the number of CPU cores asks for more."""


@dataclass
class TrainingRunner(Runner):
    """Trains any algorithm: builds what it asks for from the configuration, where the placement says, and runs it.

    The algorithm's configuration names the trainer, and :meth:`~maze.train.trainers.common.trainer.Trainer.build` asks
    the runner for its parts. Subclasses exist for arguments of single algorithms only.

    :param state_dict_dump_file: File for the weights of the best model.
    :param dump_interval: Additionally keep the weights after every so many epochs; `None`: only the best ones.
    :param spaces_config_dump_file: File for the action and observation spaces the model was built for.
    :param normalization_samples: Number of observations from which normalization statistics are estimated.
    :param trainer_class: The trainer; empty: that of the algorithm's configuration.
    :param concurrency: Number of training environments; 0: one for each CPU core, but at least eight.
    :param eval_concurrency: Number of evaluation environments; 0: as many as episodes and CPU cores suggest.
    :param placement: Where environments are stepped: `in_process`, `processes`, or a
        :class:`~maze.train.parallelization.placement.Placement` or its configuration; `None`: as the runner's class
        says. After :meth:`setup` the object.
    :param env_timeout: Seconds that a step or a reset of an environment may take; `None`: any time.
    """

    state_dict_dump_file: str = "state_dict.pt"
    dump_interval: int | None = None
    spaces_config_dump_file: str = "spaces_config.pkl"
    normalization_samples: int = 10000
    trainer_class: str | type[Trainer] = field(default="", kw_only=True)
    concurrency: int = field(default=0, kw_only=True)
    eval_concurrency: int = field(default=0, kw_only=True)
    placement: Any = field(default=None, kw_only=True)
    env_timeout: float | None = field(default=None, kw_only=True)

    env_factory: Callable[[], Any] | None = field(default=None, init=False)
    """Makes one environment with all its wrappers."""

    default_placement: ClassVar[str] = "in_process"
    default_algorithm: ClassVar[str] = ""
    """Path of the configuration's class where the configuration itself does not name it."""
    trains: ClassVar[str] = ""
    """Path of the trainer whose subclasses the runner is for; empty: for all."""
    replaced_arguments: ClassVar[Mapping[str, str]] = {}
    """Numbers of environments that this algorithm has under another name, and that name."""

    def __post_init__(self) -> None:
        self._cfg: DictConfig | None = None
        self._model_composer: BaseModelComposer | None = None
        self._trainer: Trainer | None = None
        self._algorithm: AlgorithmConfig | None = None
        self._resumed: StoredTraining | None = None
        self._closing: list[Callable[[], None]] = []
        self.normalization_statistics: StructuredStatisticsType | None = None
        """Statistics for observation normalization; `None` where nothing is normalized."""
        self.env_timeout = checked_time_limit("runner.env_timeout", self.env_timeout)
        for name in ("concurrency", "eval_concurrency"):
            n_envs = whole_number(f"runner.{name}", getattr(self, name), at_least=0)
            if n_envs and name in self.replaced_arguments:
                raise ConfigError(f"runner.{name}: leave it 0 and set {self.replaced_arguments[name]} instead.")

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.placement = placement_of(self.placement or self.default_placement)
        self.placement.env_timeout = self.env_timeout
        self._resumed = stored_training(cfg)
        seeding = dict(cfg.get("seeding") or {})
        if self._resumed is not None:
            seeding.update(resumed_seeds(self._resumed, seeding))
        self.maze_seeding = MazeSeeding(
            seeding.get("env_base_seed"), seeding.get("agent_base_seed"), bool(seeding.get("cudnn_determinism_flag"))
        )
        # networks draw their initial weights from torch's global generator
        set_seeds_globally(
            self.maze_seeding.agent_global_seed, self.maze_seeding.cudnn_determinism_flag, "of the training run"
        )
        self.env_factory = EnvFactory(cfg.env, cfg.get("wrappers") or {}, self.env_timeout)
        try:
            env = self.env_factory()
        except USER_CODE_ERRORS as error:
            fail(error, Place(PROBE), "the factory")
        call = "seed"
        try:
            env.seed(self.maze_seeding.generate_env_instance_seed())
            call = "reset or step"
            self.normalization_statistics, self.env_factory = estimated_statistics(
                env, self.env_factory, self.normalization_samples, cfg.get("input_dir")
            )
            spaces = {
                "action_spaces_dict": env.action_spaces_dict,
                "observation_spaces_dict": env.observation_spaces_dict,
                "agent_counts_dict": env.agent_counts_dict,
            }
        except USER_CODE_ERRORS as error:
            fail(error, Place.of(env, PROBE), call)
        finally:
            closed(env.close, PROBE)
        self.spaces = SpacesConfig(**spaces)
        """Spaces of the environment."""
        self.env_factory = CheckedEnvFactory(self.env_factory, self.spaces)
        self.spaces.save(self.spaces_config_dump_file)
        setup_logging(job_config=cfg)
        self._model_composer = Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]  # built from a subclass
            cfg.model, **spaces
        )
        self._model_composer.save_models()
        self._algorithm = self._checked_algorithm(cfg.get("algorithm"))
        if self._algorithm is None:
            return  # a runner of somebody's own builds the trainer
        try:
            self._trainer = self.build_trainer()
            self._init_trainer_from_input_dir(self._trainer, self.state_dict_dump_file, cfg.get("input_dir"))
        except BaseException:
            self.close()
            raise

    def build_trainer(self) -> Trainer:
        """Builds the trainer; runners with arguments for an algorithm pass them on here."""
        return self._trainer_type().build(self)

    @override(Runner)
    def run(self, n_epochs: int | None = None, **train_kwargs: Any) -> None:
        try:
            self.trainer.train(n_epochs=n_epochs, **train_kwargs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes all environments and ends their worker processes."""
        for close in self._closing:
            close()
        self._closing.clear()

    @property
    def model_composer(self) -> BaseModelComposer:
        """Builds policies and critics; available after :meth:`setup`."""
        return self._after_setup(self._model_composer)

    @property
    def cfg(self) -> DictConfig:
        """The whole configuration; available after :meth:`setup`."""
        return self._after_setup(self._cfg)

    @property
    def trainer(self) -> Trainer:
        """The trainer; available after :meth:`setup`."""
        return self._after_setup(self._trainer)

    # -- what a trainer is built of --------------------------------------------------------------------

    checkpoint_file: ClassVar[str] = CHECKPOINT_FILE
    """Where the state of the training is written after each epoch."""

    @property
    def algorithm(self) -> Any:
        """The algorithm's configuration, checked."""
        return self._after_setup(self._algorithm)

    @property
    def resumed_state(self) -> Mapping[str, Any]:
        """State of the training that goes on; empty where a new one begins."""
        return {} if self._resumed is None else self._resumed.state

    def torch_policy(self, seed: int | None = None) -> TorchPolicy:
        """The policy as configured, on the algorithm's device.

        :param seed: Its seed; `None`: the next one.
        :raises ConfigError: The device is not there.
        """
        policy = self._configured("policy", self.model_composer.policy)
        try:
            policy.to(resolve_device(self.algorithm.device))
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from error
        policy.seed(self.agent_seed() if seed is None else seed)
        return policy

    def model(self) -> TorchModel:
        """Policy and critic where the algorithm has one, else the policy."""
        return self.torch_policy() if self.algorithm.critic is None else self.actor_critic()

    def actor_critic(self) -> TorchActorCritic:
        """Policy and critic as configured, the policy with a seed of its own.

        :raises ConfigError: The model has no critic of the kind that the algorithm needs.
        """
        policy = self._configured("policy", self.model_composer.policy)
        critic = self._configured("critic", self.model_composer.critic)
        kind = self.algorithm.critic
        if not isinstance(critic, TorchStateActionCritic if kind == "state-action" else TorchStateCritic):
            raise ConfigError(
                f"model.critic: {self._trainer_type().__name__} needs {SUITABLE_CRITICS[kind]}; got a "
                f"{type(critic).__name__}."
            )
        policy.seed(self.agent_seed())
        return TorchActorCritic(policy=policy, critic=critic, device=self.algorithm.device)

    def best_model_selection(self, model: TorchModel) -> BestModelSelection:
        """What keeps the best model.

        :param model: What is trained.
        """
        return BestModelSelection(dump_file=self.state_dict_dump_file, model=model, dump_interval=self.dump_interval)

    def rollouts(self) -> RolloutGenerator:
        """What rolls a policy out in the training environments, as many as `concurrency` says."""
        n_envs = self.concurrency or default_concurrency()
        assert self.env_factory is not None, "setup comes first"
        return RolloutGenerator(self._seeded_env(self.env_factory, n_envs, "train"))

    def actors(self, **arguments: Any) -> DistributedActors:
        """Actors that collect rollouts while the trainer learns.

        :param arguments: Those of :meth:`~maze.train.parallelization.placement.Placement.actors`, without the
            environment.
        """
        actors = self._make_actors(env_factory=self.env_factory, **arguments)
        self._closing.append(actors.stop)
        return actors

    def workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        """What collects rollouts into a replay buffer.

        :param arguments: Those of `BaseDistributedWorkersWithBuffer`, without the environment.
        """
        workers = self._make_workers(env_factory=self.env_factory, **arguments)
        self._closing.append(workers.stop)
        workers.start()
        return workers

    def evaluator(self, model_selection: BestModelSelection) -> Evaluator | None:
        """The evaluator that the algorithm's field `rollout_evaluator` configures, with environments of its own.

        :param model_selection: What it reports to.
        """
        config = self.algorithm.rollout_evaluator
        if config is None or isinstance(config, Evaluator):
            return config
        n_episodes = config.get("n_episodes", MIN_CONCURRENCY) if isinstance(config, Mapping) else MIN_CONCURRENCY
        return Factory(Evaluator).instantiate(  # type: ignore[type-abstract]  # a subclass
            config,
            config_path="algorithm.rollout_evaluator",
            eval_env=self.evaluation_env(n_episodes),
            model_selection=model_selection,
        )

    def evaluation_env(
        self, n_episodes: int, env_factory: Callable[[], Any] | None = None, n_envs: int = 0
    ) -> StructuredVectorEnv:
        """Environments for evaluation; they learn no statistics, so that evaluations of different epochs compare.

        :param n_episodes: Number of episodes of an evaluation.
        :param env_factory: Makes one environment; `None`: that of the training.
        :param n_envs: Number of environments; 0: as `eval_concurrency` says.
        """
        factory = self.env_factory if env_factory is None else env_factory
        assert factory is not None, "setup comes first"
        n_envs = n_envs or self.eval_concurrency or max(1, min(n_episodes, default_concurrency()))
        return self._seeded_env(FrozenEnvFactory(factory), n_envs, "eval")

    def agent_seed(self) -> int:
        """The next seed for something that acts or learns."""
        return self.maze_seeding.generate_agent_instance_seed()

    def env_seeds(self, n_envs: int) -> list[int]:
        """The next seeds for environments.

        :param n_envs: How many.
        """
        return [self.maze_seeding.generate_env_instance_seed() for _ in range(n_envs)]

    # -- where it is placed ----------------------------------------------------------------------------

    def _make_env(self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str) -> StructuredVectorEnv:
        env: StructuredVectorEnv = self.placement.vector_env(env_factory, n_envs, logging_prefix)
        return env

    def _make_actors(self, **arguments: Any) -> DistributedActors:
        actors: DistributedActors = self.placement.actors(**arguments)
        return actors

    def _make_workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        workers: BaseDistributedWorkersWithBuffer = self.placement.workers(**arguments)
        return workers

    # -- helpers ---------------------------------------------------------------------------------------

    def _seeded_env(self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str) -> StructuredVectorEnv:
        env = self._make_env(env_factory, n_envs, logging_prefix)
        self._closing.append(env.close)
        env.seed(self.env_seeds(n_envs))
        return env

    def _checked_algorithm(self, algorithm: Any) -> AlgorithmConfig | None:
        config_class = algorithm_class(algorithm)
        if config_class is None and self.trainer_class:
            config_class = self._given_trainer().config_class
        if config_class is None and self.default_algorithm:
            config_class = algorithm_class({TARGET_KEY: self.default_algorithm})
        return None if config_class is None else config_class.from_config(algorithm)

    @classmethod
    def trainer_for(cls, config_class: type[AlgorithmConfig], trainer_class: str | type[Trainer] = "") -> type[Trainer]:
        """Returns the trainer: of the runner's and the configuration's the one that is derived from the other.

        :param config_class: The class of the algorithm's configuration.
        :param trainer_class: The runner's `trainer_class`.
        :raises ConfigError: The runner trains other algorithms.
        """
        factory = Factory(Trainer)  # type: ignore[type-abstract]
        trainer = None if trainer_class and not config_class.trainer else config_class.trainer_class()
        if trainer_class:
            given = factory.type_from_name(trainer_class, config_path="runner.trainer_class")
            if trainer is not None and not issubclass(given, trainer) and not issubclass(trainer, given):
                raise ConfigError(
                    f"runner.trainer_class: {given.__name__} does not train a {config_class.__name__}, which names "
                    f"{trainer.__name__}. Leave one of the two out."
                )
            trainer = given if trainer is None or issubclass(given, trainer) else trainer
        assert trainer is not None
        kind = factory.type_from_name(cls.trains, config_path=f"{cls.__name__}.trains") if cls.trains else Trainer
        if not issubclass(trainer, kind):
            raise ConfigError(
                f"runner: {cls.__name__} is for {kind.__name__}, not for algorithm={config_class.name}, which "
                f"{trainer.__name__} trains. Choose runner=dev or runner=local, which fit every algorithm."
            )
        return trainer

    def _given_trainer(self) -> type[Trainer]:
        return Factory(Trainer).type_from_name(self.trainer_class, config_path="runner.trainer_class")  # type: ignore[type-abstract]

    def _trainer_type(self) -> type[Trainer]:
        return self.trainer_for(type(self.algorithm), self.trainer_class)

    def _configured(self, part: str, built: ComponentType | None) -> ComponentType:
        if built is not None:
            return built
        kind, name = self.algorithm.critic, self._trainer_type().__name__
        needs = "a policy" if kind is None else f"a policy and a {kind} critic"
        critic = f" and `critic={CRITIC_OPTIONS[kind][0]}`" if kind else ""
        raise ConfigError(
            f"model.{part}: {name} needs a model with {needs}, but no {part} is configured. Choose one, for instance "
            f"with `model=flatten_concat`{critic}."
        )

    def _after_setup(self, component: ComponentType | None) -> ComponentType:
        if component is None:
            raise ConfigError(f"The {type(self).__name__} was not set up: call setup(cfg) before using it.")
        return component

    def _init_trainer_from_input_dir(self, trainer: Trainer, state_dict_dump_file: str, input_dir: str | None) -> None:
        """Starts the training from an earlier one, if that is configured: from its best model, or where it stopped.

        :param trainer: The trainer.
        :param state_dict_dump_file: Name of the file with the best model's weights in that run's directory.
        :param input_dir: Directory of the earlier run; empty: none.
        """
        if isinstance(trainer, EpochTrainer):
            trainer.run_seeds = {
                "env_base_seed": self.maze_seeding.env_global_seed,
                "agent_base_seed": self.maze_seeding.agent_global_seed,
            }
        if not input_dir:
            return
        directory = Path(input_dir)
        trained_for = directory / Path(self.spaces_config_dump_file).name
        if trained_for.is_file():
            SpacesConfig.load(trained_for).require_same(self.spaces, f"input_dir={directory}")
        with suppress(OSError):  # a directory that cannot be written to has nothing of ours to clean up
            clean_stale_temporaries(directory, min_age=60.0)
        if self._resumed is not None:
            trainer.resume(self._resumed.state, self._resumed.path)
            self._resumed = StoredTraining(self._resumed.path, {})  # it may be large
            return
        path = directory / Path(state_dict_dump_file).name
        if path.is_file():
            trainer.load_state(path)
        elif isinstance(trainer, EpochTrainer) and (directory / CHECKPOINT_FILE).is_file():  # nothing was evaluated
            path = directory / CHECKPOINT_FILE
            state = load_state(path)
            trainer.load_state_dict(state.get("model", state), path)
        else:
            found = "is no directory" if not directory.is_dir() else f"has no {path.name} in it"
            raise ConfigError(
                f"input_dir: {directory} {found}. Expected the directory of a training run; "
                "`maze-run -cn conf_train env=... algorithm=...` makes one below `outputs`."
            )


def default_concurrency() -> int:
    """Number of environments where nobody says how many."""
    return max(MIN_CONCURRENCY, os.cpu_count() or 1)
