"""Data of behavioural cloning: loading a data set and splitting off validation data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch.utils.data import Dataset, random_split

from maze.core.env.action_conversion import ActionBounds
from maze.core.env.space_values import rows_outside
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.utils.factory import ConfigType, Factory, plain_container
from maze.train.trainers.imitation.bc_algorithm_config import BCAlgorithmConfig

Batch = tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]], list[ActorID]]
"""Observations, actions and actors of the sub-steps."""


class _ActorColumns(NamedTuple):
    observations: dict[str, torch.Tensor]
    actions: dict[str, torch.Tensor]
    steps: torch.Tensor
    """The step that each row belongs to, ascending."""
    is_in_every_step: bool
    """The common case: the actor acts once in each step, so that rows are steps."""


class StepBatches:
    """Iterate over the steps of a data set in minibatches; a pass has all of them.

    The sub-steps of a minibatch are grouped by actor, so that steps need not all have the same actors.

    :param dataset: Steps as observations, actions and actors of their sub-steps.
    :param batch_size: Number of steps in a minibatch.
    :param shuffle: Whether each pass has an order of its own.
    :param device: Device of the tensors.
    :param seed: Seed of the order.
    :param action_spaces_dict: Continuous actions are clipped to these, as they were on their way to the environment;
        `None`: they stay what they are.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        device: str = "cpu",
        seed: int | None = None,
        *,
        action_spaces_dict: Mapping[StepKeyType, spaces.Dict] | None = None,
    ) -> None:
        self.n_steps = len(dataset)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = torch.Generator()
        if seed is not None:
            self.generator.manual_seed(seed)
        bounds = {step_key: ActionBounds(space) for step_key, space in (action_spaces_dict or {}).items()}
        self._device = device
        self._columns = _stacked(dataset, device, bounds)

    def __len__(self) -> int:
        return math.ceil(self.n_steps / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(self.n_steps, generator=self.generator) if self.shuffle else torch.arange(self.n_steps)
        for steps in torch.split(order, self.batch_size):
            yield self._batch(steps)

    def _batch(self, steps: torch.Tensor) -> Batch:
        observations, actions, actors = [], [], []
        for actor, columns in self._columns.items():
            rows = self._rows(columns, steps).to(self._device)
            if len(rows) == 0:
                continue
            observations.append({key: column.index_select(0, rows) for key, column in columns.observations.items()})
            actions.append({key: column.index_select(0, rows) for key, column in columns.actions.items()})
            actors.append(actor)
        return observations, actions, actors

    def _rows(self, columns: _ActorColumns, steps: torch.Tensor) -> torch.Tensor:
        if columns.is_in_every_step:
            return steps
        wanted = torch.zeros(self.n_steps, dtype=torch.bool)
        wanted[steps] = True
        return wanted[columns.steps].nonzero().squeeze(-1)


def _stacked(dataset: Any, device: str, bounds: Mapping[StepKeyType, ActionBounds]) -> dict[ActorID, _ActorColumns]:
    gathered: dict[ActorID, tuple[list[Any], list[Any], list[int]]] = {}
    for step in range(len(dataset)):
        for observation, action, actor in zip(*dataset[step], strict=True):
            lists = gathered.setdefault(ActorID(*actor), ([], [], []))
            taken = bounds[actor[0]].clip(action) if actor[0] in bounds else action
            for entries, entry in zip(lists, (observation, taken, step), strict=True):
                entries.append(entry)
    every_step = list(range(len(dataset)))
    return {
        actor: _ActorColumns(
            _tensors(observations, device), _tensors(actions, device), torch.tensor(steps), steps == every_step
        )
        for actor, (observations, actions, steps) in gathered.items()
    }


def _tensors(rows: Sequence[Mapping[str, Any]], device: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(np.stack([np.asarray(row[key]) for row in rows])).to(device) for key in rows[0]}


def check_fits(
    dataset: Any,
    observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
    action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
) -> None:
    """Raise a `ConfigError` if a data set is empty, was recorded in another environment, or cannot be learned from.

    :param dataset: Steps as observations, actions and actors of their sub-steps.
    :param observation_spaces_dict: The environment's observation spaces.
    :param action_spaces_dict: Its action spaces.
    """
    if len(dataset) == 0:
        raise ConfigError(
            "runner.dataset: there is no step in the data. Record trajectories with `maze-run ... "
            "runner.record_trajectory=true` and name their directory by runner.dataset.dir_or_file=<path>."
        )
    for step in range(len(dataset)):
        for observation, action, actor in zip(*dataset[step], strict=True):
            for kind, values, spaces_dict in (
                ("observation", observation, observation_spaces_dict),
                ("action", action, action_spaces_dict),
            ):
                space = spaces_dict.get(actor[0])
                if not _fits(values, space):
                    raise ConfigError(
                        f"runner.dataset: {kind} of sub-step {actor[0]!r}, step {step}: expected finite values of "
                        f"{space}, found {values}. Was it recorded in another environment, or with other wrappers?"
                    )


def _fits(values: Any, space: spaces.Dict | None) -> bool:
    """Return whether values are of a space, apart from the bounds of boxes; `None`: there is no such sub-step."""
    if space is None or not isinstance(values, Mapping) or set(values) != set(space):
        return False
    pairs = [(np.asarray(values[key]), part) for key, part in space.items()]
    return all(array.shape == part.shape and not rows_outside(array[np.newaxis], part).any() for array, part in pairs)


logger = logging.getLogger(__name__)

MIN_TRAJECTORIES_TO_SEPARATE = 10
"""From this number of episodes on, training and validation data have no episode in common."""


def load_dataset(config: ConfigType, env_factory: Callable[[], Any] | None) -> Any:
    """Return the data set.

    :param config: The data set or its configuration.
    :param env_factory: Makes an environment that converts states and actions.
    :raises ConfigError: There is none, or it cannot be loaded.
    """
    config = plain_container(config, "runner.dataset")
    if config is None:
        raise ConfigError("runner.dataset: expected the configuration of a data set, found nothing.")
    return Factory(Dataset).instantiate(config, config_path="runner.dataset", conversion_env_factory=env_factory)


def split_dataset(dataset: Any, config: BCAlgorithmConfig, next_seed: Callable[[], int]) -> tuple[Any, Any]:
    """Return the training and validation data: whole episodes where there are enough of them, else single steps.

    Of a handful of episodes, half would show too little of the task to learn it.

    :param dataset: All data.
    :param config: Settings of the split.
    :param next_seed: Gives the seed of the choice.
    """
    n_validation = round(len(dataset) * config.validation_percentage / 100)
    if n_validation == 0:
        return dataset, []
    generator = torch.Generator()
    generator.manual_seed(next_seed())
    lengths = [len(dataset) - n_validation, n_validation]
    n_trajectories = len(getattr(dataset, "trajectory_references", ()))
    is_few = config.validation_split == "auto" and n_trajectories < MIN_TRAJECTORIES_TO_SEPARATE
    if config.validation_split != "steps" and not is_few:
        training, validation = dataset.random_split(lengths, generator=generator)
        return training, validation
    if is_few:
        logger.info(
            "Validation steps come from the episodes that are trained on, as there are only %d; accuracy on new "
            "episodes may be lower (`algorithm.validation_split=episodes` measures it).",
            n_trajectories,
        )
    training, validation = random_split(dataset, lengths, generator)
    return training, validation
