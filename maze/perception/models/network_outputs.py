"""What policy networks return, found out by asking them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.blocks.base import PerceptionBlock

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy

_BATCH_SIZE = 2  # so that a network that drops axes of size one does not drop the batch


def embedding_spaces(
    policy: TorchPolicy, observation_spaces_dict: Mapping[Any, spaces.Dict]
) -> dict[Any, dict[str, spaces.Space[Any]]]:
    """Spaces of the outputs that are not action heads, by step key.

    :raises ConfigError: A network cannot process the observations, or does not return a dictionary.
    """
    heads = policy.distribution_mapper.action_heads
    found: dict[Any, dict[str, spaces.Space[Any]]] = {}
    for step_key, observation_space in observation_spaces_dict.items():
        keys = [key for key in policy.networks if step_key in (key, key[0] if isinstance(key, tuple) else None)]
        shapes = _output_shapes(policy.networks[keys[0]], observation_space, f"model.policy.networks[{step_key!r}]")
        found[step_key] = {
            key: spaces.Box(-np.inf, np.inf, shape, np.float32) for key, shape in shapes.items() if key not in heads
        }
    return found


def _output_shapes(network: nn.Module, observation_space: spaces.Dict, where: str) -> dict[str, tuple[int, ...]]:
    if isinstance(network, PerceptionBlock):
        return {key: tuple(shape) for key, shape in zip(network.out_keys, network.out_shapes(), strict=True)}
    in_shapes = {key: tuple(space.shape or ()) for key, space in observation_space.spaces.items()}
    parameter = next(network.parameters(), torch.empty(0))
    inputs = {key: torch.ones(_BATCH_SIZE, *shape, device=parameter.device) for key, shape in in_shapes.items()}
    in_training = [module for module in network.modules() if module.training]
    for module in in_training:
        module.training = False
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            outputs = network(inputs)
    except Exception as error:
        raise ConfigError(
            f"{where}: {type(network).__name__} cannot process observations of the shapes {in_shapes} in a batch of "
            f"{_BATCH_SIZE}: {type(error).__name__}: {error}"
        ) from error
    finally:
        for module in in_training:
            module.training = True
    if not isinstance(outputs, Mapping):
        raise ConfigError(
            f"{where}: {type(network).__name__} returned {type(outputs).__name__}, expected a dictionary of tensors."
        )
    return {key: tuple(tensor.shape[1:]) for key, tensor in outputs.items()}
