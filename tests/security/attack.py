"""Attacks every loader with generated files: `python -m tests.security.attack --files 100000 --seed 0`.

Files are programs of pickle opcodes over every name that a loader allows (and some that none does), and mutations of
files as Maze writes them, with and without a valid checksum. They are read in child processes under an audit hook. A
crash, more than five seconds for a file, an attribute of a class or module that has changed, a file that was touched,
a process, connection, import or execution of code is a failure; so is any other exception than those of Maze.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import mmap
import os
import pickle
import pkgutil
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import maze_envs
from tests.security import own_package

SECONDS_PER_FILE = 5
MEMORY = 6 << 30
_FORBIDDEN_EVENTS = (
    "exec", "import", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pickle.", "marshal.", "code.__new__",
    "webbrowser.", "urllib.", "tempfile.", "glob.", "pathlib.", "signal.", "pty.", "mmap.__new__",
)  # fmt: skip
_HARMLESS_EVENTS = ("os.rename", "os.scandir", "os.listdir", "pathlib.Path.glob")  # other checkpoints are looked for
_EVIL = [
    ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("subprocess", "Popen"),
    ("numpy", "load"), ("numpy.testing", "runstring"), ("torch.utils.collect_env", "run"), ("functools", "partial"),
    ("maze.core.utils.safe_pickle", "safe_load"), ("maze.core.utils.pickle_rules", "trusted_class"),
    ("maze_envs.logistics.cutting_2d.env.maze_env", "Cutting2DEnvironment"), ("antigravity", "x"),
    ("maze.core.env.base_env_events", "BaseEnvEvents.reward.__globals__"), ("copyreg", "_reconstructor"),
    ("builtins", "object.__subclasses__"), ("operator", "attrgetter"), ("types", "FunctionType"),
]  # fmt: skip

_TEXTS = [
    "f4", "O8", "V8", "U5", "i4", "<", ">", "|", "C", "b", "latin1", "data", "pos", "_str", "__class__", "__dict__",
    "PCG64", "MT19937", "storage", "0", "step_records", "int",
]  # fmt: skip


# -- files as Maze writes them ----------------------------------------------------------------------------------------


def legitimate_files(directory: Path) -> dict[str, list[bytes]]:
    """Small files of each kind, as their writers leave them."""
    import gymnasium as gym
    import numpy as np
    import torch
    from optuna.distributions import CategoricalDistribution

    from maze.cli.sweeps.results import STUDY_FILE
    from maze.cli.sweeps.space import SearchSpace
    from maze.cli.sweeps.study import Plan, SweepStudy
    from maze.core.env.base_env_events import BaseEnvEvents
    from maze.core.env.structured_env import ActorID
    from maze.core.events.event_collection import EventCollection
    from maze.core.events.event_record import EventRecord
    from maze.core.log_events.step_event_log import StepEventLog
    from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
    from maze.core.trajectory_recording.records.state_record import StateRecord
    from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
    from maze.core.trajectory_recording.records.trajectory_record import (
        ActionRecord,
        SpacesTrajectoryRecord,
        StateTrajectoryRecord,
    )
    from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
    from maze.core.utils.checkpoint import save_state
    from maze.core.wrappers.observation_normalization.normalization_strategies.base import save_statistics
    from maze.perception.models.space_config import SpacesConfig
    from maze_envs.logistics.cutting_2d.env.maze_state import Cutting2DMazeState

    def content(name: str) -> bytes:
        return (directory / name).read_bytes()

    space = gym.spaces.Dict(
        {"a": gym.spaces.Box(0, 1, (3,)), "b": gym.spaces.Discrete(3), "c": gym.spaces.MultiBinary(2)}
    )
    seeded = gym.spaces.Dict({"box": gym.spaces.Box(0, 1, (3,)), "text": gym.spaces.Text(2)})
    seeded.seed(3)
    trajectory = StateTrajectoryRecord("first")
    event = EventRecord(BaseEnvEvents, BaseEnvEvents.reward, {"value": 1.0})
    states = [
        {"x": np.arange(3.0), "y": np.array([{"z": 1}], dtype=object), "t": torch.ones(2)},
        Cutting2DMazeState(((1, 2),), 3, (1, 1), (5, 5)),
        {"space": seeded, "rng": np.random.RandomState(1), "gen": np.random.default_rng(1), "s": np.float32(2)},
        {"d": np.zeros(2, [("a", "<i4"), ("b", ">f8")]), "when": np.datetime64("2020-01-01"), "k": {1, (2, 3)}},
    ]
    for state in states:
        events = StepEventLog(1, EventCollection([event]))
        trajectory.append(StateRecord(state, {"action": 1}, events, 1.0, False, {}, {}))
    TrajectoryWriterFile(directory).write(trajectory)

    spaces_trajectory = SpacesTrajectoryRecord("second")
    for step in range(3):
        record = SpacesRecord(ActorID(0, 0), {"o": np.full(2, step)}, {"a": np.int64(1)}, 1.0, False, {"i": 1})
        spaces_trajectory.append(StructuredSpacesRecord([record]))

    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    save_state(directory / "state_dict.pt", network.state_dict())
    latest = {"training_state": {"optimizer": optimizer.state_dict(), "epoch": 3, "flags": torch.tensor([True])}}
    save_state(directory / "latest.pt", {**latest, "weights": {"policies": {0: network.state_dict()}}})
    save_statistics(directory / "statistics.pkl", {"o": {"mean": np.zeros(3), "std": np.ones(3, np.float32)}})
    SpacesConfig({0: space}, {"key": space}, {0: 1}).save(directory / "spaces_config.pkl")
    actions = ActionRecord("third", 5)
    actions.append(ActorID(0, 0), {"a": np.arange(2), "b": 1.5})
    name = actions.save(directory / "actions").relative_to(directory)
    grid = Plan("grid", SearchSpace({"a": CategoricalDistribution(("1", "2"))}, ()), True, {})
    with SweepStudy(directory, True) as study:
        study.begin(grid, {"seeds": [None]})
        trial = study.propose()
        assert trial is not None
        study.finish(trial, trial.result([None]))
    config = (
        b"env: {_target_: maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env, name: CartPole-v1,\n"
        b"  x: '${model.a}'}\n"
        b"model: {_target_: maze.perception.models.custom_model_composer.CustomModelComposer,\n"
        b"  a: torch.nn.Tanh, b: [1]}\n"
    )
    return {
        "state": [content("state_dict.pt"), content("latest.pt")],
        "statistics": [content("statistics.pkl")],
        "spaces": [content("spaces_config.pkl")],
        "trajectory": [content("first.pkl"), pickle.dumps(trajectory, 4), pickle.dumps(spaces_trajectory, 2)],
        "actions": [content(str(name))],
        "study": [content(STUDY_FILE)],
        "config": [config],
    }


def loaders() -> dict[str, Callable[[Path], Any]]:
    """What reads each kind of file."""
    from maze.cli.sweeps.results import STUDY_FILE
    from maze.cli.sweeps.study import SweepStudy
    from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
    from maze.core.trajectory_recording.records.trajectory_record import ActionRecord
    from maze.core.utils.checkpoint import load_state
    from maze.core.utils.stored_config import read_stored_config, refuse_foreign_targets
    from maze.core.wrappers.observation_normalization.normalization_strategies.base import load_statistics
    from maze.perception.models.space_config import SpacesConfig

    def config(path: Path) -> None:
        refuse_foreign_targets(read_stored_config(path).value(), path)

    def study(path: Path) -> Any:
        path.replace(path.with_name(STUDY_FILE))
        try:
            with SweepStudy(path.parent, True) as study:
                return study.settings
        finally:
            path.with_name(STUDY_FILE).replace(path)

    return {
        "state": load_state,
        "statistics": load_statistics,
        "spaces": SpacesConfig.load,
        "trajectory": lambda path: list(InMemoryDataset.deserialize_trajectory(path, own_packages=["tests"])),
        "actions": ActionRecord.load,
        "study": study,
        "config": config,
    }


# -- generated files --------------------------------------------------------------------------------------------------


class Generator:
    """Files by number: the same for the same seed.

    :param seed: Of all files.
    :param legitimate: Contents by kind.
    """

    def __init__(self, seed: int, legitimate: dict[str, list[bytes]]) -> None:
        from maze.core.trajectory_recording.records import trajectory_record
        from maze.core.utils.pickle_rules import plain_rules, space_rules, torch_rules

        self.seed = seed
        self.legitimate = legitimate
        classes = trajectory_record._DATA_CLASSES | trajectory_record._EVENTS
        allowed = [*plain_rules(), *space_rules(), *torch_rules(), *classes, "torch.storage._load_from_bytes"]
        own = [("tests.security.own_package", name) for name in own_package.NAMES]
        modules = [info.name for info in pkgutil.walk_packages(maze_envs.__path__, "maze_envs.")]
        shipped = [(module, name) for module in modules for name in vars(importlib.import_module(module))]
        self.names = [*(tuple(name.rsplit(".", 1)) for name in allowed), *_EVIL, *own, *shipped]
        self.events = [("maze.core.env.base_env_events", "BaseEnvEvents.reward")]
        self.pickles = [*legitimate["statistics"], *legitimate["spaces"], *legitimate["trajectory"]]

    def file(self, number: int) -> tuple[str, bytes]:
        """Kind and content of a file."""
        chooser = random.Random(self.seed << 40 | number)
        kind = chooser.choice(["trajectory", "trajectory", "trajectory", "statistics", "spaces", "state", "state",
                               "actions", "study"] if chooser.random() < 0.95 else ["config"])  # fmt: skip
        if kind in ("trajectory", "statistics", "spaces"):
            made = self.program(chooser) if chooser.random() < 0.7 else self.mutated_pickle(chooser)
            return kind, self.sealed(chooser, made)
        if kind == "state":
            return kind, self.sealed(chooser, self.checkpoint(chooser))
        content = chooser.choice(self.legitimate[kind])
        if kind == "config" and chooser.random() < 0.5:
            return kind, self.config(chooser)
        return kind, self.mutated(chooser, content)

    def program(self, chooser: random.Random, length: int | None = None) -> bytes:  # noqa: PLR0912 - a case per kind
        """A pickle of random opcodes that mostly find on the stack what they need."""
        out, depth, marks, n_memo = bytearray(b"\x80\x04"), 0, [], 0
        for _ in range(length or chooser.choice([3, 10, 40, 120])):
            kind = chooser.random()
            if kind < 0.3 or depth == 0:
                out += self.atom(chooser)
                depth += 1
            elif kind < 0.45:
                module, name = chooser.choice([*self.names, *self.events])
                out += _text(module) + _text(name) + b"\x93"
                depth += 1
            elif kind < 0.5:
                out += b"("
                marks.append(depth)
            elif kind < 0.6 and marks:
                out += chooser.choice([b"t", b"l", b"d", b"\x91", b"t"])
                depth = marks.pop() + 1
            elif kind < 0.66 and marks and marks[-1] > 0:
                out += chooser.choice([b"e", b"u", b"\x90"])
                depth = marks.pop()
            elif kind < 0.72 and n_memo:
                out += b"h" + bytes([chooser.randrange(min(n_memo, 255))])
                depth += 1
            elif kind < 0.78:
                out += b"\x94"
                n_memo += 1
            elif kind < 0.8:
                out += chooser.choice([b"2", b"0"])
                depth += 1 if out[-1] == ord("2") else -1
            elif depth >= 2:
                operation = chooser.choice(
                    [b"R", b"R", b"R", b"b", b"b", b"\x81", b"\x81", b"a", b"\x86", b"s", b"\x92"]
                )
                if operation in b"sR\x81" and chooser.random() < 0.5:
                    out += chooser.choice([b")", b"}", b"]", b"\x85"])
                    depth += 0 if out[-1] == 0x85 else 1
                out += operation
                depth -= {b"s": 2, b"\x92": 2}.get(operation, 1)
                depth = max(depth, 0)
            else:
                out += b"\x85"
        while depth > 1 and chooser.random() < 0.98:
            out += b"\x86"
            depth -= 1
        return bytes(out) + b"."

    def atom(self, chooser: random.Random) -> bytes:  # noqa: PLR0911 - a case per kind
        """A value."""
        choice = chooser.randrange(14)
        if choice == 0:
            return b"K" + bytes([chooser.randrange(256)])
        if choice == 1:
            return b"J" + struct.pack("<i", chooser.choice([-1, -(2**31), 2**31 - 1, 624, 65]))
        if choice == 2:
            return b"\x8a\x08" + struct.pack("<q", chooser.choice([2**62, -(2**62), 10**12]))
        if choice == 3:
            return b"G" + struct.pack(">d", chooser.choice([0.0, 1e308, float("nan"), float("inf"), -1.5]))
        if choice <= 6:
            return _text(chooser.choice(_TEXTS))
        if choice == 7:
            data = chooser.choice([b"", b"b", b"A" * 8, b"\0" * 16, os.urandom(0) + bytes(range(24))])
            return b"C" + bytes([len(data)]) + data
        if choice == 8:
            return b"\x96" + struct.pack("<Q", 8) + b"B" * 8
        if choice == 9:
            return self.array(chooser)
        return chooser.choice([b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"(K\x00t", b"K\x00\x85", b"N}\x86"])

    def array(self, chooser: random.Random) -> bytes:
        """An array or its parts, often with parts that do not fit."""
        named = _text("numpy") + _text("dtype") + b"\x93"
        kind = _text(chooser.choice(["f4", "O8", "V8", "U2", "M8", "c16", "i8"]))
        dtype = named + kind + b"\x89\x88\x87R"
        if chooser.random() < 0.5:
            order = chooser.choice(["<", ">", "|"])
            fields = chooser.choice([b"NNN", b"N(" + _text("a") + b"t}" + _text("a") + dtype + b"K\x00\x86s"])
            size = chooser.choice([b"J\xff\xff\xff\xff", b"K\x08", b"M\xff\xff"])
            dtype += (
                b"(K\x03"
                + _text(order)
                + fields
                + size
                + b"J\xff\xff\xff\xffK"
                + bytes([chooser.choice([0, 8, 63])])
                + b"tb"
            )
        if chooser.random() < 0.3:
            return dtype
        module = chooser.choice(["numpy._core.multiarray", "numpy.core.multiarray"])
        shell = (
            _text(module)
            + _text("_reconstruct")
            + b"\x93"
            + _text("numpy")
            + _text("ndarray")
            + b"\x93K\x00\x85C\x01b\x87R"
        )
        shape = chooser.choice(
            [b"K\x01\x85", b"K\x02K\x02\x86", b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85", b")", b"K\x00\x85"]
        )
        values = chooser.choice(
            [b"C\x08AAAAAAAA", b"C\x10AAAAAAAABBBBBBBB", b"(K\x01l", b"(K\x01K\x02l", b"]", b"C\x00"]
        )
        return shell + b"(K\x01" + shape + dtype + chooser.choice([b"\x88", b"\x89"]) + values + b"tb"

    def mutated_pickle(self, chooser: random.Random) -> bytes:
        """A legitimate pickle with some changes: names for others, parts of others, bytes."""
        content = bytearray(chooser.choice(self.pickles))
        for _ in range(chooser.choice([1, 1, 2, 5])):
            how = chooser.random()
            if how < 0.4:
                start = content.find(b"\x93", chooser.randrange(len(content)))
                if start >= 0:
                    module, name = chooser.choice(self.names)
                    content[start + 1 : start + 1] = b"0" + _text(module) + _text(name) + b"\x93"
            elif how < 0.7:
                place = chooser.randrange(len(content))
                content[place:place] = self.program(chooser, 8)[2:-1]
            else:
                content = bytearray(self.mutated(chooser, bytes(content)))
            if not content:
                break
        return bytes(content)

    def mutated(self, chooser: random.Random, content: bytes) -> bytes:
        """Content with bits flipped, and with parts removed, repeated or taken from another place."""
        changed = bytearray(content)
        for _ in range(chooser.choice([1, 1, 1, 3, 10])):
            place = chooser.randrange(len(changed)) if changed else 0
            length = chooser.choice([1, 1, 4, 30])
            how = chooser.random()
            if how < 0.5 and changed:
                changed[place] ^= 1 << chooser.randrange(8)
            elif how < 0.7:
                del changed[place : place + length]
            elif how < 0.85:
                changed[place:place] = changed[place : place + length] * chooser.choice([1, 2, 50])
            else:
                other = chooser.randrange(len(changed) + 1)
                changed[place : place + length] = changed[other : other + length]
        return bytes(changed)

    def checkpoint(self, chooser: random.Random) -> bytes:
        """An archive like a checkpoint, around a made or mutated pickle."""
        content = chooser.choice(self.legitimate["state"])
        how = chooser.random()
        if how < 0.3:
            return self.mutated(chooser, content)
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(made, "w") as written:
            for entry in archive.infolist():
                data = archive.read(entry)
                if entry.filename.endswith("data.pkl"):
                    data = self.program_with_tensors(chooser) if how < 0.6 else self.mutated(chooser, data)
                elif chooser.random() < 0.1:
                    data = self.mutated(chooser, data) if data else data
                compression = zipfile.ZIP_DEFLATED if chooser.random() < 0.03 else zipfile.ZIP_STORED
                written.writestr(entry.filename, data, compression)
        return made.getvalue()

    def program_with_tensors(self, chooser: random.Random) -> bytes:
        """Opcodes with references to the archive's entries between them."""
        kind = chooser.choice(["FloatStorage", "LongStorage", "BoolStorage", "float32", "Tensor"])
        reference = b"(" + _text("storage") + _text("torch") + _text(kind) + b"\x93" + _text(str(chooser.randrange(3)))
        reference += _text("cpu") + b"K" + bytes([chooser.choice([1, 2, 4, 200])]) + b"tQ"
        size = chooser.choice([b"K\x02\x85", b"K\x02K\x02\x86", b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85", b")"])
        stride = chooser.choice([b"K\x01\x85", b"K\x02K\x01\x86", b"K\x00\x85", b")", b"J\xff\xff\xff\xff\x85"])
        tensor = _text("torch._utils") + _text("_rebuild_tensor_v2") + b"\x93(" + reference
        tensor += b"K" + bytes([chooser.choice([0, 0, 1, 255])]) + size + stride + b"\x89NtR"
        return b"\x80\x02}" + _text("w") + tensor + b"s" + _text("x") + self.program(chooser, 10)[2:-1] + b"s."

    def config(self, chooser: random.Random) -> bytes:
        """A stored configuration that names something else somewhere."""
        text = self.legitimate["config"][0].decode()
        evil = chooser.choice([".".join(name) for name in _EVIL] + ["antigravity:X-v0", "torch.load", "${oc.env:PATH}"])
        old = chooser.choice(
            ["torch.nn.Tanh", "CartPole-v1", "'${model.a}'", "[1]", "name:", "_target_: maze.perception"]
        )
        new = chooser.choice([f"'{evil}'", f"{{_target_: '{evil}'}}", f"[{{a: {{_target_: '{evil}', _args_: [1]}}}}]"])
        return text.replace(old, new if not old.endswith(":") else f"'{evil}':", 1).encode()

    def sealed(self, chooser: random.Random, content: bytes) -> bytes:
        """With a checksum that fits in half of all cases."""
        import zlib

        is_archive = content[-22:-18] == b"PK\5\6"
        if chooser.random() < 0.5:
            return content
        if is_archive:
            content = content[:-2] + struct.pack("<H", 20)
        return content + b"maze-crc32:%08x\n" % zlib.crc32(content)


_JSON_VALUES: list[Any] = [
    None, True, -1, 0, 3, 10**30, 1.5, 1e308, float("nan"), "", "x", "0", [], {}, [[]], [None], {"x": 1}, [0] * 70,
    {"dtype": "float32", "shape": [2], "values": [1, 2]}, {"dtype": "float32", "shape": [10**9], "values": []},
    {"dtype": "int64", "shape": [], "values": [[1]]}, {"dtype": "bool", "shape": [0], "offset": 0},
]  # fmt: skip


def mutated_json(chooser: random.Random, value: Any) -> Any:
    """A copy with some values removed, renamed, nested or replaced, by those of other places as well."""
    value = json.loads(json.dumps(value))
    for _ in range(chooser.choice([1, 1, 1, 2, 4])):
        holders = [node for node in _containers(value) if node]
        if not holders:
            break
        holder, other = chooser.choice(holders), chooser.choice(holders)
        key = chooser.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        how = chooser.random()
        if how < 0.2:
            del holder[key]
        elif how < 0.3 and isinstance(holder, dict):
            holder[chooser.choice(["x", "0", "", "values"])] = holder.pop(key)
        elif how < 0.4:
            holder[key] = chooser.choice([[holder[key]], {"x": holder[key]}, str(holder[key])])
        elif how < 0.6:
            holder[key] = json.loads(
                json.dumps(chooser.choice(list(other.values() if isinstance(other, dict) else other)))
            )
        else:
            holder[key] = chooser.choice(_JSON_VALUES)
    return value


def _containers(node: Any) -> Iterator[Any]:
    if isinstance(node, (dict, list)):
        yield node
        for entry in node.values() if isinstance(node, dict) else node:
            yield from _containers(entry)


def _text(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes([len(data)]) + data


# -- the child --------------------------------------------------------------------------------------------------------


class Watch:
    """Notes what must not happen while a file is read."""

    def __init__(self) -> None:
        self.path = ""
        self.events: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.path:
            return
        if event == "open":
            name, mode, flags = arguments
            is_written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if is_written or not str(name).startswith(self.path.rpartition("/")[0]):
                self.events.append(f"open {name!r} {mode!r}")
        elif event.startswith(_FORBIDDEN_EVENTS) and event not in _HARMLESS_EVENTS:
            self.events.append(f"{event} {str(arguments)[:120]}")


def _attributes() -> dict[Any, dict[str, int]]:
    """Identities of the attributes of all modules and classes that a file might reach."""
    found: dict[Any, dict[str, int]] = {}
    roots = ("maze", own_package.__name__, "numpy", "torch._utils", "torch.storage", "gymnasium.spaces", "pathlib",
             "collections", "datetime", "decimal", "fractions", "uuid", "copyreg", "_codecs", "builtins", "os", "io",
             "json")  # fmt: skip
    for name, module in list(sys.modules.items()):
        if module is None or not any(name == root or name.startswith(f"{root}.") for root in roots):
            continue
        found[name] = {key: id(value) for key, value in vars(module).items() if key != "__warningregistry__"}
        for value in list(vars(module).values()):
            if isinstance(value, type) and value not in found:
                found[value] = {
                    key: id(entry)
                    for key, entry in vars(value).items()
                    if not key.startswith(("__annot", "_abc_", "__dict__", "__weakref__"))
                }
    return found


def child(first: int, last: int, seed: int, progress_file: str) -> None:  # noqa: PLR0912
    """Reads files one after the other; the number of each is in the progress file before it is read."""
    from maze.core.errors import MazeError

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    in_memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="attack-", dir=in_memory if os.access(in_memory, os.W_OK) else None))
    os.chdir(directory)
    (directory / "written").mkdir()
    legitimate = legitimate_files(directory / "written")
    generator, read = Generator(seed, legitimate), loaders()
    path = directory / "read" / "file"
    path.parent.mkdir()
    with open(progress_file, "r+b") as opened:
        progress = mmap.mmap(opened.fileno(), 8)

    def too_long(_: int, __: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    for kind, contents in legitimate.items():  # imports everything that is ever needed
        for content in contents:
            path.write_bytes(content)
            read[kind](path)
    for module, _ in generator.names:
        if module.startswith(("maze.", "maze_envs.")):
            importlib.import_module(module)
    warm_up = Generator(12345, legitimate)
    for number in range(300):
        kind, content = warm_up.file(number)
        path.write_bytes(content)
        with suppress(MazeError):
            read[kind](path)
    known_modules = set(sys.modules)
    before, watch, outcomes, failures = _attributes(), Watch(), Counter[str](), []
    for number in range(first, last):
        progress[:8] = struct.pack("<q", number)
        kind, content = generator.file(number)
        path.write_bytes(content)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_FILE)
        watch.path = str(path)
        try:
            read[kind](path)
            outcomes[f"{kind}: read"] += 1
        except MazeError:
            outcomes[f"{kind}: refused"] += 1
        except BaseException as error:
            failures.append(f"file {number} ({kind}): {type(error).__name__}: {str(error)[:200]}")
        watch.path = ""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if len(sys.modules) != len(known_modules):
            failures.append(f"file {number} ({kind}): imports {sorted(set(sys.modules) - known_modules)[:5]}")
            known_modules = set(sys.modules)
        if watch.events:
            failures.append(f"file {number} ({kind}): {watch.events[:3]}")
            watch.events.clear()
    after = _attributes()
    for owner, attributes in before.items():
        changed = [key for key, value in after.get(owner, {}).items() if attributes.get(key) != value]
        if changed:
            failures.append(f"files {first} to {last}: {owner} has other {changed[:5]}")
    if (
        sorted(entry.name for entry in directory.iterdir()) != ["read", "written"]
        or len(list(path.parent.iterdir())) > 1
    ):
        failures.append(f"files {first} to {last}: files were written")
    import shutil

    shutil.rmtree(directory)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))


# -- the parent -------------------------------------------------------------------------------------------------------


def attack(n_files: int, seed: int, chunk: int = 10_000) -> tuple[Counter[str], list[str]]:
    """Has child processes read generated files.

    :param n_files: How many.
    :param seed: Of the generator.
    :param chunk: Files per process.
    :return: How often each outcome was met, and the failures.
    """
    outcomes, failures = Counter[str](), []
    first = 0
    with tempfile.NamedTemporaryFile() as progress:
        while first < n_files:
            last = min(first + chunk, n_files)
            progress.seek(0)
            progress.write(struct.pack("<q", -1))
            progress.flush()
            command = [sys.executable, "-m", "tests.security.attack", "--child", str(first), str(last)]
            done = subprocess.run(
                [*command, "--seed", str(seed), "--progress", progress.name],
                capture_output=True,
                text=True,
                check=False,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            )
            if done.returncode == 0:
                report = json.loads(done.stdout.splitlines()[-1])
                outcomes.update(report["outcomes"])
                failures += report["failures"]
                first = last
            else:
                (number,) = struct.unpack("<q", Path(progress.name).read_bytes())
                if number < first:
                    raise RuntimeError(f"The attack itself fails: {done.stderr[-2000:]}")
                failures.append(f"file {number}: the process ended with {done.returncode}: {done.stderr[-300:]}")
                first = max(number, first) + 1
    return outcomes, failures


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=int, nargs=2)
    parser.add_argument("--progress")
    parser.add_argument("--show", type=int, help="write the content of one file to standard output")
    options = parser.parse_args()
    if options.child:
        child(*options.child, options.seed, options.progress)
        return 0
    if options.show is not None:
        with tempfile.TemporaryDirectory() as directory:
            content = Generator(options.seed, legitimate_files(Path(directory))).file(options.show)[1]
        sys.stdout.buffer.write(content)
        return 0
    start = time.perf_counter()
    outcomes, failures = attack(options.files, options.seed)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8d}  {outcome}")
    print(*failures, sep="\n")
    n_read = sum(outcomes.values())
    print(f"{n_read} files, seed {options.seed}, {time.perf_counter() - start:.0f} s: {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
