"""Evolution strategies."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.agent.torch_model import TorchModel
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.core.utils.factory import Factory
from maze.core.utils.worker_pool import n_available_cores
from maze.core.wrappers.return_normalization_reward_wrapper import FrozenEnvFactory
from maze.train.parallelization.vector_env.vector_env_utils import CheckedEnvFactory
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase, SelectionCriterion, tell
from maze.train.trainers.common.observation_statistics import Moments, merged
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.trainers.es.distributed.es_distributed_rollouts import EpisodeSeeds, ESDistributedRollouts
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import (
    ESDummyDistributedRollouts,
    Players,
    PooledRollouts,
)
from maze.train.trainers.es.distributed.es_subproc_distributed_rollouts import ESSubprocDistributedRollouts
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig
from maze.train.trainers.es.es_events import ESEvents
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_utils import es_gradient, get_flat_parameters, n_trained_parameters
from maze.train.trainers.es.optimizers.base_optimizer import Optimizer
from maze.train.utils.train_utils import Part

if TYPE_CHECKING:
    from maze.train.trainers.common.training_runner import TrainingRunner

NOISE_TABLE_SIZE = 100_000_000
"""Default size of the noise table."""


class ESTrainer(EpochTrainer):
    """Evolution strategies (Salimans et al. 2017): gradient ascent on the returns of randomly perturbed policies.

    Perturbations come in mirrored pairs, and the gradient depends on the ranks of the returns only.

    :param algorithm_config: Hyperparameters.
    :param torch_policy: The policy.
    :param shared_noise: The noise table.
    :param normalization_stats: Statistics for environments with observation normalization.
    :param checkpoint_file: Checkpoint of the trainer, written after each epoch; `None`: no checkpoints.
    :raises ConfigError: The policy has no parameter to train.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = ESAlgorithmConfig
    events_class: ClassVar[type[Any]] = ESEvents
    learns_observation_statistics: ClassVar[bool] = True
    evaluates_between_epochs: ClassVar[bool] = False
    takes_env_steps: ClassVar[bool] = True
    """Each update evaluates the policy."""

    config: ESAlgorithmConfig

    def __init__(
        self,
        algorithm_config: Any,
        torch_policy: TorchPolicy,
        shared_noise: SharedNoiseTable,
        normalization_stats: Any,
        *,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        super().__init__(algorithm_config, torch_policy, checkpoint_file=checkpoint_file)
        self.shared_noise = shared_noise
        self.normalization_stats = normalization_stats
        self.optimizer: Optimizer = Factory(Optimizer).instantiate(  # type: ignore[type-abstract]  # a subclass
            self.config.optimizer, config_path="algorithm.optimizer"
        )
        self.optimizer.setup(torch_policy)
        n_parameters = n_trained_parameters(torch_policy)
        if n_parameters == 0:
            raise ConfigError("model.policy: all parameters of the policy are frozen; there is nothing to train.")
        shared_noise.get(0, n_parameters)  # raises an error if the table is too small
        self._criterion = SelectionCriterion(self.config.objective, self.config.maximize, self.config.constraints)
        self._rollouts: ESDistributedRollouts | None = None
        self._make_rollouts: Callable[[], ESDistributedRollouts] | None = None
        self._eval_returns: list[float] = []
        # Observation statistics of the perturbed policies of the latest update.
        self._observed: list[Moments] = []
        self._eval_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("eval"))

    @classmethod
    @override(Trainer)
    def build(cls, run: TrainingRunner) -> ESTrainer:
        """Build the trainer of a run.

        :param run: The runner. Noise table and rollouts are those of an
            :class:`~maze.train.trainers.es.es_runners.ESMasterRunner`, otherwise those of its default settings.
        """
        assert run.env_factory is not None, "setup comes first"
        # The returns of an update are compared with each other: reward statistics must not change between episodes.
        env_factory = run.env_factory = FrozenEnvFactory(run.env_factory)
        noise = getattr(run, "shared_noise", None) or SharedNoiseTable(NOISE_TABLE_SIZE)
        make_rollouts = getattr(run, "create_distributed_rollouts", partial(make_distributed_rollouts, run))
        policy: Any = _wrapped_policy(run)
        trainer = cls(run.algorithm, policy, noise, run.normalization_statistics, checkpoint_file=run.checkpoint_file)
        seeding = copy.deepcopy(run.maze_seeding)

        def new_rollouts() -> ESDistributedRollouts:
            # The same seeds in each call, and in a resumed run, which has no warm start: episodes depend on them.
            run.maze_seeding = copy.deepcopy(seeding)
            env = CheckedEnvFactory(env_factory, run.spaces)()
            env.seed(run.env_seeds(1)[0])
            rollouts: ESDistributedRollouts = make_rollouts(env, noise, run.agent_seed())
            return rollouts

        trainer._make_rollouts = new_rollouts
        trainer.model_selection = run.best_model_selection(policy)
        return trainer

    @override(Trainer)
    def train(  # type: ignore[override]  # the rollouts come first
        self,
        distributed_rollouts: ESDistributedRollouts | None = None,
        n_epochs: int | None = None,
        model_selection: ModelSelectionBase | None = None,
    ) -> None:
        """Train until the number of epochs is reached, or until early stopping or a signal.

        Another call after a complete run trains further epochs; after an interrupted run (in this process, or loaded
        from a checkpoint), it resumes the interrupted run.

        :param distributed_rollouts: Evaluates perturbed policies; `None`: the rollouts of the run.
        :param n_epochs: Number of updates; 0: at most 1,000. `None`: as configured.
        :param model_selection: Receives the mean return of the evaluation before each update; `None`: the selection of
            the run, if there is one.
        """
        self.model_selection = model_selection or self.model_selection
        if self.config.patience > 0 and self.model_selection is None:
            raise ConfigError("algorithm.patience: early stopping needs a model selection; pass `model_selection`.")
        with ExitStack() as stack:
            if distributed_rollouts is None:
                if self._make_rollouts is None:
                    raise ConfigError("distributed_rollouts: expected an ESDistributedRollouts, found None.")
                distributed_rollouts = stack.enter_context(closing(self._make_rollouts()))
            self._rollouts = distributed_rollouts
            super().train(n_epochs)

    @override(EpochTrainer)
    def n_updates_per_epoch(self) -> int:
        return 1

    @override(EpochTrainer)
    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        return {**super()._aggregators(), "evaluations": self._eval_stats}

    @override(EpochTrainer)
    def _update(self) -> None:
        """Evaluate the policy and perturbed versions of it, and take a step."""
        start = time.perf_counter()
        self.policy.eval()
        config = self.config
        noise_indices, returns, n_steps = self._collect(config.n_rollouts_per_update, config.n_timesteps_per_update)
        assert self._rollouts is not None, "train sets them"
        self._rollouts.report_work(self.train_stats)
        gradient = es_gradient(self.shared_noise, noise_indices, returns, n_trained_parameters(self.policy))
        parameters = get_flat_parameters(self.policy).numpy()
        descent = config.l2_penalty * parameters - gradient
        if not (np.isfinite(returns).all() and np.isfinite(descent).all()):
            raise NonFiniteError(
                "the returns or the estimated gradient are not finite; the step was not taken. Check the rewards, or "
                "lower `algorithm.noise_stddev` or the optimizer's step size."
            )
        self._display.steps_per_update = n_steps
        self.before_statistics(f"Iteration {self.epoch}")
        self._report_evaluation(returns)  # of the policy as it is before the step
        update_ratio = self.optimizer.update(descent)
        self.events.policy_grad_norm(policy_id=0, value=float(np.linalg.norm(gradient)))
        self.events.policy_norm(policy_id=0, value=float(np.linalg.norm(parameters)))
        self.events.update_ratio(value=update_ratio)
        self.observation_statistics.learn_merged(merged(self._observed))
        self.events.real_time(value=time.perf_counter() - start)

    def _collect(self, n_rollouts: int, n_timesteps: int, n_evaluations: int = 0) -> tuple[list[int], np.ndarray, int]:
        """Collect rollouts until each of these numbers is reached.

        :param n_rollouts: Minimum number of training episodes.
        :param n_timesteps: Minimum number of environment steps in them.
        :param n_evaluations: Minimum number of evaluations, which come first.
        :return: Noise indices, returns `[n_pairs, 2]`, number of environment steps.
        """
        assert self._rollouts is not None, "train sets them"
        config = self.config
        self._observed, self._eval_returns = [], []
        noise_indices: list[int] = []
        returns: list[float] = []
        n_steps = 0
        self._rollouts.prepare_update(self.epoch, n_rollouts, n_timesteps)
        rollouts = self._rollouts.generate_rollouts(
            self.policy, config.max_steps or None, config.noise_stddev, self.normalization_stats
        )
        with closing(rollouts):
            for result in rollouts:
                for episode_stats in result.episode_stats:
                    (self._eval_stats if result.is_eval else self.train_stats).receive(episode_stats)
                if result.is_eval:
                    self._eval_returns += result.returns
                else:
                    noise_indices += result.noise_indices
                    returns += result.returns
                    n_steps += sum(result.lengths)
                    self._observed += result.observed
                is_evaluated = not result.is_eval or len(self._eval_returns) >= n_evaluations
                if is_evaluated and len(returns) >= n_rollouts and n_steps >= n_timesteps:
                    break
        return noise_indices, np.array(returns).reshape(-1, 2), n_steps

    def _report_evaluation(self, training_returns: np.ndarray) -> None:
        """Report the evaluation to the model selection; without evaluations, the mean return of perturbed policies."""
        if self.evaluated_epoch == self.epoch:  # an earlier run ended with these episodes
            self._eval_stats.clear_inputs()
        elif self._eval_returns:
            self._eval_stats.reduce()
            if self.model_selection is not None:
                tell(self.model_selection, self._criterion, self._eval_stats.last_stats)
        elif self.model_selection is not None:
            if self.config.objective is not None or self.config.constraints:
                raise ConfigError(
                    "algorithm.objective, algorithm.constraints: they need evaluations of the policy; set "
                    "runner.n_eval_rollouts to at least 1."
                )
            self.model_selection.update(float(training_returns.mean()))

    @override(EpochTrainer)
    def _end_training(self) -> None:
        """Evaluate the policy after the last step: updates evaluate it before their step."""
        n_evaluations = 0 if self._rollouts is None else self._rollouts.n_eval_rollouts
        if not n_evaluations or self.evaluated_epoch == self.epoch:
            return
        self.policy.eval()
        self._collect(0, 0, n_evaluations)
        self.before_statistics(f"Iteration {self.epoch}")
        self._report_evaluation(np.empty(0))
        self.evaluated_epoch = self.epoch

    # -- state -----------------------------------------------------------------------------------------

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        """Return the optimizer: episodes depend on seeds and the number of the update only."""
        return {"optimizer": self.optimizer}


def make_distributed_rollouts(
    run: TrainingRunner, env: Any, shared_noise: SharedNoiseTable, agent_seed: int
) -> ESDistributedRollouts:
    """Make the rollouts of perturbed policies with the execution backend of the run.

    :param run: The runner; its settings are those of an
        :class:`~maze.train.trainers.es.es_runners.ESMasterRunner`, or the defaults.
    :param env: An environment, which the rollouts use or close.
    :param shared_noise: The noise table.
    :param agent_seed: Seed of the perturbations.
    """
    assert run.env_factory is not None, "setup comes first"
    env_factory, env_seed = run.env_factory, run.env_seeds(1)[0]
    concurrency, n_eval_rollouts = run.concurrency, getattr(run, "n_eval_rollouts", 10)
    common: dict[str, Any] = {"concurrency": concurrency}
    if run.placement.in_process:
        common |= {"env_factory": env_factory, "env_seed": env_seed}
        return ESDummyDistributedRollouts(env, n_eval_rollouts, shared_noise, agent_seed, **common)
    env.close()  # workers make their own environments
    pool = run.placement.actor_pool(n_wanted=n_available_cores())
    if pool is not None:
        maker = Players.maker(env_factory, shared_noise, concurrency)
        return PooledRollouts(pool, maker, EpisodeSeeds(shared_noise, agent_seed, env_seed), n_eval_rollouts)
    n_workers = getattr(run, "n_train_workers", 0) or n_available_cores(), getattr(run, "n_eval_workers", 0)
    common |= {"start_method": getattr(run, "start_method", None), "n_eval_rollouts": n_eval_rollouts}
    return ESSubprocDistributedRollouts(env_factory, *n_workers, shared_noise, [env_seed], agent_seed, **common)


def _wrapped_policy(run: TrainingRunner) -> Policy:
    torch_policy: TorchPolicy = run.model(seed=run.maze_seeding.agent_global_seed)
    config: ESAlgorithmConfig = run.algorithm
    if config.policy_wrapper is None:
        return torch_policy
    policy = Factory(Policy).instantiate(  # type: ignore[type-abstract]  # a subclass
        config.policy_wrapper, config_path="algorithm.policy_wrapper", torch_policy=torch_policy
    )
    if not isinstance(policy, TorchModel):
        raise ConfigError(
            f"algorithm.policy_wrapper: {type(policy).__name__} has no parameters to train; expected a Policy that "
            "is a TorchModel as well and passes the parameters of `torch_policy` on."
        )
    return policy
