"""Set-up of a run with RLlib: its configuration, environments, modules and algorithm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.rllib.connectors.env_to_module.flatten_observations import FlattenObservations
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import TorchModel
from maze.core.errors import ConfigError, MazeError, unknown_key_error
from maze.core.utils.checkpoint import load_state
from maze.core.utils.factory import TARGET_KEY
from maze.core.wrappers.return_normalization_reward_wrapper import FrozenEnvFactory
from maze.perception.models.model_composer import BaseModelComposer
from maze.rllib import rl_module
from maze.rllib.algorithms import NEED_SINGLE_ACTION, TuneParameters
from maze.rllib.environment import EnvConfig, MazeMultiAgentEnv, MazeRLlibEnv, module_id, module_of_agent, step_key_of
from maze.rllib.training import MazeModel, RLlibTraining, explained
from maze.train.parallelization.on_ray.cluster import ray_session, require_cpus
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.observation_statistics import ObservationStatistics

_MODULES: Mapping[str, type[rl_module.MazeRLModule]] = {
    "PPO": rl_module.PolicyGradientModule,
    "IMPALA": rl_module.PolicyGradientModule,
    "APPO": rl_module.TargetPolicyModule,
    "DQN": rl_module.QPolicyModule,
    "SAC": rl_module.SoftActorCriticModule,
}
_DEFAULT_MODULE = "default_policy"  # RLlib's name for the only module
_MAX_EVAL_ENVS = 8

if TYPE_CHECKING:
    from maze.rllib.maze_rllib_runner import MazeRLlibRunner


@dataclass
class TrainingSetup:
    """Parts of a run with RLlib.

    :param runner: The runner, with its settings and seeds.
    :param algorithm: RLlib's name of the algorithm.
    :param config: Its configuration, with the user's hyperparameters.
    :param model: Configuration of the model, as plain data; without a class, RLlib builds the model.
    :param spaces_dicts: `action_spaces_dict`, `observation_spaces_dict` and `agent_counts_dict`.
    :param env_factory: Makes one environment with all its wrappers.
    """

    runner: MazeRLlibRunner
    algorithm: str
    config: Any
    model: dict[str, Any]
    spaces_dicts: dict[str, Any]
    env_factory: Callable[[], Any]

    def __post_init__(self) -> None:
        counts = self.spaces_dicts["agent_counts_dict"]
        self._step_keys = list(self.spaces_dicts["action_spaces_dict"])
        self._is_flat = len(self._step_keys) == 1 and all(n == 1 for n in counts.values())

    def build(self, resources: ExitStack, parameters: TuneParameters, input_file: Path | None) -> RLlibTraining:
        """Start Ray and build the algorithm.

        :param resources: Resources to close at the end of the run.
        :param parameters: When to stop.
        :param input_file: Weights to start from.
        :raises ConfigError: Model, environment and algorithm do not fit, or weights of a Maze model are set for a
            model of RLlib.
        """
        runner = self.runner
        # its warnings concern the development of RLlib
        logging.getLogger("ray").setLevel("ERROR" if runner.log_level == "WARN" else runner.log_level)
        model = trained = None
        if TARGET_KEY in self.model:
            model, trained = self._maze_model(input_file)
        elif input_file is not None:
            raise ConfigError("input_dir: model=rllib, RLlib's own model, cannot load weights of a Maze model.")
        self._configure(model)
        n_workers = runner.num_workers + int(self.config.num_learners or 0)
        resources.enter_context(ray_session(runner.ray_config, n_workers + 1, runner.log_level))
        advice = "Reduce runner.num_workers, or let Ray use more: runner.ray_config.num_cpus."
        require_cpus(n_workers, f"runner.num_workers: {n_workers} workers", advice)
        try:
            self.config.validate()
        except Exception as error:
            raise ConfigError(f"algorithm.config: RLlib does not accept this configuration: {error}") from error
        try:
            algorithm = self.config.build_algo()
        except MazeError:
            raise
        except Exception as error:
            raise explained(error, 0) from error
        resources.callback(algorithm.stop)
        dump_file = None if model is None else runner.state_dict_dump_file
        selection = BestModelSelection(dump_file=dump_file, model=trained)
        evaluator = None
        if model is not None:
            # the initial weights of RLlib: the seeded ones of the model, or those of an earlier run
            algorithm.learner_group.set_weights(model.states())
            algorithm.env_runner_group.sync_weights(
                from_worker_or_learner_group=algorithm.learner_group, inference_only=True, timeout_seconds=None
            )
            if n_episodes := runner.eval_episodes:
                n_envs = min(n_episodes, _MAX_EVAL_ENVS)
                env = SequentialVectorEnv([FrozenEnvFactory(self.env_factory)] * n_envs, logging_prefix="eval")
                resources.callback(env.close)
                env.seed([runner.maze_seeding.generate_env_instance_seed() for _ in range(n_envs)])
                evaluator = RolloutEvaluator(env, n_episodes, selection, deterministic=True)
        return RLlibTraining(algorithm, model, selection, evaluator, parameters, runner.iteration_timeout)

    # -- the model -----------------------------------------------------------------------------------------------------

    def _maze_model(self, input_file: Path | None) -> tuple[MazeModel, TorchModel]:
        """Build the model that loads RLlib's weights, and its part that is saved.

        Its modules are built in this process, where errors are clearer than in a worker.
        """
        composer = rl_module.ModuleConfig(self.model, self.spaces_dicts, None).composer()
        if (policy := composer.policy) is None:
            raise ConfigError("model.policy: missing; choose a model, for instance model=flatten_concat.")
        for name, plain in (("dueling", False), ("noisy", False), ("num_atoms", 1)):
            if self.algorithm == "DQN" and getattr(self.config, name) != plain:
                raise ConfigError(
                    f"algorithm.config.{name}: DQN with a Maze model takes the policy network's logits as the values "
                    f"of actions, which is neither dueling, noisy nor distributional. Set it to {plain}, or choose "
                    "model=rllib."
                )
        modules = {name: spec.build() for name, spec in self._specs(policy.networks, composer).items()}
        if self._is_flat:
            modules = {_DEFAULT_MODULE: next(iter(modules.values()))}
        policy.seed(self.runner.maze_seeding.generate_agent_instance_seed())
        critic = None if self.algorithm == "DQN" else composer.critic  # DQN trains none
        trained = policy if critic is None else TorchActorCritic(policy=policy, critic=critic, device="cpu")
        if input_file is not None:
            state = load_state(input_file)
            state = state.get("model", state)
            (trained if "critics" in state else policy).load_state_dict(state)
        return MazeModel(modules, policy, ObservationStatistics(trained)), trained

    def _specs(self, network_keys: Iterable[Any], shared: BaseModelComposer | None = None) -> dict[str, RLModuleSpec]:
        """Return the specification of a module for each network of the policy.

        :param network_keys: Keys of the networks.
        :param shared: The model whose networks the modules train; `None`: models of their own.
        """
        options = {name: getattr(self.config, name) for name in ("double_q", "epsilon") if hasattr(self.config, name)}
        head = None
        if self.algorithm in NEED_SINGLE_ACTION:
            head, *more = self.spaces_dicts["action_spaces_dict"][self._step_keys[0]].spaces
            if more or not self._is_flat:
                raise ConfigError(
                    f"rllib/algorithm={self.algorithm.lower()}: expected a flat environment with a single "
                    f"Discrete or Box action, found the sub-steps {self._step_keys} with the agents "
                    f"{list(self.spaces_dicts['agent_counts_dict'].values())} and the actions {[head, *more]}. Choose "
                    "ppo, appo or impala."
                )

        def config(key: Any) -> rl_module.ModuleConfig:
            return rl_module.ModuleConfig(self.model, self.spaces_dicts, key, head, options, shared)

        return {
            module_id(key): RLModuleSpec(
                module_class=_MODULES[self.algorithm],
                observation_space=self.spaces_dicts["observation_spaces_dict"][step_key_of(key)],
                action_space=self.spaces_dicts["action_spaces_dict"][step_key_of(key)],
                model_config={rl_module.MODEL_KEY: config(key)},
            )
            for key in network_keys
        }

    # -- RLlib's configuration -----------------------------------------------------------------------------------------

    def _configure(self, model: MazeModel | None) -> None:
        """Complete RLlib's configuration with the settings of Maze.

        :param model: The model; `None`: RLlib builds one.
        """
        config, seeding = self.config, self.runner.maze_seeding
        n_heads, n_observations = (
            len(self.spaces_dicts[name][self._step_keys[0]].spaces)
            for name in ("action_spaces_dict", "observation_spaces_dict")
        )
        is_plain = self._is_flat and model is None  # RLlib's own models
        env_config = EnvConfig(
            factory=self.env_factory,
            seed=seeding.generate_env_instance_seed(),
            is_single_action=self._is_flat and (self.algorithm in NEED_SINGLE_ACTION or (is_plain and n_heads == 1)),
            is_single_observation=is_plain and n_observations == 1,
            normalized=() if model is None else tuple(model.statistics.names),
        )
        env_class = MazeRLlibEnv if self._is_flat else MazeMultiAgentEnv
        config.environment(env=env_class, env_config={"maze": env_config}, disable_env_checking=True)
        config.framework("torch")
        config.env_runners(num_env_runners=self.runner.num_workers)
        config.debugging(seed=seeding.generate_agent_instance_seed() % 2**30, log_level=self.runner.log_level)
        if model is None:
            self._configure_default_model(n_observations)
            return
        # the actions of Maze's distributions have the scale of the environment; RLlib rescales those of its own
        config.environment(normalize_actions=False, clip_actions=True)
        specs = self._specs(model.policy.networks)
        if self._is_flat:
            (spec,) = specs.values()
            spec.observation_space = spec.action_space = None  # those of the environment
            config.rl_module(rl_module_spec=spec)
            return
        mapping = partial(module_of_agent, model.policy.substeps_with_separate_agent_nets)
        config.multi_agent(policies=set(specs), policy_mapping_fn=mapping, count_steps_by="env_steps")
        config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))

    def _configure_default_model(self, n_observations: int) -> None:
        """Configure RLlib's own model with the values of `model=rllib`."""
        if not self._is_flat:
            raise ConfigError(
                "model=rllib: RLlib's own models need a flat environment, and this one is structured. Choose a "
                "Maze model, such as model=flatten_concat with critic=flatten_concat_step."
            )
        known = [entry.name for entry in fields(DefaultModelConfig)]
        values = {key: value for key, value in self.model.items() if key != "critic"}
        if unknown := [key for key in values if key not in known]:
            raise unknown_key_error("model: setting of RLlib's model", unknown[0], known)
        self.config.rl_module(model_config=DefaultModelConfig(**values))
        if n_observations > 1:
            self.config.env_runners(env_to_module_connector=lambda *args, **kwargs: FlattenObservations())
