"""Networks from configurations, and the check of what they compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.errors import ConfigError
from maze.core.utils.factory import Factory
from maze.perception.blocks.base import PerceptionBlock, without_side_effects

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


T = TypeVar("T")


def networks_by_key(networks: Any, step_keys: Iterable[Any], where: str) -> dict[Any, tuple[Any, str]]:
    """Return network configurations (or networks) by step key, each with its place in the configuration.

    :param networks: A mapping from step keys, or a list in their order.
    :param where: Place of all of them, for messages.
    :raises ConfigError: There is not one network for each sub-step.
    """
    step_keys = list(step_keys)
    by_key: Any = networks
    if isinstance(networks, Sequence) and len(networks) == len(step_keys):
        by_key = dict(zip(step_keys, networks, strict=True))
    if not isinstance(by_key, Mapping) or set(by_key) != set(step_keys):
        raise ConfigError(
            f"{where}: expected one network for each of the sub-steps {step_keys}, as a list or as a mapping from "
            f"them, found {networks!r}."
        )
    places = {key: f"{where}[{index if isinstance(key, int) else key}]" for index, key in enumerate(step_keys)}
    return {key: (by_key[key], places[key]) for key in step_keys}


def only_network(networks: Any, where: str) -> tuple[Any, Any]:
    """Return key and configuration of the one network that a shared critic has.

    :param networks: The network or its configuration, also as the only item of a list or mapping.
    :param where: Place in the configuration, for messages.
    :raises ConfigError: There are several, or none.
    """
    if isinstance(networks, nn.Module) or (isinstance(networks, Mapping) and "_target_" in networks):
        return 0, networks
    items = list(networks.items() if isinstance(networks, Mapping) else enumerate(networks))
    if len(items) != 1:
        raise ConfigError(f"{where}: a shared critic has one network, found {len(items)}.")
    return items[0]


def build(base_type: type[T], config: Any, where: str, **arguments: Any) -> T:
    """Instantiate a configuration, or return a given object.

    :param where: Place in the configuration, for messages.
    :param arguments: Arguments that the configuration need not state; what it states has priority.
    :raises ConfigError: There is nothing to build, or it does not take its arguments; the message names the place.
    """
    if config is None:
        raise ConfigError(f"{where}: expected a mapping with `_target_`, or an object, found nothing.")
    try:
        return Factory(base_type).instantiate(config, config_path=where, **arguments)
    except ConfigError as error:
        if str(error).startswith("model."):  # a more precise place is named already
            raise
        raise ConfigError(f"{where}: {error}") from error


_BATCH_SIZE = 2  # so that a network that drops axes of size one does not drop the batch


def embedding_spaces(
    policy: TorchPolicy, observation_spaces_dict: Mapping[Any, spaces.Dict]
) -> dict[Any, dict[str, spaces.Space[Any]]]:
    """Return spaces of the outputs that are not action heads, by step key.

    :raises ConfigError: A network cannot process the observations, or does not return a dictionary.
    """
    heads = policy.distribution_mapper.action_heads
    found: dict[Any, dict[str, spaces.Space[Any]]] = {}
    for step_key, observation_space in observation_spaces_dict.items():
        keys = [key for key in policy.networks if step_key in (key, key[0] if isinstance(key, tuple) else None)]
        network = policy.networks[keys[0]]
        if isinstance(network, PerceptionBlock):
            shapes = {key: tuple(shape) for key, shape in zip(network.out_keys, network.out_shapes(), strict=True)}
        else:
            in_shapes = {key: tuple(space.shape or ()) for key, space in observation_space.spaces.items()}
            device = next(network.parameters(), torch.empty(0)).device
            inputs = {key: torch.ones(_BATCH_SIZE, *shape, device=device) for key, shape in in_shapes.items()}
            try:
                with without_side_effects(network):
                    shapes = {key: tuple(tensor.shape[1:]) for key, tensor in network(inputs).items()}
            except Exception as error:
                raise ConfigError(
                    f"model.policy.networks[{step_key!r}]: {type(network).__name__} cannot process observations of the "
                    f"shapes {in_shapes} in a batch of {_BATCH_SIZE}, or returns no dictionary of tensors: "
                    f"{type(error).__name__}: {error}"
                ) from error
        found[step_key] = {
            key: spaces.Box(-np.inf, np.inf, shape, np.float32) for key, shape in shapes.items() if key not in heads
        }
    return found
