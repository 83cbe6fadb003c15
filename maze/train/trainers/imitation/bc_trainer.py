"""Behavioural cloning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim import Optimizer

from maze.core.agent.torch_model import resolve_device
from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger, increment_log_step
from maze.train.trainers.common.epoch_trainer import EpochTrainer
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.imitation.bc_algorithm_config import BCAlgorithmConfig
from maze.train.trainers.imitation.imitation_events import ImitationEvents
from maze.train.utils.train_utils import compute_gradient_norm

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
    from maze.train.trainers.imitation.bc_loss import BCLoss


class BCTrainer(EpochTrainer):
    """Trains a policy to act as recorded trajectories show.

    :param algorithm_config: Hyperparameters.
    :param data_loader: Minibatches of observations, actions and actors, such as ``StepBatches`` or a torch DataLoader.
    :param policy: The policy.
    :param optimizer: Optimizer of its parameters.
    :param loss: The loss.
    :param model_selection: Part of the training's state; the evaluators tell it about their results.
    :param checkpoint_file: Where the state of the training is written after each epoch; ``None``: nowhere.
    """

    evaluates_between_epochs: ClassVar[bool] = False
    update_name: ClassVar[str] = "minibatch"

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
        super().__init__(self.config, policy, model_selection=model_selection, checkpoint_file=checkpoint_file)
        self.data_loader = data_loader
        self.policy = policy
        self.optimizer = optimizer
        self.loss = loss
        if len(data_loader) == 0:
            raise ConfigError("runner.dataset: there is no data to train on; lower algorithm.validation_percentage.")
        try:
            policy.to(resolve_device(self.config.device))
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from error
        self.train_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self.imitation_events = self.train_stats.create_event_topic(ImitationEvents)
        self.total_iterations = 0
        """Number of minibatches of all epochs."""
        self._every_k: int | None = None
        self._minibatches: Iterator[Any] = iter(())
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
        self.evaluator = evaluator
        every_k = eval_every_k_iterations
        self._every_k = self.config.eval_every_k_iterations if every_k is None else every_k
        self._train_epochs(n_epochs)

    @override(EpochTrainer)
    def _n_updates_per_epoch(self) -> int:
        return len(self.data_loader)

    @override(EpochTrainer)
    def _begin_epoch(self) -> None:
        generator = getattr(self.data_loader, "generator", None)
        if generator is not None:
            if self._order_state is None:
                self._order_state = generator.get_state()
            else:  # the epoch was interrupted: the same order again
                generator.set_state(self._order_state)
        self._minibatches = iter(self.data_loader)
        for _ in range(self.update):  # those were learned from before the interruption
            next(self._minibatches)

    @override(EpochTrainer)
    def _update(self) -> None:
        self._learn_from(*next(self._minibatches))
        self.total_iterations += 1
        is_last = self.update + 1 == len(self.data_loader)
        if self._every_k and self.total_iterations % self._every_k == 0 and not is_last:
            self._log_and_evaluate(self.epoch + 1)
            increment_log_step()

    @override(EpochTrainer)
    def _write_epoch_stats(self) -> None:
        self._order_state = None
        self._log_and_evaluate(self.epoch)

    @override(EpochTrainer)
    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        return {"updates": self.train_stats}

    def _learn_from(self, observations: Any, actions: Any, actor_ids: Any) -> None:
        self.policy.train()
        self.optimizer.zero_grad()
        loss = self.loss.calculate_loss(self.policy, observations, actions, actor_ids, self.imitation_events)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        loss_value = float(loss.detach())
        norms = [compute_gradient_norm(self.policy.network_for(actor).parameters()) for actor in actor_ids]
        if not (math.isfinite(loss_value) and all(map(math.isfinite, norms))):
            raise NonFiniteError(
                f"the loss is {loss_value}, gradient norms are {norms}; the step was not taken. Look for "
                "non-finite values in the data, or lower the learning rate (algorithm.optimizer.lr)."
            )
        self.optimizer.step()
        for actor, norm in zip(actor_ids, norms, strict=True):
            parameters = list(self.policy.network_for(actor).parameters())
            l2_norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.detach()) for p in parameters]))
            self.imitation_events.policy_l2_norm(actor[0], actor[1], float(l2_norm))
            self.imitation_events.policy_grad_norm(actor[0], actor[1], norm)

    def _log_and_evaluate(self, epoch: int) -> None:
        print(f"\n********** Epoch {epoch}: Iteration {self.total_iterations} **********", flush=True)
        self.train_stats.reduce()
        if self.evaluator is not None:
            self.evaluate()

    # -- state -----------------------------------------------------------------------------------------

    _keys_of_version_1: ClassVar[tuple[str, ...]] = ("bc_optimizer",)

    @override(EpochTrainer)
    def _own_state(self) -> dict[str, Any]:
        generator = getattr(self.data_loader, "generator", None)
        return {
            "bc_optimizer": self.optimizer.state_dict(),
            "optimizer_type": _type_name(self.optimizer),
            "data": self._data_sizes(),
            "total_iterations": self.total_iterations,
            "generator": None if generator is None else generator.get_state(),
            "order_state": self._order_state,
            "policy_generators": self.policy.rng_state(),
        }

    @override(EpochTrainer)
    def _check_is_readable(self, state: Mapping[str, Any], origin: str | Path) -> None:
        super()._check_is_readable(state, origin)
        found, expected = state.get("optimizer_type"), _type_name(self.optimizer)
        if found is not None and found != expected:
            raise ConfigError(
                f"algorithm.optimizer: the training in `{origin}` has the optimizer {found}; the configured {expected} "
                "cannot take over its state. Configure that one, or start a new training with the weights alone."
            )
        sizes = self._data_sizes()
        is_within_epoch = state.get("iteration", state["update"]) > 0
        if is_within_epoch and state.get("data", sizes) != sizes:
            raise ConfigError(
                f"algorithm.batch_size, runner.dataset: the training in `{origin}` stopped within an epoch of "
                f"{_described(state['data'])}, now an epoch has {_described(sizes)}. Configure the same data and batch "
                "size, or start a new training with the weights alone."
            )

    def _data_sizes(self) -> dict[str, int | None]:
        sizes = {name: getattr(self.data_loader, name, None) for name in ("n_steps", "batch_size")}
        return {"minibatches": len(self.data_loader), **sizes}

    @override(EpochTrainer)
    def _load_own_state(self, state: Mapping[str, Any], origin: str | Path) -> list[str]:
        configured = [{**group} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["bc_optimizer"])
        for group, wanted in zip(self.optimizer.param_groups, configured, strict=True):
            group.update({name: value for name, value in wanted.items() if name != "params"})
        self.update = state.get("iteration", self.update)  # its name in version 1
        self.total_iterations = state["total_iterations"]
        self._order_state = state["order_state"]
        self.policy.set_rng_state(state["policy_generators"])
        generator = getattr(self.data_loader, "generator", None)
        if generator is None or state["generator"] is None:
            return ["the order of the data starts anew: the data loader has no generator of its own"]
        generator.set_state(state["generator"])
        return []


def _type_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _described(sizes: Mapping[str, int | None]) -> str:
    known = [f"{name} {size}" for name, size in sizes.items() if size is not None and name != "minibatches"]
    return f"{sizes['minibatches']} minibatches" + (f" ({', '.join(known)})" if known else "")
