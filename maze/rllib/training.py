"""A run with RLlib: its configuration, environments, modules and algorithm, and the training loop."""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import time
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from ray.rllib.connectors.env_to_module.flatten_observations import FlattenObservations
from ray.rllib.core.rl_module.apis import TargetNetworkAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from maze.console.runs import Progressed, active_console
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import TorchModel
from maze.core.errors import ConfigError, MazeError, WorkerError, unknown_key_error
from maze.core.log_stats import log_stats
from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.log_stats.log_stats_writer_tensorboard import LogStatsWriterTensorboard
from maze.core.log_stats.stats_format import significant
from maze.core.utils.checkpoint import load_state
from maze.core.utils.factory import TARGET_KEY
from maze.core.wrappers.return_normalization_reward_wrapper import FrozenEnvFactory
from maze.perception.models.model_composer import BaseModelComposer
from maze.rllib import rl_module
from maze.rllib.algorithms import NEED_SINGLE_ACTION, RETURN, STEPS, TuneParameters, is_number, value_at
from maze.rllib.environment import (
    EnvConfig,
    MazeMultiAgentEnv,
    MazeRLlibEnv,
    module_id,
    module_of_agent,
    step_key_of,
    take_of_runner,
)
from maze.train.parallelization.on_ray.cluster import ray_session, require_cpus
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection, selected_score
from maze.train.trainers.common.observation_statistics import Moments, ObservationStatistics, merged
from maze.train.utils import run_process

if TYPE_CHECKING:
    from maze.rllib.maze_rllib_runner import MazeRLlibRunner

T = TypeVar("T")

CHECKPOINTS = "rllib_checkpoints"
"""Directory of Ray's checkpoints in the run directory."""
_SAVED = f"; Ray's checkpoint is in {CHECKPOINTS}."
_STATISTICS_TIMEOUT = 60.0
_POLL_INTERVAL = 0.2
_ALL_MODULES = "__all_modules__"
_LEFT_OUT = ("config", "hist_stats", "perf", "sampler_results", "connector", "timers")
_BOOKKEEPING = ("num_", "module_", "weights_", "diff_", "last_", "default_optimizer", "gradients_default", "connector")
_SHOWN_OF_SAMPLING = (
    *("episode_return_mean", "episode_return_max", "episode_return_min", "episode_len_mean"),
    *("num_env_steps_sampled_lifetime", "num_episodes_lifetime"),
)


class RLlibEvents(ABC):
    """Results of an iteration of RLlib."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("name")
    def sampling(self, name: str, value: float) -> None:
        """A sampling statistic by RLlib's name; episodes are those of RLlib's smoothing window."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("name")
    def learner(self, name: str, value: float) -> None:
        """A learner statistic such as a loss, by RLlib's name; with the name of the module if there are several."""

    @define_epoch_stats(np.mean)
    def time_iteration(self, value: float) -> None:
        """Duration of the iteration in seconds, without evaluation."""


def scalars(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield all finite numbers of a nested result with their paths."""
    for key, value in result.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if not any(part in str(key) for part in _LEFT_OUT):
                yield from scalars(value, f"{name}/")
        elif is_number(value) and math.isfinite(float(value)):
            yield name, float(value)


@dataclass
class MazeModel:
    """A Maze model that loads the weights of RLlib's modules after each iteration.

    :param modules: RLlib's modules with the networks of the model.
    :param policy: The policy, for evaluation.
    :param statistics: Statistics of its observations. Those of RLlib's modules are rounded to single precision and are
        not loaded.
    """

    modules: Mapping[str, rl_module.MazeRLModule]
    policy: Any
    statistics: ObservationStatistics

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load the weights of all modules."""
        with self.statistics.kept():
            for name, module in self.modules.items():
                module.set_state(weights[name])

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of all modules, with target networks that equal their networks."""
        for module in self.modules.values():
            if isinstance(module, TargetNetworkAPI):
                module.make_target_networks()
        return {name: module.get_state() for name, module in self.modules.items()}

    def buffers(self) -> dict[str, dict[str, Any]]:
        """Return the buffers of all modules, such as statistics of observations, as parts of their states."""
        buffers = {}
        for name, module in self.modules.items():
            for network, target in module.get_target_network_pairs() if isinstance(module, TargetNetworkAPI) else ():
                for buffer, copied in zip(network.buffers(), target.buffers(), strict=True):
                    copied.copy_(buffer)
            state = module.get_state()
            buffers[name] = {key: state[key] for key, _ in module.named_buffers()}
        return buffers


@dataclass
class RLlibTraining:
    """Train, write statistics, store the best policy, and stop at a stop condition.

    :param algorithm: The built algorithm of RLlib.
    :param model: Model that loads the weights; `None`: RLlib trains its own model.
    :param model_selection: Stores the best policy.
    :param evaluator: Evaluates the policy after each iteration; `None`: the mean return of training episodes counts.
    :param parameters: Stop conditions and checkpoints.
    :param iteration_timeout: Timeout of an iteration in seconds; 0: none.
    """

    algorithm: Any
    model: MazeModel | None
    model_selection: BestModelSelection
    evaluator: Evaluator | None
    parameters: TuneParameters
    iteration_timeout: float = 0.0

    def __post_init__(self) -> None:
        self.iteration = 0
        level, logger = log_stats.LogStatsLevel.EPOCH, log_stats.get_stats_logger("train")
        self._episodes = log_stats.LogStatsAggregator(level, logger)
        self._results = log_stats.LogStatsAggregator(level, logger)
        self._events: RLlibEvents = self._results.create_event_topic(RLlibEvents)
        self._writer = LogStatsWriterTensorboard(Path("rllib_results"), False)
        self._checkpoint: Path | None = None
        self._n_env_steps = 0

    def train(self) -> None:
        """Train until a stop condition holds.

        :raises TrainingInterrupted: After SIGINT or SIGTERM; the iteration is completed and saved.
        """
        reason = ""
        try:
            with run_process.InterruptGuard(
                lambda name: print(f"{name}: the run ends after this iteration.", flush=True)
            ) as guard:
                for self.iteration in itertools.count(1):
                    started = time.perf_counter()
                    result = self._in_time(self.algorithm.train)
                    reason = self._finish(result, time.perf_counter() - started)
                    if reason or guard.requested:
                        break
                self.model_selection.training_ended()
                self._save(run_process.ENDED if reason else run_process.INTERRUPTED)
            if not reason and guard.signum is not None:
                raise run_process.TrainingInterrupted(
                    guard.signum, f"interrupted after iteration {self.iteration}{_SAVED}"
                )
        finally:
            log_stats.StatsContext.active().guarded(self._writer, self._writer.close)
        if (console := active_console()) is not None:
            console.finish()
        print(f"Training ended after iteration {self.iteration}: {reason}{_SAVED}", flush=True)

    def _finish(self, result: Mapping[str, Any], seconds: float) -> str:
        """Process the result of an iteration; return why the run ends, or an empty text."""
        weights = self._in_time(self.algorithm.learner_group.get_weights)
        rl_module.require_finite(weights, f"Iteration {self.iteration}")
        taken = [one for runner in self._of_runners(take_of_runner) for one in runner]
        if self.model is not None:
            self.model.load(weights)
            self._learn_observation_statistics(self.model, [moments for _, moments in taken if moments])
        steps = value_at(result, STEPS)
        log_stats.StatsContext.active().n_env_steps = None if steps is None else int(steps)
        self._write(result, [stats for episodes, _ in taken for stats in episodes], seconds)
        if self.evaluator is not None and self.model is not None:
            self.evaluator.evaluate(self.model.policy)
        elif (score := value_at(result, RETURN)) is not None and math.isfinite(score):
            self.model_selection.update(score)
        log_stats.increment_log_step()
        if (console := active_console()) is not None:
            total, best = int(steps or 0), selected_score(self.model_selection)
            rate = f"{(total - self._n_env_steps) / max(seconds, 1e-9):,.0f} environment steps/s"
            self._n_env_steps = total
            shown = "" if best is None else significant(best)
            console.epoch_done(Progressed(self.iteration, 0, total, seconds, rate, best=shown, unit="iteration"))
        if self.parameters.checkpoint_freq and self.iteration % self.parameters.checkpoint_freq == 0:
            self._save(run_process.RUNNING)
        return self.parameters.reason_to_stop(result, self.iteration)

    def _write(self, result: Mapping[str, Any], episodes: Sequence[log_stats.LogStats], seconds: float) -> None:
        """Write the statistics of an iteration: its episodes, the main results of RLlib, and all of them."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for stats in episodes:
            self._episodes.receive(stats)
        if episodes:
            self._episodes.reduce()
        for name in _SHOWN_OF_SAMPLING:
            if (found := value_at(result, f"env_runners/{name}")) is not None:
                self._events.sampling(name=name, value=found)
        learners = result.get("learners", {}).items()
        modules = {name: values for name, values in learners if isinstance(values, Mapping) and name != _ALL_MODULES}
        for module, values in modules.items():
            for name, value in scalars(values):
                if not name.startswith(_BOOKKEEPING):
                    self._events.learner(name=name if len(modules) == 1 else f"{module}/{name}", value=value)
        self._events.time_iteration(value=seconds)
        self._results.reduce()

        def write_all() -> None:
            values = [Summary.Value(tag=f"ray/{tag}", simple_value=value) for tag, value in scalars(result)]
            self._writer.add_summary(Summary(value=values), self.iteration)
            self._writer.on_log_step_increment()

        log_stats.StatsContext.active().guarded(self._writer, write_all)

    def _learn_observation_statistics(self, model: MazeModel, seen: Sequence[Moments]) -> None:
        """Add the observations of the iteration to the statistics; the learner used the previous ones."""
        if not seen:
            return
        model.statistics.learn_merged(merged(seen))
        buffers = model.buffers()
        self._in_time(lambda: self.algorithm.learner_group.set_weights(buffers))
        self._of_runners(partial(rl_module.load_into_runner, buffers))

    def _of_runners(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with each env runner, in its process."""
        group = self.algorithm.env_runner_group
        return self._in_time(lambda: group.foreach_env_runner(function, timeout_seconds=_STATISTICS_TIMEOUT))

    def _in_time(self, function: Callable[[], T]) -> T:
        """Run a function in a thread with the timeout, so that the main thread handles signals."""
        outcome = run_process.in_thread(function)
        deadline = time.monotonic() + self.iteration_timeout if self.iteration_timeout else math.inf
        while True:
            try:
                return outcome.result(timeout=_POLL_INTERVAL)
            except FutureTimeoutError:  # noqa: PERF203 (the loop waits)
                if outcome.done():  # raised by the function
                    raise
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"Iteration {self.iteration}: RLlib did not return within {self.iteration_timeout:.0f} s. "
                        "A worker may hang; see Ray's logs, or increase runner.iteration_timeout."
                    ) from None
            except MazeError:
                raise
            except Exception as error:
                raise explained(error, self.iteration) from error

    def _save(self, state: str) -> None:
        """Write Ray's checkpoint and the progress, then remove the previous checkpoint.

        :param state: State of the run, for the record of its progress.
        """
        directory = Path.cwd() / CHECKPOINTS
        target, unfinished = directory / f"iteration_{self.iteration:06d}", directory / f".unfinished-{os.getpid()}"
        if not target.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            self._in_time(lambda: self.algorithm.save_to_path(str(unfinished)))
            unfinished.replace(target)
            previous, self._checkpoint = self._checkpoint, target
            if previous is not None:
                shutil.rmtree(previous, ignore_errors=True)
        n_steps, best = log_stats.StatsContext.active().n_env_steps, selected_score(self.model_selection)
        values = {"iteration": self.iteration, "n_env_steps": n_steps, "best_score": best}
        run_process.write_record(Path.cwd(), state, values)


def explained(error: BaseException, iteration: int) -> MazeError:
    """Convert an error of RLlib or of a worker to an error of Maze."""
    from ray.exceptions import RayTaskError

    cause: Any = error
    while isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, MazeError):
        return type(cause)(f"Iteration {iteration}, in a worker of RLlib: {cause}")
    return WorkerError(
        f"Iteration {iteration}: RLlib or a worker of it failed with {type(cause).__name__}: {cause}. The output above "
        "has the traceback of a worker; runner.num_workers=0 runs the environment in this process, and "
        "MAZE_FULL_ERROR=1 shows its traceback."
    )


# -- set-up ----------------------------------------------------------------------------------------------------------

_MODULES: Mapping[str, type[rl_module.MazeRLModule]] = {
    "PPO": rl_module.PolicyGradientModule,
    "IMPALA": rl_module.PolicyGradientModule,
    "APPO": rl_module.TargetPolicyModule,
    "DQN": rl_module.QPolicyModule,
    "SAC": rl_module.SoftActorCriticModule,
}
_DEFAULT_MODULE = "default_policy"  # RLlib's name for the only module
_MAX_EVAL_ENVS = 8


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
