"""Action masking: what is masked stays masked, and nothing becomes NaN or uniform without a word."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maze.core.errors import ConfigError, EnvironmentContractError
from maze.perception.blocks import ActionMaskingBlock
from maze.perception.program.network_program import in_numpy


def masking(n_actions: int = 3, **kwargs: object) -> ActionMaskingBlock:
    return ActionMaskingBlock(["logits", "mask"], "action", [(n_actions,), (n_actions,)], 1, None, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bool, torch.int8])
def test_masked_actions_have_no_probability_and_others_keep_their_logits(dtype, mask_dtype):
    logits = torch.tensor([[1.0, -2.0, 30.0]], dtype=dtype)
    masked = masking()({"logits": logits, "mask": torch.tensor([[1, 1, 0]]).to(mask_dtype)})["action"]
    assert masked.dtype is dtype
    assert bool(torch.isfinite(masked).all())
    assert masked[0, :2].tolist() == [1.0, -2.0]
    probabilities = masked.softmax(-1)
    assert probabilities[0, 2] == 0
    torch.testing.assert_close(probabilities[0, :2], logits[0, :2].softmax(-1))


def test_masking_twice_is_masking_once():
    logits, mask = torch.randn(4, 3), torch.tensor([1.0, 0.0, 1.0]).expand(4, 3)
    once = masking()({"logits": logits, "mask": mask})["action"]
    assert torch.equal(masking()({"logits": once, "mask": mask})["action"], once)


def test_masked_logits_get_no_gradient():
    logits = torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    masking()({"logits": logits, "mask": mask})["action"].log_softmax(-1)[:, 2].sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad[mask == 0] == 0).all())
    assert bool((logits.grad[mask == 1] != 0).all())


def test_a_row_without_valid_action_is_an_error_that_names_block_keys_and_row():
    mask = torch.ones(2, 4, 3)
    mask[1, 2] = 0.0
    with pytest.raises(
        EnvironmentContractError, match=r"ActionMaskingBlock \(action\): the mask 'mask' .*'logits'.*1 of 8.*\(1, 2\)"
    ):
        masking()({"logits": torch.zeros(2, 4, 3), "mask": mask})


def test_an_observation_without_batch_dimension_gets_the_same_error():
    with pytest.raises(EnvironmentContractError, match="no valid action in 1 of 1 rows") as caught:
        masking()({"logits": torch.zeros(3), "mask": torch.zeros(3)})
    assert caught.value.row == 0


@pytest.mark.parametrize(
    ("logits_shape", "mask_shape", "num_actors", "actions"),
    [
        ((6,), (6,), 2, 3),
        ((2, 3), (2, 3), 2, 3),
        ((6,), (6,), 2, None),
        ((6,), (6,), 3, [1, 2, 3]),
    ],
)
def test_each_actor_needs_a_valid_action(logits_shape, mask_shape, num_actors, actions):
    block = ActionMaskingBlock(["logits", "mask"], "action", [logits_shape, mask_shape], num_actors, actions)
    mask = torch.ones(1, 6)
    mask[:, 3:] = 0.0  # the last actor has none
    with pytest.raises(EnvironmentContractError, match="no valid action"):
        block({"logits": torch.zeros(1, *logits_shape), "mask": mask.reshape(1, *mask_shape)})


def test_the_mask_of_one_actor_holds_for_all():
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    flat = ActionMaskingBlock(["logits", "mask"], "action", [(6,), (3,)], 2, 3)
    grouped = ActionMaskingBlock(["logits", "mask"], "action", [(2, 3), (3,)], 2, 3)
    hidden = torch.finfo(torch.float32).min
    expected = [[0.0, hidden, 0.0, 0.0, hidden, 0.0]]
    assert flat({"logits": torch.zeros(1, 6), "mask": mask})["action"].tolist() == expected
    assert grouped({"logits": torch.zeros(1, 2, 3), "mask": mask})["action"].flatten(1).tolist() == expected


def test_multi_binary_heads_may_mask_everything():
    block = masking(require_valid_action=False)
    masked = block({"logits": torch.zeros(1, 3), "mask": torch.zeros(1, 3)})["action"]
    assert torch.sigmoid(masked).tolist() == [[0.0, 0.0, 0.0]]


def test_in_numpy_the_same_error_is_raised():
    program = in_numpy(masking())
    assert program is not None
    inputs = {"logits": np.zeros((2, 3), np.float32), "mask": np.array([[1, 0, 0], [0, 0, 0]], np.float32)}
    with pytest.raises(EnvironmentContractError, match=r"the mask 'mask' .*\(1,\)"):
        program(inputs)


@pytest.mark.parametrize(
    ("shapes", "num_actors", "actions"),
    [
        ([(6,), (6,)], 4, 2),
        ([(6,), (6,)], 4, None),
        ([(6,), (6,)], 2, [2, 3]),
        ([(6,), (5,)], 2, 3),
        ([(6,), (6,)], 0, None),
    ],
)
def test_settings_that_do_not_fit_are_named(shapes, num_actors, actions):
    with pytest.raises(ConfigError, match=rf"`num_actors` = {num_actors} .*'mask': \({shapes[1][0]},\)"):
        ActionMaskingBlock(["logits", "mask"], "action", shapes, num_actors, actions)
