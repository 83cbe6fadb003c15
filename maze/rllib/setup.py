"""Set-up of a run with RLlib: its configuration, environments, modules and algorithm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import TorchModel
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.errors import ConfigError, MazeError, did_you_mean
from maze.core.utils.checkpoint import load_state
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.reward_wrappers import FrozenEnvFactory
from maze.perception.models.model_composer import BaseModelComposer
from maze.rllib.algorithms import RLlibAlgorithm, validated
from maze.rllib.environment import EnvConfig, MazeMultiAgentEnv, MazeRLlibEnv, ModuleOfAgent, module_id, network_keys
from maze.rllib.q_modules import QPolicyModule, SoftActorCriticModule
from maze.rllib.rl_module import (
    MODEL_KEY,
    TARGETS,
    MazeRLModule,
    ModuleConfig,
    PolicyGradientModule,
    TargetPolicyModule,
    to_module_state,
)
from maze.rllib.statistics import TuneParameters
from maze.rllib.training import MazeModel, RLlibTraining, explained
from maze.train.parallelization.on_ray.session import ray_session, require_cpus
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.observation_statistics import ObservationStatistics

_MODULES: Mapping[str, type[MazeRLModule]] = {
    "PPO": PolicyGradientModule,
    "IMPALA": PolicyGradientModule,
    "APPO": TargetPolicyModule,
    "DQN": QPolicyModule,
    "SAC": SoftActorCriticModule,
}
_DEFAULT_MODULE = "default_policy"  # RLlib's name for the only module
_MAX_EVAL_ENVS = 8

_TALKATIVE = (
    "ray._common.deprecation",
    "ray.rllib.algorithms.algorithm_config",
    "ray.rllib.utils.deprecation",
    "ray.tune.utils.util",
    "ray.rllib.algorithms.sac.sac",
)
"""Loggers with warnings about RLlib's development that users cannot act on."""


@dataclass
class TrainingSetup:
    """Parts of a run with RLlib.

    :param algorithm: The algorithm.
    :param config: Its configuration, with the user's hyperparameters.
    :param model: Configuration of the model, as plain data.
    :param is_default_model: Whether RLlib builds the model.
    :param spaces_dicts: `action_spaces_dict`, `observation_spaces_dict` and `agent_counts_dict`.
    :param env_factory: Makes one environment with all its wrappers.
    :param seeding: Source of all seeds.
    :param num_workers: Number of workers that step environments.
    :param log_level: Level of RLlib's messages.
    :param restarts_workers: Whether the configuration states what to do with failed workers. By default RLlib restarts
        a worker repeatedly with the same error, and the run continues without its samples.
    """

    algorithm: RLlibAlgorithm
    config: Any
    model: dict[str, Any]
    is_default_model: bool
    spaces_dicts: dict[str, Any]
    env_factory: Callable[[], Any]
    seeding: MazeSeeding
    num_workers: int
    log_level: str
    restarts_workers: bool = False

    def build(
        self,
        resources: ExitStack,
        ray_config: Mapping[str, Any],
        parameters: TuneParameters,
        state_dict_file: str,
        input_file: Path | None,
        eval_episodes: int,
        iteration_timeout: float,
    ) -> RLlibTraining:
        """Start Ray and build the algorithm.

        :param resources: Resources to close at the end of the run.
        :param ray_config: Arguments of `ray.init`.
        :param parameters: When to stop.
        :param state_dict_file: File for the best policy.
        :param input_file: Weights to start from.
        :param eval_episodes: Number of episodes per evaluation; 0: no evaluation.
        :param iteration_timeout: See :class:`~maze.rllib.training.RLlibTraining`.
        :raises ConfigError: Weights of a Maze model are set for a model of RLlib.
        """
        set_log_levels(self.log_level)
        composer = None if self.is_default_model else self._checked_composer()
        self._configure(() if composer is None else tuple(ObservationStatistics(self._trained(composer)).names))
        learners = int(self.config.num_learners or 0)
        n_workers = self.num_workers + learners
        resources.enter_context(ray_session(ray_config, n_workers + 1, self.log_level))
        advice = "Reduce runner.num_workers, or let Ray use more: runner.ray_config.num_cpus."
        require_cpus(n_workers, f"runner.num_workers: {n_workers} workers", advice)
        validated(self.config)
        algorithm = self._built_algorithm()
        resources.callback(algorithm.stop)
        if composer is None:
            if input_file is not None:
                raise ConfigError("input_dir: model=rllib, RLlib's own model, cannot load weights of a Maze model.")
            selection = BestModelSelection(dump_file=None, model=None)
            return RLlibTraining(algorithm, None, selection, None, parameters, iteration_timeout)
        model, trained = self._maze_model(composer, input_file)
        self._give_weights(algorithm, model)
        selection = BestModelSelection(dump_file=state_dict_file, model=trained)
        evaluator = self._evaluator(resources, selection, eval_episodes) if eval_episodes else None
        return RLlibTraining(algorithm, model, selection, evaluator, parameters, iteration_timeout)

    # -- the model -----------------------------------------------------------------------------------------------------

    @property
    def _is_flat(self) -> bool:
        counts = self.spaces_dicts["agent_counts_dict"]
        return len(self.spaces_dicts["action_spaces_dict"]) == 1 and all(n == 1 for n in counts.values())

    @property
    def _module_class(self) -> type[MazeRLModule]:
        return _MODULES[self.algorithm.name]

    def _checked_composer(self) -> BaseModelComposer:
        """Build the model and a module of each kind in this process, where errors are clearer than in a worker."""
        composer = ModuleConfig(self.model, self.spaces_dicts, None).composer()
        if composer.policy is None:
            raise ConfigError("model.policy: missing; choose a model, for instance model=flatten_concat.")
        if not self._is_flat and self.algorithm.needs_single_action:
            raise ConfigError(
                f"rllib/algorithm={self.algorithm.name.lower()}: the environment is structured (sub-steps "
                f"{list(self.spaces_dicts['action_spaces_dict'])}, agents "
                f"{list(self.spaces_dicts['agent_counts_dict'].values())}), which can be trained with ppo, appo and "
                "impala. DQN and SAC take flat environments with a single action."
            )
        if self.algorithm.name == "DQN":
            self._check_dqn()
        for keys in network_keys(composer.policy).values():
            self._module_class(
                observation_space=self.spaces_dicts["observation_spaces_dict"][keys.step_key],
                action_space=self.spaces_dicts["action_spaces_dict"][keys.step_key],
                inference_only=False,
                model_config={MODEL_KEY: self._module_config(keys.network_key)},
            )
        return composer

    def _check_dqn(self) -> None:
        for name, plain in (("dueling", False), ("noisy", False), ("num_atoms", 1)):
            if getattr(self.config, name) != plain:
                raise ConfigError(
                    f"algorithm.config.{name}: DQN with a Maze model takes the policy network's logits as the values "
                    f"of actions, which is neither dueling, noisy nor distributional. Set it to {plain}, or choose "
                    "model=rllib."
                )

    def _module_config(self, network_key: Any) -> ModuleConfig:
        options = {name: getattr(self.config, name) for name in ("double_q", "epsilon") if hasattr(self.config, name)}
        return ModuleConfig(self.model, self.spaces_dicts, network_key, self._only_head(), options)

    def _only_head(self) -> str | None:
        """Return the single action head of an algorithm without dictionary actions."""
        if not self.algorithm.needs_single_action:
            return None
        heads = list(next(iter(self.spaces_dicts["action_spaces_dict"].values())).spaces)
        if len(heads) > 1:
            raise ConfigError(
                f"rllib/algorithm={self.algorithm.name.lower()}: {self.algorithm.name} of RLlib takes a single "
                f"Discrete or Box action, but the environment has {heads}. Choose ppo, appo or impala."
            )
        return str(heads[0])

    def _maze_model(self, composer: BaseModelComposer, input_file: Path | None) -> tuple[MazeModel, TorchModel]:
        """Return the model that loads RLlib's weights, and its part that is saved."""
        policy, critic = composer.policy, composer.critic
        assert policy is not None
        policy.seed(self.seeding.generate_agent_instance_seed())
        trained = self._trained(composer)
        if input_file is not None:
            state = load_state(input_file)
            state = state.get("model", state)
            (trained if "critics" in state else policy).load_state_dict(state)
        parts = {
            self._rllib_module_id(keys.network_key): self._module_class.parts(policy, critic, keys.network_key)
            for keys in network_keys(policy).values()
        }
        return MazeModel(parts, policy, ObservationStatistics(trained)), trained

    def _trained(self, composer: BaseModelComposer) -> TorchModel:
        """Return the part of a model that is trained: DQN trains no critic."""
        assert composer.policy is not None
        if self.algorithm.name == "DQN" or composer.critic is None:
            return composer.policy
        return TorchActorCritic(policy=composer.policy, critic=composer.critic, device="cpu")

    def _rllib_module_id(self, network_key: Any) -> str:
        return _DEFAULT_MODULE if self._is_flat else module_id(network_key)

    @staticmethod
    def _give_weights(algorithm: Any, model: MazeModel) -> None:
        """Set the initial weights of RLlib: the seeded ones of the model, or those of an earlier run."""
        weights = algorithm.learner_group.get_weights()
        changed = {
            module: to_module_state(model.parts[module], state, TARGETS) if module in model.parts else state
            for module, state in weights.items()
        }
        algorithm.learner_group.set_weights(changed)
        algorithm.env_runner_group.sync_weights(
            from_worker_or_learner_group=algorithm.learner_group, inference_only=True, timeout_seconds=None
        )

    # -- RLlib's configuration -----------------------------------------------------------------------------------------

    def _configure(self, normalized: tuple[str, ...]) -> None:
        """Complete RLlib's configuration with the settings of Maze.

        :param normalized: Observations with running normalization.
        """
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec

        config = self.config
        single = self._is_flat and (self.is_default_model or self.algorithm.needs_single_action)
        n_heads = len(next(iter(self.spaces_dicts["action_spaces_dict"].values())).spaces)
        n_observations = len(next(iter(self.spaces_dicts["observation_spaces_dict"].values())).spaces)
        env_config = EnvConfig(
            factory=self.env_factory,
            seed=self.seeding.generate_env_instance_seed(),
            is_single_action=single and (n_heads == 1 or self.algorithm.needs_single_action),
            is_single_observation=self._is_flat and self.is_default_model and n_observations == 1,
            normalized=normalized,
        )
        env_class = MazeRLlibEnv if self._is_flat else MazeMultiAgentEnv
        config.environment(env=env_class, env_config=env_config.to_rllib(), disable_env_checking=True)
        config.framework("torch")
        if not self.restarts_workers:
            config.fault_tolerance(restart_failed_env_runners=False)
        config.env_runners(num_env_runners=self.num_workers)
        config.debugging(seed=self.seeding.generate_agent_instance_seed() % 2**30, log_level=self.log_level)
        if self.is_default_model:
            self._configure_default_model(n_observations)
            return
        # the actions of Maze's distributions have the scale of the environment; RLlib rescales those of its own
        config.environment(normalize_actions=False, clip_actions=True)
        if self._is_flat:
            config.rl_module(
                rl_module_spec=RLModuleSpec(
                    module_class=self._module_class, model_config={MODEL_KEY: self._module_config(self._step_key())}
                )
            )
            return
        self._configure_modules()

    def _step_key(self) -> Any:
        return next(iter(self.spaces_dicts["action_spaces_dict"]))

    def _configure_modules(self) -> None:
        """Configure a module for each network of the policy, for structured environments."""
        from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec

        composer = ModuleConfig(self.model, self.spaces_dicts, None).composer()
        assert composer.policy is not None
        specs = {
            module_id(keys.network_key): RLModuleSpec(
                module_class=self._module_class,
                observation_space=self.spaces_dicts["observation_spaces_dict"][keys.step_key],
                action_space=self.spaces_dicts["action_spaces_dict"][keys.step_key],
                model_config={MODEL_KEY: self._module_config(keys.network_key)},
            )
            for keys in network_keys(composer.policy).values()
        }
        mapping = ModuleOfAgent(composer.policy.substeps_with_separate_agent_nets)
        self.config.multi_agent(policies=set(specs), policy_mapping_fn=mapping, count_steps_by="env_steps")
        self.config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))

    def _configure_default_model(self, n_observations: int) -> None:
        """Configure RLlib's own model with the values of `model=rllib`."""
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

        if not self._is_flat:
            raise ConfigError(
                "model=rllib: RLlib's own models need a flat environment, and this one is structured. Choose a "
                "Maze model, such as model=flatten_concat with critic=flatten_concat_step."
            )
        known = [entry.name for entry in fields(DefaultModelConfig)]
        values = {key: value for key, value in self.model.items() if key != "critic"}
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"model.{key}: RLlib's model has no such setting.{did_you_mean(key, known)} Known: "
                    f"{', '.join(known)}."
                )
        self.config.rl_module(model_config=DefaultModelConfig(**values))
        if n_observations > 1:
            self.config.env_runners(env_to_module_connector=_flatten_observations)

    # -- algorithm and evaluation --------------------------------------------------------------------------------------

    def _built_algorithm(self) -> Any:
        try:
            return self.config.build_algo()
        except MazeError:
            raise
        except Exception as error:
            raise explained(error, 0) from error

    def _evaluator(self, resources: ExitStack, selection: BestModelSelection, n_episodes: int) -> RolloutEvaluator:
        n_envs = min(n_episodes, _MAX_EVAL_ENVS)
        env = SequentialVectorEnv([FrozenEnvFactory(self.env_factory)] * n_envs, logging_prefix="eval")
        resources.callback(env.close)
        env.seed([self.seeding.generate_env_instance_seed() for _ in range(n_envs)])
        return RolloutEvaluator(env, n_episodes, selection, deterministic=True)


def _flatten_observations(env: Any = None, spaces: Any = None, device: Any = None) -> Any:
    from ray.rllib.connectors.env_to_module.flatten_observations import FlattenObservations

    return FlattenObservations()


def policy_of(training: RLlibTraining) -> TorchPolicy:
    """Return the policy of a run.

    :raises ConfigError: The run trains a model of RLlib.
    """
    if training.model is None:
        raise ConfigError("model=rllib trains a model of RLlib, which is no policy of Maze.")
    policy: TorchPolicy = training.model.policy
    return policy


def set_log_levels(log_level: str) -> None:
    """Set the levels of Ray's and RLlib's loggers in this process.

    :param log_level: DEBUG, INFO, WARN or ERROR.
    """
    logging.getLogger("ray").setLevel("WARNING" if log_level == "WARN" else log_level)  # Python's name
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR if log_level in ("WARN", "WARNING", "ERROR") else logging.NOTSET)
