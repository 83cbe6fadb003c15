"""Pages of the API reference: an overview, and one page per package with every public name of its modules."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from site_pages.names import ROOT, Module, Name, modules
from site_pages.written import write_pages

_DIRECTIVES = {"class": "autoclass", "function": "autofunction"}
_ROLES = {"class": "class", "function": "func", "data": "data"}
_IMPORT = re.compile(r"^ *from (maze[\w.]*) import", re.MULTILINE)
OVERVIEW: dict[str, dict[str, str]] = {
    "Train, evaluate, roll out": {
        "maze.api": "`RunContext`: train, evaluate, compare and roll out policies from Python.",
        "maze.core.rollout": "Rollout runners, and the rollout generator that trainers use.",
        "maze.evaluation": "Comparison of policies, release gate, decision inspection and replay.",
        "maze.planning": "Policies that simulate candidates before each decision.",
        "maze.core.agent_deployment": "`AgentDeployment`: act in a system that calls the agent.",
        "maze.serve": "Policy bundles, the decision server and its client.",
        "maze.interop": "Export to gymnasium and PettingZoo; models of stable-baselines3.",
        "maze.rllib": "Training with algorithms of RLlib.",
        "maze.utils": "Environment checker, logging setup, TensorBoard reader.",
    },
    "Write an environment": {
        "maze.core.env": "Interfaces of environments, conversions, rewards and batched simulators.",
        "maze.core.events": "Event topics and the event service.",
        "maze.core.log_stats": "Statistics of events on step, episode and epoch level.",
        "maze.core.log_events": "Event logs and KPI calculators.",
        "maze.core.rendering": "Renderers, viewers and HTML pages of episodes.",
        "maze.core.wrappers": "Wrappers, and the adapter of gymnasium environments.",
        "maze.core.wrappers.observation_normalization": "Normalisation of observations with estimated statistics.",
        "maze.core.wrappers.observation_preprocessing": "Preprocessing of observations.",
        "maze_envs.inventory": "Lost sales and dual sourcing, with exact values.",
        "maze_envs.queueing": "Queueing networks, with exact values.",
        "maze_envs.packing": "Online bin packing.",
        "maze_envs.scheduling": "Job shops, dispatching rules and CP-SAT.",
        "maze_envs.logistics.dispatching": "Dispatching of vehicles that come and go.",
        "maze_envs.logistics.cutting_2d": "Configurable two-dimensional cutting stock problem.",
        "maze_envs.robotics.pick_and_place": "Pick-and-place hierarchy.",
        "maze_envs.memory": "`recall`, a task that needs memory.",
    },
    "Policies and models": {
        "maze.core.agent": "Policies, critics, actor-critics and heuristics.",
        "maze.perception.models": "Model composers: `auto`, template and custom models.",
        "maze.perception.models.built_in": "Networks of `flatten_concat`.",
        "maze.perception.models.policies": "Policy composers.",
        "maze.perception.models.critics": "Critic composers.",
        "maze.perception.builders": "Architectures of template models.",
        "maze.perception.blocks": "Perception blocks.",
        "maze.perception.program": "Networks as programs: acting in NumPy, populations, joint evaluation.",
        "maze.distributions": "Action distributions and the distribution mapper.",
    },
    "Algorithms": {
        "maze.train.trainers.ppo": "PPO.",
        "maze.train.trainers.a2c": "A2C.",
        "maze.train.trainers.impala": "IMPALA with V-trace.",
        "maze.train.trainers.sac": "SAC and SAC from demonstrations.",
        "maze.train.trainers.dqn": "DQN.",
        "maze.train.trainers.es": "Evolution strategies.",
        "maze.train.trainers.imitation": "Behavioural cloning.",
        "maze.train.trainers.offline": "Learning from logged decisions: IQL, CQL, TD3+BC.",
        "maze.train.trainers.common": "Trainer base classes, training runner, losses, gradient step.",
        "maze.train.trainers.common.actor_critic": "What A2C, PPO and IMPALA share: valuation, minibatches, losses.",
        "maze.train.trainers.common.evaluators": "Evaluators.",
        "maze.train.trainers.common.model_selection": "Selection of the best model, early stopping.",
        "maze.train.trainers.common.replay_buffer": "Replay buffers.",
        "maze.train.parallelization.vector_env": "Vector environments.",
        "maze.train.parallelization.distributed_actors": "Actors that collect rollouts.",
    },
    "Records and data": {
        "maze.core.trajectory_recording.records": "Records of episodes, in terms of states and of spaces.",
        "maze.core.trajectory_recording.writers": "Files of episodes.",
        "maze.core.trajectory_recording.datasets": "Data sets for imitation and offline learning; Minari.",
        "maze.report": "HTML reports and `progress.csv`.",
        "maze.tracking": "Experiment trackers.",
        "maze.core.utils": "Factory, seeding, safe loading, files, worker processes.",
    },
}
"""Packages in the order of the overview, by section, with a sentence for each. Others follow in a last section."""


def write_reference(directory: Path) -> None:
    """Write the pages. Modules that guides import most often come first within their package.

    :param directory: Target; other files in it are removed.
    """
    packages: dict[str, list[Module]] = defaultdict(list)
    for module in modules():
        if module.names or module.has_docstring:
            packages[module.name if module.is_package else module.name.rpartition(".")[0]].append(module)
    for members in packages.values():
        members.sort(key=lambda module: (not module.is_package, -_n_imports()[module.name], module.name))
    pages = {f"{package}.rst": _page(package, members) for package, members in packages.items() if _names(members)}
    pages["index.rst"] = _overview([name.removesuffix(".rst") for name in pages])
    write_pages(directory, pages)


def _overview(packages: list[str]) -> str:
    """Return the overview: sections of packages with a sentence each, then all other packages."""
    listed = {package for section in OVERVIEW.values() for package in section}
    rest = {package: _modules_of(package) for package in sorted(set(packages) - listed)}
    parts = [_heading("API", "=")]
    parts.append("Public names by package. :ref:`genindex` lists all of them. Documented names are stable.\n")
    for title, section in {**OVERVIEW, "Further packages": rest}.items():
        shown = {package: sentence for package, sentence in section.items() if package in packages}
        rows = "\n".join(f":doc:`{package} <{package}>`\n   {sentence}\n" for package, sentence in shown.items())
        entries = "\n".join(f"   {package} <{package}>" for package in shown)
        parts += [_heading(title, "-"), rows, f".. toctree::\n   :hidden:\n\n{entries}\n"]
    return "\n".join(parts)


def _modules_of(package: str) -> str:
    names = [module.name.rpartition(".")[2] for module in modules() if module.name.rpartition(".")[0] == package]
    return "Modules: " + ", ".join(f"``{name}``" for name in names) + "." if names else f"Package ``{package}``."


@cache
def _n_imports() -> Counter[str]:
    """Count the listings of README, guides and tutorials that import from each module."""
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    return Counter(name for page in pages for name in _IMPORT.findall(page.read_text(encoding="utf-8")))


def _names(members: list[Module]) -> int:
    return sum(len(module.names) for module in members)


def _page(package: str, members: list[Module]) -> str:
    parts = [_heading(package, "=")]
    for module in members:
        if module.name != package and module.names:
            parts.append(_heading(module.name.removeprefix(f"{package}."), "-"))
        if module.has_docstring:
            parts.append(f".. automodule:: {module.name}\n")
        else:
            parts.append(f".. py:module:: {module.name}\n")
        parts += [_entry(name) for name in module.names]
    return "\n".join(parts)


def _heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def _entry(name: Name) -> str:
    if name.origin:
        directive = "class" if name.kind == "class" else "function" if name.kind == "function" else "data"
        return f".. py:{directive}:: {name.name}\n\n   Short for :{_ROLES[name.kind]}:`{name.origin}`.\n"
    if name.kind == "data":
        value = " ".join(name.value.split())
        shown = f"   :value: {value}\n" if len(value) <= 120 else ""
        text = textwrap.indent(textwrap.dedent(name.docstring), "   ")
        return f".. py:data:: {name.name}\n{shown}\n{text}\n"
    options = ""
    if name.kind == "class":
        options = "   :members:\n   :undoc-members:\n   :show-inheritance:\n"
    return f".. {_DIRECTIVES[name.kind]}:: {name.full}\n{options}"
