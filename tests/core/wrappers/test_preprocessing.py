"""Pre-processing of observations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.observation_preprocessing.preprocessing_wrapper import PreProcessingWrapper
from maze.core.wrappers.observation_preprocessing.preprocessors.base import resampling_weights
from maze.core.wrappers.wrapper_factory import WrapperFactory
from maze.preprocessors import (
    FlattenPreProcessor,
    OneHotPreProcessor,
    PreProcessor,
    ResizeImgPreProcessor,
    Rgb2GrayPreProcessor,
    TransposePreProcessor,
    UnSqueezePreProcessor,
)
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.core.wrappers.zoo_env import ZooEnv, zoo


def image_space(shape: tuple[int, ...], dtype: Any = np.uint8) -> spaces.Box:
    return spaces.Box(0, 255, shape, dtype)


class Custom(PreProcessor):
    """Doubles."""

    def __init__(self, observation_space: spaces.Box, factor: float = 2.0) -> None:
        super().__init__(observation_space)
        self.space = spaces.Box(observation_space.low * factor, observation_space.high * factor)
        self.factor = factor

    def processed_shape(self):
        return self.space.shape

    def processed_space(self):
        return self.space

    def process(self, observation):
        return observation * np.float32(self.factor)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shape=SHAPES, data=st.data())
def test_flattening_keeps_the_order_and_the_leading_dimensions(shape, data):
    n_dims = data.draw(st.integers(1, len(shape)))
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    flatten = FlattenPreProcessor(spaces.Box(-np.inf, np.inf, value.shape), num_flatten_dims=n_dims)
    flat = flatten.process(value)
    assert flat.ravel().tolist() == value.ravel().tolist()
    assert list(flat.shape[:-1]) == shape[: len(shape) - n_dims]
    assert flat.shape == flatten.processed_shape() == flatten.processed_space().shape


@given(shape=SHAPES, data=st.data())
def test_transposing_back_is_the_identity(shape, data):
    axes = data.draw(st.permutations(range(len(shape))))
    space = spaces.Box(0, np.arange(1.0, 1.0 + np.prod(shape), dtype=np.float32).reshape(shape))
    there = TransposePreProcessor(space, axes=axes)
    back = TransposePreProcessor(there.processed_space(), axes=np.argsort(axes).tolist())
    value = space.sample()
    assert there.processed_space().contains(there.process(value))
    np.testing.assert_array_equal(back.process(there.process(value)), value)


@given(shape=SHAPES, data=st.data())
def test_a_dimension_is_inserted_where_numpy_would(shape, data):
    dim = data.draw(st.integers(-len(shape) - 1, len(shape)))
    value = np.ones(shape, np.float32)
    processor = UnSqueezePreProcessor(spaces.Box(0, 1, value.shape), dim=dim)
    assert processor.process(value).shape == processor.processed_shape() == np.expand_dims(value, dim).shape


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (spaces.Discrete(3), 2, [0, 0, 1]),
        (spaces.Discrete(3, start=-1), -1, [1, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), [1, 0], [0, 1, 1, 0, 0]),
        (spaces.Box(1, 3, (2,), np.int64), [3, 1], [0, 0, 1, 1, 0, 0]),
        (spaces.Box(1, 3, (2,), np.float32), [3.0, 1.0], [0, 0, 1, 1, 0, 0]),
        (spaces.Box(np.float32([[0], [-1]]), np.float32([[1], [1]])), [[1.0], [0.0]], [0, 1, 0, 1, 0]),
        (spaces.Discrete(3), [1], [0, 1, 0]),
        (spaces.MultiDiscrete([[2], [2]]), [[1], [0]], [0, 1, 1, 0]),
    ],
)
def test_categories_are_encoded(space, value, expected):
    processor = OneHotPreProcessor(space)
    encoded = processor.process(np.asarray(value))
    assert encoded.tolist() == expected
    assert processor.processed_space().contains(encoded)


def test_a_category_outside_of_its_space_is_an_error():
    with pytest.raises(EnvironmentContractError, match="OneHotPreProcessor: expected"):
        OneHotPreProcessor(spaces.Discrete(3)).process(np.int64(3))
    with pytest.raises(EnvironmentContractError, match="OneHotPreProcessor: expected"):
        OneHotPreProcessor(spaces.Box(0, 3, (1,))).process(np.array([1.5], np.float32))


UNCOUNTABLE = [
    spaces.Box(0, 1.5, (2,)),
    spaces.Box(0, np.inf, (1,)),
    spaces.MultiBinary(2),
    spaces.Box(0, 2**40, (1,), np.int64),
]


@pytest.mark.parametrize("space", UNCOUNTABLE)
def test_only_categories_can_be_encoded(space):
    with pytest.raises(ConfigError, match="categories"):
        OneHotPreProcessor(space)


def test_gray_values_are_those_of_pillow():
    image = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    gray = Rgb2GrayPreProcessor(image_space(image.shape), rgb_dim=-1).process(image)
    expected = np.asarray(Image.fromarray(image).convert("L"))
    assert gray.dtype == np.uint8
    assert np.abs(gray.astype(int) - expected).max() <= 1
    channels_first = Rgb2GrayPreProcessor(image_space((3, 40, 30)), rgb_dim=0).process(image.transpose(2, 0, 1))
    np.testing.assert_array_equal(channels_first, gray)


@given(
    old=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    new=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 100),
)
def test_resized_images_are_those_of_pillow(old, new, seed):
    image = np.random.default_rng(seed).uniform(0, 255, old).astype(np.float32)
    resized = ResizeImgPreProcessor(image_space(old, np.float32), target_size=new, transpose=False).process(image)
    expected = Image.fromarray(image).resize((new[1], new[0]), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(resized, np.asarray(expected), atol=1e-2)


@pytest.mark.parametrize("transpose", [False, True])
def test_colour_channels_are_resized_one_by_one(transpose):
    image = np.random.default_rng(1).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(image).resize((12, 25), Image.Resampling.BILINEAR)).astype(int)
    if transpose:
        image, expected = image.transpose(2, 0, 1), expected.transpose(2, 0, 1)
    processor = ResizeImgPreProcessor(image_space(image.shape), target_size=[25, 12], transpose=transpose)
    resized = processor.process(image)
    assert resized.shape == processor.processed_shape()
    assert resized.dtype == np.uint8
    assert np.abs(resized - expected).max() <= 1


@given(size=st.integers(1, 50), target=st.integers(1, 50))
def test_resizing_keeps_a_uniform_image(size, target):
    np.testing.assert_allclose(resampling_weights(size, target).sum(axis=1), 1.0, rtol=1e-5)
    assert (resampling_weights(size, target) >= 0).all()


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda: FlattenPreProcessor(spaces.Box(0, 1, (2, 3)), num_flatten_dims=3), "from 1 to"),
        (lambda: FlattenPreProcessor(spaces.Discrete(3), num_flatten_dims=1), "Box"),
        (lambda: TransposePreProcessor(spaces.Box(0, 1, (2, 3)), axes=[0, 0]), "each of"),
        (lambda: UnSqueezePreProcessor(spaces.Box(0, 1, (2, 3)), dim=3), "axis"),
        (lambda: Rgb2GrayPreProcessor(spaces.Box(0, 1, (2, 4)), rgb_dim=1), "three channels"),
        (lambda: ResizeImgPreProcessor(image_space((4, 4)), target_size=[4], transpose=False), "target_size"),
        (lambda: ResizeImgPreProcessor(image_space((4, 4)), target_size=[4, 4], transpose=True), "channels, height"),
    ],
)
def test_settings_that_do_not_fit_the_observation_are_named(processor, message):
    with pytest.raises(ConfigError, match=message):
        processor()


def test_documented_cascade_leaves_the_final_observation_only():
    stages = [
        ("image", "Rgb2GrayPreProcessor", {"rgb_dim": -1}),
        ("image-rgb2gray", "ResizeImgPreProcessor", {"target_size": [96, 96], "transpose": False}),
        ("image-rgb2gray-resize_img", "UnSqueezePreProcessor", {"dim": -3}),
    ]
    mapping = [
        {"observation": name, "_target_": f"maze.preprocessors.{target}", "keep_original": False, "config": config}
        for name, target, config in stages
    ]
    env = PreProcessingWrapper.wrap(zoo(), pre_processor_mapping=mapping)
    observation = env.reset()
    name = "image-rgb2gray-resize_img-unsqueeze"
    assert set(observation) == set(env.observation_space) == {"vector", "category", "action_mask", name}
    assert observation[name].shape == (1, 96, 96)


def test_documented_example_keeps_the_original_on_request():
    config = {
        "PreProcessingWrapper": {
            "pre_processor_mapping": [
                {
                    "observation": "image",
                    "_target_": "maze.preprocessors.Rgb2GrayPreProcessor",
                    "keep_original": True,
                    "config": {"num_flatten_dims": 2},  # as the documentation has it
                },
                {
                    "observation": "category",
                    "_target_": "maze.preprocessors.OneHotPreProcessor",
                    "keep_original": False,
                    "config": {},
                },
            ]
        }
    }
    env = WrapperFactory.wrap_from_config(zoo(), config)
    expected = {"vector", "action_mask", "image", "image-rgb2gray", "category-one_hot"}
    assert set(env.reset()) == set(env.observation_space) == expected


def test_own_pre_processors_are_tagged_with_the_name_of_their_file():
    mapping = [{"observation": "vector", "_target_": f"{__name__}.Custom", "config": {"factor": 3.0}}]
    env = PreProcessingWrapper.wrap(zoo(), pre_processor_mapping=mapping)
    env.seed(1)
    observation = env.reset()
    expected = env.get_maze_state()["vector"] * np.float32(3.0)
    np.testing.assert_array_equal(observation[f"vector-{__name__.rpartition('.')[2]}"], expected)


def test_the_observations_of_the_wrapped_environment_are_not_changed():
    env = PreProcessingWrapper.wrap(
        zoo(), pre_processor_mapping=[{"observation": "category", "_target_": "maze.preprocessors.OneHotPreProcessor"}]
    )
    inner = GymMazeEnv(ZooEnv()).reset()
    before = dict(inner)
    env.observation(inner)
    assert inner == before


def test_only_the_sub_steps_with_the_observation_are_converted():
    env = PreProcessingWrapper.wrap(
        StructuredCuttingEnv(cutting_env_factory()),
        pre_processor_mapping=[
            {
                "observation": "inventory",
                "_target_": "maze.preprocessors.FlattenPreProcessor",
                "config": {"num_flatten_dims": 2},
            }
        ],
    )
    assert env.reset()["inventory-flatten"].shape == (10,)
    assert set(env.step({"piece_idx": 0})[0]) == {"selected_piece"}
    assert set(env.observation_spaces_dict[1].spaces) == {"selected_piece"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"observation": "imag", "_target_": "maze.preprocessors.Rgb2GrayPreProcessor"}, "Did you mean `image`"),
        ({"observation": "image", "_target_": "maze.preprocessors.Rgb2GreyPreProcessor"}, "Rgb2GrayPreProcessor"),
        ({"observation": "image", "_target_": "builtins.dict"}, "PreProcessor"),
        ({"observation": "image"}, "_target_"),
        ({"observation": "image", "_target_": "a.B", "keep_orignal": True}, "keep_original"),
        (
            {"observation": "vector", "_target_": "maze.preprocessors.FlattenPreProcessor", "config": {"dims": 1}},
            "num_flatten_dims",
        ),
        ("image", "expected a mapping"),
    ],
)
def test_faults_in_the_mapping_are_named_with_their_place(entry, message):
    with pytest.raises(ConfigError, match=message) as raised:
        PreProcessingWrapper.wrap(zoo(), pre_processor_mapping=[entry])
    assert "pre_processor_mapping[0]" in str(raised.value)
