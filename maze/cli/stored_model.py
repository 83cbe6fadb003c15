"""The model a policy was trained with, read from the configuration that its training left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from maze.core.errors import CheckpointError
from maze.core.utils.factory import TARGET_KEY
from maze.core.utils.stored_config import is_own_package, read_stored_config, refuse_foreign_targets

STORED_CONFIG = Path(".hydra") / "config.yaml"


def use_stored_model(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Takes over, in place, the model of the training run in `input_dir`, unless the command names one itself.

    It may name the environments, networks and their parts of Maze and torch, and what is defined in the packages that
    the command names: by `trusted_packages`, by its own classes, or as packages with configurations.

    :param cfg: Configuration of a rollout.
    :param overrides: The command's arguments.
    :raises CheckpointError: The stored configuration cannot be read, or names other code.
    """
    policy = cfg.get("policy")
    if not cfg.get("input_dir") or not isinstance(policy, DictConfig) or "model" not in policy:
        return
    if any(
        override.lstrip("+~").startswith(("model", "critic", "policy.model", "env_model")) for override in overrides
    ):
        return
    stored = _stored_model(Path(cfg.input_dir) / STORED_CONFIG)
    if stored is None or stored == _plain(cfg, "model"):
        return
    trusted = [*(cfg.get("trusted_packages") or ()), *packages_with_configurations(), *_packages_named_in(cfg)]
    way_out = "name the model yourself, model=<option>, or its package, +"
    refuse_foreign_targets(stored, Path(cfg.input_dir) / STORED_CONFIG, trusted, way_out)
    with open_dict(cfg):
        cfg.model = stored
    print(f"Using the model configuration of {cfg.input_dir}; name model=<option> to choose another.")


def packages_with_configurations() -> list[str]:
    """Packages that an installed search path plugin, or the command, has Hydra look for configurations in."""
    if not HydraConfig.initialized():
        return []
    sources = HydraConfig.get().runtime.config_sources
    return [str(source.path).partition(".")[0] for source in sources if source.schema == "pkg"]


def _stored_model(path: Path) -> Any:
    if not path.is_file():
        return None
    way_out = "Name the model the policy was trained with: model=<option>."
    config = read_stored_config(path, way_out)
    try:
        return _plain(config, "model")
    except OmegaConfBaseException as error:
        raise CheckpointError(f"{path}: its model refers to what is not there ({error}). {way_out}") from error


def _packages_named_in(cfg: DictConfig) -> list[str]:
    """Packages of the user's own whose classes and functions the command itself names: these run anyway."""
    targets = _targets(OmegaConf.to_container(cfg, resolve=False))
    return [package for package in {target.partition(".")[0] for target in targets} if is_own_package(package)]


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get(TARGET_KEY), str):
            yield node[TARGET_KEY]
        node = list(node.values())
    if isinstance(node, list):
        for entry in node:
            yield from _targets(entry)


def _plain(cfg: Any, key: str) -> Any:
    node = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
