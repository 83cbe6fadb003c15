"""The runner of all algorithms: environments and execution backend, spaces, model, logging, trainer, resumption."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import TorchModel, resolve_device, threads_for
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.faults import USER_CODE_ERRORS, Place, closed, fail, made_by
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.checkpoint import load_state
from maze.core.utils.config_utils import EnvFactory, flag, whole_number
from maze.core.utils.factory import TARGET_KEY, Factory, plain_container
from maze.core.utils.files import clean_stale_temporaries
from maze.core.utils.seeding import MazeSeeding, set_seeds_globally
from maze.core.utils.update_profile import PROFILE_FILE, UpdateProfile
from maze.core.wrappers.gym_vector_env import GymVectorMazeEnv
from maze.core.wrappers.observation_normalization.normalization_strategies.base import StructuredStatisticsType
from maze.core.wrappers.observation_normalization.observation_normalization_utils import make_normalized_env_factory
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import estimated_statistics
from maze.core.wrappers.return_normalization_reward_wrapper import FrozenEnvFactory
from maze.core.wrappers.time_limit_wrapper import checked_time_limit
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
from maze.train.parallelization.placement import Batched, placement_of
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import CheckedEnvFactory, check_same_spaces
from maze.train.trainers.common.config_classes import AlgorithmConfig, algorithm_class
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.trainers.common.warm_start import start_warm
from maze.train.utils.train_utils import STATE_FORMAT
from maze.utils.log_stats_utils import setup_logging

if TYPE_CHECKING:
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )

CHECKPOINT_FILE = "latest.pt"
"""File with the state of a run, in its directory."""
SEED_KEYS = ("env_base_seed", "agent_base_seed")
_PROBE = "the environment that provides the spaces"

# Minimum number of environments by default.
_MIN_CONCURRENCY = 8


@dataclass
class TrainingRunner(Runner):
    """Train any algorithm: build its parts from the configuration, with the configured placement, and run it.

    The algorithm's configuration names the trainer, and :meth:`~maze.train.trainers.common.trainer.Trainer.build` asks
    the runner for its parts. Subclasses exist for arguments of single algorithms only.

    :param state_dict_dump_file: File for the weights of the best model.
    :param dump_interval: Additionally keep the weights after every so many epochs; `None`: only the best ones.
    :param spaces_config_dump_file: File for the action and observation spaces the model was built for.
    :param normalization_samples: Number of observations from which normalization statistics are estimated.
    :param trainer_class: The trainer; empty: that of the algorithm's configuration.
    :param concurrency: Number of training environments; 0: one for each CPU core, but at least eight.
    :param eval_concurrency: Number of evaluation environments; 0: as many as episodes and CPU cores suggest.
    :param placement: Execution backend of the environments: `in_process`, `processes`, or a
        :class:`~maze.train.parallelization.placement.Placement` or its configuration; `None`: as the runner's class
        says. After :meth:`setup` the object.
    :param env_groups: Number of groups in which environments act by themselves, each with random numbers of its own; on
        a cluster each group is an actor. 0: one, on a cluster as many as there are CPUs. With the same number of groups
        all placements learn the same.
    :param address: Address of Ray with `runner=ray`: `auto` (the cluster that this machine belongs to) or
        `<host>:<port>`; `None`: one is started on this machine for the time of the run.
    :param env_timeout: Seconds that a step or a reset of an environment may take; `None`: any time.
    :param profile: Write the time of the second update by parts, and of the third one by function, into `profile.txt`;
        after a shorter run, the file states which of them is missing.
    """

    state_dict_dump_file: str = "state_dict.pt"
    dump_interval: int | None = None
    spaces_config_dump_file: str = "spaces_config.pkl"
    normalization_samples: int = 10000
    trainer_class: str | type[Trainer] = field(default="", kw_only=True)
    concurrency: int = field(default=0, kw_only=True)
    eval_concurrency: int = field(default=0, kw_only=True)
    placement: Any = field(default=None, kw_only=True)
    env_groups: int = field(default=0, kw_only=True)
    address: str | None = field(default=None, kw_only=True)
    env_timeout: float | None = field(default=None, kw_only=True)
    profile: bool = field(default=False, kw_only=True)

    env_factory: Callable[[], Any] | None = field(default=None, init=False)
    """Makes one environment with all its wrappers, after :meth:`setup`."""

    default_algorithm: ClassVar[str] = ""
    """Path of the configuration's class where the configuration itself does not name it."""
    trains: ClassVar[str] = ""
    """Path of the trainer whose subclasses the runner is for; empty: for all."""
    checkpoint_file: ClassVar[str] = CHECKPOINT_FILE
    """File of the state of the run, written after each epoch."""
    default_placement: ClassVar[str] = "in_process"
    replaced_arguments: ClassVar[Mapping[str, str]] = {}
    """Arguments for numbers of environments that this algorithm replaces -> name of the replacement."""

    def __post_init__(self) -> None:
        self._closing: list[Callable[[], None]] = []
        self._num_envs: int | None = None
        self.normalization_statistics: StructuredStatisticsType | None = None
        """Statistics for observation normalization, after :meth:`setup`; `None`: nothing is normalized."""
        self.sampling_policy: Any = None
        """Policy that fills a replay buffer to begin with, or its configuration; the trainer sets it."""
        self.env_timeout = checked_time_limit("runner.env_timeout", self.env_timeout)
        whole_number("runner.env_groups", self.env_groups, at_least=0)
        for name in ("concurrency", "eval_concurrency"):
            n_envs = whole_number(f"runner.{name}", getattr(self, name), at_least=0)
            if n_envs and name in self.replaced_arguments:
                raise ConfigError(f"runner.{name}: leave it 0 and set {self.replaced_arguments[name]} instead.")

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.resumed_state = stored_training(cfg)
        """State of the resumed run, while the trainer is built; empty for a new run."""
        self.maze_seeding = MazeSeeding.configured(resumed_seeds(self.resumed_state, cfg.get("seeding") or {}))
        # networks draw their initial weights from torch's global generator
        set_seeds_globally(
            self.maze_seeding.agent_global_seed, self.maze_seeding.cudnn_determinism_flag, "of the training run"
        )
        self._find_environments(cfg)
        self.spaces.save(self.spaces_config_dump_file)
        setup_logging(job_config=cfg)
        self._model_composer = Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]  # built from a subclass
            cfg.model, **vars(self.spaces)
        )
        self._model_composer.save_models()
        if (algorithm := self._checked_algorithm(cfg.get("algorithm"))) is None:
            return  # a user's runner builds the trainer
        self._algorithm = algorithm
        if cfg.get("curriculum") and not getattr(self.trainer_type, "follows_curriculum", False):
            raise ConfigError(
                f"curriculum: {self.trainer_type.__name__} supports no curriculum. Use "
                "algorithm=ppo or algorithm=a2c, or leave it empty."
            )
        try:
            self._trainer = self.build_trainer()
            self._begin_where_configured(cfg)
            self.resumed_state = {}  # it may be large
        except BaseException:
            self.close()
            raise

    def _begin_where_configured(self, cfg: DictConfig) -> None:
        """Resume an earlier run, start from its best model, or clone another policy, if that is configured."""
        trainer, input_dir = self.trainer, cfg.get("input_dir")
        if isinstance(trainer, EpochTrainer):
            trainer.profile = UpdateProfile(Path(PROFILE_FILE)) if self.profile else None
            seeds = (self.maze_seeding.env_global_seed, self.maze_seeding.agent_global_seed)
            trainer.run_seeds = dict(zip(SEED_KEYS, seeds, strict=True))
        if not input_dir:
            start_warm(trainer, cfg.get("warm_start") or {}, self.rollouts, self.agent_seed)
            return
        directory = Path(input_dir)
        trained_for = directory / Path(self.spaces_config_dump_file).name
        if trained_for.is_file():
            SpacesConfig.load(trained_for).require_same(self.spaces, f"input_dir={directory}")
        with suppress(OSError):  # a directory that cannot be written to contains no file to remove
            clean_stale_temporaries(directory, min_age=60.0)
        weights, checkpoint = directory / Path(self.state_dict_dump_file).name, directory / CHECKPOINT_FILE
        if self.resumed_state:
            trainer.resume(self.resumed_state, checkpoint)
        elif weights.is_file():
            trainer.load_state(weights)
        elif isinstance(trainer, EpochTrainer) and checkpoint.is_file():  # nothing was evaluated
            state = load_state(checkpoint)
            trainer.load_state_dict(state.get("model", state), checkpoint)
        else:
            raise ConfigError(
                f"input_dir: expected the directory of a training run, found no {weights.name} in {directory}. "
                "`maze-run -cn conf_train env=... algorithm=...` makes one below `outputs`."
            )

    def build_trainer(self) -> Trainer:
        """Build the trainer; runners with arguments for an algorithm pass them on here."""
        return self.trainer_type.build(self)

    @override(Runner)
    def run(self, n_epochs: int | None = None, **train_kwargs: Any) -> None:
        model = self.trainer.model
        try:
            with threads_for(() if model is None else model.parameters()):
                self.trainer.train(n_epochs=n_epochs, **train_kwargs)
        except BaseException:
            self.close()
            raise

    @property
    def model_composer(self) -> BaseModelComposer:
        """Build policies and critics; available after :meth:`setup`."""
        return self._after_setup("_model_composer")  # type: ignore[no-any-return]

    @property
    def cfg(self) -> DictConfig:
        """The whole configuration; available after :meth:`setup`."""
        return self._after_setup("_cfg")  # type: ignore[no-any-return]

    @property
    def trainer(self) -> Trainer:
        """The trainer; available after :meth:`setup`."""
        return self._after_setup("_trainer")  # type: ignore[no-any-return]

    def _after_setup(self, name: str) -> Any:
        if not hasattr(self, name):
            raise ConfigError(f"The {type(self).__name__} was not set up: call setup(cfg) before using it.")
        return getattr(self, name)

    # -- parts of a trainer besides environments ----------------------------------------------

    @property
    def algorithm(self) -> Any:
        """The algorithm's configuration, checked."""
        return self._after_setup("_algorithm")

    def model(self, seed: int | None = None) -> Any:
        """Return the policy as configured on the algorithm's device, in a `TorchActorCritic` where the algorithm has a
        critic.

        :param seed: The policy's seed; `None`: the next one.
        :raises ConfigError: The device is not there, or the model has no critic of the kind that the algorithm needs.
        """
        default = type(self.algorithm).device
        # kept: the trainer resolves it again and would repeat the notice
        device = self.algorithm.device = resolve_device(self.algorithm.device, "algorithm.device", default)
        policy, critic = self.model_composer.parts_for(self.trainer_type.__name__, self.algorithm.critic)
        policy.to(device)
        policy.seed(self.agent_seed() if seed is None else seed)
        return policy if critic is None else TorchActorCritic(policy, critic, device)

    def best_model_selection(self, model: TorchModel) -> BestModelSelection:
        """Return the selection of the best model.

        :param model: The model that is trained.
        """
        return BestModelSelection(dump_file=self.state_dict_dump_file, model=model, dump_interval=self.dump_interval)

    def common_arguments(self, model: TorchModel) -> dict[str, Any]:
        """Return the arguments that trainers have in common: selection of the best model, evaluator, checkpoint.

        :param model: The model that is trained.
        """
        selection = self.best_model_selection(model)
        evaluator, checkpoint_file = self.evaluator(selection), self.checkpoint_file
        return {"evaluator": evaluator, "model_selection": selection, "checkpoint_file": checkpoint_file}

    def evaluator(self, model_selection: BestModelSelection) -> Evaluator | None:
        """Return the evaluator that the algorithm's field `rollout_evaluator` configures, with environments of its own.

        Its key `instances` replaces the instance set of the environment in evaluations.

        :param model_selection: Receives the results.
        """
        config = self.algorithm.rollout_evaluator
        if config is None or isinstance(config, Evaluator):
            return config
        n_episodes, env_factory = _MIN_CONCURRENCY, None
        if isinstance(config, Mapping):
            n_episodes = config.get("n_episodes", n_episodes)
            if config.get("instances") is not None:
                env = {**plain_container(self.cfg.env, "env"), "instances": config["instances"]}
                own = EnvFactory(env, self.cfg.get("wrappers") or {}, self.env_timeout)
                env_factory = make_normalized_env_factory(own, self.normalization_statistics)
            config = {name: value for name, value in config.items() if name != "instances"}
        return Factory(Evaluator).instantiate(  # type: ignore[type-abstract]  # a subclass
            config,
            config_path="algorithm.rollout_evaluator",
            eval_env=self.evaluation_env(n_episodes, env_factory),
            model_selection=model_selection,
        )

    # -- which algorithm -------------------------------------------------------------------------------

    def _checked_algorithm(self, algorithm: Any) -> AlgorithmConfig | None:
        config_class = algorithm_class(algorithm)
        if config_class is None and self.trainer_class:
            config_class = _trainer_named(self.trainer_class, "runner.trainer_class").config_class
        if config_class is None and self.default_algorithm:
            config_class = algorithm_class({TARGET_KEY: self.default_algorithm})
        return None if config_class is None else config_class.from_config(algorithm)

    @property
    def trainer_type(self) -> type[Trainer]:
        """The class of the trainer; available after :meth:`setup`."""
        return self.trainer_for(type(self.algorithm), self.trainer_class)

    @classmethod
    def trainer_for(cls, config_class: type[AlgorithmConfig], trainer_class: str | type[Trainer] = "") -> type[Trainer]:
        """Return the trainer: of the runner's and the configuration's the one that is derived from the other.

        :param config_class: The class of the algorithm's configuration.
        :param trainer_class: The runner's `trainer_class`.
        :raises ConfigError: No trainer is named, or the runner trains other algorithms.
        """
        named = {"runner.trainer_class": trainer_class, f"{config_class.__name__}.trainer": config_class.trainer}
        given = [_trainer_named(name, config_path) for config_path, name in named.items() if name]
        if not given:
            raise ConfigError(f"algorithm: {config_class.__name__} has no trainer. Set its class attribute `trainer`.")
        trainer = next((one for one in given if all(issubclass(one, other) for other in given)), None)
        if trainer is None:
            raise ConfigError(
                f"runner.trainer_class: {given[0].__name__} does not train a {config_class.__name__}, which names "
                f"{given[1].__name__}. Leave one of the two out."
            )
        kind = _trainer_named(cls.trains, f"{cls.__name__}.trains") if cls.trains else Trainer
        if not issubclass(trainer, kind):
            raise ConfigError(
                f"runner: {cls.__name__} is for {kind.__name__}, not for algorithm={config_class.name}, which "
                f"{trainer.__name__} trains. Choose runner=dev or runner=local, which fit every algorithm."
            )
        return trainer

    def _find_environments(self, cfg: DictConfig) -> None:
        """Build environment factory and execution backend; read spaces and normalization statistics."""
        is_open = self.placement is None and self.default_placement == "in_process"
        self.placement = placement_of(
            self.placement or self.default_placement, self.address, self.env_groups, self.env_timeout
        )
        self._closing.append(self.placement.close)
        factory = EnvFactory(cfg.env, cfg.get("wrappers") or {}, self.env_timeout)
        env = made_by(factory, _PROBE)
        if is_open and type(env) is GymVectorMazeEnv:  # with wrappers it is of another class
            self.placement, self._num_envs = Batched(), env.num_envs
        call = "seed"
        try:
            env.seed(self.env_seeds(1)[0])
            call = "reset or step"
            self.normalization_statistics, normalized, env = estimated_statistics(
                env, factory, self.normalization_samples, cfg.get("input_dir")
            )
            self.spaces = SpacesConfig(env.action_spaces_dict, env.observation_spaces_dict, env.agent_counts_dict)
            """Spaces of the environment, after :meth:`setup`."""
        except USER_CODE_ERRORS as error:
            fail(error, Place.of(env, _PROBE), call)
        finally:
            closed(env.close, _PROBE)
        self.env_factory = CheckedEnvFactory(normalized, self.spaces)

    @override(Runner)
    def close(self) -> None:
        """Close all environments and end their worker processes."""
        for close in reversed(self._closing):
            close()
        self._closing.clear()

    def closing(self, close: Callable[[], None]) -> None:
        """Have something closed together with the environments.

        :param close: Closes it.
        """
        self._closing.append(close)

    # -- for trainers ----------------------------------------------------------------------------------

    @property
    def n_training_envs(self) -> int:
        """Number of training environments."""
        return self.concurrency or self._num_envs or _default_concurrency()

    def rollouts(
        self, env_factory: Callable[[], Any] | None = None, seeds: Sequence[int] | None = None
    ) -> RolloutGenerator:
        """Return a rollout generator for `concurrency` training environments.

        :param env_factory: Makes one environment; `None`: the factory of the run.
        :param seeds: A seed for each environment; `None`: the next seeds of the run.
        """
        env = self._seeded_env(env_factory or self.env_factory, self.n_training_envs, "train", seeds)
        may_be_late = env.n_rollout_envs < env.n_envs  # late fragments need the logits of their older policy
        return RolloutGenerator(env, record_logits=may_be_late)

    def actors(self, **arguments: Any) -> DistributedActors:
        """Return actors that collect rollouts while the trainer learns.

        :param arguments: Arguments of :meth:`create_distributed_rollout_actors` except `env_factory`.
        """
        actors = self.create_distributed_rollout_actors(env_factory=self.env_factory, **arguments)
        self._closing.append(actors.stop)
        return actors

    def create_distributed_rollout_actors(
        self,
        env_factory: Callable[[], Any] | None,
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        env_instance_seeds: list[int],
        agent_instance_seeds: list[int],
    ) -> DistributedActors:
        """Build actors with the execution backend.

        :param env_factory: Makes one environment.
        :param policy: The policy; actors use copies of it.
        :param n_rollout_steps: Number of environment steps of a rollout.
        :param n_actors: Number of actors.
        :param batch_size: Number of rollouts in a batch.
        :param queue_out_of_sync_factor: Maximum number of finished rollouts in the queue, in units of `batch_size`.
        :param env_instance_seeds: A seed for each environment; their number divided by `n_actors` is the number of
            environments of each actor.
        :param agent_instance_seeds: A seed for the policy of each actor.
        """
        actors: DistributedActors = self.placement.actors(
            env_factory=env_factory,
            policy=policy,
            n_rollout_steps=n_rollout_steps,
            n_actors=n_actors,
            batch_size=batch_size,
            queue_out_of_sync_factor=queue_out_of_sync_factor,
            actor_env_seeds=env_instance_seeds,
            actor_agent_seeds=agent_instance_seeds,
            envs_per_actor=len(env_instance_seeds) // n_actors,
        )
        return actors

    def workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        """Return workers that collect rollouts into a replay buffer.

        :param arguments: Arguments of `BaseDistributedWorkersWithBuffer` except `env_factory`.
        """
        workers = self.create_distributed_rollout_workers(env_factory=self.env_factory, **arguments)
        self._closing.append(workers.stop)
        workers.start()
        return workers

    def evaluation_env(
        self, n_episodes: int, env_factory: Callable[[], Any] | None = None, n_envs: int = 0
    ) -> StructuredVectorEnv:
        """Return environments for evaluation; their wrappers do not update statistics, so evaluations are comparable.

        :param n_episodes: Number of episodes of an evaluation.
        :param env_factory: Makes one environment; `None`: the factory of the run.
        :param n_envs: Number of environments; 0: `eval_concurrency`.
        """
        factory = self.env_factory if env_factory is None else env_factory
        assert factory is not None, "setup comes first"
        n_envs = n_envs or self.eval_concurrency or max(1, min(n_episodes, _default_concurrency()))
        env = self._seeded_env(FrozenEnvFactory(factory), n_envs, "eval")
        check_same_spaces(self.spaces, env, "environment")  # its factory may be another one
        return env

    def agent_seed(self) -> int:
        """Return the next seed for a policy or trainer."""
        return self.maze_seeding.generate_agent_instance_seed()

    def env_seeds(self, n_envs: int) -> list[int]:
        """Return the next seeds for environments.

        :param n_envs: Number of seeds.
        """
        return [self.maze_seeding.generate_env_instance_seed() for _ in range(n_envs)]

    # -- execution backend -----------------------------------------------------------------------------

    def _seeded_env(
        self,
        env_factory: Callable[[], Any] | None,
        n_envs: int,
        logging_prefix: str,
        seeds: Sequence[int] | None = None,
    ) -> StructuredVectorEnv:
        assert env_factory is not None, "setup comes first"
        env = self.create_distributed_env(env_factory, n_envs, logging_prefix)
        self._closing.append(env.close)
        env.seed(self.env_seeds(n_envs) if seeds is None else seeds)
        return env

    def give_back(self, env: StructuredVectorEnv) -> None:
        """Close environments before the run ends.

        :param env: The environments of :meth:`rollouts`.
        """
        self._closing.remove(env.close)
        env.close()

    def create_distributed_env(
        self, env_factory: Callable[[], Any], concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Build a vector environment.

        :param env_factory: Makes one environment.
        :param concurrency: Number of environments.
        :param logging_prefix: Prefix of the epoch statistics.
        """
        return self.create_distributed_eval_env(env_factory, concurrency, logging_prefix)

    def create_distributed_eval_env(
        self, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Build a vector environment for evaluations.

        :param env_factory: Makes one environment.
        :param eval_concurrency: Number of environments.
        :param logging_prefix: Prefix of the epoch statistics.
        """
        env: StructuredVectorEnv = self.placement.vector_env(env_factory, eval_concurrency, logging_prefix)
        return env

    def create_distributed_rollout_workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        """Build workers with the execution backend.

        :param arguments: Arguments of
            :class:`~maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer.BaseDistributedWorkersWithBuffer`.
        """
        workers: BaseDistributedWorkersWithBuffer = self.placement.workers(**arguments)
        return workers


def stored_training(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the run to resume; empty: a new one begins.

    :param cfg: The whole configuration.
    :raises ConfigError: The state of the run is missing or cannot be read.
    """
    resume, input_dir = cfg.get("resume", False), cfg.get("input_dir")
    if not flag("resume", resume or False):
        return {}
    if not input_dir:
        raise ConfigError(
            "resume: true resumes the run in `input_dir`, but no input_dir is given. Name the directory of that run, "
            "input_dir=outputs/<name>/<time>, or leave out `resume=true` to start a new run."
        )
    path = Path(str(input_dir)) / CHECKPOINT_FILE
    state = load_state(path) if path.is_file() else {}
    if STATE_FORMAT not in state:
        found = "weights alone" if state else "no such file"
        raise ConfigError(
            f"resume: expected the state of a run in {path}, which is written when its first epoch ends; found {found}."
            " Leave out `resume=true` to start from the weights in state_dict.pt, if there are some."
        )
    return state


def resumed_seeds(resumed: Mapping[str, Any], seeding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seeding of a run, with the seeds of the run that it resumes.

    :param resumed: The state of the resumed run; empty: a new one begins.
    :param seeding: The configured section; its seeds are the same, or `None`.
    :raises ConfigError: The configured seeds differ from those of the run.
    """
    stored = {key: int(seed) for key, seed in resumed.get("seeds", {}).items() if key in SEED_KEYS}
    for key, seed in stored.items():
        if seeding.get(key) not in (None, seed):
            raise ConfigError(
                f"seeding.{key}: the resumed run has the seed {seed}, found {seeding[key]}. Leave it out when "
                "resuming: seeds are taken over."
            )
    return {**seeding, **stored}


def _trainer_named(name: str | type[Trainer], config_path: str) -> type[Trainer]:
    return Factory(Trainer).type_from_name(name, config_path=config_path)  # type: ignore[type-abstract]


def _default_concurrency() -> int:
    """Return the default number of environments."""
    return max(_MIN_CONCURRENCY, os.cpu_count() or 1)
