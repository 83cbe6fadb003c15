"""The documented ways to use and extend the configuration, as a user types them; only what takes time is overridden."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.utils.factory import Factory
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main

CONF = Path(str(resources.files("maze.conf")))
SHORT_ROLLOUT = ("runner.n_episodes=2", "runner.record_trajectory=false", "runner.record_event_logs=false")
SHORT_TRAINING = (
    *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4", "algorithm.batch_size=4"),
    *("algorithm.rollout_evaluator.n_episodes=1", "runner.concurrency=2"),
)

FILES = {
    "__init__.py": "",
    "conf/__init__.py": "",
    "conf/env/mountain_car.yaml": """
        # @package env
        _target_: maze.core.wrappers.maze_gym_env_wrapper.GymMazeEnv
        env: MountainCar-v0
        """,
    "conf/env_model/mountain_car-flatten_concat.yaml": """
        # @package _global_
        # what this environment needs with this model
        model:
          policy:
            networks:
              - _target_: maze.perception.models.built_in.flatten_concat.FlattenConcatPolicyNet
                hidden_units: [16]
                non_lin: torch.nn.ReLU
        """,
    "conf/experiment/my_experiment.yaml": """
        # @package _global_
        # defaults to override
        defaults:
          - override /env: mountain_car
          - override /algorithm: ppo
        # overrides
        algorithm:
          lr: 0.0001
        """,
    "conf/my_own_conf.yaml": """
        defaults:
          - env: mountain_car
          - wrappers: default
          - policy: random_policy
          - model: flatten_concat
          - critic: flatten_concat_shared
          - runner: sequential
          - seeding: default
          - optional env_model: ${env}-${model}
          - _self_  # what stands below comes last
        input_dir: ''
        log_base_dir: outputs
        wrappers: {}
        steps:
          value: 7
        runner:
          max_episode_steps: ${steps.value}
        hydra:
          run:
            dir: ${log_base_dir}/mine/${now:%Y-%m-%d_%H-%M-%S}
        """,
    "conf/small_conf.yaml": """
        defaults:
          - env: gym_env
          - runner: sequential
        """,
    # in the syntax of Hydra 1.0, as documented
    "conf/runner/short.yaml": """
        # @package _group_
        _target_: maze.core.rollout.sequential_rollout_runner.SequentialRolloutRunner
        n_episodes: 2
        max_episode_steps: 3
        record_trajectory: true
        record_event_logs: true
        render: false
        """,
    "conf/older_conf.yaml": """
        defaults:
          - runner: short
          - env: mountain_car
          - wrappers: missing
            optional: true
          - policy: random_policy
          - model: flatten_concat
          - critic: flatten_concat_shared
          - seeding: default
          - env_model: ${defaults.1.env}-${defaults.4.model}
            optional: true
        input_dir: ''
        log_base_dir: outputs
        hydra:
          run:
            dir: ${log_base_dir}/older/${now:%Y-%m-%d_%H-%M-%S}
        """,
    "conf/runner/greeting.yaml": """
        # @package runner
        _target_: your_project.runners.GreetingRunner
        text: hello
        """,
    "runners.py": """
        from pathlib import Path

        from maze.runner import Runner


        class GreetingRunner(Runner):
            def __init__(self, text):
                self.text = text

            def setup(self, cfg):
                self.env_id = cfg.env.name

            def run(self, **kwargs):
                Path("greeting.txt").write_text(f"{self.text}, {self.env_id}")
        """,
}


@pytest.fixture(autouse=True)
def _in_an_own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        file = tmp_path / "your_project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        file.write_text("\n".join(line[indent:] for line in lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


COMMANDS = [
    ("runner=parallel", SHORT_ROLLOUT),
    ("runner=parallel runner.n_processes=10", (*SHORT_ROLLOUT, "runner.max_episode_steps=3")),
    ("runner=sequential", SHORT_ROLLOUT),
    ("runner=sequential runner.max_episode_steps=1000", SHORT_ROLLOUT),
    ("runner=sequential hydra.run.dir=my_dir", SHORT_ROLLOUT),
    ("-cd your_project/conf env=mountain_car runner=sequential", (*SHORT_ROLLOUT, "runner.max_episode_steps=3")),
    ("-cd your_project/conf -cn my_own_conf", SHORT_ROLLOUT),
    ("-cd your_project/conf -cn older_conf", SHORT_ROLLOUT),
    ("-cd your_project/conf -cn older_conf runner=short", SHORT_ROLLOUT),
    ("-cd your_project/conf -cn conf_train +experiment=my_experiment", SHORT_TRAINING),
    ("-cd your_project/conf runner=greeting", ()),
    ("-cd your_project/conf -cn small_conf runner=greeting", ()),
]


@pytest.mark.filterwarnings("ignore:.*(out of date|retired)")
@pytest.mark.filterwarnings("ignore:(?s).*(deprecated|is missing `_self_`)")  # of Hydra, with the new syntax
@pytest.mark.parametrize(("command", "shorter"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_documented_commands_work_as_written(command: str, shorter: tuple[str, ...], tmp_path: Path) -> None:
    assert main([*shlex.split(command), *shorter]) == 0
    (run,) = {path.parent for path in tmp_path.rglob("command.txt")}
    cfg = OmegaConf.load(run / ".hydra" / "config.yaml")
    if "my_dir" in command:
        assert run == tmp_path / "my_dir"
    else:
        assert run.parent.parent == tmp_path / "outputs"
    if "greeting" in command:
        assert (run / "greeting.txt").read_text() == f"hello, {cfg.env.name}"
    if "my_own_conf" in command:
        assert cfg.runner.max_episode_steps == 7, "an interpolation"
        assert cfg.model.policy.networks[0].hidden_units == [16], "a specialisation"
    if "older_conf" in command:
        assert (cfg.runner.max_episode_steps, "_group_" in cfg, cfg.get("wrappers")) == (3, False, None)
        assert cfg.model.policy.networks[0].hidden_units == [16], "a specialisation"
    if "my_experiment" in command:
        assert (cfg.env.env, cfg.algorithm.lr) == ("MountainCar-v0", 0.0001)


@pytest.mark.parametrize(
    ("command", "known"),
    [
        ("-cd your_project/conf -cn small_cnof", "Did you mean `small_conf`? Known: conf_check,"),
        ("-cn conf_trian", "Did you mean `conf_train`? Known: conf_check,"),
    ],
)
def test_root_configurations_of_all_searched_directories_are_listed(
    command: str, known: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    error = capfd.readouterr().err
    assert known in error
    assert ("my_own_conf" in error) == ("-cd" in command)


def test_a_file_and_a_class_of_one_algorithm_are_merged_without_a_remark_of_hydra(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "patient_algorithm.py").write_text(
        "from dataclasses import dataclass\n\n"
        "from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig\n\n\n"
        "@dataclass\n"
        "class PatientPPO(PPOAlgorithmConfig):\n"
        "    name = 'patient_ppo'\n"
    )
    file = tmp_path / "your_project" / "conf" / "algorithm" / "patient_ppo.yaml"
    file.parent.mkdir()
    file.write_text("# @package algorithm\n_target_: patient_algorithm.PatientPPO\npatience: 99\n")
    target = "algorithm._target_=patient_algorithm.PatientPPO"
    assert main(["-cd", "your_project/conf", "-cn", "conf_train", target, "--cfg", "job"]) == 0
    printed = capfd.readouterr()
    assert "ConfigStore" not in printed.out + printed.err
    assert "patience: 99" in printed.out
    assert "clip_range: 0.2" in printed.out


@pytest.mark.parametrize("runner", ["runner=sequential", "runner=parallel"])
def test_the_users_gymnasium_class_is_rolled_out_after_training(
    runner: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = f"lever_{runner.partition('=')[2]}"  # of its own: modules stay imported
    (tmp_path / f"{module}.py").write_text(
        "import gymnasium\n\n\n"
        "class Lever(gymnasium.Env):\n"
        "    observation_space = action_space = gymnasium.spaces.Discrete(2)\n\n"
        "    def __init__(self, length: int = 3):\n"
        "        self.length = length\n\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        self.steps = 0\n"
        "        return 0, {}\n\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        return action, 1.0, self.steps == self.length, False, {}\n"
    )
    env = [f"env._target_={module}.Lever", "+env.length=5"]
    assert main([*env, runner, *SHORT_ROLLOUT]) == 0
    assert re.search(r"reward +max +\| +5\.000", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("root", "shorter"), [("conf_rollout", ("runner=sequential", *SHORT_ROLLOUT)), ("conf_train", SHORT_TRAINING)]
)
def test_a_copied_root_configuration_may_have_a_specialisation(
    root: str, shorter: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = "  - optional env_model: ${env}-${model}\n"
    text = (CONF / f"{root}.yaml").read_text().replace("env: gym_env", "env: mountain_car")
    defaults, end, rest = text.replace(line, "").partition("\n\n")
    copy = tmp_path / "your_project" / "conf" / "my_copy.yaml"
    copy.write_text(f"{defaults}\n{line}{end.lstrip()}{rest}")
    command = ["-cd", "your_project/conf", "-cn", "my_copy", *shorter]
    if root == "conf_train":
        command.append("algorithm=ppo")
    assert main(command) == 0
    (run,) = {path.parent for path in tmp_path.rglob("command.txt")}
    cfg = OmegaConf.load(run / ".hydra" / "config.yaml")
    assert (cfg.env.env, cfg.model.policy.networks[0].hidden_units) == ("MountainCar-v0", [16])
    copy.write_text(f"{defaults}\n{line}{line}{end.lstrip()}{rest}")
    capfd.readouterr()
    assert main(command) == 2
    assert "env_model appears more than once in the final defaults list" in capfd.readouterr().err


def test_the_factory_builds_from_configurations_adds_arguments_and_passes_objects_through() -> None:
    target = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.GymMazeEnv"}
    env = Factory(MazeEnv).instantiate({**target, "env": "MountainCar-v0"})
    other = Factory(MazeEnv).instantiate(target, env="MountainCar-v0")
    assert isinstance(env, GymMazeEnv)
    assert isinstance(other, GymMazeEnv)
    assert Factory(MazeEnv).instantiate(env) is env
    with pytest.raises(ConfigError, match="MazeEnv"):
        Factory(MazeEnv).instantiate("something else")  # type: ignore[arg-type]
