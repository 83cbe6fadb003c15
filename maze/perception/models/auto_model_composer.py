"""Composer of models that are derived from the spaces of an environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.random_policy import candidates_of
from maze.core.annotations import override
from maze.core.env.action_conversion import masked_heads, masks_by_name
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError
from maze.core.utils.factory import TARGET_KEY, ConfigType, plain_container
from maze.perception.models.critics import SharedStateCriticComposer, StepStateCriticComposer
from maze.perception.models.model_composer import BaseModelComposer, check_keys, critic_composer_type
from maze.perception.models.template_model_composer import TemplateModelComposer

CARRIED = "carried"
"""Recurrence whose hidden state is carried from step to step."""
MODEL_FILE = "model.yaml"
"""File of the derived model, which can be edited and used as an option of the group `model`."""

EMBED_FROM = 65
"""Number of categories from which observations get learned embeddings instead of unit vectors."""
_EMBEDDING_DIM = 32
# Largest number of entries of a set whose items are also passed on in their order.
_MOST_PLACES = 128
# Largest number of items with attention, whose cost is quadratic.
_MOST_ATTENDING = 64
# Observations with bounds between these are scaled to the first one, so that small differences have an effect.
_LARGE, _UNBOUNDED = 10.0, 1e6
# Largest vector that scores of items depend on directly; others act through the latent representation.
_MOST_DETAILS = 64
# Smaller images hold codes of their cells, not intensities.
_GRID_SIZE = 16
# Prefix of the paths of networks that flatten and concatenate all observations.
_FLATTEN_CONCAT = "maze.perception.models.built_in.flatten_concat"
_BLOCKS = "maze.perception.blocks."
_SCALED = ("feature", "set", "graph")


class AutoModelComposer(TemplateModelComposer):
    """Build the networks of all sub-steps by a template that is derived from their spaces.

    * Discrete and MultiDiscrete observations become unit vectors, or learned embeddings from 65 values on;
    * images (layout recognised) are scaled and convolved;
    * vectors stay unchanged, and other arrays are flattened; entries bounded by more than 10 are scaled to 10 first;
    * two-dimensional boxes `[n, features]` are sets: attention among their items and pooling; an observation
      `<name>_mask` of shape `[n]` marks the items that exist; a Discrete action with `n` choices chooses one of them,
      by scores from shared layers;
    * an observation `<head>_candidates` `[n, features]` holds the candidates of a Discrete action `<head>` (see
      :func:`~maze.core.agent.random_policy.candidates_of`): the logits are scores only, so that the networks act on
      any number of candidates, in any order;
    * with an observation `<name>_adjacency` of shape `[n, n]` they are graphs;
    * `<head>_mask`, `action_mask` if a sub-step has one action head, and others called `...mask` that have the size of
      exactly one discrete head, mask actions, and are not features.

    The template is written to `model.yaml` by :meth:`save_models`.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper_config: Distributions that differ from the defaults.
    :param policy: A policy composer, or its configuration; `None`: there is no policy.
    :param critic: A critic composer, or its configuration; `None`: there is no critic. The networks of the built-in
        `flatten_concat` critics are replaced by those of the template.
    :param hidden_units: Width of each dense layer after the concatenation; layers of items are half as wide.
    :param non_lin: Activation of dense layers.
    :param recurrence: Whether an LSTM follows. True: over stacked observations, which have the time steps in their
        first dimension; `carried`: over single ones, with a hidden state that is carried from step to step.
    :param shared_embedding: Whether policy and critic share all but their outputs.
    :param action_masks: Observation with the mask of an action head, by head, if the names do not determine it.
    :param attention: Whether the items of sets of up to 64 attend to each other.
    :param normalize_observations: Whether vectors and flattened arrays are normalized with running statistics of the
        observations, instead of scaled by their bounds.
    :param initialization: See :class:`~maze.perception.models.template_model_composer.TemplateModelComposer`.
    :param state_dependent_std: See there.
    :param initial_std: See there.
    """

    def __init__(
        self,
        action_spaces_dict: dict[StepKeyType, spaces.Dict],
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        distribution_mapper_config: ConfigType = None,
        policy: ConfigType = None,
        critic: ConfigType = None,
        hidden_units: Sequence[int] = (64, 64),
        non_lin: Any = "torch.nn.Tanh",
        recurrence: bool | str = False,
        shared_embedding: bool = False,
        action_masks: Mapping[str, str] | None = None,
        attention: bool = True,
        normalize_observations: bool = False,
        initialization: str = "normc",
        state_dependent_std: bool = True,
        initial_std: float = 1.0,
    ) -> None:
        if recurrence not in (True, False, CARRIED):
            raise ConfigError(f"model.recurrence: expected true, false or `{CARRIED}`, found {recurrence!r}.")
        if not hidden_units:
            raise ConfigError("model.hidden_units: expected one width for each dense layer, found none.")
        masks = {**recognised_masks(action_spaces_dict, observation_spaces_dict), **(action_masks or {})}
        for step_key, action_space in action_spaces_dict.items():
            shapes = {key: tuple(space.shape or ()) for key, space in observation_spaces_dict[step_key].spaces.items()}
            for mask in masked_heads(shapes, action_space, {mask: head for head, mask in masks.items()})[1]:
                hint = f"model.action_masks={{<action>: {mask}}} makes it a mask"
                print(f"model=auto: sub-step {step_key!r}: `{mask}` fits several actions and masks none; {hint}.")
        dense = {"hidden_units": list(hidden_units), "non_lin": non_lin}
        # there are many items with little information each
        of_items = {**dense, "hidden_units": [(units + 1) // 2 for units in hidden_units]}
        given = (action_spaces_dict, observation_spaces_dict, masks)
        items = {} if recurrence is True else _action_items(*given, of_items)
        builder = _model_builder(*given, dense, of_items, recurrence, attention)
        vectors = [key for key, kind in builder["observation_modality_mapping"].items() if kind.startswith("feature")]
        if normalize_observations and not vectors:
            raise ConfigError(
                "model.normalize_observations: expected a vector among the observations, found "
                f"{builder['observation_modality_mapping']}, which are scaled or encoded. Leave it false."
            )
        if normalize_observations:
            scales = builder["observation_scales"].items()
            builder["observation_scales"] = {key: scale for key, scale in scales if key not in vectors}
            builder["normalized_observations"] = vectors
        self.template: dict[str, Any] = {
            "model_builder": {**builder, "shared_embedding_keys": ["latent"] if shared_embedding else None},
            "action_masks": masks,
            "action_items": items,
            "initialization": initialization,
            "state_dependent_std": state_dependent_std,
            "initial_std": initial_std,
        }
        self._parts = {
            "distribution_mapper_config": plain_container(distribution_mapper_config) or [],
            "policy": plain_container(policy),
            "critic": without_flat_networks(critic),
        }
        super().__init__(action_spaces_dict, observation_spaces_dict, agent_counts_dict, **self._parts, **self.template)

    @classmethod
    @override(TemplateModelComposer)
    def check_model_config(cls, model_config: ConfigType) -> None:
        check_keys(cls, model_config, {"policy": (TARGET_KEY,), "critic": (TARGET_KEY,)})

    @override(BaseModelComposer)
    def save_models(self, save_path: str | Path = ".") -> None:
        """Draw the networks, and write the template as a configuration of the group `model`."""
        from omegaconf import OmegaConf

        super().save_models(save_path)
        target = f"{TemplateModelComposer.__module__}.{TemplateModelComposer.__qualname__}"
        # without composers that were given as objects
        parts = {key: part if isinstance(part, dict | list) else None for key, part in self._parts.items()}
        text = OmegaConf.to_yaml({TARGET_KEY: target, **parts, **self.template}, sort_keys=False)
        header = "# @package model\n\n# Derived from the spaces of the environment by `model=auto`.\n"
        (Path(save_path) / MODEL_FILE).write_text(header + text)


def is_flat(space: spaces.Space[Any]) -> bool:
    """Return whether an observation is a vector or a single number, and no category."""
    return (isinstance(space, spaces.Box) and len(space.shape) <= 1) or isinstance(space, spaces.MultiBinary)


def recognised_masks(
    action_spaces_dict: Mapping[StepKeyType, spaces.Dict], observation_spaces_dict: Mapping[StepKeyType, spaces.Dict]
) -> dict[str, str]:
    """Return the mask of each action head: `<head>_mask`, `action_mask` if there is one head, or any other observation
    whose name ends with `mask` and whose size is the number of choices of one discrete head.
    """
    masks: dict[str, str] = {}
    for step_key, action_space in action_spaces_dict.items():
        shapes = {key: tuple(space.shape or ()) for key, space in observation_spaces_dict[step_key].spaces.items()}
        masks |= masks_by_name(shapes, action_space)
        by_size, _ = masked_heads(shapes, action_space, {mask: head for head, mask in masks.items()})
        masks |= {head: mask for mask, head in by_size.items() if head not in masks}
    return {
        head: mask
        for head, mask in masks.items()
        if all(
            mask in observation_spaces_dict[step_key].spaces
            for step_key, action_space in action_spaces_dict.items()
            if head in action_space.spaces
        )
    }


def _action_items(
    action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
    observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
    masks: Mapping[str, str],
    dense: Mapping[str, Any],
) -> dict[str, Any]:
    """Configure the scores of action heads whose choices are the items of a set in all sub-steps that have them."""
    found: dict[str, Any] = {}
    candidates = candidates_of(action_spaces_dict, observation_spaces_dict)
    for head in {head: None for space in action_spaces_dict.values() for head in space.spaces}:
        steps = [key for key, space in action_spaces_dict.items() if head in space.spaces]
        space = action_spaces_dict[steps[0]].spaces[head]
        shapes = [
            {key: sub.shape for key, sub in observation_spaces_dict[step].spaces.items() if isinstance(sub, spaces.Box)}
            for step in steps
        ]
        items, vectors = (
            [key for key, shape in shapes[0].items() if len(shape) == n and all(key in other for other in shapes)]
            for n in (2, 1)
        )
        items = [key for key in items if all(len(s[key]) == 2 and s[key][0] == getattr(space, "n", 0) for s in shapes)]
        items = [candidates[head]] if candidates.get(head) in items else items
        if not isinstance(space, spaces.Discrete) or len(items) != 1:
            continue
        own_masks = {*masks.values(), f"{items[0]}_mask"}
        vectors = [
            key
            for key in vectors
            if key not in own_masks and all(len(s[key]) == 1 and s[key][0] <= _MOST_DETAILS for s in shapes)
        ]
        found[head] = {"observations": [*items, *vectors], **dense}
        if head in candidates:
            found[head]["by_place"] = False
    return found


def _scale(found: Sequence[spaces.Space[Any]]) -> float | list[float] | None:
    """Return factors that scale large bounds to 10: one for all entries, or one for each of the last dimension."""
    bounds = [
        np.maximum(-space.low.astype(np.float64), space.high)  # the smallest whole number has no opposite in its type
        for space in found
        if isinstance(space, spaces.Box)
    ]
    if not bounds or any(not bound.size for bound in bounds):
        return None
    if len({bound.shape[-1:] for bound in bounds}) > 1:
        bounds = [bound.max(keepdims=True).reshape(1) for bound in bounds]
    largest = np.max([bound.reshape(-1, bound.shape[-1] if bound.ndim else 1).max(axis=0) for bound in bounds], axis=0)
    factors = np.where((largest > _LARGE) & (largest < _UNBOUNDED), _LARGE / np.maximum(largest, 1.0), 1.0)
    if (factors == 1.0).all():
        return None
    rounded = [float(f"{factor:.6g}") for factor in factors]
    return rounded[0] if len(set(rounded)) == 1 else rounded


def _model_builder(
    action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
    observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
    masks: Mapping[str, str],
    dense: Mapping[str, Any],
    of_items: Mapping[str, Any],
    recurrence: bool | str,
    attention: bool,
) -> dict[str, Any]:
    """Derive the configuration of a :class:`~maze.perception.builders.concat.ConcatModelBuilder` from spaces.

    :param masks: Observations that mask action heads, by head; they are not features.
    :param dense: Settings of dense layers.
    :param of_items: Settings of dense layers of items.
    :param recurrence: Whether an LSTM follows, over stacked observations (true) or from step to step (`carried`).
    :param attention: Whether items of sets attend to each other, where they are not too many.
    :raises ConfigError: There is no observation but masks.
    """
    is_stacked = recurrence is True
    by_key: dict[str, list[spaces.Space[Any]]] = {}
    for step in observation_spaces_dict.values():
        for key, space in step.spaces.items():
            by_key.setdefault(key, []).append(space)
    companions = _companions(by_key, observation_spaces_dict, int(is_stacked))
    candidates = {} if is_stacked else candidates_of(action_spaces_dict, observation_spaces_dict)
    for head, key in candidates.items():
        if key in companions and head in masks:
            companions[key].append(masks[head])
    joined = {other for others in companions.values() for other in others}
    blocks: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for key, found in by_key.items():
        if key not in joined and key not in masks.values():
            is_graph = key in companions and companions[key][0].endswith("_adjacency")
            holds_candidates = key in candidates.values()
            blocks[key] = _block(found, is_graph, dense, of_items, int(is_stacked), attention, holds_candidates)
    if not blocks:
        raise ConfigError("model: expected an observation other than masks of actions, found none.")
    # the modality of each observation is called by its kind, and by the observation where settings differ
    names = {
        key: kind if all(other == block for other in blocks.values() if other[0] == kind) else f"{kind}_{key}"
        for key, block in blocks.items()
        for kind in block[:1]
    }
    config: dict[str, Any] = {}
    for key, (_, block_type, params) in blocks.items():
        config[names[key]] = {"block_type": f"{_BLOCKS}{block_type}", "block_params": params}
    config["hidden"] = {"block_type": f"{_BLOCKS}DenseBlock", "block_params": dense}
    config["recurrence"] = {}
    size = int(dense["hidden_units"][-1])
    if recurrence == CARRIED:
        cell = {"hidden_size": size, "cell": "lstm"}
        config["recurrence"] = {"block_type": f"{_BLOCKS}RecurrentCellBlock", "block_params": cell}
    elif is_stacked:
        lstm = {"hidden_size": size, "num_layers": 1, "bidirectional": False, "non_lin": dense["non_lin"]}
        config["recurrence"] = {"block_type": f"{_BLOCKS}LSTMLastStepBlock", "block_params": lstm}
    return {
        TARGET_KEY: "maze.perception.builders.ConcatModelBuilder",
        "observation_modality_mapping": names,
        "joint_observations": companions,
        "observation_scales": {
            key: scale
            for key, (kind, *_) in blocks.items()
            if kind in _SCALED and (scale := _scale(by_key[key])) is not None
        },
        "normalized_observations": [],
        "modality_config": config,
    }


def _block(
    found: Sequence[spaces.Space[Any]],
    is_graph: bool,
    dense: Mapping[str, Any],
    of_items: Mapping[str, Any],
    n_time_dims: int,
    attention: bool,
    holds_candidates: bool,
) -> tuple[str, str, dict[str, Any]]:
    """Choose the block of an observation: kind of observation, class of the block, its arguments.

    :param found: The space of the observation in each sub-step that has it.
    :param is_graph: Whether it has an adjacency matrix.
    :param dense: Settings of dense layers.
    :param of_items: Settings of dense layers of items.
    :param n_time_dims: Number of leading dimensions that are time steps.
    :param attention: Whether items of small sets attend to each other.
    :param holds_candidates: Whether the items are candidates of an action.
    """
    if (categories := _categories(found, n_time_dims)) is not None:
        n_categories, start = categories
        width = _EMBEDDING_DIM if max(n_categories) >= EMBED_FROM else None
        return (
            "category",
            "CategoryEncodingBlock",
            {"num_categories": n_categories, "embedding_dim": width, "start": start},
        )
    space = found[0]
    shape = tuple(space.shape or ())[n_time_dims:]
    if is_graph:
        params = {"hidden_features": dense["hidden_units"], "bias": True, "non_lins": dense["non_lin"]}
        params |= {"node_self_importance": 1.0, "trainable_node_self_importance": False, "preprocess_adj": True}
        return "graph", "GraphConvBlock", params
    if isinstance(space, spaces.Box) and (layout := image_layout(space, shape)) is not None:
        return "image", "ImageDenseBlock", _image_params(space, shape, layout)
    if isinstance(space, spaces.Box) and len(shape) == 2 and (shape[0] > 1 or holds_candidates):
        shapes = [tuple(other.shape or ()) for other in found]
        # several heads would multiply the cost
        params = {**of_items, "num_heads": int(attention and max(shape[-2] for shape in shapes) <= _MOST_ATTENDING)}
        if holds_candidates:
            return "set", "SetAttentionBlock", {**params, "keep_places": False, "keep_items": True}
        keep_places = all(math.prod(shape[n_time_dims:]) <= _MOST_PLACES for shape in shapes)
        return "set", "SetAttentionBlock", {**params, "keep_places": keep_places}
    return "feature", "FlattenBlock", {"num_flatten_dims": max(1, len(shape))}


def _categories(found: Sequence[spaces.Space[Any]], n_time_dims: int) -> tuple[list[int], list[int]] | None:
    """Return number of categories and first category of each entry of an observation; `None`: it has no categories."""
    ranges: list[tuple[Any, Any]] = []
    for space in found:
        if isinstance(space, spaces.Discrete):
            ranges.append((space.n, space.start))
        elif isinstance(space, spaces.MultiDiscrete):
            ranges.append((space.nvec[0], space.start[0]) if n_time_dims else (space.nvec, space.start))
        elif n_time_dims and isinstance(space, spaces.Box) and space.dtype == np.int64 and len(space.shape) == 1:
            ranges.append((space.high[0] - space.low[0] + 1, space.low[0]))  # a Discrete space that was stacked
        else:
            return None
    sizes, starts = (list(map(np.ravel, column)) for column in zip(*ranges, strict=True))
    if len({len(size) for size in sizes}) > 1:
        return None
    first = np.min(starts, axis=0)
    last = np.max([start + size for start, size in zip(starts, sizes, strict=True)], axis=0)
    return [int(n) for n in last - first], [int(n) for n in first]


def image_layout(space: spaces.Box, shape: Sequence[int]) -> str | None:
    """Return `HW`, `HWC` or `CHW` if an observation is an image, otherwise `None`.

    Three dimensions are an image if the first or the last is small enough to be channels; two if they hold bytes.

    :param space: Its space.
    :param shape: Its shape without time steps.
    """
    if len(shape) == 2:
        return "HW" if space.dtype == np.uint8 and min(shape) >= _GRID_SIZE else None
    if len(shape) != 3 or sorted(shape)[1] < 4:
        return None
    return "HWC" if shape[2] <= shape[0] else "CHW"


def _image_params(space: spaces.Box, shape: Sequence[int], layout: str) -> dict[str, Any]:
    height_and_width = {"HW": shape, "HWC": shape[:2], "CHW": shape[1:]}[layout]
    size, high = min(height_and_width), float(np.max(space.high))
    is_grid = size < _GRID_SIZE
    scale = 1.0 if is_grid or not math.isfinite(high) or high <= 1.0 else 1.0 / high
    if is_grid:
        kernels, strides, paddings, units = [3, 3], [1, 1], [1, 1], 64
    elif size < 36:
        kernels, strides, paddings, units = [4, 4, 3], [2, 2, 1], [1, 1, 1], 128
    else:  # as Mnih et al. (2015), with half the channels
        kernels, strides, paddings, units = [8, 4, 3], [4, 2, 1], [0, 0, 0], 256
    return {
        "layout": layout,
        "scale": scale,
        "hidden_channels": [16, 32, 32][: len(kernels)],
        "hidden_kernels": kernels,
        "hidden_strides": strides,
        "hidden_padding": paddings,
        "hidden_units": [units],
        "non_lin": "torch.nn.ReLU",
    }


def _companions(
    by_key: Mapping[str, Sequence[spaces.Space[Any]]],
    observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
    n_time_dims: int,
) -> dict[str, list[str]]:
    """Return masks of sets and adjacencies of graphs, by the observation that they belong to."""
    companions: dict[str, list[str]] = {}
    for key, found in by_key.items():
        if not all(isinstance(space, spaces.Box) and len(space.shape) == n_time_dims + 2 for space in found):
            continue
        for suffix, n_dims in (("_adjacency", 2), ("_mask", 1)):
            name = f"{key}{suffix}"
            steps = [step.spaces for step in observation_spaces_dict.values() if key in step.spaces]
            if all(
                name in step
                and tuple(step[name].shape or ())[n_time_dims:] == ((step[key].shape or ())[n_time_dims],) * n_dims
                for step in steps
            ):
                companions[key] = [name]
                break
    return companions


def flat_networks(part: Any) -> list[Mapping[str, Any]]:
    """Return the configurations of a policy's or critic's networks, if all of them flatten and concatenate."""
    networks = part.get("networks") if isinstance(part, Mapping) else None
    listed = list(networks.values() if isinstance(networks, Mapping) else networks or [])
    targets = [network.get(TARGET_KEY) if isinstance(network, Mapping) else None for network in listed]
    return listed if all(isinstance(path, str) and path.startswith(_FLATTEN_CONCAT) for path in targets) else []


def as_step_critic(critic: Any) -> Any:
    """Replace a shared critic with flat networks by one that values each sub-step and agent separately."""
    critic = plain_container(critic)
    is_flat_shared = isinstance(critic, Mapping) and flat_networks(critic) and not critic.get("stack_observations")
    if not is_flat_shared or critic_composer_type(critic) is not SharedStateCriticComposer:
        return critic
    return {TARGET_KEY: f"{StepStateCriticComposer.__module__}.{StepStateCriticComposer.__qualname__}"}


def without_flat_networks(part: Any) -> Any:
    """Return the configuration of a policy or critic without networks that flatten and concatenate all observations."""
    part = plain_container(part)
    return {key: value for key, value in part.items() if key != "networks"} if flat_networks(part) else part
