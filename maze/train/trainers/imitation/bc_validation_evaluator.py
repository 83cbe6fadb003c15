"""Evaluation on data that was not trained on."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from maze.core.annotations import override
from maze.core.errors import NonFiniteError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.imitation.imitation_events import ImitationEvents
from maze.train.utils.train_utils import statistics_from_plain, statistics_to_plain

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.imitation.bc_loss import BCLoss


class BCValidationEvaluator(Evaluator):
    """Calculate the loss on validation data; the smaller it is, the better the model.

    An evaluated policy is left in evaluation mode.

    :param loss: The loss; its entropy bonus is for training alone and left out here.
    :param model_selection: Receives the negative mean loss; `None`: there is none.
    :param data_loader: Minibatches of the validation data, at least one.
    :param logging_prefix: Prefix of the statistics; `None`: they are not logged.
    """

    def __init__(
        self,
        loss: BCLoss,
        model_selection: ModelSelectionBase | None,
        data_loader: Iterable[Any],
        logging_prefix: str | None = "eval",
    ) -> None:
        self.loss = copy.copy(loss)
        self.loss.entropy_coef = 0.0
        self.model_selection = model_selection
        self.data_loader = data_loader
        self.eval_stats = LogStatsAggregator(LogStatsLevel.EPOCH)
        if logging_prefix is not None:
            self.eval_stats.register_consumer(get_stats_logger(logging_prefix))
        self.eval_events = self.eval_stats.create_event_topic(ImitationEvents)

    @override(Evaluator)
    def evaluate(self, policy: TorchPolicy) -> None:
        policy.eval()
        total, n_steps = 0.0, 0
        with torch.no_grad():
            for observations, actions, actor_ids in self.data_loader:
                loss = self.loss.calculate_loss(policy, observations, actions, actor_ids, self.eval_events)
                # the last minibatch may be smaller than the others
                n_in_batch = max(len(next(iter(action.values()))) for action in actions)
                total += float(loss) * n_in_batch
                n_steps += n_in_batch
        self.eval_stats.reduce()
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the loss on the validation data is {total / n_steps}. Check the data for extreme values, or lower "
                "the learning rate (algorithm.optimizer.lr)."
            )
        if self.model_selection is not None:
            self.model_selection.update(-total / n_steps)

    @override(Evaluator)
    def state_dict(self) -> dict[str, Any]:
        return {"statistics": statistics_to_plain(self.eval_stats)}

    @override(Evaluator)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> list[str]:
        statistics_from_plain(self.eval_stats, state_dict.get("statistics", ()))
        return []
