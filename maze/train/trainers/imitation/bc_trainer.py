"""Behavioural cloning."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.optim import Optimizer

from maze.core.agent.torch_model import resolve_device
from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger, increment_log_step
from maze.core.utils.checkpoint import load_into, load_state, save_state
from maze.train.trainers.common.actor_critic.actor_critic_trainer import STATE_FORMAT
from maze.train.trainers.common.interrupt import InterruptGuard, TrainingInterrupted
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.imitation.bc_algorithm_config import BCAlgorithmConfig
from maze.train.trainers.imitation.imitation_events import ImitationEvents
from maze.train.utils.train_utils import compute_gradient_norm

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
    from maze.train.trainers.imitation.bc_loss import BCLoss


class BCTrainer(Trainer):
    """Trains a policy to act as recorded trajectories show.

    :param algorithm_config: Hyperparameters.
    :param data_loader: Minibatches of observations, actions and actors, such as ``StepBatches`` or a torch DataLoader.
    :param policy: The policy.
    :param optimizer: Optimizer of its parameters.
    :param loss: The loss.
    :param model_selection: Part of the training's state; the evaluators tell it about their results.
    :param checkpoint_file: Where the state of the training is written after each epoch; ``None``: nowhere.
    """

    data_loader: Any
    policy: TorchPolicy
    optimizer: Optimizer
    loss: BCLoss
    train_stats: LogStatsAggregator
    imitation_events: ImitationEvents

    def __init__(
        self,
        algorithm_config: Any,
        data_loader: Any,
        policy: TorchPolicy,
        optimizer: Optimizer,
        loss: BCLoss,
        *,
        model_selection: BestModelSelection | None = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        self.config = BCAlgorithmConfig.from_config(algorithm_config)
        super().__init__(self.config, policy)
        self.data_loader = data_loader
        self.policy = policy
        self.optimizer = optimizer
        self.loss = loss
        self.model_selection = model_selection
        self.checkpoint_file = Path(checkpoint_file) if checkpoint_file is not None else None
        if len(data_loader) == 0:
            raise ConfigError("runner.dataset: there is no data to train on; lower algorithm.validation_percentage.")
        try:
            policy.to(resolve_device(self.config.device))
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from error
        self.train_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self.imitation_events = self.train_stats.create_event_topic(ImitationEvents)
        self.epoch = 0
        """Number of completed epochs."""
        self.iteration = 0
        """Number of minibatches of the current epoch that were learned from."""
        self.total_iterations = 0
        """Number of minibatches of all epochs."""
        self._first_epoch = 0
        self._is_finished = False
        self._order_state: torch.Tensor | None = None
        """State of the generator before it drew the order of the current epoch."""

    @override(Trainer)
    def train(  # type: ignore[override]  # documented: the evaluator comes first
        self, evaluator: Evaluator | None, n_epochs: int | None = None, eval_every_k_iterations: int | None = None
    ) -> None:
        """Trains until the number of epochs is reached, or a signal ends the training.

        After a training that has come to its end, another call trains on; after an interrupted one (in this process or
        one whose state was loaded), it does what was left.

        :param evaluator: Evaluates the policy at the end of each epoch; ``None``: nobody does.
        :param n_epochs: Number of epochs; 0: no limit. ``None`` takes the configuration's.
        :param eval_every_k_iterations: Additionally evaluate after every so many minibatches; ``None`` takes the
            configuration's.
        """
        n_epochs = self.config.n_epochs if n_epochs is None else n_epochs
        every_k = self.config.eval_every_k_iterations if eval_every_k_iterations is None else eval_every_k_iterations
        if self._is_finished:
            self._first_epoch, self._is_finished = self.epoch, False
        with InterruptGuard(_announce_interrupt) as interrupt:
            while n_epochs == 0 or self.epoch - self._first_epoch < n_epochs:
                self._run_epoch(evaluator, every_k, interrupt)
        self._is_finished = True
        self._save_checkpoint()

    def _run_epoch(self, evaluator: Evaluator | None, every_k: int | None, interrupt: InterruptGuard) -> None:
        self._stop_if_requested(interrupt)
        for batch in self._batches():
            self._learn_from(*batch)
            self.iteration += 1
            self.total_iterations += 1
            is_last = self.iteration == len(self.data_loader)
            if every_k and self.total_iterations % every_k == 0 and not is_last:
                self._evaluate(evaluator)
            if not is_last:
                self._stop_if_requested(interrupt)
        self._evaluate(evaluator)
        self.epoch, self.iteration, self._order_state = self.epoch + 1, 0, None
        self._save_checkpoint()

    def _batches(self) -> Any:
        """What is left of the current epoch."""
        generator = getattr(self.data_loader, "generator", None)
        if generator is not None:
            if self._order_state is None:
                self._order_state = generator.get_state()
            else:  # the epoch was interrupted: the same order again
                generator.set_state(self._order_state)
        return itertools.islice(self.data_loader, self.iteration, None)

    def _learn_from(self, observations: Any, actions: Any, actor_ids: Any) -> None:
        self.policy.train()
        self.optimizer.zero_grad()
        loss = self.loss.calculate_loss(self.policy, observations, actions, actor_ids, self.imitation_events)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        loss_value = float(loss.detach())
        norms = [compute_gradient_norm(self.policy.network_for(actor).parameters()) for actor in actor_ids]
        if not (math.isfinite(loss_value) and all(map(math.isfinite, norms))):
            raise NonFiniteError(
                f"Epoch {self.epoch + 1}, minibatch {self.iteration + 1}: the loss is {loss_value}, gradient "
                f"norms are {norms}; the step was not taken. Look for non-finite values in the data, or lower "
                "the learning rate (algorithm.optimizer.lr)."
            )
        self.optimizer.step()
        for actor, norm in zip(actor_ids, norms, strict=True):
            parameters = list(self.policy.network_for(actor).parameters())
            l2_norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.detach()) for p in parameters]))
            self.imitation_events.policy_l2_norm(actor[0], actor[1], float(l2_norm))
            self.imitation_events.policy_grad_norm(actor[0], actor[1], norm)

    def _evaluate(self, evaluator: Evaluator | None) -> None:
        print(f"\n********** Epoch {self.epoch + 1}: Iteration {self.total_iterations} **********", flush=True)
        self.train_stats.reduce()
        if evaluator is not None:
            evaluator.evaluate(self.policy)
        increment_log_step()

    def _stop_if_requested(self, interrupt: InterruptGuard) -> None:
        """After a signal, ends the training with everything saved."""
        if interrupt.signum is None:
            return
        self._save_checkpoint()
        saved = f" Its state is saved in `{self.checkpoint_file}`." if self.checkpoint_file is not None else ""
        where = f"in epoch {self.epoch + 1} after minibatch {self.iteration}"
        raise TrainingInterrupted(interrupt.signum, f"Training was interrupted {where}.{saved}")

    # -- state -----------------------------------------------------------------------------------------

    @override(Trainer)
    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        """Loads weights; of an actor-critic's it takes the policy's.

        :param state_dict: Weights as :meth:`state_dict` gives them.
        :param origin: Where they come from, for error messages.
        """
        own = self.policy.state_dict()
        load_into(self.policy, {key: value for key, value in state_dict.items() if key in own}, origin)

    @override(Trainer)
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        state = load_state(file_path)
        origin = Path(file_path) if isinstance(file_path, str | Path) else "The checkpoint"
        if STATE_FORMAT in state and "bc_optimizer" in state:
            self.load_training_state(state, origin)
        else:
            self.load_state_dict(state["model"] if STATE_FORMAT in state else state, origin)

    def training_state(self) -> dict[str, Any]:
        """All that the training itself consists of: weights, optimizer, order of the data, progress, best model."""
        generator = getattr(self.data_loader, "generator", None)
        return {
            STATE_FORMAT: 1,
            "model": self.policy.state_dict(),
            "bc_optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "iteration": self.iteration,
            "total_iterations": self.total_iterations,
            "first_epoch": self._first_epoch,
            "is_finished": self._is_finished,
            "generator": None if generator is None else generator.get_state(),
            "order_state": self._order_state,
            "policy_generators": self.policy.rng_state(),
            "model_selection": None if self.model_selection is None else self.model_selection.state_dict(),
        }

    def load_training_state(self, state: Mapping[str, Any], origin: str | Path = "The training state") -> None:
        """Continues from a state that :meth:`training_state` returned."""
        load_into(self.policy, state["model"], origin)
        self.optimizer.load_state_dict(state["bc_optimizer"])
        for name in ("epoch", "iteration", "total_iterations"):
            setattr(self, name, state[name])
        self._first_epoch, self._is_finished = state["first_epoch"], state["is_finished"]
        self._order_state = state["order_state"]
        generator = getattr(self.data_loader, "generator", None)
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"])
        self.policy.set_rng_state(state["policy_generators"])
        if self.model_selection is not None and state["model_selection"] is not None:
            self.model_selection.load_state_dict(state["model_selection"])

    def _save_checkpoint(self) -> None:
        if self.checkpoint_file is not None:
            save_state(self.checkpoint_file, self.training_state())


def _announce_interrupt(signal_name: str) -> None:
    print(
        f"{signal_name}: ending after the current minibatch; interrupt again to stop at once.",
        file=sys.stderr,
        flush=True,
    )
