"""Networks from configurations: the base of architecture templates, single networks, and the check of their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces

from maze.core.errors import ConfigError, did_you_mean, unknown_key_error
from maze.core.utils.factory import Factory, plain_container
from maze.perception.blocks.base import PerceptionBlock, without_side_effects
from maze.perception.blocks.recurrent.recurrent_cell import RecurrentCellBlock

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.structured_env import StepKeyType
    from maze.perception.blocks.inference import InferenceBlock


WHERE = "model.model_builder"
ENCODED, SCALED, NORMALIZED = "_SetAttentionBlock_items", "_ScalingBlock", "_RunningNormalizationBlock"
"""Suffixes of the name of an observation: encoded items of a set, multiplied by its factor, normalized with running
statistics."""
PRESET_KEYS = ("hidden", "recurrence")
"""Entries of the modality configuration that are stages of the template, not modalities."""


class BaseModelBuilder(ABC):
    """Build the perception part of a network from an observation space.

    :param modality_config: Block of each modality, and of the stages `hidden` and `recurrence`: a mapping with
        `block_type` and `block_params`, or only the block type. Empty or `None`: no such stage.
    :param observation_modality_mapping: Modality of each observation.
    :param shared_embedding_keys: Tensors that the critic takes from the policy instead of computing them: a list for
        all sub-steps, or one for each step key. `None`: policy and critic share nothing.
    :param joint_observations: Further inputs of the block of an observation, such as the mask of a set
        (`items: [items_mask]`) or the adjacency of a graph. They need no modality.
    :param observation_scales: Factors of observations: one for all entries, or a list with one for each entry of the
        last dimension.
    :param normalized_observations: Observations that are normalized with running statistics, see
        :class:`~maze.perception.blocks.general.input_conversion.RunningNormalizationBlock`.
    """

    def __init__(
        self,
        modality_config: dict[str, str | dict[str, Any]],
        observation_modality_mapping: dict[str, str],
        shared_embedding_keys: list[str] | dict[str, list[str]] | None,
        joint_observations: Mapping[str, Sequence[str]] | None = None,
        observation_scales: Mapping[str, float | Sequence[float]] | None = None,
        normalized_observations: Sequence[str] | None = None,
    ) -> None:
        self.modality_config = _checked_modality_config(modality_config)
        self.observation_modality_mapping: dict[str, str] = _mapping(
            "observation_modality_mapping", observation_modality_mapping
        )
        joint = _mapping("joint_observations", joint_observations)
        self.joint_observations: dict[str, list[str]] = {key: list(others) for key, others in joint.items()}
        self.observation_scales: dict[str, float | list[float]] = _mapping("observation_scales", observation_scales)
        normalized = plain_container(normalized_observations, f"{WHERE}.normalized_observations")
        self.normalized_observations: list[str] = list(normalized or ())
        for observation, modality in self.observation_modality_mapping.items():
            if modality not in self._modalities():
                where = f"{WHERE}.observation_modality_mapping.{observation}: modality"
                raise unknown_key_error(where, modality, self._modalities())
        for name in ("joint_observations", "observation_scales", "normalized_observations"):
            for key in getattr(self, name):
                if key not in self.observation_modality_mapping:
                    where = f"{WHERE}.{name}: observation with a modality"
                    raise unknown_key_error(where, key, self.observation_modality_mapping)
        if both := [key for key in self.normalized_observations if key in self.observation_scales]:
            raise ConfigError(f"{WHERE}: {both} are both in `normalized_observations` and in `observation_scales`.")
        self.shared_embedding_keys: dict[StepKeyType, list[str]] = {}
        self._shared_embedding_keys = plain_container(shared_embedding_keys, f"{WHERE}.shared_embedding_keys")

    def init_shared_embedding_keys(self, step_keys: Iterable[StepKeyType]) -> None:
        """Set `shared_embedding_keys` for each sub-step of an environment.

        :param step_keys: Keys of all sub-steps.
        :raises ConfigError: There are keys for an unknown sub-step.
        """
        step_keys = list(step_keys)
        given = self._shared_embedding_keys
        by_step = given if isinstance(given, Mapping) else dict.fromkeys(step_keys, given)
        if unknown := [key for key in by_step if key not in step_keys]:
            raise unknown_key_error(f"{WHERE}.shared_embedding_keys: sub-step", unknown[0], step_keys)
        self.shared_embedding_keys = {key: list(by_step.get(key) or []) for key in step_keys}

    @classmethod
    def to_recurrent_gym_space(cls, observation_space: spaces.Dict, rnn_steps: int) -> spaces.Dict:
        """Return the space of observations whose last `rnn_steps` are stacked in a new first dimension.

        >>> space = spaces.Dict({"observation": spaces.Box(-1.0, 1.0, (4,))})
        >>> BaseModelBuilder.to_recurrent_gym_space(space, 5)["observation"].shape
        (5, 4)

        :param observation_space: The observations of a single time step.
        :param rnn_steps: Number of time steps; 0: the space as it is.
        :raises ConfigError: An observation cannot be stacked.
        """
        if rnn_steps == 0:
            return observation_space
        return spaces.Dict({key: _stacked(space, rnn_steps, key) for key, space in observation_space.spaces.items()})

    @abstractmethod
    def from_observation_space(self, observation_space: spaces.Dict) -> InferenceBlock:
        """Build the perception network of one sub-step, with new weights.

        :param observation_space: Observations of the sub-step.
        :return: A block from the observations to one latent tensor.
        """

    def check_observations(self, observation_spaces: Iterable[spaces.Dict]) -> None:
        """Check that every observation has a modality, and that every mapped observation exists in a sub-step.

        :raises ConfigError: Names the observation.
        """
        found = list(dict.fromkeys(key for space in observation_spaces for key in space.spaces))
        joined = {other for others in self.joint_observations.values() for other in others}
        for key in found:
            if key not in joined:
                self.modality_of(key)
        in_use = {self._mapped_key(key) for key in found}
        for key in self.observation_modality_mapping:
            if key not in in_use:
                raise unknown_key_error(f"{WHERE}.observation_modality_mapping: observation", key, found)

    def modality_of(self, observation_key: str) -> str:
        """Return the modality of an observation, or of the one that it was pre-processed from.

        Pre-processors append their tags: `image-rgb2gray-resize_img` is derived from `image`.

        :raises ConfigError: It has no modality.
        """
        mapped_key = self._mapped_key(observation_key)
        if mapped_key is None:
            known = list(self.observation_modality_mapping)
            raise ConfigError(
                f"{WHERE}.observation_modality_mapping: observation `{observation_key}` has no modality."
                f"{did_you_mean(observation_key, known)} Mapped are: {', '.join(known) or 'none'}. Add "
                f"`{observation_key}: <modality>` with one of the modalities {', '.join(self._modalities())}."
            )
        return self.observation_modality_mapping[mapped_key]

    def _mapped_key(self, observation_key: str) -> str | None:
        key = observation_key
        while key not in self.observation_modality_mapping:
            key, separator, _ = key.rpartition("-")
            if not separator:
                return None
        return key

    def build_block(
        self, modality: str, in_keys: str | list[str], out_key: str, in_shapes: Sequence[Any]
    ) -> PerceptionBlock:
        """Build the block of a modality or stage.

        :param modality: Key of the modality configuration, for which :meth:`has_stage` holds.
        :param in_keys: Keys of the input tensors.
        :param out_key: Key of the output tensor.
        :param in_shapes: Shapes of the input tensors, without batch dimensions.
        :raises ConfigError: The block does not take its arguments or inputs; names the key.
        """
        where = f"{WHERE}.modality_config.{modality}"
        block_type, block_params = self.modality_config[modality].values()
        try:
            return Factory(PerceptionBlock).instantiate(  # type: ignore[type-abstract]  # a concrete one is named
                {"_target_": block_type, **block_params},
                config_path=where,
                in_keys=in_keys,
                out_keys=out_key,
                in_shapes=in_shapes,
            )
        except ConfigError as error:
            raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from error
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:  # refused by layers of torch
            raise ConfigError(f"{where}: {self.block_name(modality)}: {error}") from error

    def block_name(self, modality: str) -> str:
        """Return the class name of the block of a modality or stage.

        :param modality: Key of the modality configuration.
        :raises KeyError: The modality configuration has no such entry.
        """
        block_type = self.modality_config[modality]["block_type"]
        return block_type.rpartition(".")[2] if isinstance(block_type, str) else str(block_type.__name__)

    @property
    def stacks_time_steps(self) -> bool:
        """Whether the first dimension of observations holds the time steps that the recurrence processes."""
        if not self.has_stage("recurrence"):
            return False
        where = f"{WHERE}.modality_config.recurrence.block_type"
        factory: Factory[Any] = Factory(PerceptionBlock)
        block_type = factory.type_from_name(self.modality_config["recurrence"]["block_type"], config_path=where)
        return not issubclass(block_type, RecurrentCellBlock)

    def has_stage(self, stage: str) -> bool:
        """Return whether the modality configuration has a block for a stage.

        :param stage: `hidden` or `recurrence`.
        """
        return stage in self.modality_config

    def _modalities(self) -> list[str]:
        return [modality for modality in self.modality_config if modality not in PRESET_KEYS]


def free_name(name: str, taken: Container[str]) -> str:
    """Append underscores to a name until it is unique.

    :param name: Name of a tensor.
    :param taken: Names of other tensors.
    """
    while name in taken:
        name += "_"
    return name


def _mapping(name: str, given: Any) -> dict[str, Any]:
    """Return an argument as a dictionary; `None` is an empty one."""
    given = plain_container(given, f"{WHERE}.{name}")
    if not isinstance(given or {}, Mapping):
        raise ConfigError(f"{WHERE}.{name}: expected a mapping, found {given!r}.")
    return dict(given or {})


def _checked_modality_config(modality_config: Any) -> dict[str, dict[str, Any]]:
    """Return `block_type` and `block_params` by modality, without empty entries."""
    checked: dict[str, dict[str, Any]] = {}
    for modality, entry in _mapping("modality_config", modality_config).items():
        if not entry:
            continue
        block = dict(entry) if isinstance(entry, Mapping) else {"block_type": entry}
        params = block.get("block_params") or {}
        is_known = {"block_type"} <= {*block} <= {"block_type", "block_params"}
        if not is_known or not isinstance(params, Mapping):
            where = f"{WHERE}.modality_config.{modality}"
            raise ConfigError(f"{where}: expected `block_type` and a mapping `block_params`, found {block}.")
        checked[modality] = {"block_type": block["block_type"], "block_params": dict(params)}
    return checked


def _stacked(space: spaces.Space[Any], n_steps: int, key: str) -> spaces.Space[Any]:
    if isinstance(space, spaces.Box):
        low, high = (np.stack([bound] * n_steps) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype)
    if isinstance(space, spaces.Discrete):
        last = int(space.start) + int(space.n) - 1
        return spaces.Box(int(space.start), last, (n_steps,), np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(np.stack([space.nvec] * n_steps), start=np.stack([space.start] * n_steps))
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary([n_steps, *space.shape])
    raise ConfigError(f"to_recurrent_gym_space: observation `{key}` is {space}, which cannot be stacked.")


T = TypeVar("T")


def networks_by_key(networks: Any, step_keys: Iterable[Any], where: str) -> dict[Any, tuple[Any, str]]:
    """Return network configurations (or networks) by step key, each with its place in the configuration.

    :param networks: A mapping from step keys, or a list in their order.
    :param step_keys: Step keys of all sub-steps.
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
    if isinstance(networks, torch.nn.Module) or (isinstance(networks, Mapping) and "_target_" in networks):
        return 0, networks
    items = list(networks.items() if isinstance(networks, Mapping) else enumerate(networks))
    if len(items) != 1:
        raise ConfigError(f"{where}: a shared critic has one network, found {len(items)}.")
    return items[0]


def build(base_type: type[T], config: Any, where: str, **arguments: Any) -> T:
    """Instantiate a configuration, or return a given object.

    :param where: Place in the configuration, for messages.
    :param arguments: Defaults of arguments; those of the configuration have priority.
    :param base_type: Type of the result.
    :param config: A mapping with `_target_`, or the object.
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

    :param policy: The policy.
    :param observation_spaces_dict: Observation spaces by step key.
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
