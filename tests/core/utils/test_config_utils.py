"""Configuration files and environments made from them."""

import functools
import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from maze.core.errors import ConfigError
from maze.core.utils.config_utils import (
    CheckedConfig,
    EnvFactory,
    describe,
    list_to_dict,
    make_env_from_hydra,
    read_config,
    read_hydra_config,
)
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper

ENV = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.GymMazeEnv", "env": "CartPole-v1"}


def cart_pole():
    return GymMazeEnv("CartPole-v1")


def test_lists_become_mappings_from_their_indices_and_mappings_stay():
    assert list_to_dict(["a", "b"]) == {0: "a", 1: "b"}
    mapping = {"x": 1}
    assert list_to_dict(mapping) is mapping


@dataclass
class Checked(CheckedConfig):
    section = "own"
    n_epochs: int = 1
    lr: float = 0.1

    def __post_init__(self) -> None:
        self.require_integer("n_epochs", minimum=1)
        self.require_number("lr", 0.0, above=True)


def test_numbers_of_numpy_are_numbers_of_a_configuration():
    found = Checked(np.arange(1, 4)[2], np.float32(0.5))
    assert (found, type(found.n_epochs), type(found.lr)) == (Checked(3, 0.5), int, float)
    for values, message in (
        ((np.bool_(True), 0.1), "own.n_epochs"),
        ((2.0, 0.1), "own.n_epochs"),
        ((1, "1"), "own.lr"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}: expected a .*number"):
            Checked(*values)


@pytest.mark.parametrize("path", ["/data/orders (2024), new.csv", "null", "a=b", "plain"])
def test_texts_reach_a_composed_configuration_unchanged(path):
    overrides = {"env.name": path, "+env.sizes": [np.int64(2), path]}
    env = read_hydra_config("maze.conf", "conf_rollout", **overrides).env
    assert (env.name, list(env.sizes)) == (path, [2, path])


def test_the_first_composition_of_a_process_keeps_what_plugins_register():
    compositions = "; ".join(
        f"print(read_hydra_config('maze.conf', {name!r}).env)" for name in ("conf_rollout", "conf_train")
    )
    code = f"from maze.core.utils.config_utils import read_hydra_config; {compositions}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_are_read_with_interpolations_and_faults_are_named(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("x: 3\ny: ${x}\n")
    assert read_config(file) == {"x": 3, "y": 3}
    for text, message in (("- 1\n", "mapping"), ("a: [", "valid YAML"), ("a: ${b}\n", "incomplete")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(file)
    with pytest.raises(ConfigError, match="no configuration file"):
        read_config(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    "env",
    [ENV, cart_pole, cart_pole(), describe(functools.partial(GymMazeEnv, "CartPole-v1"))],
    ids=["configuration", "function", "environment", "stored partial"],
)
def test_each_call_of_a_pickled_factory_makes_another_wrapped_environment(env):
    factory = pickle.loads(pickle.dumps(EnvFactory(env, {"TimeLimitWrapper": {"max_episode_steps": 2}})))
    one, other = factory(), factory()
    assert type(one) is type(other) is TimeLimitWrapper
    one.reset()
    one.step({"action": 0})
    assert (one.get_env_time(), other.get_env_time()) == (1, 0)


def test_an_object_that_is_no_environment_is_named():
    with pytest.raises(ConfigError, match=r"^env: "):
        EnvFactory(None, None)()


@pytest.fixture
def conf_module(tmp_path, monkeypatch):
    package = tmp_path / "a_project_with_conf"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_conf.yaml").write_text(
        "env:\n  _target_: maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env\n  name: CartPole-v1\n"
        "wrappers:\n  TimeLimitWrapper:\n    max_episode_steps: 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package.name
    sys.modules.pop(package.name, None)


def test_environments_are_made_from_hydra_configurations_even_within_a_run_of_hydra(conf_module):
    from hydra import compose, initialize_config_module, version
    from hydra.core.global_hydra import GlobalHydra

    overrides = {"env.name": "Acrobot-v1", "wrappers.TimeLimitWrapper.max_episode_steps": 9}
    with initialize_config_module(conf_module, version_base="1.3"):
        env = make_env_from_hydra(conf_module, **overrides)
        assert compose("my_conf").env.name == "CartPole-v1"  # the outer run is unharmed
        assert str(version.getbase()) == "1.3"
    assert not GlobalHydra.instance().is_initialized()
    assert env.core_env.env.spec.id == "Acrobot-v1"
    assert env._max_episode_steps == 9
    assert make_env_from_hydra(conf_module, "my_conf").core_env.env.spec.id == "CartPole-v1"


def test_faults_of_hydra_configurations_are_named(conf_module, tmp_path):
    with pytest.raises(ConfigError, match="nonsense"):
        read_hydra_config(conf_module, nonsense=3)
    (tmp_path / conf_module / "second.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=r"give `config_name`, one of \['my_conf', 'second'\]"):
        read_hydra_config(conf_module)
    with pytest.raises(ConfigError, match="no key `env`"):
        make_env_from_hydra(conf_module, "second")
