"""Values and objects find their places in configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from maze.api.config_auditor import as_wrapper_configs, is_plain, place
from maze.api.utils import InvalidSpecificationError
from maze.core.utils.config_utils import value_text

texts = st.text(st.characters(codec="utf-8", exclude_characters="$\x00", exclude_categories=("Cs", "Cc")))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(values)
def test_hydra_parses_written_values(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"key={value_text(value)}")
    assert override.value() == value


@dataclass
class Settings:
    rate: float = 0.1
    inner: Any = None


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("objects of users are not copied")


def config() -> DictConfig:
    cfg = OmegaConf.create(
        {
            "wrappers": {"package.Wrapper": {"size": 1}},
            "model": {"_target_": "a.B", "policy": {"_target_": "a.C", "layers": [1, 2]}, "critic": "${critic}"},
            "critic": {"_target_": "a.D", "width": 3},
            "algorithm": {"rate": 1},
        },
        flags={"allow_objects": True},
    )
    OmegaConf.set_struct(cfg, True)
    return cfg


def test_objects_are_neither_copied_nor_converted() -> None:
    cfg, uncopyable, settings = config(), Uncopyable(), Settings()
    place(cfg, "critic", uncopyable)
    place(cfg, "algorithm", settings)
    assert cfg.critic is cfg.model.critic is uncopyable
    assert cfg.algorithm is settings


def test_mappings_may_hold_objects() -> None:
    cfg, uncopyable = config(), Uncopyable()
    place(cfg, "model.policy", {"_target_": "x.Y", "networks": [uncopyable], "counts": {0: 1}})
    assert cfg.model.policy.networks[0] is uncopyable
    assert OmegaConf.to_container(cfg.model.policy)["counts"] == {0: 1}
    assert "layers" not in cfg.model.policy


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("wrappers.package.Wrapper.size", 2, {"package.Wrapper": {"size": 2}}),
        ("wrappers.Wrapper.size", 2, {"package.Wrapper": {"size": 2}}),
        ("+wrappers.Other.size", 2, {"package.Wrapper": {"size": 1}, "Other": {"size": 2}}),
        ("+wrappers.own.package.Other.size", 2, {"package.Wrapper": {"size": 1}, "own.package.Other": {"size": 2}}),
        ("wrappers.package.Wrapper", {"extra": 3}, {"package.Wrapper": {"size": 1, "extra": 3}}),
        ("wrappers", {"other.Wrapper": {}}, {"package.Wrapper": {"size": 1}, "other.Wrapper": {}}),
    ],
)
def test_keys_with_dots_are_followed_and_mappings_merged(path: str, value: Any, expected: Any) -> None:
    cfg = config()
    place(cfg, path, value)
    assert OmegaConf.to_container(cfg.wrappers) == expected


def test_a_wrapper_that_is_not_configured_is_named_with_those_that_are() -> None:
    with pytest.raises(InvalidSpecificationError, match=r"no key 'Wraper'\. Did you mean `Wrapper`"):
        place(config(), "wrappers.Wraper.size", 2)


def test_entries_of_lists_and_fields_of_objects_can_be_set() -> None:
    cfg, settings = config(), Settings(inner=Settings(rate=0.5))
    place(cfg, "model.policy.layers.1", 9)
    place(cfg, "algorithm", settings)
    place(cfg, "algorithm.inner.rate", 0.7)
    assert list(cfg.model.policy.layers) == [1, 9]
    assert cfg.algorithm.inner.rate == 0.7
    assert settings.inner.rate == 0.5


def test_new_keys_need_a_plus() -> None:
    cfg = config()
    with pytest.raises(InvalidSpecificationError, match=r"`algorithm` has no key 'ratee'.*rate"):
        place(cfg, "algorithm.ratee", 1)
    place(cfg, "+algorithm.ratee", 1)
    assert cfg.algorithm.ratee == 1


def test_plain_values_are_those_that_a_command_line_can_state() -> None:
    assert is_plain([1, "a", None, np.float32(0.5)])
    assert not is_plain({"a": 1})
    assert not is_plain([object()])


def test_wrappers_may_be_named_by_their_classes() -> None:
    assert as_wrapper_configs({"a.B": {}}) == {"a.B": {}}
    assert as_wrapper_configs({Uncopyable: {"size": 1}}) == [{"_target_": Uncopyable, "size": 1}]
