from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maze.core.env.structured_env import ActorID
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.train.utils.train_utils import (
    compute_gradient_norm,
    stack_numpy_dict_list,
    stack_torch_dict_list,
    unstack_numpy_list_dict,
)
from tests.train.parallelization.toy_envs import two_step_env

FIRST, SECOND = ActorID("first", 0), ActorID("second", 0)


def record(value: float, actor: ActorID = FIRST, **fields: object) -> SpacesRecord:
    return SpacesRecord(
        actor_id=actor,
        observation={"b": np.full(3, value, np.float32), "a": np.array([value], np.uint8)},
        action={"go": np.int64(value)},
        reward=float(value),
        done=value > 2,
        **fields,  # type: ignore[arg-type]
    )


def test_stacking_adds_a_dimension_keeps_dtypes_and_key_order():
    stacked = SpacesRecord.stack([record(1), record(2), record(3)])
    assert stacked.batch_shape == [3]
    assert list(stacked.observation) == ["b", "a"]
    assert stacked.observation["a"].dtype == np.uint8
    np.testing.assert_array_equal(stacked.observation["b"][:, 0], [1, 2, 3])
    assert stacked.action["go"].dtype == np.int64
    assert stacked.reward.dtype == np.float32
    np.testing.assert_array_equal(stacked.done, [False, False, True])
    assert stacked.info is stacked.logits is stacked.next_observation is None
    assert SpacesRecord.stack([stacked, stacked]).batch_shape == [2, 3]


def test_infos_of_stacked_records_are_a_list():
    assert SpacesRecord.stack([record(1, info={"x": 1}), record(2, info={})]).info == [{"x": 1}, {}]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "no records"),
        ([record(1), record(1, SECOND)], "one actor"),
        ([record(1), SpacesRecord.stack([record(1)])], "one batch shape"),
        ([record(1), record(1, logits={"go": np.zeros(2)})], r"`logits`: records \[0\] of 2"),
        ([record(1), SpacesRecord(FIRST, {"b": np.zeros(3)}, {"go": 0}, 1.0, False)], "keys"),
    ],
)
def test_records_of_different_structure_are_not_stacked(records, expected):
    with pytest.raises(ValueError, match=expected):
        SpacesRecord.stack(records)


def test_conversion_to_torch_and_back_is_in_place_and_keeps_dtypes():
    original = SpacesRecord.stack([record(1, info={"x": 1}), record(2, info={})])
    array = original.observation["b"]
    converted = original.to_torch("cpu")
    assert converted is original
    assert original.observation["a"].dtype == torch.uint8
    assert original.done.dtype == torch.bool
    assert original.observation["b"].data_ptr() == array.ctypes.data  # the same memory
    back = original.to_numpy()
    assert isinstance(back.observation["b"], np.ndarray)
    np.testing.assert_array_equal(back.observation["b"], array)
    assert back.info == [{"x": 1}, {}]


def test_single_records_and_read_only_arrays_become_tensors_too():
    single = record(1)
    single.observation["b"].flags.writeable = False
    single.to_torch("cpu")
    assert single.reward.dtype == torch.float32
    assert single.action["go"].dtype == torch.int64
    assert single.done.dtype == torch.bool
    assert single.batch_shape is None


def step(value: float) -> StructuredSpacesRecord:
    return StructuredSpacesRecord([record(value), record(value + 0.5, SECOND)])


def test_a_structured_record_gives_its_sub_steps_by_order_and_by_key():
    one = step(2)
    assert one.actor_ids == [FIRST, SECOND]
    assert one.substep_keys == ["first", "second"]
    assert one.rewards == [2.0, 2.5]
    assert one.rewards_dict == {"first": 2.0, "second": 2.5}
    assert one.dones == [False, True]
    assert one.is_done()
    assert not one.is_batched()
    assert one.observations_dict["second"]["b"].shape == (3,)
    assert StructuredSpacesRecord(None).substep_records == []  # type: ignore[arg-type]


def test_trajectories_stack_along_time_and_side_by_side():
    trajectory = SpacesTrajectoryRecord("a")
    for value in range(4):
        trajectory.append(step(value))
    stacked = trajectory.stack()
    assert stacked.batch_shape == [4]
    np.testing.assert_array_equal(stacked.rewards_dict["second"], [0.5, 1.5, 2.5, 3.5])
    assert trajectory.total_reward() == 2 * 6 + 2
    assert trajectory.is_done()
    assert trajectory.actions_dicts[1] == {"first": {"go": 1}, "second": {"go": 1}}
    other = SpacesTrajectoryRecord("b")
    other.extend(trajectory)
    both = SpacesTrajectoryRecord.stack_trajectories([trajectory, other])
    assert both.id == ["a", "b"]
    assert len(both) == 4
    assert both.step_records[0].batch_shape == [2]
    assert both.stack().batch_shape == [4, 2]
    with pytest.raises(ValueError, match="single done flag"):
        both.is_done()
    other.append(step(9))
    with pytest.raises(ValueError, match=r"\[4, 5\]"):
        SpacesTrajectoryRecord.stack_trajectories([trajectory, other])
    with pytest.raises(ValueError, match="sequence of actors"):
        StructuredSpacesRecord.stack_records([step(1), StructuredSpacesRecord([record(1)])])


def test_states_are_converted_with_the_environment():
    state = {"time": [4], "choice": [4, 2]}
    action = {"item": 2, "where": np.zeros(2, np.float32)}
    converted = StructuredSpacesRecord.converted_from(
        StateRecord(state, action, None, 7.0, True, {"x": 1}, {}), two_step_env(), first_step_in_episode=False
    )
    assert converted.actor_ids == [ActorID("choose", 0), ActorID("cut", 0)]
    np.testing.assert_array_equal(converted.observations_dict["cut"]["choice"], [4, 2])
    assert converted.rewards == [0.0, 7.0]
    assert converted.dones == [False, True]
    assert converted.is_done()


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=6))
def test_unstacking_undoes_stacking(values):
    dicts = [{"x": np.array([value, value]), "y": np.float32(value)} for value in values]
    for before, after in zip(dicts, unstack_numpy_list_dict(stack_numpy_dict_list(dicts)), strict=True):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[key], after[key]) for key in before)
        assert all(before[key].dtype == after[key].dtype for key in before)


def test_arrays_of_different_length_are_not_unstacked():
    with pytest.raises(ValueError, match="different lengths"):
        unstack_numpy_list_dict({"a": np.zeros(2), "b": np.zeros(3)})


def test_tensors_stack_along_any_dimension():
    stacked = stack_torch_dict_list([{"x": np.zeros(3)}, {"x": torch.ones(3, dtype=torch.float64)}], dim=1)
    assert stacked["x"].shape == (3, 2)
    with pytest.raises(ValueError, match="element 1"):
        stack_torch_dict_list([{"x": np.zeros(3)}, {"y": np.zeros(3)}])


def test_the_gradient_norm_is_that_of_all_gradients_together():
    one, two, without = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    one.grad, two.grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0, 0.0])
    assert compute_gradient_norm([one, two, without]) == pytest.approx(7.0)
    assert compute_gradient_norm([without]) == 0.0


def test_recording_needs_no_torch():
    modules = "maze.core.trajectory_recording.records.trajectory_record, maze.core.utils.safe_pickle"
    code = f"import sys, {modules}, maze.core.wrappers.trajectory_recording_wrapper; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
