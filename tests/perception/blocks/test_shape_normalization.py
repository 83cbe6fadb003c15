"""What shape normalisation accepts, and how it says what it does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.blocks import DenseBlock, LinearOutputBlock, ShapeNormalizationBlock, TorchModelBlock
from maze.perception.blocks.base import TensorDict
from maze.perception.program.network_program import in_numpy


class Pair(ShapeNormalizationBlock):
    """Two inputs of different rank."""

    def __init__(self, out_num_dims: int = 2) -> None:
        super().__init__(["a", "b"], "out", [(3,), (2, 3)], in_num_dims=[2, 3], out_num_dims=out_num_dims)

    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        assert block_input.keys() == {"a", "b"}
        return {"out": block_input["a"] + block_input["b"].sum(dim=1)}


class Returning(nn.Module):
    """A network with a fixed result."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self.result = result

    def forward(self, _: TensorDict) -> object:
        return self.result


def test_layers_see_exactly_one_batch_dimension():
    shapes = []

    class Recorder(DenseBlock):
        def normalized_forward(self, block_input: TensorDict) -> TensorDict:
            shapes.append(tuple(block_input["x"].shape))
            return super().normalized_forward(block_input)

    block = Recorder("x", "out", (4,), [2], nn.ReLU)
    for batch_shape in [(), (5,), (2, 5), (3, 2, 5)]:
        block({"x": torch.ones(*batch_shape, 4)})
    assert shapes == [(1, 4), (5, 4), (10, 4), (30, 4)]


@pytest.mark.parametrize("batch_shape", [(0,), (3, 0), (0, 3)])
def test_empty_batches_stay_empty(batch_shape):
    block = DenseBlock("x", "out", (4,), [2], nn.ReLU)
    assert block({"x": torch.ones(*batch_shape, 4)})["out"].shape == (*batch_shape, 2)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"), [((3,), (7, 2, 3)), ((7, 3), (2, 3)), ((5, 7, 3), (7, 5, 2, 3)), ((7, 3), (1, 7, 2, 3))]
)
def test_different_batch_dimensions_of_inputs_are_an_error_that_names_both(shape_a, shape_b):
    with pytest.raises(ConfigError, match=r"Pair \(out\): .*'a': .*'b': "):
        Pair()({"a": torch.ones(shape_a), "b": torch.ones(shape_b)})


def test_too_few_dimensions_are_an_error_that_names_block_and_key():
    with pytest.raises(ConfigError, match=r"Pair \(out\): expected \[2, 3\] dimensions.*'b': \(3,\)"):
        Pair()({"a": torch.ones(3), "b": torch.ones(3)})


def test_declared_shapes_with_too_few_dimensions_are_an_error():
    with pytest.raises(ConfigError, match=r"DenseBlock \(out\): expected inputs with at least \[1\] dimensions"):
        DenseBlock("x", "out", (), [2], nn.ReLU)


@pytest.mark.parametrize(("name", "value"), [("in_num_dims", [2, 2]), ("in_num_dims", 0), ("out_num_dims", [2, 2])])
def test_numbers_of_dimensions_must_fit_the_keys(name, value):
    settings = {"in_num_dims": 2, "out_num_dims": 2, name: value}
    with pytest.raises(ConfigError, match=name):
        TorchModelBlock("x", "out", (3,), net=nn.Identity(), **settings)


def test_outputs_with_other_dimensions_than_declared_are_an_error():
    with pytest.raises(ConfigError, match=r"`out_num_dims`.* is \[4\]"):
        Pair(out_num_dims=4).out_shapes()


@pytest.mark.parametrize(
    ("result", "message"),
    [(torch.ones(2, 1), "Returning returned a tensor"), ({"value": torch.ones(2, 1)}, r"keys \['action'\]")],
)
def test_networks_that_return_something_else_than_their_outputs_are_named(result, message):
    block = TorchModelBlock("x", "action", (3,), 2, 2, Returning(result))
    with pytest.raises(ConfigError, match=message):
        block.out_shapes()


def test_layers_that_cannot_process_the_declared_shape_are_named_at_shape_inference():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: TensorDict) -> TensorDict:
            return {"action": self.layer(x["x"])}

    with pytest.raises(ConfigError, match=r"TorchModelBlock \(action\)"):
        TorchModelBlock("x", "action", (3,), 2, 2, Net()).out_shapes()


@pytest.mark.parametrize("in_shapes", [(4,), [4], [(4,)], [[4]], np.array([4]), torch.Size([4]), [np.int64(4)]])
def test_one_shape_may_be_given_with_or_without_a_list(in_shapes):
    block = LinearOutputBlock("x", "out", in_shapes, 2)
    assert block.in_shapes == [(4,)]
    assert all(type(size) is int for size in block.in_shapes[0])


def test_keys_and_shapes_must_correspond():
    with pytest.raises(ConfigError, match=r"one shape for each of the 1 input keys \['x'\], found 2"):
        LinearOutputBlock("x", "out", [(4,), (4,)], 2)
    with pytest.raises(ConfigError, match="holds a key twice"):
        Pair.__base__.__init__(Pair.__new__(Pair), ["a", "a"], "out", [(3,), (3,)], 2, 2)


def test_the_output_bias_is_one_number_or_one_per_unit():
    block = LinearOutputBlock("x", "out", (3,), 2)
    block.set_bias(-1.5)
    assert block.net.bias.tolist() == [-1.5, -1.5]
    block.set_bias(np.array([1.0, 2.0]))
    assert block.net.bias.tolist() == [1.0, 2.0]
    assert block.net.bias.requires_grad
    with pytest.raises(ConfigError, match="2 values"):
        block.set_bias(np.ones(3))


def test_a_subclass_with_its_own_forward_pass_does_not_inherit_the_description():
    class Doubled(LinearOutputBlock):
        def normalized_forward(self, block_input: TensorDict) -> TensorDict:
            return {key: 2.0 * value for key, value in super().normalized_forward(block_input).items()}

    class Renamed(LinearOutputBlock):
        pass

    assert in_numpy(Doubled("x", "out", (3,), 2)) is None
    assert in_numpy(Renamed("x", "out", (3,), 2)) is not None


def test_numpy_sees_parameter_updates():
    block = DenseBlock("x", "out", (3,), [2], nn.Tanh)
    program = in_numpy(block)
    assert program is not None
    block.load_state_dict(DenseBlock("x", "out", (3,), [2], nn.Tanh).state_dict())
    array = np.ones((4, 3), np.float32)
    torch.testing.assert_close(torch.from_numpy(program({"x": array})["out"]), block({"x": torch.ones(4, 3)})["out"])
    assert bool((array == 1.0).all())


@pytest.mark.parametrize("non_lin", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.Identity])
def test_activations_in_numpy_equal_those_in_torch(non_lin):
    block = DenseBlock("x", "out", (3,), [4, 4], non_lin)
    nn.init.normal_(block.net[0].weight, std=20.0)  # also far from zero
    program = in_numpy(block)
    assert program is not None
    array = np.random.default_rng(0).standard_normal((16, 3), dtype=np.float32)
    result = torch.from_numpy(program({"x": array})["out"])
    torch.testing.assert_close(result, block({"x": torch.from_numpy(array)})["out"], rtol=1e-4, atol=1e-5)


def test_unknown_activations_have_no_numpy_form():
    assert in_numpy(DenseBlock("x", "out", (3,), [4], nn.GELU)) is None


def test_unknown_activation_names_are_errors_that_name_the_block():
    with pytest.raises(ConfigError, match=r"DenseBlock \(latent\)\.non_lin"):
        DenseBlock("x", "latent", (3,), [4], "torch.nn.RelU")


def test_a_block_without_layers_is_an_error():
    with pytest.raises(ConfigError, match="`hidden_units` is empty"):
        DenseBlock("x", "out", (3,), [], nn.ReLU)
