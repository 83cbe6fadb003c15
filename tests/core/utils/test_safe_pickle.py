from __future__ import annotations

import datetime
import io
import os
import pickle
from abc import ABC
from collections import OrderedDict, defaultdict, deque
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import CheckpointError
from maze.core.utils.safe_pickle import safe_load


def round_trip(value: Any, protocol: int = pickle.HIGHEST_PROTOCOL, **options: Any) -> Any:
    return safe_load(io.BytesIO(pickle.dumps(value, protocol=protocol)), **options)


class OwnEvents(ABC):
    """Events of a user's environment."""

    def happened(self, value: int) -> None:
        """Something happened."""

    def stopped(self) -> None:
        pass


class ActingEvents(ABC):
    def happened(self) -> None:
        os.getcwd()


SPACE = gym.spaces.Dict(
    {
        "box": gym.spaces.Box(0, 1, (3,), np.float32),
        "discrete": gym.spaces.Discrete(3, start=1),
        "others": gym.spaces.Tuple((gym.spaces.MultiBinary(2), gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Text(4))),
    }
)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.0, None, "x", b"y"], "b": {1, 2}, "c": frozenset([3]), "d": (1j, slice(1, 2))},
        OrderedDict(a=1),
        defaultdict(list, a=[1]),
        deque([1], maxlen=3),
        datetime.datetime(2020, 1, 2),
        SPACE,
        BaseEnvEvents,
        OwnEvents,
        np.float32(2.5),
        np.dtype([("a", "<i4")]),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_data_survives_the_trip(value, protocol):
    assert round_trip(value, protocol) == value


@pytest.mark.parametrize("event", [BaseEnvEvents.reward, OwnEvents.happened, OwnEvents.stopped])
def test_events_of_any_interface_survive_because_calling_them_does_nothing(event):
    assert round_trip(event) is event


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((3, 4))), np.array("x"), np.array([{"a": 1}], dtype=object)],
)
def test_arrays_survive_the_trip(array):
    found = round_trip(array)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


def test_generators_and_seeded_spaces_continue_their_sequences():
    for generator in (np.random.default_rng(3), np.random.RandomState(3)):
        assert round_trip(generator).normal() == generator.normal()
    space = gym.spaces.Box(0, 1, (3,))
    space.seed(4)
    space.sample()
    np.testing.assert_array_equal(round_trip(space).sample(), space.sample())


def test_tensors_survive_and_their_storage_brings_no_code_along():
    assert torch.equal(round_trip(torch.arange(4.0)), torch.arange(4.0))

    class Storage:
        def __reduce__(self) -> Any:
            buffer = io.BytesIO()
            torch.save(Call(os.getpid), buffer)
            return torch.storage._load_from_bytes, (buffer.getvalue(),)

    with pytest.raises(CheckpointError):
        round_trip(Storage())


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Call(os.system, "true"), "posix.system"),
        (Call(eval, "1"), "builtins.eval"),
        (Call(getattr, 1, "real"), "builtins.getattr"),
        (Call(np.load, "x"), "numpy.load"),
        (Call(__import__, "antigravity"), "builtins.__import__"),
        (ActingEvents, "ActingEvents"),
        (ActingEvents.happened, "ActingEvents.happened"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_other_types_are_refused_by_name(value, name):
    with pytest.raises(CheckpointError, match=name):
        round_trip(value)


def test_a_name_is_not_even_imported():
    import sys

    code = b"\x80\x04\x8c\x0bantigravity\x8c\x01x\x93."
    with pytest.raises(CheckpointError, match=r"antigravity\.x"):
        safe_load(io.BytesIO(code))
    assert "antigravity" not in sys.modules


def test_imports_of_an_allowed_module_are_not_allowed():
    code = f"\x80\x04\x8c{chr(len(__name__))}{__name__}\x8c\x09os.system\x93.".encode("latin-1")
    with pytest.raises(CheckpointError, match=r"os\.system"):
        safe_load(io.BytesIO(code), allowed=[f"{__name__}.*"])


def test_references_out_of_the_file_are_refused():
    with pytest.raises(CheckpointError, match="outside the file"):
        safe_load(io.BytesIO(b"\x80\x04\x8c\x01aQ."))
