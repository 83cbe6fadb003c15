"""Several evaluations, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze.core.annotations import override
from maze.train.trainers.common.evaluators.evaluator import Evaluator

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class MultiEvaluator(Evaluator):
    """Runs several evaluators in the given order.

    :param evaluators: The evaluators, each with the statistics prefix and model selection of its own.
    """

    def __init__(self, evaluators: list[Evaluator]) -> None:
        self.evaluators = evaluators

    @override(Evaluator)
    def evaluate(self, policy: TorchPolicy) -> None:
        for evaluator in self.evaluators:
            evaluator.evaluate(policy)
