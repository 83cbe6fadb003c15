"""Configurations of strangers: what they lead to is judged, wherever they say it."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import maze
from maze.cli.stored_runs import use_stored_run
from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils import stored_config
from maze.core.utils.stored_config import read_stored_config, refuse_foreign_targets

PATH = Path("config.yaml")
NETWORK = "maze.perception.models.built_in.flatten_concat.FlattenConcatPolicyNet"
MODEL = {
    "_target_": "maze.perception.models.custom_model_composer.CustomModelComposer",
    "distribution_mapper_config": [
        {"action_space": "gym.spaces.Box", "distribution": "maze.distributions.squashed_gaussian.SquashedGaussian"}
    ],
    "policy": {
        "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
        "networks": [{"_target_": NETWORK, "hidden_units": [32], "non_lin": "torch.nn.Tanh"}],
    },
    "critic": {"_target_": "maze.perception.models.critics.StateCriticComposer", "optimizer": "torch.optim.Adam"},
}
EXPLOITS: list[Any] = [
    {"_target_": "hydra._internal.instantiate._instantiate2.instantiate", "config": {}},
    {"_target_": "numpy.testing.runstring", "astr": "1", "dict": {}},
    {"_target_": "torch.utils.collect_env.run", "command": "id"},
    {"_target_": "maze.core.utils.safe_pickle.safe_load", "file": "x.pkl", "allow_pickle": True},
    {"_target_": "torch.serialization.load", "f": "x.pt", "weights_only": False},
    {"_target_": "maze.core.env.maze_env.np.testing.runstring", "astr": "1", "dict": {}},
    {"_target_": "maze.core.utils.files.atomic_write"},
    {"_target_": "maze.core.agent_deployment.agent_deployment.AgentDeployment.from_run", "run_dir": "x"},
    {"_target_": "maze.core.rollout.rollout_runner.RolloutRunner"},
    {"_target_": "maze.train.trainers.es.ESLocalRunner"},
    {"_target_": "maze.core.utils.factory.Factory", "base_type": "builtins.object"},
    {"_target_": "maze.cli.launchers.sys.exit"},
    {"_target_": "torch.jit.ScriptModule"},
    {"_target_": "torch.fx.GraphModule", "root": {}, "graph": None},
    {"_target_": "torch.nn.init.constant_"},
    {"_target_": "torch.nn.functional.torch.load"},
    {"_target_": "functools.partial", "_args_": []},
    {"_target_": "antigravity.fly"},
    {"_target_": ["os", "system"]},
    {"_target_": r"${env.name}"},
    {"_target_": "torch.nn.Tanh", "_args_": [{"_target_": "os.system", "_args_": ["true"]}]},
    "antigravity.fly",
    "antigravity:Env-v0",
    {"import": ["antigravity"]},
    {"gym_wrappers": [{"RecordVideo": {"video_folder": "/"}}]},
    {"gym_wrappers": ["gymnasium.wrappers.vector.vectorize_observation.VectorizeTransformObservation.a"]},
    "torch.utils.collect_env.run",
    "${oc.decode:x}",
    {"evil.module.Wrapper": {}, "antigravity.Wrapper": {}},
]


@pytest.fixture(autouse=True)
def nothing_is_imported_from_elsewhere():
    import sys

    yield
    assert "antigravity" not in sys.modules


def test_configurations_of_training_runs_are_accepted():
    refuse_foreign_targets(MODEL, PATH)
    refuse_foreign_targets(
        {
            "env": {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env", "name": "CartPole-v1"},
            "wrappers": {
                "maze.core.wrappers.observation_normalization.observation_normalization_wrapper"
                ".ObservationNormalizationWrapper": {"statistics": "statistics.pkl", "a": "see: www.example.com/x.y"},
                "TimeLimitWrapper": {"max_episode_steps": 3},
            },
        },
        PATH,
    )


ROOT = Path(maze.__file__).parent.parent
CONFIGURATIONS = [
    path
    for package in ("maze", "maze_envs")
    for group in ("env", "wrappers", "model", "critic")
    for path in (ROOT / package).rglob(f"conf/{group}/*.yaml")
]


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_configurations_stored_by_all_runs_are_accepted(path, monkeypatch):
    monkeypatch.setattr(stored_config, "is_importable", lambda package: True)  # extras may be installed
    if "rllib" not in path.stem:
        refuse_foreign_targets(yaml.safe_load(re.sub(r"\$\{[^}]*\}", "x", path.read_text())), path)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a configuration that could be something else."""
    entries = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
    here = [(*path, key) for key, _ in entries]
    return here + [p for key, value in entries for p in places(value, (*path, key))]


def replaced(node: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = replaced(node[path[0]], path[1:], by)
    return copy


@pytest.mark.parametrize("exploit", EXPLOITS, ids=str)
def test_an_exploit_is_refused_at_every_position_of_a_file(exploit):
    chooser = random.Random(0)
    everywhere = [path for path in places(MODEL) if path[-1] != "_target_" or isinstance(exploit, str)]
    for path in everywhere:
        hidden = exploit
        for _ in range(chooser.randrange(3)):  # in further containers
            hidden = chooser.choice([[hidden], {"a": hidden}, {"_target_": "torch.nn.Tanh", "_args_": [hidden]}])
        if path[-1] == "_target_":
            hidden = exploit
        for trusted in ([], ["maze", "maze_envs", "torch", "hydra", "numpy", "os", "my_project"]):
            with pytest.raises(CheckpointError, match=r"config\.yaml: `.*` names"):
                refuse_foreign_targets(replaced(MODEL, path, hidden), PATH, trusted)


def test_classes_of_ones_own_are_built_from_packages_that_are_named():
    model = replaced(MODEL, ("policy", "networks", 0, "_target_"), "tests.core.utils.factory_targets.Circle")
    with pytest.raises(CheckpointError, match=r"names tests\.core.*trusted_packages=\['tests'\]"):
        refuse_foreign_targets(model, PATH)
    refuse_foreign_targets(model, PATH, ["tests"])
    imported = replaced(MODEL, ("policy", "networks", 0, "_target_"), "tests.core.utils.factory_targets.innocent_name")
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        refuse_foreign_targets(imported, PATH, ["tests"])


@pytest.mark.parametrize("exploit", EXPLOITS, ids=str)
def test_a_rollout_does_not_use_the_stored_stable_baselines3_model(exploit, tmp_path):
    (tmp_path / ".hydra").mkdir()
    model = replaced(MODEL, ("policy", "networks", 0, "hidden_units"), exploit)
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    env = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env", "name": "CartPole-v1"}
    others = {
        "_target_": "torch.nn.Tanh",
        "_args_": [{"_target_": "numpy.zeros"}, {"_target_": "hydra.utils.get_class"}],
    }
    cfg = OmegaConf.create(
        {"env": env, "o": others, "policy": {"model": None}, "input_dir": str(tmp_path), "model": {}}
    )
    with pytest.raises((CheckpointError, ConfigError)):
        use_stored_run(cfg, [])
    assert cfg.model == {}


@pytest.mark.parametrize(
    "text", ["${eval:1}", "${a}", "a ${oc.decode:'{}'}", "${oc.e${b}:x}", "${${b}:1}"], ids=["eval", "", "in", "2", "3"]
)
def test_values_are_not_calculated_by_functions(text, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f'a: 1\nb: "{text}"\nc: "\\x24{{oc.env:HOME}}"\n')
    if text == "${a}":
        assert read_stored_config(path).value("b") == 1
        return
    with pytest.raises(CheckpointError, match=r"may only refer to other values|GrammarParseError"):
        read_stored_config(path)


def test_interpolations_are_resolved_as_omegaconf_does(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERE", "here")
    path = tmp_path / "config.yaml"
    path.write_text(
        "a: 1\nb: ${a}\nc: 'x ${a} ${b}'\nd: {e: [1, '${.0}', '${..f}', '${d.e[0]}'], f: 1e-3, g: '${d.e.1}'}\n"
        "h: ${d}\ni: ${oc.env:WHERE}\nj: ${oc.env:NOWHERE,x}\nk: ${oc.select:nowhere,5}\nl: ${oc.select:d.f}\n"
        "m: ${oc.dict.keys:d}\nn: ${oc.dict.values:d}\no: ${h.f}\np: 2020-01-01\nq: .5\nr: 1_0\ns: yes\nt: null\n"
        "u: ${t}\nv: !!python/object/apply:pathlib.PosixPath [x, y]\nw: 1e3\nx: .inf\ny: 0x10\nz: '1e-3'\n"
    )
    assert read_stored_config(path).value() == OmegaConf.to_container(OmegaConf.load(path), resolve=True)


def repeated(start: str, line: str, n_lines: int = 29) -> str:
    return "\n".join([start, *(line.replace("$n", str(n)).replace("$m", str(n - 1)) for n in range(1, n_lines))])


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        repeated("a0: x", "a$n: ${a$m}${a$m}"),
        repeated("a0: [x]", "a$n: ['${a$m}', '${a$m}']"),
        repeated("a0: x", "a$n: ${oc.select:a$m}${oc.select:'a$m'}"),
        repeated("a0: {x: x}", "a$n: {x: '${oc.dict.values:a$m}', y: '${oc.dict.values:a$m}'}"),
        "b:\n" + repeated("  a0: x", "  a$n: ${.a$m}${.a$m}"),
        "a: " + "x" * 100_000 + "\nb: " + "${a}" * 200,
        repeated("a0: x", "a$n: ${a$m}", 500),
        "a: ${a}",
        "a: {b: '${a}'}",
        "a: ${oc.dict.values:a}",
        "a: " + "[" * 5000 + "]" * 5000,
        "a: [" + "x, " * 400_000 + "]",
        "a: " + "1:" * 400_000 + "1",
        "a: 0x" + "f" * 900_000,
        "a: " + "x" * 2_000_000,
        "a: {" + ", ".join(f"k{n}.x: 1" for n in range(20_000)) + "}",
        "a: &a [1]\nb: *a",
        "a: !!set {evil.X}",
        "a: [1\nb: {",
        "a: ${oc.select:b,[}",
        "a: ${nowhere}",
    ],
    ids=lambda text: text[:40],
)
def test_small_files_that_expand_to_large_objects_are_refused(text, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        refuse_foreign_targets(read_stored_config(path).value(), path)


@pytest.mark.parametrize(
    ("package", "is_own"), [("tests", True), ("maze", False), ("maze_envs", False), ("yaml", False)]
)
def test_a_checkout_of_maze_is_no_package_of_the_user(package: str, is_own: bool) -> None:
    assert stored_config.is_own_package(package) is is_own


@pytest.mark.parametrize(
    ("config", "packages"),
    [
        ({"env": {"_target_": "tests.envs.Lever"}}, {"tests"}),
        ({"env": {"name": "tests.envs:Lever-v0", "import": None}}, {"tests"}),
        ({"env": {"import": ["tests"]}}, {"tests"}),
        ({"wrappers": {"tests.wrappers.Observer": {"scale": 0.5}}}, {"tests"}),
        ({"wrappers": [{"plot_function": "tests.plots.plot_stack"}]}, {"tests"}),
        ({"distribution_mapper_config": [{"distribution": "tests.distributions.Ordered"}]}, {"tests"}),
        ({"model": {"action_space": "gym.spaces.Box", "non_lin": "torch.nn.ReLU", "network": "tests"}}, set()),
        ({"data": "tests.csv", "runner": {"objective": "reward.mean"}}, set()),
    ],
)
def test_packages_of_the_user_are_found_wherever_a_configuration_may_name_code(config, packages):
    assert stored_config.own_packages(config) == packages
