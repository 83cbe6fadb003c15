"""Soft actor-critic (Haarnoja et al. 2018), with a replay buffer that may start with demonstrations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from maze.core.agent.torch_model import resolve_device
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.core.utils.checkpoint import load_into
from maze.train.trainers.common.epoch_trainer import EpochTrainer, new_episodes
from maze.train.trainers.common.initial_policy import InitialPolicy, decayed_coef
from maze.train.trainers.common.module_modes import depends_on_mode
from maze.train.trainers.common.plain_state import from_plain, to_plain
from maze.train.trainers.common.replay_buffer.column_rows import RolloutRows
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.sac_events import SACEvents
from maze.train.trainers.sac.sac_learner import SACLearner
from maze.train.trainers.sac.sac_stats import SACStats

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection

ALWAYS_SAVED_BYTES = 1 << 26
"""A larger replay buffer is saved only when training ends or is interrupted, not after each epoch."""


class SAC(EpochTrainer):
    """Collects transitions into a replay buffer and learns from batches of it.

    :param algorithm_config: Hyperparameters.
    :param learner_model: Policy and state-action critic.
    :param distributed_actors: Collect transitions into a buffer; it has been filled to begin with.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param evaluator: Evaluates the policy between epochs; ``None``: the training episodes say how good it is.
    :param seed: Seed of the actions drawn for learning; ``None`` draws one from torch's global generator.
    :param checkpoint_file: Where the state of the training is written after each epoch; ``None``: nowhere.
    """

    config_class = SACAlgorithmConfig

    def __init__(
        self,
        algorithm_config: Any,
        learner_model: TorchActorCritic,
        distributed_actors: BaseDistributedWorkersWithBuffer,
        model_selection: BestModelSelection | None,
        evaluator: Evaluator | None,
        *,
        seed: int | None = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        self.config = SACAlgorithmConfig.from_config(algorithm_config)
        super().__init__(
            self.config,
            learner_model,
            evaluator=evaluator,
            model_selection=model_selection,
            checkpoint_file=checkpoint_file,
        )
        self.model: TorchActorCritic = learner_model
        self.actors = distributed_actors
        try:
            learner_model.to(resolve_device(self.config.device))
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from error
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        self.learner = SACLearner(learner_model, self.config, distributed_actors.actors, seed)
        self._dequeuing = 0.0
        self._has_modes = depends_on_mode(
            [*learner_model.policy.networks.values(), *learner_model.critic.networks.values()]
        )
        self._stats = SACStats()
        self._events_aggregator = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self._events = self._events_aggregator.create_event_topic(SACEvents)

    # -- life cycle ------------------------------------------------------------------------------------

    @override(Trainer)
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Trains until the number of epochs is reached, or early stopping or a signal ends the training.

        After a training that has come to its end, another call trains on; after an interrupted one (in this process or
        one whose state was loaded), it does what was left.

        :param n_epochs: Number of epochs; 0: no limit. ``None`` takes the configuration's.
        """
        self.learner.tie()
        self.model.train()
        if self.config.kl_to_initial_coef and self.learner.initial_policy is None:
            self.learner.initial_policy = InitialPolicy(self.model.policy)
        self._train_epochs(n_epochs)

    @override(EpochTrainer)
    def _steps_per_update(self) -> int:
        return self.config.n_rollout_steps * self.config.rollouts_per_iteration

    @override(EpochTrainer)
    def _training_statistics(self) -> LogStatsAggregator:
        return self.actors.get_epoch_stats_aggregator()

    @override(EpochTrainer)
    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        return {"updates": self._events_aggregator, "episodes": self._training_statistics()}

    @property
    @override(EpochTrainer)
    def _policy(self) -> TorchPolicy:
        return self.model.policy

    @override(EpochTrainer)
    def _write_epoch_stats(self) -> None:
        buffer = self.actors.replay_buffer
        self._stats.add_plain("buffer_size", len(buffer))
        self._stats.add_plain("buffer_avg_pick_per_transition", buffer.avg_pick_per_transition)
        self._stats.publish(self._events)
        self._events_aggregator.reduce()
        self.actors.write_epoch_stats()

    # -- one update ------------------------------------------------------------------------------------

    @override(EpochTrainer)
    def _update(self) -> None:
        """Collects transitions and learns from batches of the buffer."""
        learner, stats = self.learner, self._stats
        learner.seconds_of_losses = learner.seconds_of_gradients = 0.0
        sampling = 0.0
        start = time.perf_counter()
        self._collect()
        collected = time.perf_counter()
        for _ in range(self.config.num_batches_per_iter):
            drawing = time.perf_counter()
            batch = self.actors.sample_transitions(self.model.device)
            sampling += time.perf_counter() - drawing
            stats.add_terms(learner.update(batch, self._critic_learns_alone, self._kl_to_initial_coef))
        stats.add_time("time_learner_rollout", collected - start - self._dequeuing)
        stats.add_time("time_dequeuing_actors", self._dequeuing)
        stats.add_time("time_sampling_from_buffer", sampling)
        stats.add_time("time_loss_computation", learner.seconds_of_losses)
        stats.add_time("time_backprob", learner.seconds_of_gradients)

    def _collect(self) -> None:
        policy = self.model.policy
        if self.actors.worker_policy is not policy:
            self.actors.broadcast_updated_policy(policy.state_dict())
        if self._has_modes:
            self.actors.worker_policy.eval()
        before, after, self._dequeuing = self.actors.collect_rollouts()
        if self._has_modes:
            self.model.train()
        self._stats.add_plain("estimated_queue_sizes", before, after)

    @property
    def _critic_learns_alone(self) -> bool:
        return self.epoch < self.config.critic_burn_in_epochs

    @property
    def _kl_to_initial_coef(self) -> float:
        config = self.config
        n_learning_epochs = self.epoch - config.critic_burn_in_epochs
        return decayed_coef(config.kl_to_initial_coef, config.kl_to_initial_decay, n_learning_epochs)

    # -- state -----------------------------------------------------------------------------------------

    _keys_of_version_1: ClassVar[tuple[str, ...]] = ("learner", "replay_buffer")

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        super().load_state_dict(state_dict, origin)
        self.learner.initial_policy = None

    @override(EpochTrainer)
    def training_state(self, with_buffer: bool = True) -> dict[str, Any]:
        """All that the training consists of, so that another process can go on with it; tensors and plain values.

        :param with_buffer: Whether the transitions are part of it.
        """
        return {**super().training_state(), "replay_buffer": self.actors.replay_buffer.state_dict(with_buffer)}

    @override(EpochTrainer)
    def _own_state(self) -> dict[str, Any]:
        initial = self.learner.initial_policy
        return {
            "learner": self.learner.state_dict(),
            "policy_generators": self.actors.worker_policy.rng_state(),
            "environments": to_plain(self.actors.episodes_state()),
            "wrapper_statistics": self.actors.wrapper_statistics(),
            "update_statistics": self._stats.state(),
            "initial_policy": None if initial is None else initial.policy.state_dict(),
        }

    @override(EpochTrainer)
    def _load_own_state(self, state: Mapping[str, Any], origin: str | Path) -> list[str]:
        self.learner.load_state_dict(state["learner"])
        self.actors.worker_policy.set_rng_state(state["policy_generators"])
        if "update_statistics" in state:
            self._stats.load_state(state["update_statistics"])
        self.learner.initial_policy = None
        if state.get("initial_policy") is not None:
            self.learner.initial_policy = InitialPolicy(self.model.policy)
            load_into(self.learner.initial_policy.policy, state["initial_policy"], origin)
        problems = []
        environments = from_plain(state.get("environments", {}))
        self.actors.replay_buffer.load_state_dict(state["replay_buffer"])
        if state["replay_buffer"]["content"] is None:
            problems.append("the replay buffer was too large to be saved with every epoch, and is filled anew")
            for group in environments.get("groups", ()):
                group["rows"] = RolloutRows.without_numbers(group["rows"])
        problems += new_episodes(self.actors.load_episodes_state(environments))
        self.actors.load_wrapper_statistics(state["wrapper_statistics"])
        return problems

    @override(EpochTrainer)
    def _checkpoint_state(self, is_last: bool) -> dict[str, Any]:
        return self.training_state(is_last or self.actors.replay_buffer.columns.n_bytes <= ALWAYS_SAVED_BYTES)
