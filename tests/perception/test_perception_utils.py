from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.perception.perception_utils import (
    convert_to_numpy,
    convert_to_torch,
    flatten_spaces,
    observation_spaces_to_in_shapes,
    stack_and_flatten_spaces,
)

SPACES = {0: spaces.Dict({"a": spaces.Box(-1, 1, (2, 3)), "b": spaces.Discrete(4)})}


class Pair(NamedTuple):
    first: object
    second: object


def test_shapes_are_those_of_the_spaces():
    assert observation_spaces_to_in_shapes(SPACES) == {0: {"a": (2, 3), "b": ()}}


def test_flattening_merges_substeps_and_the_first_one_wins():
    first, second = {"a": torch.zeros(1)}, {"a": torch.ones(1), "c": torch.ones(1)}
    merged = flatten_spaces([first, second])
    assert list(merged) == ["a", "c"]
    assert merged["a"].item() == 0.0


def test_stacking_puts_the_new_dimension_behind_all_batch_dimensions():
    substeps = [{"a": torch.full((7, 5, 2, 3), float(agent)), "b": torch.full((7, 5), 1)} for agent in range(4)]
    merged = stack_and_flatten_spaces([*substeps, {"single": torch.ones(7, 5, 9)}], SPACES)
    assert {key: tuple(tensor.shape) for key, tensor in merged.items()} == {
        "a": (7, 5, 4, 2, 3),
        "b": (7, 5, 4),
        "single": (7, 5, 9),
    }
    assert merged["a"][0, 0, :, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_any_structure_converts_to_torch_and_back():
    structure = {"x": [np.arange(3), (np.float32(1.5), "text")], "y": Pair(True, None), "z": np.array(["text"])}
    tensors = convert_to_torch(structure, device="cpu", cast=torch.float32, in_place=False)
    assert tensors["x"][0].dtype is torch.float32
    assert tensors["x"][1][1] == "text"
    assert isinstance(tensors["y"], Pair)
    assert tensors["y"].first.item() == 1.0
    assert isinstance(structure["x"][0], np.ndarray)
    arrays = convert_to_numpy(tensors, cast=np.dtype(np.int64), in_place=False)
    assert arrays["x"][0].tolist() == [0, 1, 2]
    assert arrays["x"][0].dtype == np.int64
    assert arrays["y"].second is None


def test_converting_in_place_keeps_the_containers():
    inner = [np.ones(2)]
    structure = {"x": inner}
    assert convert_to_torch(structure, device=None, cast=None, in_place=True) is structure
    assert structure["x"] is inner
    assert isinstance(inner[0], torch.Tensor)
    with pytest.raises(TypeError, match="tuple"):
        convert_to_torch((1,), device=None, cast=None, in_place=True)
    assert isinstance(convert_to_numpy((torch.ones(1),), cast=None, in_place="try")[0], np.ndarray)
