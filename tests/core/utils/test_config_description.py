"""Descriptions of configurations that hold objects."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import OmegaConf
from torch import nn

from maze.core.utils.config_utils import config_to_yaml, describe


@dataclass
class Settings:
    rate: float = 0.1
    parts: list[Any] = field(default_factory=list)


class Keeper:
    def __init__(self, kept: int, hidden: str, lost: float) -> None:
        self.kept, self._hidden = kept, hidden

    @property
    def lost(self) -> float:
        raise AssertionError("no code of the object is run")


def module_function() -> None:
    """Importable."""


HERE = __name__


def test_a_configuration_without_objects_reads_as_omegaconf_writes_it() -> None:
    cfg = OmegaConf.create({"b": {"x": "${a}", "y": [1, None, "z"]}, "a": 2.5})
    assert config_to_yaml(cfg) == OmegaConf.to_yaml(cfg)
    assert config_to_yaml(cfg, sort_keys=True) == OmegaConf.to_yaml(cfg, sort_keys=True)


def test_objects_are_described_by_class_and_the_arguments_they_kept() -> None:
    assert describe(Keeper(1, "h", 2.0)) == {"_target_": f"{HERE}.Keeper", "kept": 1, "hidden": "h"}
    assert describe(Settings(parts=[Keeper(2, "x", 0.0)])) == {
        "_target_": f"{HERE}.Settings",
        "rate": 0.1,
        "parts": [{"_target_": f"{HERE}.Keeper", "kept": 2, "hidden": "x"}],
    }


def test_long_lists_are_complete_in_configurations_and_named_in_objects() -> None:
    penalties = list(range(200))
    config = {"context": {"penalty": penalties}, "by_name": {f"{number}": number for number in penalties}}
    assert yaml.safe_load(config_to_yaml(config)) == config
    # an object that is made from a part of its data would differ without a message
    assert describe(Keeper(penalties, "h", 2.0))["kept"] == "<builtins.list>"


def test_functions_and_classes_are_described_by_where_they_are() -> None:
    assert describe(module_function) == {"_target_": f"{HERE}.module_function"}
    assert describe(Keeper) == f"{HERE}.Keeper"
    partial = describe(functools.partial(module_function, size=3))
    assert partial == {"_target_": f"{HERE}.module_function", "_partial_": True, "size": 3}
    assert describe(functools.partial(Keeper, 1)) == {"_target_": f"{HERE}.Keeper", "_partial_": True, "_args_": [1]}


def test_networks_are_described_by_their_layers() -> None:
    described = describe(nn.Sequential(nn.Linear(4, 2)))
    assert any("in_features=4, out_features=2" in line for line in described["_layers_"])


def test_every_description_is_writable_as_yaml() -> None:
    loop: dict[str, Any] = {"path": Path("a") / "b", "number": np.float64(0.5), "many": {1, 2}, 3: object()}
    loop["self"] = loop
    read = yaml.safe_load(config_to_yaml({"all": loop}))
    assert read["all"]["path"] == "a/b"
    assert read["all"]["number"] == 0.5
    assert "dict" in str(read["all"]["self"])


def test_containers_of_a_configuration_are_stored_at_any_depth() -> None:
    config: Any = {"hidden_units": [64, 32]}
    for key in ("block_params", "observation", "modality_config", "model_builder", "policy", "model", "sweep"):
        config = {key: config}
    assert yaml.safe_load(config_to_yaml(config)) == config
