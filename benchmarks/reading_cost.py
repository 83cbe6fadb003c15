"""Amount of code from an algorithm's configuration to its gradient step.

The rule, the same for both libraries: start where the configuration points to (the configuration's class, the classes
that its runner's file names), and follow every import, also those inside functions and those by name in a text such as
`"package.module.Class"`; what is only imported for annotations is left out. A module counts with all its lines.
Taken as given, because it can be used without being read, is what decides nothing about what is learned: what steps
environments and collects from them, what evaluates and selects models, networks and distributions, logging, files and
small helpers:

* of Maze everything outside `maze.train`, except for the advantages (`maze.core.agent.returns`), and of `maze.train`
  the modules of `GIVEN`, each beside its counterpart;
* of stable-baselines3 the modules of `GIVEN`.

What builds a run of a configuration (the runner) counts for Maze, though stable-baselines3 leaves it to its users;
saving and loading counts for stable-baselines3 where its base class has it.

A second figure for Maze adds the modules that collect rollouts (stable-baselines3 has those in what is counted: its
rollout buffer and `collect_rollouts`).

    python benchmarks/reading_cost.py
    python benchmarks/reading_cost.py --files --documented interfaces.md

With `--documented`, a list of documented import paths, it also counts the small modules that are free to move.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

REPOSITORY = Path(__file__).resolve().parent.parent

SB3 = "stable_baselines3.common"
GIVEN: tuple[tuple[str, ...], ...] = (
    # what steps environments and collects from them
    (f"{SB3}.vec_env", f"{SB3}.env_util", f"{SB3}.monitor", "maze.train.parallelization"),
    (
        *(f"{SB3}.atari_wrappers", f"{SB3}.preprocessing", f"{SB3}.running_mean_std", f"{SB3}.noise"),
        "maze.train.trainers.common.observation_statistics",
        "maze.train.trainers.common.observation_statistics",
    ),
    # networks and distributions (of Maze all of it lies outside of maze.train)
    (f"{SB3}.policies", f"{SB3}.torch_layers", f"{SB3}.distributions"),
    # what evaluates and selects models
    (f"{SB3}.evaluation", "maze.train.trainers.common.evaluators", "maze.train.trainers.common.model_selection"),
    # what accompanies a run: evaluations, early stopping, checkpoints, signals, the progress bar
    (
        f"{SB3}.callbacks",
        "maze.train.trainers.common.trainer",
        "maze.train.utils.run_process",
        "maze.console.runs",
    ),
    # files: what is saved, and where a run begins
    (
        f"{SB3}.save_util",
        "maze.train.trainers.common.training_runner",
        "maze.train.utils.train_utils",
    ),
    # logging
    (f"{SB3}.logger", "maze.train.trainers.common.learning"),
    # small helpers
    (f"{SB3}.utils", f"{SB3}.type_aliases"),
)
EVENTS = "_events"
"""Modules of Maze that end so declare the statistics that are logged, each with its group."""
COUNTED = ("maze.train", "maze.core.agent.returns", "stable_baselines3")
COLLECTING = ("maze.core.rollout",)
CHECKPOINT_METHODS = (
    "wrapper_statistics",
    "load_wrapper_statistics",
    "episodes_state",
    "load_episodes_state",
    "training_state",
    "load_training_state",
    "_own_state",
    "_load_own_state",
    "state_dict",
    "load_state_dict",
)
SMALL = 60
"""Modules of at most so many lines are small."""

CLASS_PATH = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)+\.[A-Z]\w*")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="ppo", help="an algorithm of Maze")
    parser.add_argument("--files", action="store_true", help="name the files")
    parser.add_argument("--documented", type=Path, help="a list of documented import paths, `package.module.Name`")
    arguments = parser.parse_args()
    starts = starting_points(arguments.algorithm)
    counted = modules_read(REPOSITORY, starts, COUNTED)
    report(f"{arguments.algorithm}, Maze", counted, arguments.files)
    collecting = modules_read(REPOSITORY, starts, COUNTED + COLLECTING)
    report("  with what collects rollouts", collecting, files=False)
    other = importlib.util.find_spec("stable_baselines3")
    if other is not None and other.origin is not None and arguments.algorithm in ("ppo", "a2c", "sac", "dqn"):
        root = Path(other.origin).parent.parent
        start = f"stable_baselines3.{arguments.algorithm}.{arguments.algorithm}"
        report(f"{arguments.algorithm}, stable-baselines3", modules_read(root, [start], COUNTED), arguments.files)
    report_structure(arguments.documented)


def starting_points(algorithm: str) -> list[str]:
    """The modules that an algorithm's configuration and its runner's (in process) name."""
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", [f"algorithm={algorithm}"])
    paths = [path for part in (cfg.algorithm, cfg.runner) for path in CLASS_PATH.findall(OmegaConf.to_yaml(part))]
    return [path.rpartition(".")[0] for path in paths]


def modules_read(root: Path, starts: list[str], rooms: tuple[str, ...]) -> dict[str, int]:
    """Number of lines of each module that is reached from some.

    :param root: Directory of the packages.
    :param starts: Modules to start with.
    :param rooms: Packages and modules that count.
    """
    lines: dict[str, int] = {}
    todo = list(starts)
    while todo:
        module = todo.pop()
        file = file_of(root, module)
        if module in lines or file is None or not is_in(module, rooms) or is_given(module):
            continue
        text = file.read_text()
        lines[module] = len(text.splitlines())
        todo += imported(root, module, ast.parse(text))
    return {module: n for module, n in lines.items() if n}


def imported(root: Path, module: str, tree: ast.AST) -> Iterator[str]:
    """Modules that a module needs when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if file_of(root, inner) else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and CLASS_PATH.fullmatch(node.value):
            yield node.value.rpartition(".")[0]
        yield from imported(root, module, node)


def file_of(root: Path, module: str) -> Path | None:
    """The file of a module or package."""
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


def is_in(module: str, rooms: tuple[str, ...]) -> bool:
    """Whether a module is one of the rooms or inside one."""
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def is_given(module: str) -> bool:
    """Whether a module is taken as given."""
    return module.endswith(EVENTS) or any(is_in(module, rooms) for rooms in GIVEN)


def report(what: str, lines: dict[str, int], files: bool) -> None:
    """Print one figure."""
    print(f"{what:<32} {len(lines):3} files {sum(lines.values()):6,} lines")
    for module, n in sorted(lines.items()) if files else ():
        print(f"    {n:5} {module}")


def report_structure(documented: Path | None) -> None:
    """Print measures of the whole package."""
    lengths, definitions = {}, dict.fromkeys(CHECKPOINT_METHODS, 0)
    for file in sorted((REPOSITORY / "maze").rglob("*.py")):
        text = file.read_text()
        lengths[".".join(file.relative_to(REPOSITORY).with_suffix("").parts)] = len(text.splitlines())
        for method in CHECKPOINT_METHODS:
            definitions[method] += len(re.findall(rf"^ +def {method}\(", text, re.MULTILINE))
    print(f"maze/                            {len(lengths):3} files {sum(lengths.values()):6,} lines")
    small = [module for module, n in lengths.items() if 0 < n <= SMALL]
    print(f"modules of 1 to {SMALL} lines          {len(small):3}")
    if documented is not None:
        names = set(re.findall(r"maze(?:\.\w+)+", documented.read_text()))
        free = [m for m in small if m not in names and not any(name.startswith(f"{m}.") for name in names)]
        print(f"  of them at free paths          {len(free):3}")
    print(f"checkpoint methods               {sum(definitions.values()):3} definitions")
    for method, n in definitions.items():
        print(f"    {n:5} {method}")


if __name__ == "__main__":
    main()
