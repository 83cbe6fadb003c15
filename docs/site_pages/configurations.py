"""Pages of the configurations: every group, its options, and their fields with defaults and meaning.

Keys and defaults come from the YAML files, and for algorithms from the dataclasses that Hydra's `ConfigStore` holds.
Meanings come from the fields and arguments of the class that `_target_` names, and otherwise from the comment above the
key.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer

from site_pages.names import OPTIONAL, ROOT
from site_pages.written import write_pages

TARGET = "_target_"
_PARAMETER = re.compile(r"^:param (?:[\w.\[\], |]+ )?\*{0,2}(\w+): *(.*(?:\n(?:[ \t]+.*|(?=\n[ \t])))*)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#(.*)$")
_ORDER = ("env", "wrappers", "algorithm", "model", "critic", "policy", "runner", "seeding", "tracking", "experiment")
_GROUPS = {
    "": "Root configurations, selected with `-cn`: one per command.",
    "env": "Environments.",
    "wrappers": "Wrappers of the environment.",
    "algorithm": "Trainers and their hyperparameters.",
    "model": "Networks, templates and automatic models.",
    "critic": "Critics.",
    "policy": "Policies of rollouts.",
    "runner": "Runners of training and rollouts.",
    "seeding": "Seeds; empty ones are drawn and recorded.",
    "tracking": "Experiment trackers.",
    "experiment": "Sets of settings, selected with `+experiment=...`.",
    "algorithm_runner": "Settings of a pair of algorithm and runner, selected automatically.",
    "algorithm_model": "Settings of a pair of algorithm and model, selected automatically.",
    "env_model": "Settings of a pair of environment and model, selected automatically.",
    "training_runner": "Training settings of a runner, selected automatically.",
    "rollout_runner": "Rollout settings of a runner, selected automatically.",
    "hydra/sweeper": "Sweepers of `--multirun`.",
    "rllib/algorithm": "RLlib's algorithms, for `-cn conf_rllib`.",
    "rllib/runner": "Runners of RLlib, for `-cn conf_rllib`.",
}


class Option(NamedTuple):
    """An option of a group."""

    group: str
    name: str
    text: str
    """The configuration as YAML."""
    path: Path | None = None
    """Its file; `None` where a dataclass states it."""


class Field(NamedTuple):
    """A key of an option."""

    key: str
    default: str
    meaning: str


def options() -> list[Option]:
    """Return every shipped configuration."""
    from maze.cli.hydra_setup import environment_configs, register_algorithms

    found = []
    for package in ("maze.conf", *environment_configs()):
        module = importlib.import_module(package)
        directory = Path(str(module.__file__)).parent
        for path in sorted(directory.rglob("*.yaml")):
            group = path.parent.relative_to(directory).as_posix()
            text = path.read_text(encoding="utf-8")
            found.append(Option("" if group == "." else group, path.stem, text, path))
    register_algorithms()
    for group in ("algorithm", "algorithm_runner"):
        for name in ConfigStore.instance().list(group):
            node = ConfigStore.instance().load(f"{group}/{name}").node
            found.append(Option(group, name.removesuffix(".yaml"), OmegaConf.to_yaml(node)))
    return found


def write_configurations(directory: Path, options_found: list[Option] | None = None) -> None:
    """Write one page for each group.

    :param directory: Target; other files in it are removed.
    :param options_found: The configurations; default: the shipped ones.
    """
    groups: dict[str, list[Option]] = defaultdict(list)
    for option in options() if options_found is None else options_found:
        groups[option.group].append(option)
    pages = {}
    for group, members in groups.items():
        number = _ORDER.index(group) if group in _ORDER else len(_ORDER) if group else 98
        file = f"{number:02d}-{group.replace('/', '-') or 'root'}.rst"
        pages[file] = _page(group, members)
    write_pages(directory, pages)


def fields(option: Option) -> list[Field]:
    """Return the keys of an option with their defaults and meanings."""
    node = yaml.compose(option.text)
    if not isinstance(node, yaml.MappingNode):
        return []
    lines = option.text.splitlines()
    found = list(_fields(node, lines, ""))
    target = _value(node, TARGET)
    if target is not None:
        found += _fields_of_the_class_only(str(target), {field.key for field in found})
    return found


def _page(group: str, members: list[Option]) -> str:
    title = group or "commands"
    parts = [f"{title}\n{'=' * len(title)}\n", _GROUPS.get(group, ""), ""]
    for option in members:
        title = f"-cn {option.name}" if not group else f"{group}={option.name}"
        parts += [f"{title}\n{'-' * len(title)}\n", *_option(option)]
    return "\n".join(parts)


def _option(option: Option) -> Iterator[str]:
    if described := _head(option.text):
        yield f"{_escaped(described)}\n"
    node = yaml.compose(option.text)
    target = _value(node, TARGET) if isinstance(node, yaml.MappingNode) else None
    if target:
        yield f"Builds a :obj:`{target}`.\n"
    if isinstance(node, yaml.MappingNode) and (defaults := _value(node, "defaults")):
        chosen = ", ".join(f"``{_flow(entry)}``" for entry in defaults if entry != "_self_")
        yield f"Begins with: {chosen}.\n"
    rows = fields(option)
    if rows:
        yield ".. list-table::\n   :header-rows: 1\n   :widths: 28 22 50\n   :class: fields\n"
        yield "   * - key\n     - default\n     - meaning"
        for row in rows:
            meaning = " ".join(row.meaning.split())
            yield f"   * - ``{row.key}``\n     - {f'``{row.default}``' if row.default else ''}\n     - {meaning}"
        yield ""
    if option.path is None:
        return
    yield '.. raw:: html\n\n   <details class="file"><summary>the file</summary>\n'
    yield f".. literalinclude:: /../{_relative(option.path)}\n   :language: yaml\n"
    yield ".. raw:: html\n\n   </details>\n"


def _relative(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix()


def _head(text: str) -> str:
    """Return the comment at the beginning of a file, without the `@package` line."""
    found: list[str] = []
    for line in text.splitlines():
        comment = _COMMENT.match(line)
        if comment and "@package" in line:
            continue
        if comment:
            found.append(comment[1].strip())
        elif line.strip() or found:
            # a comment right above the first key belongs to that key, unless it is above `_target_` or `defaults`
            first = line.split(":")[0].strip()
            return " ".join(found) if not line.strip() or first in (TARGET, "defaults") else ""
    return " ".join(found)


def _fields(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[Field]:
    target = _value(node, TARGET)
    documented = documentation(str(target)) if target is not None else {}
    group = ""  # one comment may stand above several keys
    last_line = -2
    for key_node, value_node in node.value:
        key = str(key_node.value)
        line = key_node.start_mark.line
        own = _comment_above(lines, line)
        if key in (TARGET, "hydra") or (key == "defaults" and not prefix):
            continue
        group = own or (group if line == last_line + 1 else "")
        last_line = value_node.end_mark.line if isinstance(value_node, yaml.ScalarNode) else -2
        meaning = documented.get(key) or _escaped(group)
        path = f"{prefix}{key}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            inner = _value(value_node, TARGET)
            made = f":obj:`{inner}`" if inner else ""
            if meaning or made:
                yield Field(path, "", f"{meaning} {f'Makes a {made}.' if made else ''}".strip())
            yield from _fields(value_node, lines, f"{path}.")
        else:
            yield Field(path, _flow(_plain(value_node)), meaning)


def _fields_of_the_class_only(target: str, present: set[str]) -> Iterator[Field]:
    """Fields of a dataclass that the file does not set."""
    made = _located(target)
    if not (inspect.isclass(made) and dataclasses.is_dataclass(made)):
        return
    documented = documentation(target)
    for field in dataclasses.fields(made):
        if field.init and field.name not in present and not any(key.startswith(f"{field.name}.") for key in present):
            default = "" if field.default is dataclasses.MISSING else _flow(field.default)
            yield Field(field.name, default, documented.get(field.name, ""))


@cache
def documentation(target: str) -> Mapping[str, str]:
    """Return the documentation of fields and arguments of a class or function, by name, as reStructuredText."""
    made = _located(target)
    found: dict[str, str] = {}
    if inspect.isclass(made):
        for each in reversed(made.__mro__):
            if each.__module__.split(".")[0] in ("maze", "maze_envs", "tutorial_maze_env"):
                found |= _parameters(each.__doc__) | _parameters(vars(each).get("__init__", None).__doc__)
                analyzer = ModuleAnalyzer.for_module(each.__module__)
                analyzer.analyze()
                for (owner, name), text in analyzer.attr_docs.items():
                    if owner == each.__qualname__:
                        found[name] = " ".join(" ".join(text).split())
    elif callable(made):
        found |= _parameters(made.__doc__)
    return found


def _parameters(docstring: str | None) -> dict[str, str]:
    return {name: " ".join(text.split()) for name, text in _PARAMETER.findall(inspect.cleandoc(docstring or ""))}


def _located(target: str) -> Any:
    """Return the object of a dotted path; `None` for foreign objects and failing imports."""
    module, _, name = target.rpartition(".")
    if module.split(".")[0] not in ("maze", "maze_envs", "tutorial_maze_env"):
        return None
    with mock([*OPTIONAL]):
        return getattr(importlib.import_module(module), name)


def _comment_above(lines: list[str], line: int) -> str:
    found: list[str] = []
    while line > 0 and (comment := _COMMENT.match(lines[line - 1])) and "@package" not in lines[line - 1]:
        found.insert(0, comment[1].strip())
        line -= 1
    return " ".join(found)


def _value(node: yaml.MappingNode, key: str) -> Any:
    return next((_plain(value) for name, value in node.value if name.value == key), None)


def _plain(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))


def _flow(value: Any) -> str:
    """A value as it is written on one line."""
    if value is None:
        return "null"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    text = text.removesuffix("...").strip()
    return text if text and "`" not in text else repr(value)


def _escaped(text: str) -> str:
    """A comment as reStructuredText: code in backticks stays, nothing else means anything."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts = [text.replace("`", "'")]
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([\\*|_<>])", r"\\\1", parts[index])
    return "`".join(parts)
