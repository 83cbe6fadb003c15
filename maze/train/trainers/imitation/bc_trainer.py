"""Behavioural cloning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import increment_log_step
from maze.core.utils.factory import Factory
from maze.core.wrappers.time_limit_wrapper import time_limited
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.evaluators.multi_evaluator import MultiEvaluator
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.trainers.imitation.bc_algorithm_config import BCAlgorithmConfig
from maze.train.trainers.imitation.bc_data import StepBatches, check_fits, load_dataset, split_dataset
from maze.train.trainers.imitation.bc_loss import BCLoss
from maze.train.trainers.imitation.bc_validation_evaluator import BCValidationEvaluator
from maze.train.trainers.imitation.imitation_events import ImitationEvents
from maze.train.utils.train_utils import Part, compute_gradient_norm

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
    from maze.train.trainers.common.training_runner import TrainingRunner


class BCTrainer(EpochTrainer):
    """Train a policy to act as recorded trajectories show.

    :param algorithm_config: Hyperparameters.
    :param data_loader: Minibatches of observations, actions and actors, such as `StepBatches` or a torch DataLoader.
    :param policy: The policy.
    :param optimizer: Optimizer of its parameters.
    :param loss: The loss.
    :param model_selection: Part of the trainer's state; the evaluators report their results to it.
    :param checkpoint_file: File of the trainer's state, written after each epoch; `None`: none is written.
    :raises ConfigError: There is no data to train on.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = BCAlgorithmConfig
    events_class: ClassVar[type[Any]] = ImitationEvents
    evaluates_between_epochs: ClassVar[bool] = False

    learns_observation_statistics: ClassVar[bool] = True

    config: BCAlgorithmConfig
    policy: TorchPolicy

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
        super().__init__(algorithm_config, policy, model_selection=model_selection, checkpoint_file=checkpoint_file)
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.loss = loss
        if len(data_loader) == 0:
            raise ConfigError("runner.dataset: there is no data to train on; lower algorithm.validation_percentage.")
        self.imitation_events: ImitationEvents = self.events
        self._minibatches = _Minibatches(data_loader)
        self.run_evaluators: list[Evaluator] = []
        """Default evaluator of :meth:`train`: on validation data, and by rollouts."""
        self._every_k: int | None = None

    @classmethod
    @override(Trainer)
    def build(cls, run: TrainingRunner) -> BCTrainer:
        """Build the trainer of a run.

        :param run: The runner; its `dataset` are the trajectories: a data set or its configuration, which gets
            `conversion_env_factory`.
        """
        config: BCAlgorithmConfig = run.algorithm
        action_spaces = run.spaces.action_spaces_dict
        data = load_dataset(getattr(run, "dataset", None), run.env_factory)
        check_fits(data, run.spaces.observation_spaces_dict, action_spaces)
        policy: TorchPolicy = run.model()
        training_data, validation_data = split_dataset(data, config, run.agent_seed)
        selection = run.best_model_selection(policy)
        loss = BCLoss(action_spaces, config.entropy_coef)
        batches = partial(
            StepBatches, batch_size=config.batch_size, device=policy.device, action_spaces_dict=action_spaces
        )
        trainer = cls(
            algorithm_config=config,
            data_loader=batches(training_data, shuffle=True, seed=run.agent_seed()),
            policy=policy,
            optimizer=Factory(Optimizer).instantiate(
                config.optimizer, config_path="algorithm.optimizer", params=policy.parameters()
            ),
            loss=loss,
            model_selection=selection,
            checkpoint_file=run.checkpoint_file,
        )
        evaluators: list[Evaluator] = []
        if len(validation_data) > 0:
            evaluators.append(BCValidationEvaluator(loss, selection, batches(validation_data), logging_prefix="eval"))
        if (n_episodes := config.n_eval_episodes) > 0:
            env_factory = run.env_factory
            if env_factory is not None and config.max_episode_steps > 0:
                env_factory = partial(time_limited, env_factory, config.max_episode_steps)
            env = run.evaluation_env(n_episodes, env_factory, config.n_eval_workers)
            evaluators.append(RolloutEvaluator(env, n_episodes, None if evaluators else selection, deterministic=True))
        trainer.run_evaluators = evaluators
        return trainer

    @override(Trainer)
    def train(  # type: ignore[override]  # the evaluator comes first
        self,
        evaluator: Evaluator | None = None,
        n_epochs: int | None = None,
        eval_every_k_iterations: int | None = None,
    ) -> None:
        """Train until the number of epochs is reached, or a signal ends the run.

        After a completed run, another call trains further. After an interrupted run (in this process,
        or one whose state was loaded), it trains for the remaining epochs.

        :param evaluator: Evaluates the policy at the end of each epoch; `None`: those of the run that the trainer was
            built for, if any.
        :param n_epochs: Number of epochs; 0: 1,000 at most. `None` takes the configuration's.
        :param eval_every_k_iterations: Additionally evaluate after every so many minibatches; `None` takes the
            configuration's.
        """
        self.evaluator = MultiEvaluator(self.run_evaluators) if evaluator is None and self.run_evaluators else evaluator
        every_k = eval_every_k_iterations
        self._every_k = self.config.eval_every_k_iterations if every_k is None else every_k
        super().train(n_epochs)

    @property
    def total_iterations(self) -> int:
        """Number of minibatches of all epochs."""
        return self._minibatches.n_done

    @override(EpochTrainer)
    def n_updates_per_epoch(self) -> int:
        return len(self.data_loader)

    @override(EpochTrainer)
    def _begin_training(self, n_epochs: int) -> None:
        super()._begin_training(n_epochs)
        if self.observation_statistics.is_missing:
            self.observation_statistics.learn_from(
                {key: tensor.cpu().numpy() for key, tensor in of_actor.items()}
                for observations, _, _ in self.data_loader
                for of_actor in observations
            )

    @override(EpochTrainer)
    def _update(self) -> None:
        self._learn_from(*self._minibatches.next(self.update))
        self._minibatches.n_done += 1
        is_last = self.update + 1 == len(self.data_loader)
        if self._every_k and self.total_iterations % self._every_k == 0 and not is_last:
            self._log_and_evaluate(self.epoch + 1)
            increment_log_step()

    @override(EpochTrainer)
    def _write_epoch_stats(self) -> None:
        self._minibatches.end_epoch()
        self._log_and_evaluate(self.epoch)

    def _learn_from(self, observations: Any, actions: Any, actor_ids: Any) -> None:
        self.policy.train()
        networks = {actor: self.policy.network_for(actor) for actor in actor_ids}
        loss = self.loss.calculate_loss(self.policy, observations, actions, actor_ids, self.imitation_events)
        self.optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
        norms = {actor: compute_gradient_norm(network.parameters()) for actor, network in networks.items()}
        value = loss.item()
        if not math.isfinite(sum(norms.values(), value)):
            raise NonFiniteError(
                f"the loss is {value}, the gradient norms are {list(norms.values())}; the step was not applied. "
                "Check the data for extreme values, or lower the learning rate."
            )
        self.optimizer.step()
        for actor, network in networks.items():
            parameters = [p.detach() for p in network.parameters()]
            self.imitation_events.policy_l2_norm(actor[0], actor[1], float(nn.utils.get_total_norm(parameters)))
            self.imitation_events.policy_grad_norm(actor[0], actor[1], norms[actor])

    def _log_and_evaluate(self, epoch: int) -> None:
        self.before_statistics(f"Epoch {epoch}: Iteration {self.total_iterations}")
        self.train_stats.reduce()
        if self.evaluator is not None:
            self.evaluate()

    # -- state -----------------------------------------------------------------------------------------

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        return {"optimizer": _OptimizerState(self.optimizer), "minibatches": self._minibatches}

    @override(EpochTrainer)
    def _check_fits(self, state: Mapping[str, Any], origin: str | Path) -> None:
        parts: Any = state["parts"]
        found: dict[str, Any] = {"algorithm.optimizer": _OptimizerState(self.optimizer).type_name}
        saved = {"algorithm.optimizer": parts["optimizer"]["type"]}
        if state["update"] > 0:  # the rest of the epoch has to be the same
            keys = "algorithm.batch_size, runner.dataset"
            saved[keys], found[keys] = parts["minibatches"]["sizes"], self._minibatches.sizes
        for keys, value in saved.items():
            if value != found[keys]:
                raise ConfigError(
                    f"{keys}: the run in `{origin}` has {value}, found {found[keys]}. Configure the same, or start a "
                    "new run with the weights alone."
                )


class _OptimizerState:
    """State of an optimizer; restored with the configured learning rate and the like."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.type_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"type": self.type_name, "state": self._optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        configured = [{**group} for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(dict(state_dict["state"]))
        for group, wanted in zip(self._optimizer.param_groups, configured, strict=True):
            group.update({name: value for name, value in wanted.items() if name != "params"})


class _Minibatches:
    """Minibatches epoch after epoch, in an order that is the same after an interruption.

    :param data_loader: Draws the order, with a `generator` of its own if it is to be continued.
    """

    def __init__(self, data_loader: Any) -> None:
        self._data_loader = data_loader
        self._generator: torch.Generator | None = getattr(data_loader, "generator", None)
        # State of the generator before it drew the order of the current epoch.
        self._order_state: torch.Tensor | None = None
        self._iterator: Iterator[Any] | None = None
        self.n_done = 0
        """Number of minibatches of all epochs that were learned from."""

    @property
    def sizes(self) -> dict[str, int | None]:
        sizes = {name: getattr(self._data_loader, name, None) for name in ("n_steps", "batch_size")}
        return {"n_minibatches": len(self._data_loader), **sizes}

    def next(self, n_done: int) -> Any:
        """Return the next minibatch; the first one draws the order of the epoch, the same again after an interruption.

        :param n_done: Number of minibatches of the epoch that were learned from.
        """
        if self._iterator is None:
            if self._order_state is not None and self._generator is not None:
                self._generator.set_state(self._order_state)
            elif self._generator is not None:
                self._order_state = self._generator.get_state()
            self._iterator = iter(self._data_loader)
            for _ in range(n_done):
                next(self._iterator)
        return next(self._iterator)

    def end_epoch(self) -> None:
        self._order_state = self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        generator = None if self._generator is None else self._generator.get_state()
        orders = {"generator": generator, "order_state": self._order_state}
        return {"sizes": self.sizes, "n_done": self.n_done, **orders}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> list[str]:
        self.n_done, self._order_state, self._iterator = state_dict["n_done"], state_dict["order_state"], None
        if self._generator is None or state_dict["generator"] is None:
            return ["the order of the data starts anew: the data loader has no generator of its own"]
        self._generator.set_state(state_dict["generator"])
        return []
