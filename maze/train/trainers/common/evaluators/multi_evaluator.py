"""Several evaluations, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.train.trainers.common.evaluators.evaluator import Evaluator

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class MultiEvaluator(Evaluator):
    """Run several evaluators in the given order.

    :param evaluators: The evaluators, each with the statistics prefix and model selection of its own.
    """

    def __init__(self, evaluators: list[Evaluator]) -> None:
        self.evaluators = evaluators

    @override(Evaluator)
    def evaluate(self, policy: TorchPolicy) -> None:
        for evaluator in self.evaluators:
            evaluator.evaluate(policy)

    @override(Evaluator)
    def state_dict(self) -> dict[str, Any]:
        return {"evaluators": [evaluator.state_dict() for evaluator in self.evaluators]}

    @override(Evaluator)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> list[str]:
        states = state_dict.get("evaluators", [])
        if len(states) != len(self.evaluators):
            return [f"there were {len(states)} evaluators, now there are {len(self.evaluators)}"]
        pairs = zip(self.evaluators, states, strict=True)
        return [problem for evaluator, state in pairs for problem in evaluator.load_state_dict(state)]
