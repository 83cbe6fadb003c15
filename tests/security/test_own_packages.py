"""Files may fill the classes of the environment's own package, as far as that runs nothing of them."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.core.errors import CheckpointError
from maze.core.trajectory_recording.records.trajectory_record import _DATA_CLASSES, packages_of
from maze.core.utils.safe_pickle import safe_load
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from tests.security import own_package
from tests.security.attack import _text
from tests.security.own_package import NAMES, OTHERS, STORING, Colour, Level, Order, Plain, Position, Stock

MODULE = "tests.security.own_package"


@pytest.fixture(autouse=True)
def _nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    ran: list[Any] = []
    monkeypatch.setattr(os, "system", ran.append)
    yield
    assert ran == []


def read(content: bytes, **options: Any) -> Any:
    return safe_load(io.BytesIO(content), **{"own_packages": ["tests"], **options})


def named(name: str, module: str = MODULE) -> bytes:
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93"


def test_data_classes_round_trip() -> None:
    stock = object.__new__(Stock)
    vars(stock).update(level=3, orders=[Order(1, Colour.RED), Order(2, Level.LOW)])
    plain = Plain()
    plain.a, plain.b = Position(1, 2), np.arange(3)  # type: ignore[attr-defined]
    shelf = object.__new__(Stock.Shelf)
    found = read(pickle.dumps([stock, plain, shelf, {Colour.RED: 1, Level.LOW: 2}]))
    assert (found[0].level, found[0].orders) == (3, stock.orders)
    assert found[0].orders[0].colour is Colour.RED
    assert found[1].a == Position(1, 2)
    assert type(found[1].a) is Position
    assert list(found[1].b) == [0, 1, 2]
    assert type(found[2]) is Stock.Shelf
    assert found[3] == {Colour.RED: 1, Level.LOW: 2}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "use", [b")R.", b")\x81}\x8c\x01aK\x01sb.", b"(K\x01tR.", b")\x81]b.", b"}\x94h\x00)\x81K\x01s."], ids=str
)
def test_no_code_of_the_package_is_run_by_any_file(name: str, use: bytes) -> None:
    try:
        read(named(name) + use)
    except CheckpointError as error:
        assert name in str(error) or name.rpartition(".")[2] in str(error) or name in STORING  # noqa: PT017
    else:
        assert name in STORING


@pytest.mark.parametrize("name", [name for name in NAMES if name not in STORING])
def test_classes_with_code_on_loading_are_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"type `{MODULE}\.{name}`.*allow it by name"):
        read(named(name) + b".")


@pytest.mark.parametrize(
    "name", [name for name in STORING if name != "Plain"]
)  # without methods it may be named, as events are
def test_other_packages_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        read(named(name) + b".", own_packages=["test", "my_project"])
    with pytest.raises(CheckpointError, match=name):
        read(named(name) + b".", own_packages=())


def test_modules_that_are_not_imported_yet_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_project").mkdir()
    (tmp_path / "own_project" / "__init__.py").write_text("")
    (tmp_path / "own_project" / "more.py").write_text("import os\nos.system('imported')\n\n\nclass State:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"own_project\.more\.State"):
        read(named("State", "own_project.more") + b".", own_packages=["own_project"])
    assert "own_project.more" not in sys.modules


@pytest.mark.parametrize(
    "value", [b"K\x07", b"\x8c\x03red" + b"\x85", b"]", b"N"], ids=["other", "tuple", "list", "None"]
)
def test_only_members_of_an_enumeration_can_be_requested(value: bytes) -> None:
    with pytest.raises(CheckpointError, match="does not have"):
        read(named("Missing") + value + b"\x85R.")


def test_a_method_is_not_replaced_and_fields_have_to_fit() -> None:
    with pytest.raises(CheckpointError, match="replaces the method `__post_init__`"):
        read(named("Stock") + b")\x81}" + _text("__post_init__") + b"K\x01sb.")
    with pytest.raises(CheckpointError, match="damaged state of `Order`"):
        read(named("Order") + b")\x81]b.")


def test_the_packages_are_those_of_the_chosen_environment_and_never_libraries() -> None:
    from tests.train.parallelization.toy_envs import counting_env

    assert packages_of(TimeLimitWrapper.wrap(GymMazeEnv("CartPole-v1"), max_episode_steps=2)) == frozenset()
    assert packages_of(TimeLimitWrapper.wrap(counting_env(), max_episode_steps=2)) == {"tests"}


def test_packages_of_wrappers_and_of_the_gymnasium_environment_inside_count_as_well() -> None:
    from tests.core.wrappers.test_small_wrappers import CountingEnv  # a gymnasium environment of ours

    assert packages_of(TimeLimitWrapper.wrap(GymMazeEnv(CountingEnv()), max_episode_steps=2)) == {"tests"}


SHIPPED = "maze_envs.packing.bin_packing"


@pytest.mark.parametrize(
    "name",
    [
        "maze_envs.packing.renderer.BinRenderer",
        "maze_envs.logistics.cutting_2d.env.maze_state.Cutting2DMazeState",
        "maze_envs.logistics.dispatching.simulation.Vehicle",
        f"{SHIPPED}.PackingEvents",
    ],
)
def test_data_and_events_of_the_shipped_environments_need_no_list(name: str) -> None:
    module, _, qualified_name = name.rpartition(".")
    made = safe_load(io.BytesIO(named(qualified_name, module) + b"."), data_classes=_DATA_CLASSES)
    assert f"{made.__module__}.{made.__qualname__}" == name


@pytest.mark.parametrize(
    "name",
    [
        f"{SHIPPED}.BinPackingEnv",  # an environment
        f"{SHIPPED}.BinPacking",
        f"{SHIPPED}.item_sizes",  # a function
        f"{SHIPPED}.BinRenderer",  # imported there, not defined
        f"{SHIPPED}.np.load",
        f"{SHIPPED}.functools.partial",
        f"{SHIPPED}.nothing",
        "maze_envs.common.array_policy.ArrayPolicy",  # a policy
        "maze_envs.common.masked_flatten_concat.MaskedFlattenConcatPolicyNet",  # a network
        "maze_envs.no_such_module.State",
        "maze_envs_of_somebody_else.State",
    ],
)
def test_no_other_class_of_the_built_in_environments_is_loadable(name: str) -> None:
    module = SHIPPED if name.startswith(f"{SHIPPED}.") else name.rpartition(".")[0]
    content = named(name.removeprefix(f"{module}."), module) + b")\x81."
    with pytest.raises(CheckpointError, match=rf"type `{re.escape(name)}`.*allow it by name"):
        safe_load(io.BytesIO(content), data_classes=_DATA_CLASSES)


def test_the_lists_are_complete() -> None:
    defined = {name for name, value in vars(own_package).items() if getattr(value, "__module__", "") == MODULE}
    assert defined <= {*NAMES}
    assert not set(STORING) & set(OTHERS)
