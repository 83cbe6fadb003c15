"""Running normalization of observations: what the networks of a model know of them, and when they learn more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.errors import ConfigError
from maze.core.utils.stats_utils import CumulativeMovingMeanStd
from maze.perception.blocks.general.input_conversion import RunningNormalizationBlock

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel
    from maze.core.rollout.rollout_columns import RolloutColumns


class ObservationStatistics:
    """The statistics in all :class:`~maze.perception.blocks.general.input_conversion.RunningNormalizationBlock`
    of a model, which are the same for all networks, sub-steps and environments that see an observation of that name.

    Trainers call :meth:`learn` once for each rollout, when they have learned from it: so it was collected, valued and
    learned from with the same statistics, those of all rollouts before. Every observation that was acted on counts
    once, and wherever environments are, they are joined in the order that the rollout has them.

    :param model: The model that is trained.
    """

    def __init__(self, model: TorchModel | None) -> None:
        parts = (model.policy, model.critic) if isinstance(model, TorchActorCritic) else (model,)
        modules = [
            module
            for part in parts
            for network in getattr(part, "networks", {}).values()
            for module in network.modules()
            if isinstance(module, RunningNormalizationBlock)
        ]
        self._blocks: dict[str, list[RunningNormalizationBlock]] = {}
        for block in dict.fromkeys(modules):  # those that networks share once
            self._blocks.setdefault(block.in_keys[0], []).append(block)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    @property
    def is_missing(self) -> bool:
        """Whether there are blocks that have not seen anything yet."""
        return any(not bool(block.count) for blocks in self._blocks.values() for block in blocks)

    @property
    def names(self) -> list[str]:
        """Names of the observations that are normalized."""
        return list(self._blocks)

    def acting_buffers(self) -> list[torch.Tensor]:
        """What networks normalize by: of each block what is subtracted and what is divided by, `[*shape]` each."""
        return [buffer for blocks in self._blocks.values() for each in blocks for buffer in (each.offset, each.scale)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context in which the model's weights are replaced, and its statistics stay what they are."""
        buffers = [buffer for blocks in self._blocks.values() for each in blocks for buffer in each.buffers()]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def learn(self, columns: RolloutColumns) -> None:
        """Takes the observations of a rollout into account.

        :param columns: The rollout.
        """
        if self._blocks:
            self.learn_from(_observations(columns))

    def learn_from(self, observations: Iterable[Mapping[str, np.ndarray]]) -> None:
        """Takes observations into account.

        :param observations: Arrays `[n, *shape]` by name, each observation in one of them.
        :raises ConfigError: A network normalizes something that is no observation.
        """
        if not self._blocks:
            return
        parts = list(observations)
        for key, blocks in self._blocks.items():
            found = CumulativeMovingMeanStd(epsilon=0.0)
            for part in parts:
                if key in part and len(part[key]):
                    found.update(part[key])
            if not found.count:
                if any(part for part in parts) and not any(key in part for part in parts):
                    raise ConfigError(
                        f"model: {blocks[0].block_name} normalizes `{key}`, but there are the observations "
                        f"{sorted({name for part in parts for name in part})}. A RunningNormalizationBlock takes an "
                        "observation as the environment shows it."
                    )
                continue
            for block in blocks:
                block.learn(found)

    def learn_merged(self, found: Mapping[str, CumulativeMovingMeanStd]) -> None:
        """Takes observations into account of which only the statistics are known.

        :param found: The statistics by name.
        :raises ConfigError: There are none.
        """
        if self._blocks and not found:
            raise ConfigError(
                f"model.normalize_observations: expected statistics of the observations {self.names}, and whoever "
                "played the episodes has told none."
            )
        for key, blocks in self._blocks.items():
            for block in blocks if key in found else []:
                block.learn(found[key])

    def require_learned(self, learner: str) -> None:
        """For algorithms that learn no statistics.

        :param learner: Their name.
        :raises ConfigError: There are none yet.
        """
        if self.is_missing:
            raise ConfigError(
                f"model.normalize_observations: {learner} learns no statistics of observations, and the networks have "
                "none yet. Train with A2C, PPO, IMPALA, SAC, DQN, ES or BC, start from such a model (input_dir=...), "
                "or use wrappers=vector_obs, whose statistics are estimated before the training."
            )


def _observations(columns: RolloutColumns) -> Iterable[Mapping[str, np.ndarray]]:
    """What was acted on, by sub-step; not what comes after the last step, with which the next rollout begins."""
    for substep in columns.substeps.values():
        entries: Any = (slice(None, substep.n_rows),) if substep.valid is None else substep.entries()
        yield {
            key: array[entries].reshape(-1, *array.shape[2:]) if substep.valid is None else array[entries]
            for key, array in substep.observations.items()
        }
