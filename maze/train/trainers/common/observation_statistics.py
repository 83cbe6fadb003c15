"""Running normalization of observations: statistics in the networks of a model, and their updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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
    from maze.core.env.structured_env import ActorID, StepKeyType
    from maze.core.rollout.rollout_columns import RolloutColumns
    from maze.perception.program.network_program import Rows


Moments = dict[str, tuple[int, np.ndarray, np.ndarray]]
"""Number, mean and variance (float64 `[*shape]`) of an episode's observations by name."""


class ObservedRows:
    """Sums over the observations of episodes, each of which is a row.

    Of each observation the first one of its episode is subtracted, so that entries that do not vary have a variance of
    exactly 0. A row's sums do not depend on the other rows.

    :param names: Names of the observations.
    :param observation_spaces_dict: Observation spaces by sub-step.
    :param n_rows: Number of episodes side by side.
    """

    def __init__(self, names: Collection[str], observation_spaces_dict: Mapping[StepKeyType, Any], n_rows: int) -> None:
        # Of each observation: its number, the first one, and sums of differences from it and of their squares.
        self._sums = {
            (step_key, name): [np.zeros(n_rows, np.int64), *(np.zeros((n_rows, *space[name].shape)) for _ in range(3))]
            for step_key, space in observation_spaces_dict.items()
            for name in space
            if name in names
        }

    def __bool__(self) -> bool:
        return bool(self._sums)

    def begin(self, row: int) -> None:
        """Begin an episode."""
        for arrays in self._sums.values():
            for array in arrays:
                array[row] = 0

    def add(self, actor: ActorID, observation: Mapping[str, np.ndarray], rows: Rows) -> None:
        """Take observations into account that are acted on.

        :param actor: The acting actor.
        :param observation: Arrays `[len(rows), *shape]`.
        :param rows: The episodes.
        """
        for (step_key, name), (count, first, total, squares) in self._sums.items():
            if step_key != actor[0]:
                continue
            values, begins = observation[name], count[rows] == 0
            if begins.any():
                first[np.arange(len(count))[rows][begins]] = values[begins]
            difference = values - first[rows]
            total[rows] += difference
            difference *= difference
            squares[rows] += difference
            count[rows] += 1

    def move(self, source: int, target: int) -> None:
        """Move an episode to another row."""
        for arrays in self._sums.values():
            for array in arrays:
                array[target] = array[source]

    def of(self, row: int) -> Moments | None:
        """Return statistics of an episode; `None` if it has no observations."""
        parts: list[Moments] = []
        for (_, name), (counts, first, total, squares) in self._sums.items():
            if count := int(counts[row]):
                shift = total[row] / count
                variance = np.maximum(squares[row] / count - shift * shift, 0.0)
                parts.append({name: (count, first[row] + shift, variance)})
        return {
            name: (int(found.count), np.asarray(found.mean), np.asarray(found.var))
            for name, found in merged(parts).items()
        } or None


def merged(observed: Iterable[Moments]) -> dict[str, CumulativeMovingMeanStd]:
    """Return statistics of several episodes by name, merged in their order.

    :param observed: Statistics of each.
    """
    found: dict[str, CumulativeMovingMeanStd] = {}
    for moments in observed:
        for name, of_episode in moments.items():
            found.setdefault(name, CumulativeMovingMeanStd(epsilon=0.0)).merge(*of_episode)
    return found


class ObservationStatistics:
    """The statistics in all :class:`~maze.perception.blocks.general.input_conversion.RunningNormalizationBlock`
    of a model, which are the same for all networks, sub-steps and environments with an observation of that name.

    Trainers call :meth:`learn` once for each rollout, after they have learned from it. A rollout is collected and
    learned from with the same statistics, those of all rollouts before. Every observation that was acted on counts
    once, in the order of the rollout for every placement of the environments.

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
        self.names = list(self._blocks)
        """Names of the observations that are normalized."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    @property
    def is_missing(self) -> bool:
        """Whether there are blocks without any observations so far."""
        return any(not bool(block.count) for blocks in self._blocks.values() for block in blocks)

    def acting_buffers(self) -> list[torch.Tensor]:
        """Return the offset and scale of each block, `[*shape]` each."""
        return [buffer for blocks in self._blocks.values() for each in blocks for buffer in (each.offset, each.scale)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context in which the model's weights are replaced, but not its statistics."""
        buffers = [buffer for blocks in self._blocks.values() for each in blocks for buffer in each.buffers()]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def learn(self, columns: RolloutColumns) -> None:
        """Take the observations of a rollout into account.

        :param columns: The rollout.
        """
        parts = []
        for substep in columns.substeps.values() if self._blocks else ():
            if substep.valid is None:  # all but those after the last step
                n, seen = substep.n_rows, substep.observations.items()
                parts.append({key: array[:n].reshape(n * columns.n_envs, *array.shape[2:]) for key, array in seen})
            else:
                parts.append({key: array[substep.entries()] for key, array in substep.observations.items()})
        self.learn_from(parts)

    def learn_from(self, observations: Iterable[Mapping[str, np.ndarray]]) -> None:
        """Take observations into account.

        :param observations: Arrays `[n, *shape]` by name, each observation in one of them.
        :raises ConfigError: A network normalizes something that is not an observation.
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
        """Take observations into account of which only the statistics are known.

        :param found: The statistics by name.
        :raises ConfigError: There are none.
        """
        if self._blocks and not found:
            raise ConfigError(
                f"model.normalize_observations: expected statistics of the observations {self.names}, but the workers "
                "reported none."
            )
        for key, blocks in self._blocks.items():
            for block in blocks if key in found else []:
                block.learn(found[key])

    def require_learned(self, learner: str) -> None:
        """Refuse networks without statistics, for algorithms that learn none.

        :param learner: Their name.
        :raises ConfigError: There are none yet.
        """
        if self.is_missing:
            raise ConfigError(
                f"model.normalize_observations: {learner} learns no statistics of observations, and the networks have "
                "none yet. Train with A2C, PPO, IMPALA, SAC, DQN, ES or BC, start from such a model (input_dir=...), "
                "or use wrappers=vector_obs, whose statistics are estimated before the run."
            )
