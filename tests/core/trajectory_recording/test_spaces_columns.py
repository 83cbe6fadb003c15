from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, EnvironmentContractError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.core.trajectory_recording.writers.spaces_columns import (
    read_spaces_columns,
    write_spaces_columns,
)

dtypes = st.sampled_from([np.float32, np.float64, np.int64, np.int8, np.uint8, np.bool_])
shapes = hnp.array_shapes(min_dims=0, max_dims=3, max_side=3)
whole = hnp.arrays(dtype=np.int16, shape=shapes, fill=st.nothing())
arrays = st.builds(lambda values, dtype: (values / 7).astype(dtype), whole, dtypes)
dictionaries = st.dictionaries(st.text(min_size=1, max_size=3), arrays, min_size=1, max_size=3)
numbers = st.integers(-9, 9).map(lambda eighths: eighths / 8) | st.integers(-5, 5)
substeps = st.builds(
    SpacesRecord,
    actor_id=st.builds(ActorID, st.sampled_from([0, 1, "0", "cut"]), st.integers(0, 2)),
    observation=dictionaries,
    action=st.none() | st.dictionaries(st.text(max_size=2), arrays | st.integers(0, 9), min_size=1, max_size=2),
    reward=st.none() | numbers,
    done=st.none() | st.booleans(),
    info=st.just({})
    | st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.text(max_size=3), max_size=2),
    logits=st.none() | st.just({"a": np.zeros(2, dtype=np.float32)}),
)
trajectories = st.lists(st.lists(st.lists(substeps, max_size=3), max_size=3), max_size=3)


def as_trajectories(steps_of_trajectories):
    result = []
    for number, steps in enumerate(steps_of_trajectories):
        trajectory = SpacesTrajectoryRecord(f"id {number}")
        trajectory.step_records = [StructuredSpacesRecord(list(step)) for step in steps]
        result.append(trajectory)
    return result


def assert_same(read, written):
    assert [t.id for t in read] == [t.id for t in written]
    for one, other in zip(read, written, strict=True):
        assert len(one) == len(other)
        for step, other_step in zip(one.step_records, other.step_records, strict=True):
            assert step.actor_ids == other_step.actor_ids
            for record, original in zip(step.substep_records, other_step.substep_records, strict=True):
                assert type(record.actor_id.step_key) is type(original.actor_id.step_key)
                assert record.batch_shape == original.batch_shape
                assert record.info == original.info
                for name in ("reward", "done", "discounted_return"):
                    assert getattr(record, name) == getattr(original, name)
                    assert type(getattr(record, name)) is type(getattr(original, name))
                for name in ("observation", "action", "next_observation", "logits"):
                    values, originals = getattr(record, name), getattr(original, name)
                    assert (values is None) == (originals is None)
                    assert list(values or {}) == list(originals or {})
                    for key in originals or {}:
                        np.testing.assert_array_equal(values[key], originals[key])
                        assert np.asarray(values[key]).dtype == np.asarray(originals[key]).dtype


@settings(deadline=None, max_examples=40)
@given(trajectories)
def test_what_is_read_is_what_was_written(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("columns") / "run.npz"
    written = as_trajectories(steps)
    assert_same(read_spaces_columns(write_spaces_columns(path, written)), written)


def simple(n_steps=4, **extra):
    trajectory = SpacesTrajectoryRecord("a")
    for step in range(n_steps):
        record = SpacesRecord(ActorID(0, 0), {"x": np.full(3, step, np.float32)}, {"a": step}, 1.0, False, {}, **extra)
        trajectory.append(StructuredSpacesRecord([record]))
    return trajectory


def test_tensors_and_batches_are_stored_as_arrays(tmp_path):
    record = SpacesRecord(
        ActorID(0, 0),
        observation={"x": torch.ones(2, 3)},
        reward=torch.zeros(2),
        batch_shape=[2],
    )
    trajectory = SpacesTrajectoryRecord("a")
    trajectory.append(StructuredSpacesRecord([record]))
    (read,) = read_spaces_columns(write_spaces_columns(tmp_path / "run", [trajectory]))
    (substep,) = read.step_records[0].substep_records
    assert substep.batch_shape == [2]
    np.testing.assert_array_equal(substep.observation["x"], np.ones((2, 3), np.float32))
    assert read.step_records[0].is_batched()


def test_of_infos_what_json_cannot_hold_is_left_out_with_a_warning(tmp_path, caplog):
    trajectory = simple(1)
    trajectory.step_records[0].substep_records[0].info = {
        "TimeLimit.truncated": True,
        "array": np.arange(2),
        "object": object(),
    }
    (read,) = read_spaces_columns(write_spaces_columns(tmp_path / "run", [trajectory]))
    assert read.step_records[0].infos == [{"TimeLimit.truncated": True, "array": [0, 1]}]
    assert "1 entries of `info`" in caplog.text


def test_what_is_no_number_is_refused_with_its_place(tmp_path):
    trajectory = simple(1)
    trajectory.step_records[0].substep_records[0].action = {"a": object()}
    with pytest.raises(EnvironmentContractError, match=r"`action` of ActorID\(step_key=0, agent_id=0\), key 'a'"):
        write_spaces_columns(tmp_path / "run", [trajectory])


def damaged(content: bytes, how: str) -> bytes:
    if how == "cut off":
        return content[: len(content) // 2]
    if how == "empty":
        return b""
    middle = len(content) // 3
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


@pytest.mark.parametrize("how", ["cut off", "empty", "flipped byte"])
def test_a_damaged_file_is_reported_and_never_read_as_something_else(tmp_path, how):
    path = write_spaces_columns(tmp_path / "run", [simple(50)])
    path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.raises(CheckpointError, match=r"run\.npz.* is damaged"):
        read_spaces_columns(path)


def test_pickled_content_is_refused(tmp_path):
    path = tmp_path / "run.npz"
    np.savez(path, manifest=np.array([{"format": "maze spaces columns"}], dtype=object))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_spaces_columns(path)


def test_foreign_and_newer_files_are_named(tmp_path):
    path = tmp_path / "run.npz"
    for manifest in ({"format": "other", "version": 1}, {"format": "maze spaces columns", "version": 99}):
        np.savez(path, manifest=np.frombuffer(json.dumps(manifest).encode(), dtype=np.uint8))
        with pytest.raises(CheckpointError, match="this release reads"):
            read_spaces_columns(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_spaces_columns(tmp_path / "missing.npz")


def test_columns_take_a_fraction_of_the_space_of_pickled_steps(tmp_path):
    rng = np.random.default_rng(1)
    trajectory = SpacesTrajectoryRecord("a")
    for step in range(500):
        observation = {"x": rng.normal(size=4).astype(np.float32)}
        record = SpacesRecord(ActorID(0, 0), observation, {"a": int(rng.integers(2))}, 1.0, step == 499, {})
        trajectory.append(StructuredSpacesRecord([record]))
    size = write_spaces_columns(tmp_path / "run", [trajectory]).stat().st_size
    assert 4 * size < len(pickle.dumps(trajectory, protocol=pickle.HIGHEST_PROTOCOL))
