"""Evolution strategies."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.agent.torch_model import TorchModel
from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.core.utils.factory import Factory
from maze.core.wrappers.reward_wrappers import FrozenEnvFactory
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.model_selection.selection_criterion import SelectionCriterion, tell
from maze.train.trainers.common.observation_statistics import Moments, merged
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.trainers.es.distributed.es_distributed_rollouts import Episode, EpisodeSeeds
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import ESDummyDistributedRollouts
from maze.train.trainers.es.distributed.es_subproc_distributed_rollouts import (
    ESRayDistributedRollouts,
    ESSubprocDistributedRollouts,
)
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig
from maze.train.trainers.es.es_events import ESEvents
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_utils import es_gradient, get_flat_parameters, n_trained_parameters
from maze.train.trainers.es.optimizers.base_optimizer import Optimizer
from maze.train.utils.plain_state import Part

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.common.training_runner import TrainingRunner
    from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts, ESRolloutResult

NOISE_TABLE_SIZE = 100_000_000
"""Number of random numbers that perturbations are cut out of, unless a runner says otherwise."""


class ESTrainer(EpochTrainer):
    """Follows a gradient that is estimated from the returns of randomly perturbed policies.

    Salimans et al. 2017: perturbations come in mirrored pairs, and only the order of the returns counts.

    :param algorithm_config: Hyperparameters.
    :param torch_policy: The policy.
    :param shared_noise: The perturbations.
    :param normalization_stats: Statistics for observation normalization, for the environments.
    :param checkpoint_file: Where the state of the training is written after each epoch; `None`: nowhere.
    :raises ConfigError: The policy has no parameter to train.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = ESAlgorithmConfig
    events_class: ClassVar[type[Any]] = ESEvents
    learns_observation_statistics: ClassVar[bool] = True
    evaluates_between_epochs: ClassVar[bool] = False
    takes_env_steps: ClassVar[bool] = True
    """The policy is evaluated by rollouts of each update."""

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
        shared_noise.get(0, n_parameters)  # tells now if the table is too small
        self._criterion = SelectionCriterion(self.config.objective, self.config.maximize, self.config.constraints)
        self._rollouts: ESDistributedRollouts | None = None
        self._make_rollouts: Callable[[], ESDistributedRollouts] | None = None
        self._eval_returns: list[float] = []
        self._observed: list[Moments] = []
        """What the perturbed policies of the latest update have seen."""
        self._n_evaluations = 0
        """Number of episodes in which the latest update has evaluated the policy."""
        self._eval_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("eval"))

    @classmethod
    @override(Trainer)
    def build(
        cls,
        run: TrainingRunner,
        shared_noise: SharedNoiseTable | None = None,
        make_rollouts: Callable[[], ESDistributedRollouts] | None = None,
    ) -> ESTrainer:
        """Builds the trainer of a run.

        :param run: The runner.
        :param shared_noise: The perturbations; `None`: a table of the usual size.
        :param make_rollouts: Makes what evaluates perturbed policies; `None`: what fits the placement.
        """
        assert run.env_factory is not None, "setup comes first"
        # Returns of the episodes of an update are compared with one another: none may change how the next is rewarded.
        run.env_factory = FrozenEnvFactory(run.env_factory)
        shared_noise = SharedNoiseTable(NOISE_TABLE_SIZE) if shared_noise is None else shared_noise
        policy: Any = _wrapped_policy(run)
        trainer = cls(
            run.algorithm, policy, shared_noise, run.normalization_statistics, checkpoint_file=run.checkpoint_file
        )
        trainer._make_rollouts = make_rollouts or (lambda: make_distributed_rollouts(run, shared_noise))
        trainer.model_selection = run.best_model_selection(policy)
        return trainer

    @override(Trainer)
    def train(  # type: ignore[override]  # the rollouts come first
        self,
        distributed_rollouts: ESDistributedRollouts | None = None,
        n_epochs: int | None = None,
        model_selection: ModelSelectionBase | None = None,
    ) -> None:
        """Trains until the number of epochs is reached, or early stopping or a signal ends the training.

        After a training that has come to its end, another call trains on; after an interrupted one (in this process or
        one whose state was loaded), it does what was left.

        :param distributed_rollouts: Evaluates perturbed policies; `None`: what the run that the trainer was built for
            makes.
        :param n_epochs: Number of updates; 0: 1,000 at most. `None` takes the configuration's.
        :param model_selection: Told about the mean return of the evaluation before each update; `None`: that of the
            run, if there is one.
        """
        self.model_selection = model_selection or self.model_selection
        if self.config.patience > 0 and self.model_selection is None:
            raise ConfigError("algorithm.patience: early stopping needs a model selection; pass `model_selection`.")
        with ExitStack() as stack:
            if distributed_rollouts is None:
                if self._make_rollouts is None:
                    raise ConfigError("distributed_rollouts: none are given that could evaluate perturbed policies.")
                distributed_rollouts = stack.enter_context(closing(self._make_rollouts()))
            self._rollouts = distributed_rollouts
            super().train(n_epochs)

    @override(EpochTrainer)
    def n_updates_per_epoch(self) -> int:
        return 1

    @override(EpochTrainer)
    def work_of_an_epoch(self) -> str:
        config = self.config
        wanted = {"episodes": config.n_rollouts_per_update, "environment steps": config.n_timesteps_per_update}
        amounts = " and ".join(f"{number:,} {what}" for what, number in wanted.items() if number)
        return f"collecting {amounts} with perturbed policies, one update"

    @override(EpochTrainer)
    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        return {**super()._aggregators(), "evaluations": self._eval_stats}

    @override(EpochTrainer)
    def _update(self) -> None:
        """Evaluates the policy and perturbed versions of it, and takes a step."""
        assert self._rollouts is not None, "train sets them"
        start = time.perf_counter()
        self.policy.eval()
        noise_indices, returns, n_steps = self._collect(self._rollouts)
        gradient = es_gradient(self.shared_noise, noise_indices, returns, n_trained_parameters(self.policy))
        parameters = get_flat_parameters(self.policy).numpy()
        descent = self.config.l2_penalty * parameters - gradient
        if not np.isfinite(descent).all():
            raise NonFiniteError(
                "the estimated gradient is not finite; the step was not taken. Lower "
                "`algorithm.noise_stddev` or the optimizer's step size."
            )
        self.session.took_steps(n_steps)
        self.session.before_statistics(f"Iteration {self.epoch}")
        self._report_evaluation(returns)  # of the policy as it is before the step
        update_ratio = self.optimizer.update(descent)
        self.events.policy_grad_norm(policy_id=0, value=float(np.linalg.norm(gradient)))
        self.events.policy_norm(policy_id=0, value=float(np.linalg.norm(parameters)))
        self.events.update_ratio(value=update_ratio)
        self.observation_statistics.learn_merged(merged(self._observed))
        self.events.real_time(value=time.perf_counter() - start)

    def _collect(self, distributed_rollouts: ESDistributedRollouts) -> tuple[list[int], np.ndarray, int]:
        """The rollouts of one update.

        :return: Perturbations, returns `[n_pairs, 2]`, number of environment steps.
        """
        config = self.config
        distributed_rollouts.prepare_update(self.epoch, config.n_rollouts_per_update, config.n_timesteps_per_update)
        rollouts = distributed_rollouts.generate_rollouts(
            self.policy, config.max_steps or None, config.noise_stddev, self.normalization_stats
        )
        self._eval_returns = []
        self._observed = []
        noise_indices: list[int] = []
        returns: list[float] = []
        n_steps = 0
        try:
            for result in rollouts:
                if result.is_eval:
                    self._take_evaluation(result)
                    continue
                for episode_stats in result.episode_stats:
                    self.train_stats.receive(episode_stats)
                self._check_finite(result.returns, result.noise_indices)
                noise_indices += result.noise_indices
                returns += result.returns
                n_steps += sum(result.lengths)
                self._observed += result.observed
                if len(returns) >= config.n_rollouts_per_update and n_steps >= config.n_timesteps_per_update:
                    break
        finally:
            rollouts.close()
        distributed_rollouts.report_work(self.train_stats)
        self._n_evaluations = len(self._eval_returns)
        return noise_indices, np.array(returns).reshape(-1, 2), n_steps

    def _check_finite(self, returns: list[float], noise_indices: list[int]) -> None:
        for position, episode_return in enumerate(returns):
            if not math.isfinite(episode_return):
                episode = Episode(position, noise_indices[position // 2], -1 if position % 2 else 1, None)
                raise NonFiniteError(f"the return of {episode} is {episode_return}; no step was taken.")

    def _report_evaluation(self, training_returns: np.ndarray) -> None:
        """Tells how good the policy is; where it is not evaluated itself, by the perturbed ones around it."""
        if self.session.evaluated_epoch == self.epoch:  # an earlier training ended with these episodes
            self._eval_stats.clear_inputs()
        elif self._eval_returns:
            self._eval_stats.reduce()
            if self.model_selection is not None:
                tell(self.model_selection, self._criterion, self._eval_stats.last_stats)
        elif self.model_selection is not None:
            if self.config.objective is not None or self.config.constraints:
                raise ConfigError(
                    "algorithm.objective, algorithm.constraints: they judge evaluations of the policy, but there are "
                    "none; set runner.n_eval_rollouts to at least 1."
                )
            self.model_selection.update(float(training_returns.mean()))

    @override(EpochTrainer)
    def _end_training(self) -> None:
        """Updates evaluate the policy before their step; nobody has seen yet what the last step led to."""
        if not self._n_evaluations or self.session.evaluated_epoch == self.epoch or self._rollouts is None:
            return
        self._eval_returns = []
        self.policy.eval()
        self._rollouts.prepare_update(self.epoch, 0, 0)
        rollouts = self._rollouts.generate_rollouts(
            self.policy, self.config.max_steps or None, self.config.noise_stddev, self.normalization_stats
        )
        try:
            for result in rollouts:
                self._take_evaluation(result)
                if not result.is_eval or len(self._eval_returns) >= self._n_evaluations:
                    break
        finally:
            rollouts.close()
        self.session.before_statistics(f"Iteration {self.epoch}")
        self._report_evaluation(np.empty(0))
        self.session.evaluated_epoch = self.epoch

    def _take_evaluation(self, result: ESRolloutResult) -> None:
        if result.is_eval:
            for episode_stats in result.episode_stats:
                self._eval_stats.receive(episode_stats)
            self._eval_returns += result.returns

    # -- state -----------------------------------------------------------------------------------------

    @override(EpochTrainer)
    def training_state(self, is_last: bool = True) -> dict[str, Any]:
        return {**super().training_state(is_last), "n_evaluations": self._n_evaluations}

    @override(EpochTrainer)
    def load_training_state(self, state: Mapping[str, Any], origin: str | Path = "The training state") -> None:
        super().load_training_state(state, origin)
        self._n_evaluations = state["n_evaluations"]

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        """Episodes depend on seeds and the number of the update only."""
        return {"optimizer": self.optimizer}


def make_distributed_rollouts(
    run: TrainingRunner,
    shared_noise: SharedNoiseTable,
    *,
    env: Any = None,
    agent_instance_seed: int | None = None,
    n_eval_rollouts: int = 10,
    concurrency: int = 0,
    n_train_workers: int = 0,
    n_eval_workers: int = 0,
    start_method: str | None = None,
) -> ESDistributedRollouts:
    """Makes what evaluates perturbed policies, where the placement says.

    :param run: The runner.
    :param shared_noise: The noise table.
    :param env: An environment, which is used up; `None`: one is made.
    :param agent_instance_seed: Seed of the perturbations; `None`: the next one of the run.
    :param n_eval_rollouts: Number of episodes of the policy itself for each update.
    :param concurrency: Number of episodes that a process plays side by side; 0: as many as there are, up to 64.
    :param n_train_workers: Number of processes for perturbed policies; 0: one for each CPU core.
    :param n_eval_workers: Number of processes for the policy itself; 0: the others evaluate it as well.
    :param start_method: `forkserver`, `spawn` or `fork`; `None`: `forkserver` where there is one.
    """
    assert run.env_factory is not None, "setup comes first"
    if env is None:
        env = run.env_factory()
        env.seed(run.env_seeds(1)[0])
    seed = run.agent_seed() if agent_instance_seed is None else agent_instance_seed
    if run.placement.in_process:
        return ESDummyDistributedRollouts(
            env=env,
            n_eval_rollouts=n_eval_rollouts,
            shared_noise=shared_noise,
            agent_instance_seed=seed,
            env_factory=run.env_factory,
            env_seed=run.env_seeds(1)[0],
            concurrency=concurrency,
        )
    env.close()  # the workers make their own
    crew = run.placement.crew(n_wanted=n_available_cores())
    if crew is not None:
        seeds = EpisodeSeeds(shared_noise, seed, run.env_seeds(1)[0])
        return ESRayDistributedRollouts(crew, run.env_factory, seeds, n_eval_rollouts, concurrency)
    n_train_workers = n_train_workers or n_available_cores()
    return ESSubprocDistributedRollouts(
        env_factory=run.env_factory,
        n_training_workers=n_train_workers,
        n_eval_workers=n_eval_workers,
        shared_noise=shared_noise,
        env_seeds=run.env_seeds(n_train_workers + n_eval_workers),
        agent_seed=seed,
        start_method=start_method,
        n_eval_rollouts=n_eval_rollouts,
        concurrency=concurrency,
    )


def n_available_cores() -> int:
    """Number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


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
