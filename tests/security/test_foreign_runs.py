"""Foreign run directories: no name at any place of a stored configuration imports a foreign module.

The run, and the working directory in some tests, hold a module or package for each name. Python imports from the
working directory, as it does in a notebook. An imported module writes its name into a file.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from maze.api.run_context import RunContext
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.errors import MazeError
from maze.core.utils import stored_config
from maze.core.utils.factory import locate, named_module
from maze.core.utils.import_guard import ForeignModuleError, ImportGuard
from maze.interop import to_sb3
from maze.maze_cli import main

NAMES = [
    "evilmod:CartPole-v1",
    "evilmod: x",
    "evilmod::x",
    "evilmod:ns/X-v0",
    "evilpkg.sub:X-v0",
    "evil-mod:CartPole-v1",
    "1evil:CartPole-v1",
    "evil mod:CartPole-v1",
    " evilmod:X-v0",
    "évil:X-v0",
    "evilmod.X",
    "evilpkg.sub.X",
    "evil-mod.X",
    "1evil.X",
    "evil mod.X",
    " evilmod.X",
    "évil.X",
    "evilmod.X ",
    "evilmod",
    "evil-mod",
    "gym.spaces.X",
    "gym:X-v0",
    "jax.X",
    "JaxToNumpy",
    "gymnasium.wrappers.JaxToNumpy",
    "${oc.env:EVIL_NAME}.X",
    "${oc.select:nowhere,evilmod.X}",
    "maze.evilmod.X",
    "maze_envs.evilmod.X",
    "torch.evilmod.X",
]
"""Malformed and well-formed names of modules of the working directory, and of what is in them."""
MODULES = ("evilmod", "evil-mod", "1evil", "evil mod", " evilmod", "évil", "jax")
PACKAGES = {"evilpkg": "sub", "gym": "spaces"}

_NETWORK = ("model", "policy", "networks", 0)
_WRAPPERS = "maze.core.wrappers"
_NORMALIZATION = (
    f"{_WRAPPERS}.observation_normalization.observation_normalization_wrapper.ObservationNormalizationWrapper"
)
_PREPROCESSING = f"{_WRAPPERS}.observation_preprocessing.preprocessing_wrapper.PreProcessingWrapper"


def _set(*path: Any) -> Callable[[dict[str, Any], str], None]:
    def change(config: dict[str, Any], name: Any) -> None:
        node: Any = config
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = name

    return change


def _env(**values: Callable[[str], Any]) -> Callable[[dict[str, Any], str], None]:
    return lambda config, name: config["env"].update({key: make(name) for key, make in values.items()})


def _wrappers(make: Callable[[str], Any]) -> Callable[[dict[str, Any], str], None]:
    return lambda config, name: config.update(wrappers=make(name))


PLACES: dict[str, Callable[[dict[str, Any], str], None]] = {
    "env": lambda config, name: config.update(env=name),
    "env.name": _set("env", "name"),
    "env._target_": _set("env", "_target_"),
    "env.import": _env(**{"import": lambda name: [name]}),
    "env.import text": _env(**{"import": lambda name: name}),
    "env.gym_wrappers": _env(gym_wrappers=lambda name: [name]),
    "env.gym_wrappers key": _env(gym_wrappers=lambda name: [{name: {}}]),
    "env.pettingzoo": lambda config, name: config.update(
        env={"_target_": "maze.interop.pettingzoo_env.make_pettingzoo_env", "name": name}
    ),
    "wrappers key": _wrappers(lambda name: {name: {}}),
    "wrappers list": _wrappers(lambda name: [name]),
    "wrappers._target_": _wrappers(lambda name: [{"_target_": name}]),
    "strategy": _wrappers(lambda name: {_NORMALIZATION: {"default_strategy": name}}),
    "sampling_policy": _wrappers(lambda name: {_NORMALIZATION: {"sampling_policy": {"_target_": name}}}),
    "pre_processor": _wrappers(
        lambda name: {
            _PREPROCESSING: {"pre_processor_mapping": [{"observation": "observation", "_target_": name, "config": {}}]}
        }
    ),
    "network": _set(*_NETWORK, "_target_"),
    "non_lin": _set(*_NETWORK, "non_lin"),
    "nested target": lambda config, name: _set(*_NETWORK, "hidden_units")(config, [{"_target_": name}]),
    "policy composer": _set("model", "policy", "_target_"),
    "action_space": lambda config, name: config["model"].update(
        distribution_mapper_config=[{"action_space": name, "distribution": "torch.nn.Tanh"}]
    ),
    "distribution": lambda config, name: config["model"].update(
        distribution_mapper_config=[{"action_space": "gym.spaces.Discrete", "distribution": name}]
    ),
}
VARIANTS = [(place, name) for place in PLACES for name in NAMES]
SOME = [
    (place, name) for row, place in enumerate(PLACES) for column, name in enumerate(NAMES) if (row + column) % 4 == 0
]
"""Each name at five places, each place with seven or eight names."""
PLAIN = [
    ("env._target_", "evilmod.X"),
    ("env.import", "evilmod"),
    ("env.name", "evilmod:CartPole-v1"),
    ("wrappers._target_", "evilpkg.sub.X"),
    ("network", "evilmod.X"),
    ("non_lin", "evilpkg.sub.X"),
]
"""Well-formed names where Maze imports them; most others would import nothing either way."""

_SHORT = ["runner.n_episodes=1", "runner.max_episode_steps=3"]


def _command(*arguments: str) -> None:
    console = io.StringIO()
    with redirect_stdout(console), redirect_stderr(console):
        status = main(arguments)
    assert "Traceback" not in console.getvalue(), console.getvalue()[-2000:]
    if status:
        raise MazeError(console.getvalue())


def _load(run: Path) -> None:
    with RunContext.load(run, silent=True) as context:
        _ = context.policy


ENTRY_POINTS: dict[str, Callable[[Path], Any]] = {
    "from_run": lambda run: AgentDeployment.from_run(run).close(),
    "load": _load,
    "to_sb3": to_sb3,
    "export": lambda run: _command("--export", str(run), "--out", "policy.maze", "--steps", "5"),
    "rollout": lambda run: _command("policy=torch_policy", "runner=sequential", f"input_dir={run}", *_SHORT),
    "resume": lambda run: _command(
        "-cn", "conf_train", f"input_dir={run}", "resume=true", "algorithm=a2c", "algorithm.n_epochs=1"
    ),
    "gate": lambda run: _command("-cn", "conf_gate", f"candidate={run}", "baseline=random", *_SHORT),
}


def write_modules(directory: Path) -> None:
    """Modules and packages that write down that they were imported."""
    canary = "import os\nwith open(os.environ['EVIL_FILE'], 'a') as file:\n    file.write(__name__ + '\\n')\nX = dict\n"
    for module in MODULES:
        (directory / f"{module}.py").write_text(canary)
    for package, module in PACKAGES.items():
        (directory / package).mkdir()
        for file in ("__init__", module):
            (directory / package / f"{file}.py").write_text(canary)


@pytest.fixture
def foreign(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A foreign run, with such modules in it, in a working directory that Python imports from.

    As in a notebook, it is the empty entry of `sys.path`, which follows changes of the directory: runs and rollouts
    work in directories of their own. As for a script in it, it is also an absolute entry, which does not.
    """
    shutil.copytree(trained_run, tmp_path / "run")
    write_modules(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EVIL_FILE", str(tmp_path / "imported"))
    monkeypatch.setenv("EVIL_NAME", "evilmod")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    known = set(sys.modules)
    yield tmp_path / "run"
    os.chdir(tmp_path)
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in (*MODULES, *PACKAGES):
            del sys.modules[name]


def attacked(run: Path, variants: list[tuple[str, str]], enter: Callable[[Path], Any]) -> list[str]:
    """The variants that imported a module, were not refused, or failed in another way than by an error of Maze."""
    path, marker = run / ".hydra" / "config.yaml", run.parent / "imported"
    original = yaml.safe_load(path.read_text())
    failures = []
    for place, name in variants:
        config = copy.deepcopy(original)
        PLACES[place](config, name)
        path.write_text(json.dumps(config))  # JSON is YAML, and written in no time
        try:
            enter(run)
        except MazeError:
            outcome = ""
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        else:
            outcome = "accepted"
        if marker.exists():
            outcome += f" IMPORTED {marker.read_text().split()}"
            marker.unlink()
        if Path.cwd() != run.parent:
            outcome += f" LEFT IN {os.getcwd()}"
            os.chdir(run.parent)
        if outcome:
            failures.append(f"{place}: {name!r}: {outcome}")
    return failures


def test_no_name_imports_a_module_of_the_run(foreign: Path) -> None:
    failures = attacked(foreign, SOME, ENTRY_POINTS["from_run"])
    assert failures == [], "\n".join(failures)


def variants_of(entry: str) -> list[tuple[str, str]]:
    """All variants for one entry point; for the others, which read configurations by the same code, each name once.

    Each of them meets every place, and each name elsewhere than the others do.
    """
    if entry == "from_run":
        return VARIANTS
    places, shift = list(PLACES), 3 * list(ENTRY_POINTS).index(entry)
    return [*PLAIN, *((places[(column + shift) % len(places)], name) for column, name in enumerate(NAMES))]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_no_name_imports_a_module_of_the_working_directory(foreign: Path, entry: str) -> None:
    write_modules(foreign.parent)
    failures = attacked(foreign, variants_of(entry), ENTRY_POINTS[entry])
    assert failures == [], "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_without_both_defences_a_module_is_imported(foreign: Path, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other tests show nothing: the modules have to be found where the entry point imports."""
    write_modules(foreign.parent)
    monkeypatch.setattr(stored_config, "refuse_foreign_targets", lambda *arguments: None)
    monkeypatch.setattr(ImportGuard, "spec_of", lambda *arguments: None)
    (failure,) = attacked(foreign, [("wrappers._target_", "evilpkg.sub.X")], ENTRY_POINTS[entry])
    assert "IMPORTED ['evilpkg', 'evilpkg.sub']" in failure


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["from_run", "rollout", "load", "gate"])
def test_the_import_guard_alone_refuses_them(foreign: Path, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second line of defence does not rest on how the texts are judged."""
    write_modules(foreign.parent)
    monkeypatch.setattr(stored_config, "refuse_foreign_targets", lambda *arguments: None)
    variants = [*PLAIN, *SOME] if entry == "from_run" else PLAIN
    failures = attacked(foreign, variants, ENTRY_POINTS[entry])
    assert not [failure for failure in failures if "IMPORTED" in failure], "\n".join(failures)


@pytest.fixture
def armed(foreign: Path) -> ImportGuard:
    """A guard of a configuration that names modules of the working directory."""
    write_modules(foreign.parent)
    guard = ImportGuard()
    guard.watch(
        foreign, [("config.yaml: env.import[0]", "evilmod"), ("config.yaml: env.name", "évil:X-v0")], ["evilpkg"]
    )
    return guard


@pytest.mark.parametrize(
    ("module", "key"), [("evilmod", r"env\.import\[0\]: 'evilmod'"), ("évil", r"env\.name: 'évil:X-v0'")]
)
def test_the_guard_names_the_key_that_a_module_is_imported_for(armed: ImportGuard, module: str, key: str) -> None:
    with (
        pytest.raises(
            ForeignModuleError, match=rf"config\.yaml: {key} would import the module '{module}'.*--trust {module}"
        ),
        armed.active(),
    ):
        named_module(module, "env.import")


def test_the_import_guard_applies_in_its_context_only(armed: ImportGuard) -> None:
    found: list[str] = []
    with armed.active():
        elsewhere = threading.Thread(target=lambda: found.append(named_module("evilmod", "").__name__))
        elsewhere.start()
        elsewhere.join()
    assert found == ["evilmod"]


def test_the_guard_lets_trusted_packages_dependencies_and_the_users_own_code_import(armed: ImportGuard) -> None:
    with armed.active():
        assert locate("evilpkg.sub.X") is dict
        assert locate("matplotlib.backends.backend_svg.FigureCanvasSVG")
        assert locate("torch.utils.data.datapipes.iter.callable.MapperIterDataPipe")
        assert importlib.import_module("evil-mod").X is dict  # by this test, which is not a library


def test_the_guard_takes_dependencies_from_where_they_are_installed(armed: ImportGuard, foreign: Path) -> None:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        pytest.skip("imageio_ffmpeg is not installed")
    for place in (foreign, foreign.parent):
        (place / "imageio_ffmpeg.py").write_text("raise SystemExit('imported from the working directory')\n")
        (place / "no_such_dependency.py").write_text("raise SystemExit('imported')\n")
    with armed.active():
        assert "site-packages" in str(named_module("imageio_ffmpeg", "").__file__)
        with pytest.raises(ForeignModuleError, match="no_such_dependency"):
            named_module("no_such_dependency", "")


def test_trusted_libraries_may_import_the_standard_library(tmp_path: Path) -> None:
    """`sysconfig` imports a module that belongs to no list: its name depends on the platform."""
    script = tmp_path / "script.py"
    library = "import sysconfig; sysconfig.get_config_vars(); print('imported')"
    script.write_text(
        "from pathlib import Path\n"
        "from maze.core.utils.import_guard import imports_guarded\n"
        "with imports_guarded() as guard:\n"
        "    guard.watch(Path('run'), [('env.name', 'CartPole-v1')], [])\n"
        f"    exec({library!r}, {{'__name__': 'numpy.library'}})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert finished.stdout == "imported\n", finished.stderr
