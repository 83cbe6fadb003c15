"""Errors of the command line; messages of Hydra and OmegaConf with the place of the error and its remedy."""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterable
from importlib import resources
from typing import Any, NoReturn

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from maze.core.annotations import override
from maze.core.errors import ConfigError, GateNotPassedError, did_you_mean, first_line


class UsageError(ConfigError):
    """The command itself is wrong; nothing was started."""

    exit_status = 2


class FlagParser(argparse.ArgumentParser):
    """Parse the arguments of a flag of `maze-run`. Options that are not given are not attributes of the result.

    :param flag: The flag.
    :param description: What it does.
    """

    def __init__(self, flag: str, description: str) -> None:
        super().__init__(f"maze-run {flag}", description=description, allow_abbrev=False)
        self.argument_default = argparse.SUPPRESS
        self._flag = flag

    @override(argparse.ArgumentParser)
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self._flag}: {message}. {' '.join(self.format_usage().split())}")


class RunFailedError(BaseException):
    """Carry an error, its cause, past Hydra, which would print it in another form, or continue."""


GATE = ("baseline", "candidate")
"""Keys of the policies that a gate compares."""


def is_gate(cfg: Container[str]) -> bool:
    """Return whether a configuration is that of a gate."""
    return all(name in cfg for name in GATE)


def set_gate_status(error: BaseException, cfg: Container[str]) -> None:
    """Set the exit status of a gate with an invalid configuration or a failure to 2; 1 means: candidate rejected.

    :param error: The error that ends the command.
    :param cfg: Its configuration.
    """
    if is_gate(cfg) and isinstance(error, Exception) and not isinstance(error, GateNotPassedError):
        vars(error)["exit_status"] = UsageError.exit_status


def translated(error: BaseException) -> ConfigError | None:
    """Return the error as one message for users of the command line; None: Hydra did not raise it."""
    message: str | None = None
    if isinstance(error, MissingConfigException):
        message = _missing_config(error)
    elif isinstance(error, OverrideParseException):
        message = (
            f"Cannot read the argument {error.override!r}. Arguments are <group>=<option> or <key>=<value>; put values "
            f"with blanks, brackets or commas in quotes, for instance 'key=\"a, b\"'; null stands for nothing."
        )
    elif isinstance(error, ConfigCompositionException):
        message = _composition(error)
    elif isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", None)
        message = f"{key}: {first_line(error).rstrip('.')}" if key else first_line(error).rstrip(".")
    elif isinstance(error, HydraException):
        message = str(error).strip()
    elif isinstance(error, YAMLError):
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
        place = (
            "A configuration file" if mark is None else f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
        )
        message = f"{place}: this is not valid YAML: {problem}."
    return None if message is None else UsageError(message)


def suggestion(wrong: str, known: Iterable[str], introduction: str = "Known") -> str:
    """Return a sentence with the most similar name, and another with all known names."""
    names = sorted(set(known))
    known_names = f" {introduction}: {', '.join(names)}." if names else ""
    return did_you_mean(wrong, names) + known_names


def _missing_config(error: MissingConfigException) -> str:
    missing = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = missing.rpartition("/")
    options = list(error.options or ())
    if not group:
        files = (entry.name for entry in resources.files("maze.conf").iterdir())
        known = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
        return f"-cn {missing}: there is no such root configuration." + suggestion(missing, known)
    if not options:
        return f"{group}={option}: there is no group {group!r}, or it is empty."
    return f"{group}={option}: there is no such option." + suggestion(option, options, f"Options of {group}")


def _composition(error: ConfigCompositionException) -> str:
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | AttributeError) and getattr(cause, "full_key", None):
        return _unknown_key(cause)
    message = str(error).strip()
    if isinstance(cause, OmegaConfBaseException):
        message = f"{message.splitlines()[0].rstrip('.')}: {first_line(cause).rstrip('.')}"
    return message


def _unknown_key(cause: Any) -> str:
    full_key, parent, wrong = str(cause.full_key), cause.parent_node, str(cause.key)
    siblings = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
    hint = did_you_mean(wrong, siblings, f"{full_key.removesuffix(wrong)}{{}}")
    hint += suggestion("", siblings, "Known here")
    return f"{full_key}: unknown key.{hint} To add a new key, write +{full_key}=<value>."
