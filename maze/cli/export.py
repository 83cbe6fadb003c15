"""`maze-run --export <run>`: a trained policy as one file that acts without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maze.cli.errors import UsageError
from maze.cli.run_description import find_run
from maze.serve.bundle import PolicyBundle

FLAG = "--export"
USAGE = (
    f"maze-run {FLAG} <run> [--out policy.maze] [--name <name>] [--weights state_dict.pt] [--steps 2000] [--seed 0] "
    "[--trust <package>]"
)
_OPTIONS = {"--out": "out", "--name": "name", "--weights": "state_dict_file", "--steps": "n_steps", "--seed": "seed"}


def export_run(arguments: Sequence[str]) -> int:
    """Writes the bundle of a run, and says what is in it and what is not.

    :param arguments: What follows `--export`.
    :return: Exit status.
    :raises UsageError: There is no such run, or an option is unknown.
    """
    run, settings = _parsed(arguments)
    out = Path(settings.pop("out", "") or f"{run.absolute().name}.maze")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out: there is no directory {out.parent}.")
    bundle = PolicyBundle.from_run(run, **settings)
    path = bundle.save(out)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, SHA-256 {bundle.sha256}")
    for key, step in bundle.steps.items():
        observed = ", ".join(step.observation_space)
        heads = ", ".join(f"{name} ({head.description['distribution']})" for name, head in step.heads.items())
        print(f"  sub-step {key!r}: from {observed} to {heads}")
        if sizes := next(iter(step.networks.values())).state_sizes:
            states = ", ".join(f"{name} ({size})" for name, size in sizes.items())
            print(f"    carries from step to step: {states}; sessions do so by themselves")
    for piece in bundle.card["code"]:
        need = "has to be provided" if piece["is_required"] else "may be provided" if piece["call"] else "comes before"
        print(f"  not in the file: {piece['name']} ({piece['class']}) {need}")
    n_cases = sum(len(next(iter(case["logits"].values()))) for case in bundle.reference)
    print(f"Its logits were those of the trained policy in {n_cases} recorded states.")
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    directories: list[str] = []
    settings: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            directories.append(argument)
            continue
        if option not in _OPTIONS:
            raise UsageError(f"{FLAG}: {argument} is not known here. {USAGE}")
        if not equals and not rest:
            raise UsageError(f"{option}: its value is missing. {USAGE}")
        value = value if equals else rest.pop(0)
        if option in ("--steps", "--seed"):
            if not value.isdigit():
                raise UsageError(f"{option}: expected a whole number, got {value!r}. {USAGE}")
            settings[_OPTIONS[option]] = int(value)
        else:
            settings[_OPTIONS[option]] = value
    if len(directories) != 1:
        raise UsageError(f"{FLAG}: name the directory of one training. {USAGE}")
    return find_run(Path(directories[0]), FLAG), settings
