"""What a replay takes over from the rollout whose trajectories it reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from maze.cli.compared_policies import PolicyReader
from maze.cli.errors import UsageError
from maze.cli.run_info import CONFIG_FILE, VERSIONS_FILE, installed_versions, read_plain_yaml
from maze.cli.stored_model import STORED_CONFIG, packages_with_configurations, stored_sections
from maze.core.rollout.recording import TRAJECTORY_DIR
from maze.core.utils.files import read_json_object

_AS_RECORDED = "recorded_actions"


def complete_replay(cfg: DictConfig, project: Path, overrides: Sequence[str]) -> None:
    """Puts, in place, what the recorded rollout was configured with, unless the command names it itself.

    That is the environment, the wrappers, the limit of steps, the seeds, and the policy of a what-if that names none.

    :param cfg: The configuration of the replay.
    :param project: Directory that relative paths refer to.
    :param overrides: The command's arguments.
    :raises UsageError: There are no trajectories.
    """
    if not cfg.trajectory_data:
        raise UsageError(
            "trajectory_data: name the directory of a rollout, or a file in its trajectory_data: "
            "trajectory_data=outputs/<rollout>/<time>."
        )
    data = project / str(cfg.trajectory_data)
    if (data / TRAJECTORY_DIR).is_dir():
        data /= TRAJECTORY_DIR
    if not (data.is_file() or any(data.glob("*.pkl"))):
        raise UsageError(f"trajectory_data: there are no trajectories (*.pkl) at {data}.")
    run = next((place for place in (data.parent, data.parent.parent) if (place / STORED_CONFIG).is_file()), None)
    named = {override.lstrip("+~").partition("=")[0].partition(".")[0] for override in overrides}
    recorded = {} if run is None else read_plain_yaml(run / CONFIG_FILE)
    trusted = [*(cfg.get("trusted_packages") or ()), *packages_with_configurations()]
    is_asked = cfg.what_if.step is not None
    plays_on_itself = is_asked and cfg.what_if.policy is None
    wanted = [section for section in ("env", "wrappers", "seeding") if section not in named]
    stored = {} if run is None else stored_sections(run, [*wanted, *["policy"] * plays_on_itself], trusted)
    runner = recorded.get("runner") or {}
    with open_dict(cfg):
        cfg.trajectory_data = str(data)
        if run is None and "env" not in named:
            cfg.env = None
        for section in ("env", "wrappers"):
            if section in stored:
                cfg[section] = stored[section]
        if "seeding" in wanted and recorded.get("seeding"):
            cfg.seeding = recorded["seeding"]
        own = cfg.runner
        own.input_dir = str(recorded.get("input_dir") or "")
        own.n_recorded = int(runner.get("n_episodes") or 1)
        own.versions = _differing_versions(run)
        if own.max_episode_steps is None:
            own.max_episode_steps = runner.get("max_episode_steps") or 0
        if own.deterministic is None:
            own.deterministic = bool(runner.get("deterministic")) if plays_on_itself else True
        if is_asked:
            cfg.what_if.policy = _policy(cfg, project, named, stored, own.input_dir)


def _policy(cfg: DictConfig, project: Path, named: set[str], stored: dict[str, Any], input_dir: str) -> Any:
    """The configuration of the policy that goes on; `None`: the recorded actions do."""
    policy = cfg.what_if.policy
    if policy is None:
        return {"policy": stored["policy"], "input_dir": input_dir} if "policy" in stored else None
    if policy == _AS_RECORDED:
        return None
    wanted = OmegaConf.to_container(policy, resolve=True) if OmegaConf.is_config(policy) else policy
    reader = PolicyReader(cfg, project, {*named, "wrappers"})
    reader.where = "what_if.policy"
    return reader.entry(wanted)[1]


def _differing_versions(run: Path | None) -> str:
    """How the installed versions differ from those that a run was recorded with."""
    recorded: Any = {} if run is None else read_json_object(run / VERSIONS_FILE).get("versions") or {}
    now = installed_versions()
    different = [name for name in now if recorded.get(name, now[name]) != now[name]]
    texts = [f"{name} {recorded[name]}, now {now[name]}" for name in different]
    return f"it was recorded with {'; '.join(texts)}" if texts else ""
