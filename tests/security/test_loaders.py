"""What lies in files of strangers, or of a failing disk, is refused and never silent."""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch

from maze.core.errors import CheckpointError, MazeError
from maze.core.trajectory_recording.records.trajectory_record import load_trajectory
from maze.core.utils.checkpoint import load_state, save_state
from maze.core.utils.safe_pickle import safe_load
from tests.security.attack import _text, attack, legitimate_files, loaders


@pytest.mark.long
def test_generated_malicious_files_execute_no_code():
    outcomes, failures = attack(800, seed=7)
    assert failures == []
    assert sum(outcomes.values()) == 800
    assert sum(count for outcome, count in outcomes.items() if outcome.endswith("refused")) > 300


class Calls:
    """Pickled as a call of whatever it is given, with a state to be set afterwards."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


def refused(value: Any, **options: Any) -> str:
    content = value if isinstance(value, bytes) else pickle.dumps(value, 4)
    with pytest.raises(CheckpointError) as error:
        safe_load(io.BytesIO(content), **options)
    return str(error.value)


def test_an_environment_in_a_trajectory_is_not_made(tmp_path):
    from maze_envs.logistics.cutting_2d.env.maze_env import Cutting2DEnvironment

    marker = tmp_path / "marker"
    target = {"_target_": "torch.utils.collect_env.run", "command": f"touch {marker}"}
    path = tmp_path / "episode.pkl"
    path.write_bytes(pickle.dumps(Calls(Cutting2DEnvironment, target, {}, {})))
    with pytest.raises(CheckpointError, match="Cutting2DEnvironment"):
        load_trajectory(path)
    assert not marker.exists()


def test_imitation_of_such_a_trajectory_runs_nothing_either(tmp_path):
    from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
    from maze_envs.logistics.cutting_2d.env.maze_env import Cutting2DEnvironment

    marker = tmp_path / "marker"
    (tmp_path / "data").mkdir()
    target = {"_target_": "torch.utils.collect_env.run", "command": f"touch {marker}"}
    (tmp_path / "data" / "a.pkl").write_bytes(pickle.dumps(Calls(Cutting2DEnvironment, target, {}, {})))
    with pytest.raises(MazeError, match="Cutting2DEnvironment"):
        InMemoryDataset(dir_or_file=str(tmp_path / "data"), conversion_env_factory=None, n_workers=1)
    assert not marker.exists()


def reconstruct(state: Any) -> Calls:
    return Calls(np._core.multiarray._reconstruct, np.ndarray, (0,), b"b", state=state)


OBJECTS = np.dtype("O")


@pytest.mark.parametrize(
    "value",
    [
        Calls(np.ndarray, (1,), OBJECTS, b"A" * 8),
        reconstruct((1, (1,), OBJECTS, False, b"A" * 8)),
        reconstruct((1, (2,), OBJECTS, False, [1])),
        reconstruct((1, (2**40,), np.dtype("f4"), False, b"AAAA")),
        reconstruct((1, (-1,), np.dtype("f4"), False, b"AAAA")),
        Calls(np._core.multiarray.scalar, OBJECTS, b"A" * 8),
        Calls(np._core.multiarray.scalar, np.dtype("f8"), b"A"),
        Calls(np._core.numeric._frombuffer, b"A" * 8, OBJECTS, (1,), "C"),
        Calls(np._core.numeric._frombuffer, b"A" * 8, np.dtype("f8"), (2,), "C"),
        Calls(np.dtype, "V4", False, True, state=(3, "|", None, ("a",), {"a": (np.dtype("f8"), 0)}, 8, 1, 16)),
        Calls(np.dtype, "V8", False, True, state=(3, "|", None, ("a",), {"a": (np.dtype("f8"), 9)}, 8, 1, 16)),
        Calls(np.dtype, "V8", False, True, state=(3, "|", None, ("a",), {"a": (OBJECTS, 0)}, 8, 1, 27)),
        Calls(np.dtype, "U1", False, True, state=(3, "<", None, None, None, 4000, 4, 8)),
        Calls(torch._utils._rebuild_tensor_v2, torch.zeros(1), 0, (2**40,), (0,), False, OrderedDict()),
        Calls(bytearray, 2**50),
        Calls(list, range(2**50)),
        Calls(set, range(2**50)),
        Calls(deque, range(2**50)),
        Calls(defaultdict, Calls),
        Calls(__import__("fractions").Fraction, "1e999999999"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value.parts))[:60],
)
def test_values_that_do_not_fit_are_refused_before_numpy_or_torch_see_them(value):
    refused(value)


def test_random_generators_with_impossible_positions_are_refused():
    for name, key, value in (("MT19937", "pos", 10**9), ("Philox", "buffer_pos", -9), ("PCG64", "has_uint32", 7)):
        state = getattr(np.random, name)(1).state
        (state["state"] if key == "pos" else state)[key] = value
        call = Calls(np.random._pickle.__dict__["__bit_generator_ctor"], name, state=(state, None))
        assert key in refused(call)


@pytest.mark.parametrize("klass", [PosixPath, defaultdict, OrderedDict, np.ndarray, np.dtype])
@pytest.mark.parametrize("state", [(None, {"_str": "/any/file"}), {"_str": "/any/file"}])
def test_attributes_of_classes_and_functions_stay_what_they_are(klass, state):
    before = dict(vars(klass))
    content = pickle.dumps(klass, 4)[:-1] + pickle.dumps(state, 4)[2:-1].replace(b"\x94", b"") + b"b."
    refused(content)
    assert dict(vars(klass)) == before
    from maze.core.env.base_env_events import BaseEnvEvents

    refused(pickle.dumps(BaseEnvEvents, 4)[:-1] + b"N}\x8c\x01aK\x01s\x86b.")
    assert not hasattr(BaseEnvEvents, "a")


def nested(depth: int, step: bytes, start: bytes = b")") -> bytes:
    return b"\x80\x04" + start + step * depth + b"."


def doubled(number: int) -> bytes:
    """A list that holds the one before it twice."""
    return b"]\x94(h" + bytes([number]) + b"h" + bytes([number]) + b"e"


def recalled(argument: bytes, module: str, name: str, times: int) -> bytes:
    """The same call many times, with an argument that the file holds once."""
    return (
        b"\x80\x04"
        + argument
        + b"\x940"
        + _text(module)
        + _text(name)
        + b"\x93\x940("
        + b"h\x01h\x00\x85R" * times
        + b"t."
    )


@pytest.mark.parametrize(
    "content",
    [
        nested(200_000, b"\x85") [:-1] + b"}\x94h\x00N0N" + b"\x92.",  # opcodes without sense
        b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns.",  # a key whose hash overflows the stack
        b"\x80\x04}" + b")" + b"\x942\x86" * 60 + b"Ns.",  # a key whose hash takes for ever
        b"\x80\x04]" + b"\x942]\x94" + b"".join(map(doubled, range(2, 60))) + b".",
        b"\x80\x04]\x94(h\x00h\x00e.",  # a list that holds itself
        b"\x80\x04\x96" + struct.pack("<Q", 2**40) + b".",
        b"\x80\x04N" + b"r" + struct.pack("<I", 2**32 - 1) + b"0.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N0.",
        recalled(b"B" + struct.pack("<I", 2**20) + bytes(2**20), "builtins", "bytearray", 4000),
        recalled(b"X" + struct.pack("<I", 2**20) + b"a" * 2**20, "_codecs", "encode", 4000),
        recalled(b"(" + b"K\x01" * 100_000 + b"l", "builtins", "set", 400),
        b"\x80\x04(" + b"K\x01" * 990 + b"t\x940}("
        + b"".join(b"h\x00J" + struct.pack("<i", number) + b"\x86N" for number in range(2000)) + b"u.",
    ],
    ids=["opcodes", "deep key", "wide key", "wide lists", "itself", "bytearray", "memo", "frame", "copies of bytes",
         "copies of a text", "sets of a list", "keys that share a part"],
)  # fmt: skip
def test_small_files_exhaust_neither_memory_nor_time_nor_stack(content):
    refused(content)


DEEP = """
import io, sys
from maze.core.errors import CheckpointError
from maze.core.utils.safe_pickle import safe_load
text = lambda t: b"\\x8c" + bytes([len(t)]) + t.encode()
array = text("numpy._core.multiarray") + text("_reconstruct") + b"\\x93" + text("numpy") + text("ndarray")
array += b"\\x93K\\x00\\x85C\\x01b\\x87R"
dtype = text("numpy") + text("dtype") + b"\\x93" + text("O8") + b"\\x89\\x88\\x87R"
module, name, n = text("collections"), text("deque"), 60_000
contents = [
    b"\\x80\\x04" + (module + name + b"\\x93)R") * n + b"a" * (n - 1) + b".",
    b"\\x80\\x04" + (module + text("defaultdict") + b"\\x93)RN") * n + b"N" + b"s" * n + b".",
    b"\\x80\\x04" + (array + b"(K\\x01K\\x01\\x85" + dtype + b"\\x89(") * n + b"N" + b"ltb" * n + b".",
    b"\\x80\\x04" + b")" + b"\\x85" * n + b".",
    b"\\x80\\x04" + b"]" * n + b"a" * (n - 1) + b".",
]
for content in contents:
    try:
        print(type(safe_load(io.BytesIO(content))).__name__)
    except CheckpointError:
        print("refused")
"""


def test_chains_of_containers_do_not_overflow_the_stack_when_they_are_taken_apart():
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "refused", "refused", "tuple", "list"]), (
        done.stderr
    )


KINDS = ("state", "statistics", "spaces", "trajectory", "actions")


def same(first: Any, second: Any) -> bool:
    return plain(first) == plain(second)


def plain(value: Any) -> Any:  # noqa: PLR0911 - a case per type
    """What can be compared by ==."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.dtype, plain(value.float())
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        array = np.asarray(value)
        content = [plain(entry) for entry in array.flat] if array.dtype.hasobject else array.tobytes()
        return type(value), str(array.dtype), array.shape, content
    if isinstance(value, dict):
        return [(plain(key), plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, np.random.Generator):
        return plain(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return plain(value.get_state())
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return type(value), plain(vars(value))
    return (type(value), [plain(getattr(value, name)) for name in slots]) if slots else value


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_is_silent(kind, tmp_path):
    content = legitimate_files(tmp_path)[kind][0]
    read, path = loaders()[kind], tmp_path / "file"
    path.write_bytes(content)
    expected = read(path)
    n_bits, n_silent = 8 * len(content), 0
    # all bits of the first and last bytes, and of the others one of each (one of ten, of large files)
    ends = (*range(min(200, n_bits)), *range(max(0, n_bits - 800), n_bits))
    others = (8 * byte + byte % 8 for byte in range(0, len(content), 1 if len(content) < 1000 else 10))
    chosen = sorted({*ends, *others})
    for bit in chosen:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = read(path)
        except CheckpointError:
            continue
        n_silent += not same(found, expected)
    assert n_silent == 0


def test_the_folder_bit_of_an_entry_is_noticed_with_and_without_a_checksum_of_the_file(tmp_path):
    state = {"w": torch.arange(4.0)}
    save_state(tmp_path / "ours.pt", state)
    torch.save(state, tmp_path / "others.pt")
    for name in ("ours.pt", "others.pt"):
        content = bytearray((tmp_path / name).read_bytes())
        assert torch.equal(load_state(io.BytesIO(content))["w"], state["w"])
        entry = content.rindex(b"PK\1\2", 0, content.rindex(b"/data/0"))
        content[entry + 38] ^= 0x10
        with pytest.raises(CheckpointError):
            load_state(io.BytesIO(content))


def test_files_stay_what_other_programs_read(tmp_path):
    files = legitimate_files(tmp_path)
    assert (
        torch.load(io.BytesIO(files["state"][0]), weights_only=True).keys()
        == torch.load(io.BytesIO(files["state"][0]), weights_only=False).keys()
    )
    assert set(pickle.loads(files["statistics"][0])) == {"o"}
    assert pickle.loads(files["trajectory"][0]).id == "first"
    assert set(json.loads(files["actions"][0])) == {"episode_id", "seed", "actions", "crc32"}


def test_a_checkpoint_keeps_types_shapes_ties_and_gradients(tmp_path):
    tied = torch.arange(6.0).reshape(2, 3)
    state = {
        "tied": [tied, tied.t()], "bool": torch.tensor([True, False]), "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4), "scalar": torch.tensor(3, dtype=torch.int64), "part": torch.arange(10)[2:8:2],
        "parameter": torch.nn.Parameter(torch.ones(2)), "complex": torch.ones(2, dtype=torch.complex64),
        "plain": {"a": (1, 2.5, None, b"x", "y", True, {3}, 10**30)}, "dtype": torch.float32, "size": torch.Size([2]),
        "device": torch.device("cpu"), "numpy": np.float64(1.5), "array": np.arange(3),
    }  # fmt: skip
    save_state(tmp_path / "state.pt", state)
    found = load_state(tmp_path / "state.pt")
    expected = torch.load(tmp_path / "state.pt", weights_only=False)
    assert same(
        {key: value for key, value in found.items() if key != "parameter"},
        {key: value for key, value in expected.items() if key != "parameter"},
    )
    assert found["parameter"].requires_grad
    found["tied"][0][0, 1] = 9.0
    assert found["tied"][1][1, 0] == 9.0
    assert Path(tmp_path / "state.pt").stat().st_size > 0
