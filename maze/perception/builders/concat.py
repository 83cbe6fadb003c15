"""A template that joins all observations by concatenation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.perception.blocks.base import PerceptionBlock
from maze.perception.blocks.general.concat import ConcatenationBlock
from maze.perception.blocks.general.flatten import FlattenBlock
from maze.perception.blocks.general.input_conversion import RunningNormalizationBlock, ScalingBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.builders.base import WHERE, BaseModelBuilder, free_name, normalized_key, scaled_key


class ConcatModelBuilder(BaseModelBuilder):
    """Processes each observation by its modality's block, concatenates the results, then `hidden` and `recurrence`.

    The tensors are called `<observation>_ScalingBlock` (where there is a factor), or
    `<observation>_RunningNormalizationBlock` (where it is normalized), `<observation>_<block>` (such as
    `observation_DenseBlock`), `concat`, `hidden` and `recurrence`. What a modality's block returns is flattened first
    where it is no vector. Where an observation has one of these names, an underscore follows. With a recurrence all
    observations carry the time steps in their first dimension (see `ObservationStackWrapper`), which stays, unless it
    is a `RecurrentCellBlock`, which carries its hidden state from step to step instead.

    :param modality_config: See :class:`BaseModelBuilder`.
    :param observation_modality_mapping: See :class:`BaseModelBuilder`.
    :param shared_embedding_keys: See :class:`BaseModelBuilder`.
    :param joint_observations: See :class:`BaseModelBuilder`.
    :param observation_scales: See :class:`BaseModelBuilder`.
    :param normalized_observations: See :class:`BaseModelBuilder`.
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
        super().__init__(
            modality_config,
            observation_modality_mapping,
            shared_embedding_keys,
            joint_observations,
            observation_scales,
            normalized_observations,
        )

    @override(BaseModelBuilder)
    def from_observation_space(self, observation_space: spaces.Dict) -> InferenceBlock:
        in_shapes = {key: tuple(space.shape or ()) for key, space in observation_space.spaces.items()}
        if not in_shapes:
            raise ConfigError(f"{WHERE}: there are no observations to process.")
        blocks: dict[str, PerceptionBlock] = {}
        joined = {other for key in in_shapes for other in self.joint_observations.get(key, ())}
        features = [self._add_observation(blocks, key, in_shapes) for key in in_shapes if key not in joined]
        shapes = [blocks[key].out_shapes()[0] for key in features]
        if self.stacks_time_steps:
            self._check_time_steps(in_shapes, shapes)
        latent = free_name("concat", in_shapes)
        blocks[latent] = ConcatenationBlock(features, latent, shapes, concat_dim=-1)
        for stage in ("hidden", "recurrence"):
            if self.has_stage(stage):
                name = free_name(stage, in_shapes)
                blocks[name] = self.build_block(stage, latent, name, blocks[latent].out_shapes())
                latent = name
        return InferenceBlock(list(in_shapes), latent, list(in_shapes.values()), blocks)

    def _add_observation(
        self, blocks: dict[str, PerceptionBlock], key: str, in_shapes: Mapping[str, Sequence[int]]
    ) -> str:
        """Adds the blocks of one observation; returns the key of its features."""
        modality = self.modality_of(key)
        in_keys = [key, *self.joint_observations.get(key, ())]
        if missing := [other for other in in_keys if other not in in_shapes]:
            raise ConfigError(
                f"{WHERE}.joint_observations.{key}: there is no observation {missing[0]!r} beside `{key}`."
            )
        shapes = [in_shapes[other] for other in in_keys]
        if key in self.normalized_observations:
            in_keys[0] = normalized_key(key)
            blocks[in_keys[0]] = RunningNormalizationBlock(key, in_keys[0], [shapes[0]])
        if not shapes[0]:  # a single number
            flat = f"{key}_FlattenBlock"
            blocks[flat] = FlattenBlock(in_keys[0], flat, shapes[0], num_flatten_dims=0)
            in_keys[0], shapes[0] = flat, (1,)
        scale = self.observation_scales.get(key)
        if scale is not None:
            scaled = scaled_key(key)
            blocks[scaled] = ScalingBlock(in_keys[0], scaled, [shapes[0]], scale)
            in_keys[0] = scaled
        out_key = free_name(f"{key}_{self.block_name(modality)}", blocks)
        block = blocks[out_key] = self.build_block(modality, in_keys, out_key, shapes)
        n_dims = len(block.out_shapes()[0])
        n_kept = 1 if self.stacks_time_steps else 0
        if n_dims - n_kept <= 1:
            return out_key
        flat_key = f"{out_key}_flat"
        blocks[flat_key] = FlattenBlock(out_key, flat_key, block.out_shapes(), num_flatten_dims=n_dims - n_kept)
        return flat_key

    def _check_time_steps(self, in_shapes: dict[str, tuple[int, ...]], shapes: list[Sequence[int]]) -> None:
        found = dict(zip(in_shapes, shapes, strict=True))
        if any(len(shape) != 2 for shape in shapes):
            without = [f"`{key}` of shape {in_shapes[key]}" for key, shape in found.items() if len(shape) != 2]
            raise ConfigError(
                f"{WHERE}.modality_config.recurrence: a recurrent model needs observations with the time steps in "
                f"their first dimension, but {', '.join(without)} has none. Stack the observations of several steps "
                "(maze.core.wrappers.observation_stack_wrapper.ObservationStackWrapper), use a RecurrentCellBlock, or "
                "leave the recurrence empty."
            )
        if len({shape[0] for shape in shapes}) > 1:
            steps = {key: shape[0] for key, shape in found.items()}
            raise ConfigError(
                f"{WHERE}.modality_config.recurrence: all observations need the same number of time steps, found "
                f"{steps}. Stack the same number of steps of each of them."
            )
