"""Checkpoints: whatever happens to a file, the state is either the one that was saved or an error that says why."""

import io
import os
import pickle
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.core.agent.torch_state_critic import TorchStepStateCritic
from maze.core.errors import CheckpointError
from maze.core.utils import checkpoint
from maze.core.utils.checkpoint import load_into, load_state, save_state

STATE = {"policies": {0: {"weight": torch.arange(6.0).reshape(2, 3)}}, "epoch": 3, "best": 1.5}


def assert_same(state, expected=STATE):
    assert torch.equal(state["policies"][0]["weight"], expected["policies"][0]["weight"])
    assert (state["epoch"], state["best"]) == (expected["epoch"], expected["best"])


def saved_bytes():
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    return buffer.getvalue()


CONTENT = saved_bytes()


def test_a_saved_state_is_loaded_again_from_path_and_from_file(tmp_path):
    path = tmp_path / "latest.pt"
    save_state(path, STATE)
    assert_same(load_state(path))
    assert_same(load_state(str(path)))
    with path.open("rb") as file:
        assert_same(load_state(file))
    assert [file.name for file in tmp_path.iterdir()] == ["latest.pt"]


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, len(CONTENT) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_never_changes_the_loaded_state_silently(position, bit):
    damaged = bytearray(CONTENT)
    damaged[position] ^= 1 << bit
    try:
        state = load_state(io.BytesIO(bytes(damaged)))
    except CheckpointError:
        return
    assert_same(state)  # bytes that carry no content, such as padding


@pytest.mark.parametrize("length", [1, 3, 30, 200, len(CONTENT) // 2, len(CONTENT) - 30, len(CONTENT) - 1])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, length):
    path = tmp_path / "state_dict.pt"
    path.write_bytes(CONTENT[:length])
    with pytest.raises(CheckpointError, match=r"state_dict\.pt"):
        load_state(path)


def foreign_zip():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("report.csv", "1,2")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is 0 bytes of something else"),
        (b"\n<!doctype html><html>sign in</html>", "is an HTML page; expected a checkpoint"),
        (b"not a checkpoint", "is 16 bytes of something else; expected a checkpoint"),
        (foreign_zip(), r"is a zip archive of something else \(it holds report.csv\)"),
        (CONTENT[:-40], "is damaged or was cut off"),
    ],
)
def test_a_foreign_file_raises_an_error_that_describes_it(tmp_path, content, message):
    path = tmp_path / "state_dict.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_state(path)


def test_a_missing_file_and_a_directory_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint .*state_dict.pt`. Training writes one"):
        load_state(tmp_path / "state_dict.pt")
    with pytest.raises(CheckpointError, match="is a directory"):
        load_state(tmp_path)


class Malicious:
    def __reduce__(self):
        return (os.system, ("echo executed > executed.txt",))


def test_a_malicious_file_is_refused_and_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": Malicious()}, tmp_path / "state_dict.pt")
    with pytest.raises(CheckpointError, match="nothing in it is executed"):
        load_state(tmp_path / "state_dict.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointError):
        load_state(tmp_path / "old.pt")
    assert not (tmp_path / "executed.txt").exists()


def test_a_file_that_holds_no_dictionary_is_refused(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    with pytest.raises(CheckpointError, match="holds a Tensor; expected a state dictionary"):
        load_state(tmp_path / "tensor.pt")


def test_a_full_disk_leaves_the_previous_file_untouched(tmp_path, monkeypatch):
    path = tmp_path / "latest.pt"
    save_state(path, STATE)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match=r"latest.pt.*No space left on device.*previous file is unchanged"):
        save_state(path, {"epoch": 4})
    assert_same(load_state(path))
    assert [file.name for file in tmp_path.iterdir()] == ["latest.pt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="Could not write the checkpoint"):
        save_state(tmp_path / "missing" / "latest.pt", STATE)


def critic_of(*layers: nn.Module) -> TorchStepStateCritic:
    """Return a model of one network."""
    return TorchStepStateCritic({0: nn.Sequential(*layers)}, {}, "cpu")


def test_weights_that_do_not_fit_are_listed_and_the_model_stays_as_it_is():
    model = critic_of(nn.Linear(3, 2), nn.Linear(2, 1))
    before = {name: value.clone() for name, value in model.networks[0].state_dict().items()}
    other = critic_of(nn.Linear(3, 2), nn.Linear(2, 5), nn.Linear(5, 1)).state_dict()
    del other["critics"][0]["0.bias"]
    with pytest.raises(CheckpointError) as error:
        load_into(model, other, "state_dict.pt")
    message = str(error.value)
    assert message.startswith("state_dict.pt does not fit the model, which is unchanged.")
    assert "`0.bias` is missing" in message
    assert "`2.weight` is left over" in message
    assert "`2.bias` is left over" in message
    assert "`1.weight` is (5, 2), the model has (1, 2)" in message
    for name, value in model.networks[0].state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("critics", [None, {0: None}, {0: {"0.weight": 1.0, "0.bias": torch.zeros(2)}}])
def test_states_that_hold_something_else_than_weights_are_refused(critics):
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_into(critic_of(nn.Linear(3, 2)), {"critics": critics})


def test_weights_that_fit_are_loaded():
    source, target = critic_of(nn.Linear(3, 2)), critic_of(nn.Linear(3, 2))
    load_into(target, source.state_dict())
    assert torch.equal(source.networks[0][0].weight, target.networks[0][0].weight)


def test_long_lists_of_differences_are_shortened():
    with pytest.raises(CheckpointError, match="and 14 more"):
        load_into(critic_of(*[nn.Linear(1, 1) for _ in range(10)]), {"critics": {0: {}}})


def test_checkpoints_are_verified_before_they_are_unpickled(monkeypatch):
    damaged = CONTENT.replace(b"\x00\x00\xa0\x40", b"\x00\x00\xa1\x40")  # the last weight, 5.0
    assert damaged != CONTENT
    monkeypatch.setattr(checkpoint, "read_pickle", lambda *args, **kwargs: pytest.fail("was unpickled"))
    with pytest.raises(CheckpointError, match="checksum of its part"):
        load_state(io.BytesIO(damaged))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_come_back(tmp_path, dtype):
    save_state(tmp_path / "state.pt", {"numbers": torch.arange(6).to(dtype).reshape(2, 3)})
    found = load_state(tmp_path / "state.pt")["numbers"]
    assert (found.dtype, found.tolist()) == (dtype, [[0, 1, 2], [3, 4, 5]])
