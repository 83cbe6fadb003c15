"""Architecture template that concatenates the features of all observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.perception.blocks.base import PerceptionBlock
from maze.perception.blocks.general.concat import ConcatenationBlock
from maze.perception.blocks.general.flatten import FlattenBlock
from maze.perception.blocks.general.input_conversion import RunningNormalizationBlock, ScalingBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.builders.base import NORMALIZED, SCALED, WHERE, BaseModelBuilder, free_name


class ConcatModelBuilder(BaseModelBuilder):
    """Process each observation by its modality's block, concatenate the features, then apply `hidden` and `recurrence`.

    The arguments are those of :class:`BaseModelBuilder`. The tensors are called `<observation>_ScalingBlock` (if there
    is a factor), `<observation>_RunningNormalizationBlock` (if it is normalized), `<observation>_<block>` (such as
    `observation_DenseBlock`), `concat`, `hidden` and `recurrence`; an underscore is appended to the name of an
    observation. Features that are not vectors are flattened. With a recurrence the first dimension of all observations
    holds the time steps (see `ObservationStackWrapper`) and stays, unless the recurrence is a `RecurrentCellBlock`,
    which carries its hidden state from step to step instead.
    """

    @override(BaseModelBuilder)
    def from_observation_space(self, observation_space: spaces.Dict) -> InferenceBlock:
        in_shapes = {key: tuple(space.shape or ()) for key, space in observation_space.spaces.items()}
        if not in_shapes:
            raise ConfigError(f"{WHERE}: there are no observations to process.")
        blocks: dict[str, PerceptionBlock] = {}
        joined = {other for key in in_shapes for other in self.joint_observations.get(key, ())}
        features = [self._add_observation(blocks, key, in_shapes) for key in in_shapes if key not in joined]
        shapes = [blocks[key].out_shapes()[0] for key in features]
        n_steps = {shape[0] if len(shape) == 2 else None for shape in shapes}
        if self.stacks_time_steps and (len(n_steps) > 1 or None in n_steps):
            raise ConfigError(
                f"{WHERE}.modality_config.recurrence: a recurrent model needs observations with the same number of "
                f"time steps in their first dimension, found the shapes {in_shapes}. Stack the observations of several "
                "steps (maze.core.wrappers.observation_stack_wrapper.ObservationStackWrapper), use a "
                "RecurrentCellBlock, or leave the recurrence empty."
            )
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
        """Add the blocks of one observation and return the key of its features."""
        modality = self.modality_of(key)
        in_keys = [key, *self.joint_observations.get(key, ())]
        if missing := [other for other in in_keys if other not in in_shapes]:
            raise ConfigError(
                f"{WHERE}.joint_observations.{key}: there is no observation {missing[0]!r} in the sub-step of `{key}`."
            )
        shapes = [in_shapes[other] for other in in_keys]
        if key in self.normalized_observations:
            in_keys[0] = key + NORMALIZED
            blocks[in_keys[0]] = RunningNormalizationBlock(key, in_keys[0], [shapes[0]])
        if not shapes[0]:  # a single number
            flat = f"{key}_FlattenBlock"
            blocks[flat] = FlattenBlock(in_keys[0], flat, shapes[0], num_flatten_dims=0)
            in_keys[0], shapes[0] = flat, (1,)
        scale = self.observation_scales.get(key)
        if scale is not None:
            blocks[key + SCALED] = ScalingBlock(in_keys[0], key + SCALED, [shapes[0]], scale)
            in_keys[0] = key + SCALED
        out_key = free_name(f"{key}_{self.block_name(modality)}", blocks)
        block = blocks[out_key] = self.build_block(modality, in_keys, out_key, shapes)
        n_dims = len(block.out_shapes()[0])
        n_kept = 1 if self.stacks_time_steps else 0
        if n_dims - n_kept <= 1:
            return out_key
        flat_key = f"{out_key}_flat"
        blocks[flat_key] = FlattenBlock(out_key, flat_key, block.out_shapes(), num_flatten_dims=n_dims - n_kept)
        return flat_key
