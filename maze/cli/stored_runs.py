"""Configurations that use stored runs: sections of the run in `input_dir`, trusted packages, compared policies."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from maze.cli.hydra_setup import GATE, FlagParser, UsageError, changed_wrappers, is_gate
from maze.cli.run_summary import CONFIG_FILE, TRUST, algorithm_name
from maze.core.errors import ConfigError, did_you_mean
from maze.core.rollout.recording import TRAJECTORY_DIR
from maze.core.trajectory_recording.datasets.minari_data import PREFIX as MINARI
from maze.core.utils import stored_config
from maze.core.utils.config_utils import read_config, with_files_of
from maze.core.utils.factory import TARGET_KEY
from maze.core.utils.import_guard import NEVER_WHOLE
from maze.serve.bundle import SHELF, PolicyBundle

# Root configurations with a default environment.
_ROOTS = ("conf_rollout", "conf_train")
# Overrides that name a section.
_NAMING = {
    "env": re.compile(r"env([=@]|\.(_target_|name)\b|$)"),  # single values are changed in that of the run
    "wrappers": re.compile("wrappers([=@]|$)"),  # single wrappers are added to those of the run
    "model": re.compile(r"(model|critic|policy\.model|env_model|algorithm_model)([.=@]|$)"),
}


def use_stored_run(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Take over, in place, sections of the configuration of the run in `input_dir`, unless the command names them.

    These are the model, and, with Maze's own root configurations and without an experiment (others name them), the
    environment and the wrappers. Single wrappers that the command configures are added to the run's. The sections may
    name environments, networks and their parts of Maze and torch, and objects in trusted packages: those that the
    command names (`trusted_packages`, its own classes, packages with configurations) and those that are remembered for
    the working directory of the command.

    :param cfg: Configuration of a rollout or a training run.
    :param overrides: Arguments of the command, or paths of values given otherwise.
    :raises CheckpointError: The stored configuration cannot be read, or names other code.
    """
    directory = str(cfg.get("input_dir") or "")
    given = [override.lstrip("+~") for override in overrides]
    wanted = [section for section in _taken_over(cfg, given) if not any(map(_NAMING[section].match, given))]
    if not directory or not wanted or not (Path(directory) / stored_config.STORED_CONFIG).is_file():
        return
    run = stored_config.StoredRun(directory, packages_trusted_by(cfg))
    stored = run.sections(wanted)
    if "algorithm" in cfg and "model" in stored:
        stored["model"] = _model_for(cfg, stored["model"], run)
    if "wrappers" in stored:
        stored["wrappers"] = changed_wrappers(stored["wrappers"], _plain(cfg, "wrappers") or {})
    if "env" in stored:
        stored["env"] = _changed_env(stored["env"], cfg, overrides)
    different = [section for section in stored if stored[section] != _plain(cfg, section)]
    with open_dict(cfg):
        for section in different:
            cfg[section] = stored[section]
    if different:
        names = " and ".join([", ".join(different[:-1]), different[-1]] if len(different) > 1 else different)
        choices = " ".join(f"{section}=<option>" for section in different)
        print(f"Using the {names} configuration of {directory}; name {choices} to choose another.")


def _taken_over(cfg: DictConfig, given: Sequence[str]) -> list[str]:
    policy = cfg.get("policy")
    names_model = isinstance(policy, DictConfig) and "model" in {*policy, *(policy.get("base") or ())}
    builds_model = "algorithm" in cfg or names_model
    own_root = HydraConfig.initialized() and HydraConfig.get().job.config_name not in _ROOTS
    is_chosen_elsewhere = own_root or any(override.startswith("experiment=") for override in given)
    sections = [] if is_chosen_elsewhere else [name for name in ("env", "wrappers") if name in cfg]
    if builds_model and "model" in cfg and not (is_chosen_elsewhere and "algorithm" in cfg):
        sections.append("model")
    return sections


def _model_for(cfg: DictConfig, model: Any, run: stored_config.StoredRun) -> Any:
    """Return a stored model for training with the configured algorithm.

    An algorithm that needs another kind of critic uses its own, and the distributions of the former algorithm are
    removed. These are known for Maze's own algorithms only; no other stored name is imported.
    """
    from maze.train.trainers.common.config_classes import algorithm_class

    stored, own = str(run.config.value("algorithm._target_")), cfg.algorithm
    before = algorithm_class({TARGET_KEY: stored}) if stored.startswith("maze.train.trainers.") else None
    after = algorithm_class(own)
    if before is after or not isinstance(model, dict):
        return model
    distributions = model.get("distribution_mapper_config")
    if before is not None and isinstance(distributions, list):
        kept = [entry for entry in distributions if entry not in before.distributions]
        model = {**model, "distribution_mapper_config": kept}
    if before is None or after is None or before.critic != after.critic:
        model = {**model, "critic": _plain(cfg, "model.critic")}
    return model


def split_trust(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove `--trust <package>`, which every command accepts, from a command.

    :param command: The arguments of `maze-run`.
    :return: The other arguments, and the packages.
    :raises UsageError: A package is missing, or cannot be trusted.
    """
    parser = FlagParser(TRUST, "Trust your own packages.", add_help=False)
    parser.add_argument(TRUST, action="append", default=[], dest="names", metavar="package")
    chosen, rest = parser.parse_known_args(command)
    packages = [package for names in chosen.names for package in names.split(",")]
    for package in packages:
        if not package.isidentifier() or package in NEVER_WHOLE:
            raise UsageError(
                f"{TRUST}: expected the name of your own package, such as {TRUST} my_project, found {package!r}."
            )
    return rest, packages


def remember_trust(packages: Sequence[str]) -> int:
    """Trust packages in all further commands of the working directory: `maze-run --trust <package>` alone."""
    file = stored_config.remember(Path.cwd(), packages)
    print(f"Trusted in {Path.cwd()}: {', '.join(stored_config.remembered(Path.cwd()))}. Edit {file} to revoke trust.")
    return 0


def packages_trusted_by(cfg: DictConfig | None) -> list[str]:
    """Return the packages that a command trusts.

    These are the packages that it names, also by its own classes, those remembered for its working directory, and those
    on Hydra's search path because of an installed plugin or of the command.

    :param cfg: The command's configuration, if any.
    """
    named: list[str] = []
    if cfg is not None:  # the code of the user's packages that the command names is executed anyway
        plain = OmegaConf.to_container(cfg, resolve=False)
        named = [*(cfg.get("trusted_packages") or ()), *stored_config.own_packages(plain)]
    if not HydraConfig.initialized():
        return named
    runtime = HydraConfig.get().runtime
    configured = [str(source.path).partition(".")[0] for source in runtime.config_sources if source.schema == "pkg"]
    return [*named, *configured, *stored_config.remembered(Path(runtime.cwd))]


def _plain(cfg: Any, key: str) -> Any:
    node = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


_GROUP = "policy"
_CLONED = "warm_start.policy"
_TRAINED = "torch_policy"
_WEIGHTS = "state_dict.pt"
_BUNDLE, _WHOLE_BUNDLE = ".maze", "maze.serve.policy.WholeBundlePolicy"
_SB3 = ".zip"
_ROLLOUT = "rollout"
_EVIDENCE_GATE = "maze.offline.estimation.EvidenceGateRunner"
_PLAYED_MEASURES = ("risk", "minimize", "maximize")
_AS_RECORDED = "recorded_actions"


def complete_policies(cfg: DictConfig, project: Path, overrides: Sequence[str]) -> None:
    """Replace, in place, options, directories and bundles among the compared policies by configurations.

    A training run provides its model and, unless the command names them, its wrappers; the first one its environment.
    Its wrappers of rewards and episodes also apply to policies without wrappers of their own.

    :param cfg: The configuration of the comparison.
    :param project: Directory that relative paths refer to.
    :param overrides: The command's arguments.
    :raises UsageError: There is no such option and no such training run.
    """
    reader = PolicyReader(cfg, project, sections_named_by(overrides), " or ".join(GATE) if is_gate(cfg) else "policies")
    if isinstance(cfg.get("data"), str) and not cfg.data.startswith(MINARI):
        cfg.data = str(project / cfg.data)
    if is_gate(cfg):
        _complete_gate(cfg, project, overrides)
    policies = _plain(cfg, "policies") or []
    if not isinstance(policies, (list, dict)):
        raise UsageError(f"policies: expected a list, or a mapping from names to policies, found {policies!r}.")
    completed: dict[str, Any] = {}
    # Entries of a list may have names: [random, {mine: <run>}].
    named_entries = (
        map(reader.entry, policies)
        if isinstance(policies, list)
        else [(str(name), reader.entry(entry)[1]) for name, entry in policies.items()]
    )
    for name, policy in named_entries:
        completed[name if name not in completed else f"{name} ({len(completed) + 1})"] = policy
    with open_dict(cfg):
        cfg.policies = {name: reader.surrounded(policy) for name, policy in completed.items()}
        cfg.env = _changed_env(reader.env, cfg, overrides)


def sections_named_by(overrides: Sequence[str]) -> set[str]:
    """Return the sections of the configuration that a command's arguments name.

    Single values of an environment do not name it.
    """
    paths = {_path_of(override) for override in overrides}
    return {path.partition(".")[0] for path in paths if not path.startswith("env.") or _NAMING["env"].match(path)}


def _changed_env(env: Any, cfg: DictConfig, overrides: Sequence[str]) -> Any:
    """Return the environment of a run with the values that the command's arguments change; `None`: the command's."""
    if not isinstance(env, Mapping):
        return cfg.get("env") if env is None else env
    changed = OmegaConf.create({"env": env})
    for path in map(_path_of, overrides):
        if path.startswith("env.") and OmegaConf.select(cfg, path) is not None:
            OmegaConf.update(changed, path, _plain(cfg, path), force_add=True)
    return OmegaConf.to_container(changed.env)


def _path_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _complete_gate(cfg: DictConfig, project: Path, overrides: Sequence[str]) -> None:
    """Check that both policies are named, and replace a file of thresholds by its content."""
    for name in GATE:
        if cfg[name] is None:
            raise UsageError(
                f"{name}: expected a training run, a bundle or an option of {_GROUP}: {name}=outputs/<name>/<time>."
            )
    if cfg.get("evidence") is not None:
        evidence = {"data": cfg.evidence} if isinstance(cfg.evidence, str) else OmegaConf.to_container(cfg.evidence)
        if not isinstance(evidence, dict) or "data" not in evidence:
            raise UsageError(f"evidence: expected a log, or a mapping with `data`, found {evidence!r}.")
        played = {"thresholds": cfg.get("thresholds")} | {f"runner.{k}": cfg.runner.get(k) for k in _PLAYED_MEASURES}
        named = [key for key in map(_path_of, overrides) if key.startswith("runner.") and key != "runner.margin"]
        if ignored := sorted({*named, *(key for key, value in played.items() if value)}):
            rule = (
                "evidence: a log judges the return by `runner.margin` only, and estimates have settings in `evidence`"
            )
            raise UsageError(f"{rule}; leave out {', '.join(ignored)}, or play episodes, without evidence.")
        data = str(evidence["data"])
        evidence["data"] = data if data.startswith(MINARI) else str(project / data)
        with open_dict(cfg):
            common = {"_target_": _EVIDENCE_GATE, "policies": "${policies}", "margin": cfg.runner.margin}
            cfg.runner = {**common, "deterministic": False, **evidence}
    if isinstance(cfg.get("thresholds"), str):
        try:
            thresholds = read_config(project / cfg.thresholds)
        except (ConfigError, OSError) as error:
            raise UsageError(f"thresholds: {error}") from error
        with open_dict(cfg):
            cfg.thresholds = thresholds


def complete_base(cfg: DictConfig, project: Path, overrides: Sequence[str]) -> None:
    """Put, in place, the configuration of a rollout policy's base where an option, a run or a bundle is named.

    A bundle of the shelf provides the environment of a rollout, unless the command names it.

    :param cfg: The configuration of a rollout, or of a run whose warm start may have such a policy.
    :param project: Directory that relative paths refer to.
    :param overrides: The command's arguments.
    :raises UsageError: There is no such option and no such run.
    """
    named = sections_named_by(overrides)
    if _is_entry(OmegaConf.select(cfg, f"{_CLONED}.base")):
        entry = PolicyReader(cfg, project, {*named, "env", "wrappers"}, f"{_CLONED}.base").planned(_plain(cfg, _CLONED))
        policy, input_dir = entry["policy"], entry.get("input_dir")
        with open_dict(cfg):
            cfg.warm_start.policy = with_files_of(input_dir, policy, _CLONED) if input_dir else policy
    if not isinstance(cfg.get(_GROUP), DictConfig):
        return
    if str(cfg.policy.get("bundle")).startswith(SHELF):
        with open_dict(cfg):
            cfg.env = _changed_env(env_of_shelf(cfg.policy.bundle, named), cfg, overrides)
    base = _plain(cfg, _GROUP).get("base")
    if not _is_entry(base):
        return
    reader = PolicyReader(cfg, project, named, "policy.base")
    is_run = isinstance(base, str) and (project / base / _WEIGHTS).is_file()
    entry = reader.entry(_TRAINED if is_run else base)[1]
    with open_dict(cfg):
        cfg.policy.base = entry["policy"]
        if is_run or "input_dir" in entry:
            cfg.input_dir = str(project / base) if is_run else entry["input_dir"]
        cfg.env = _changed_env(reader.env, cfg, overrides)


def _is_entry(base: Any) -> bool:
    """Return whether the base of a policy is named: an option, a run, a file, or a policy with a base of its own."""
    return isinstance(base, str) or (isinstance(base, Mapping) and "base" in base and TARGET_KEY not in base)


def env_of_shelf(bundle: str, named: Container[str]) -> Any:
    """Return the environment of a bundle of the shelf as its card states it.

    :param bundle: `shelf:<name>`.
    :param named: Sections that the command names; `None` is returned if `env` is among them.
    :raises UsageError: The shelf has no such bundle.
    """
    try:
        return None if "env" in named else PolicyBundle.load(bundle, check=False).card["shelf"]["env"]
    except ConfigError as error:
        raise UsageError(f"{error} See maze-run --shelf.") from error


@dataclass
class PolicyReader:
    """Read entries of compared policies.

    :param cfg: The whole configuration.
    :param project: Directory that relative paths refer to.
    :param named: Sections that the command names.
    :param where: Beginning of error messages: the configuration key.
    """

    cfg: DictConfig
    project: Path
    named: set[str]
    where: str = "policies"
    env: Any = field(default=None, init=False)
    """The environment of the first training run, unless the command names one."""
    wrappers: Any = field(default=None, init=False)
    """Wrappers of the first training run, unless the command names some."""

    def entry(self, entry: Any) -> tuple[str, Any]:
        """Return a label and the configuration, with `runs` if there are several."""
        if isinstance(entry, Mapping):
            if "base" in entry and str(entry.get(TARGET_KEY, "maze.")).startswith("maze."):
                option = "exploring" if "epsilon" in entry else _ROLLOUT
                return option, self.planned({**self._option(option), **entry})
            if TARGET_KEY in entry or _GROUP in entry:
                return str(entry.get(TARGET_KEY, _GROUP)).rpartition(".")[2], dict(entry)
            if len(entry) == 1:
                ((name, inner),) = entry.items()
                return str(name), self.entry(inner)[1]
        if isinstance(entry, (list, tuple)) and entry:
            found = [self.entry(each) for each in entry]
            return found[0][0], {"runs": [policy for _, policy in found]}
        if not isinstance(entry, str):
            raise UsageError(
                f"{self.where}: {entry!r} is neither an option of {_GROUP}, nor a training run, nor a configuration."
            )
        path = self.project / entry
        if path.is_dir():
            return self._training_runs(path)
        is_file = path.suffix in (_BUNDLE, _SB3)
        if entry.startswith(SHELF):
            self.env = self.env or env_of_shelf(entry, self.named)
            policy = {TARGET_KEY: _WHOLE_BUNDLE, "bundle": entry}
        else:
            policy = self._file(path) if is_file else self._option(entry)
        return path.stem if is_file else entry, self.planned(policy)

    def planned(self, policy: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry of a policy; if its base is named, it has the files of the base."""
        if not _is_entry(policy.get("base")):
            return {"policy": dict(policy)}
        of_base = self.entry(policy["base"])[1]
        inner = of_base.get(_GROUP, of_base)
        return {**(of_base if _GROUP in of_base else {}), "policy": {**policy, "base": inner}}

    def _file(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            raise UsageError(f"{self.where}: there is no file {path}.")
        if path.suffix == _BUNDLE:
            return {TARGET_KEY: _WHOLE_BUNDLE, "bundle": str(path)}
        return {**self._option("sb3"), "path": str(path)}

    def surrounded(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration; if it has no wrappers, with those of the first training run."""
        if "runs" in entry and TARGET_KEY not in entry:
            return {"runs": [self.surrounded(each) for each in entry["runs"]]}
        entry = dict(entry) if _GROUP in entry and TARGET_KEY not in entry else {_GROUP: dict(entry)}
        if self.wrappers and entry.get("wrappers") is None:
            from maze.serve.wrappers_as_data import wrappers_of_environment

            policy = entry[_GROUP]
            is_bundle = isinstance(policy, Mapping) and policy.get(TARGET_KEY) == _WHOLE_BUNDLE
            entry["wrappers"] = wrappers_of_environment(self.wrappers, with_own=is_bundle)
        return entry

    def _training_runs(self, directory: Path) -> tuple[str, Any]:
        if (directory / _WEIGHTS).is_file():
            return self._training(directory)
        if not (runs := sorted(path.parent for path in directory.glob(f"*/{_WEIGHTS}"))):
            raise UsageError(
                f"{self.where}: {directory} is not the directory of a training run, and contains none: there is no "
                f"{_WEIGHTS} in it."
            )
        return directory.name, {"runs": [self._training(run)[1] for run in runs]}

    def _training(self, run: Path) -> tuple[str, dict[str, Any]]:
        wanted = ["model", *(name for name in ("env", "wrappers") if name not in self.named)]
        stored = stored_config.StoredRun(run, packages_trusted_by(self.cfg)).sections(wanted)
        if self.env is None:
            self.env = stored.get("env")
        if self.wrappers is None:
            self.wrappers = stored.get("wrappers")
        policy = {**self._option(_TRAINED), "model": stored.get("model")}
        algorithm = stored_config.read_plain_yaml(run / CONFIG_FILE).get("algorithm")
        gamma = algorithm.get("gamma") if isinstance(algorithm, dict) else None
        entry = {"policy": policy, "wrappers": stored.get("wrappers"), "input_dir": str(run), "gamma": gamma}
        # A time, or the number of a trial, needs the algorithm.
        return f"{algorithm_name(algorithm, run)} {run.name}" if run.name[:1].isdigit() else run.name, entry

    def _option(self, name: str) -> dict[str, Any]:
        """Return the configuration of an option of the group; the suffix `_policy` may be omitted."""
        loader: Any = GlobalHydra.instance().config_loader()
        repository = loader.repository
        options = sorted(repository.get_group_options(_GROUP))
        chosen = next((option for option in (name, f"{name}_policy") if option in options), None)
        if chosen is None:
            short = [option.removesuffix("_policy") for option in options]
            raise UsageError(
                f"{self.where}: {name} is neither an option of {_GROUP} nor a directory.{did_you_mean(name, short)} "
                f"Options: {', '.join(short)}. A class of your own: {{_target_: <module>.<class>}}."
            )
        found: Any = OmegaConf.to_container(repository.load_config(f"{_GROUP}/{chosen}").config)
        return dict(found)


def complete_replay(cfg: DictConfig, project: Path, overrides: Sequence[str]) -> None:
    """Take over, in place, the configuration of the recorded rollout, unless the command names it.

    These are the environment, the wrappers, the limit of steps, the seeds, and the policy of a what-if without one.

    :param cfg: The configuration of the replay.
    :param project: Directory that relative paths refer to.
    :param overrides: The command's arguments.
    :raises UsageError: There are no trajectories.
    """
    if not cfg.trajectory_data:
        raise UsageError(
            "trajectory_data: expected the directory of a rollout, or a file in its trajectory_data: "
            "trajectory_data=outputs/<rollout>/<time>."
        )
    data = project / str(cfg.trajectory_data)
    if (data / TRAJECTORY_DIR).is_dir():
        data /= TRAJECTORY_DIR
    if not (data.is_file() or any(data.glob("*.pkl"))):
        raise UsageError(f"trajectory_data: there are no trajectories (*.pkl) at {data}.")
    run = next((place for place in data.parents[:2] if (place / stored_config.STORED_CONFIG).is_file()), None)
    named = sections_named_by(overrides)
    has_what_if = cfg.what_if.step is not None
    plays_on_itself = has_what_if and cfg.what_if.policy is None
    wanted = [section for section in ("env", "wrappers", "seeding") if section not in named]
    wanted += ["policy"] * plays_on_itself
    recorded, stored = dict[str, Any](), dict[str, Any]()
    if run is not None:
        recorded = stored_config.read_plain_yaml(run / CONFIG_FILE)
        stored = stored_config.StoredRun(run, packages_trusted_by(cfg)).sections(wanted)
    runner = recorded.get("runner") or {}
    with open_dict(cfg):
        cfg.trajectory_data = str(data)
        if run is None and "env" not in named:
            cfg.env = None
        cfg.env = _changed_env(stored.get("env"), cfg, overrides)
        cfg.wrappers = stored.get("wrappers", cfg.get("wrappers"))
        if "seeding" in wanted and recorded.get("seeding"):
            cfg.seeding = recorded["seeding"]
        own = cfg.runner
        own.input_dir = str(recorded.get("input_dir") or "")
        own.n_recorded = int(runner.get("n_episodes") or 1)
        if own.max_episode_steps is None:
            own.max_episode_steps = runner.get("max_episode_steps") or 0
        if own.deterministic is None:
            own.deterministic = bool(runner.get("deterministic")) if plays_on_itself else True
        policy = _plain(cfg, "what_if.policy")
        reader = PolicyReader(cfg, project, {*named, "wrappers"}, "what_if.policy")
        if plays_on_itself and "policy" in stored:
            cfg.what_if.policy = {"input_dir": own.input_dir, **reader.planned(stored["policy"])}
        elif policy == _AS_RECORDED:
            cfg.what_if.policy = None
        elif has_what_if and policy is not None:
            cfg.what_if.policy = reader.entry(policy)[1]
