"""Rollouts and training runs that continue from a run, with its configuration."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from maze.api.run_context import RunContext
from maze.cli.run_summary import trust_arguments
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.errors import CheckpointError
from maze.core.utils import stored_config
from maze.maze_cli import main

TINY = [
    "algorithm.n_epochs=1",
    "algorithm.epoch_length=1",
    "algorithm.n_rollout_steps=4",
    "runner.concurrency=2",
    "algorithm.rollout_evaluator.n_episodes=1",
]
ROLLOUT = ["policy=torch_policy", "runner=sequential", "runner.n_episodes=1", "runner.max_episode_steps=3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with an environment, wrappers and a network that are not defaults."""
    directory = tmp_path_factory.mktemp("run") / "run"
    own = ["env.name=Acrobot-v1", "wrappers=vector_obs", "algorithm=a2c", "runner.normalization_samples=20"]
    network = "model.policy.networks.0.hidden_units=[8]"
    assert main(["-cn", "conf_train", *own, *TINY, network, f"hydra.run.dir={directory}"]) == 0
    return directory


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def used(directory: str) -> tuple[str, bool, list[int]]:
    """Environment, whether observations are normalized, and the network's layers."""
    cfg = OmegaConf.load(Path(directory) / "hydra_config.yaml")
    normalizes = any("ObservationNormalizationWrapper" in str(name) for name in cfg.wrappers)
    return cfg.env.name, normalizes, list(cfg.model.policy.networks[0].hidden_units)


def test_a_rollout_uses_environment_wrappers_and_model_of_the_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ROLLOUT, f"input_dir={run}", "hydra.run.dir=out"]) == 0
    assert "Using the env, wrappers and model configuration of" in capfd.readouterr().out
    assert used("out") == ("Acrobot-v1", True, [8])


def test_a_run_context_that_loads_the_run_has_its_drawn_seeds(run: Path) -> None:
    drawn = OmegaConf.load(run / "hydra_config.yaml").seeding
    loaded = RunContext.load(run, silent=True).results
    assert (loaded.env_base_seed, loaded.agent_base_seed) == (drawn.env_base_seed, drawn.agent_base_seed)
    assert None not in (drawn.env_base_seed, drawn.agent_base_seed)


def test_single_wrappers_come_on_top_of_those_of_the_run(run: Path) -> None:
    clip = "+wrappers.ObservationNormalizationWrapper.default_strategy_config.clip_range=[-5,5]"
    further = ["+wrappers.TimeLimitWrapper.max_episode_steps=2", clip]
    assert main([*ROLLOUT, *further, f"input_dir={run}", "hydra.run.dir=out"]) == 0
    wrappers = OmegaConf.load("out/hydra_config.yaml").wrappers
    by_name = {name.rpartition(".")[2]: arguments for name, arguments in wrappers.items()}
    normalization, limit = by_name.pop("ObservationNormalizationWrapper"), by_name.pop("TimeLimitWrapper")
    assert not by_name
    assert list(normalization.default_strategy_config.clip_range) == [-5, 5]
    assert normalization.statistics_dump == "statistics.pkl", "the run's own arguments are kept"
    assert limit.max_episode_steps == 2
    assert used("out") == ("Acrobot-v1", True, [8])


def test_sections_that_a_run_inherited_are_inherited_from_it(run: Path) -> None:
    tiny = [*TINY, "algorithm=a2c", "+wrappers.TimeLimitWrapper.max_episode_steps=7"]
    assert main(["-cn", "conf_train", *tiny, f"input_dir={run}", "hydra.run.dir=second"]) == 0
    assert main([*ROLLOUT, "input_dir=second", "hydra.run.dir=out"]) == 0
    assert used("out") == ("Acrobot-v1", True, [8])
    assert "TimeLimitWrapper" in OmegaConf.load("out/hydra_config.yaml").wrappers


ES = [
    "algorithm.n_epochs=1",
    "algorithm.n_rollouts_per_update=2",
    "algorithm.max_steps=5",
    "runner.n_eval_rollouts=1",
    "runner.shared_noise_table_size=1000000",
]


@pytest.mark.parametrize(("algorithm", "short"), [("a2c", TINY), ("ppo", TINY), ("es", ES)], ids=["a2c", "ppo", "es"])
def test_training_continues_in_the_environment_of_the_run(algorithm: str, short: list[str], run: Path) -> None:
    command = ["-cn", "conf_train", f"algorithm={algorithm}", *short, f"input_dir={run}", "hydra.run.dir=out"]
    assert main(command) == 0
    assert used("out") == ("Acrobot-v1", True, [8])


def test_single_values_of_an_environment_change_that_of_the_run(run: Path) -> None:
    given = "+env.reset_options={low: -0.05, high: 0.05}"
    assert main([*ROLLOUT, given, f"input_dir={run}", "hydra.run.dir=out"]) == 0
    compared = ["-cn", "conf_compare", f"policies=[random,{run}]", "runner.n_episodes=2", "runner.max_episode_steps=3"]
    assert main([*compared, given, "hydra.run.dir=compared"]) == 0
    for directory in ("out", "compared"):
        env = OmegaConf.load(f"{directory}/hydra_config.yaml").env
        assert (env.name, env.reset_options) == ("Acrobot-v1", {"low": -0.05, "high": 0.05})


@pytest.mark.parametrize(
    ("env", "name"),
    [("env=lost_sales", "lost_sales"), ("env._target_=maze_envs.inventory.lost_sales.LostSalesEnv", "LostSalesEnv")],
)
def test_the_environment_of_a_used_run_names_directories(env: str, name: str) -> None:
    assert main(["-cn", "conf_train", env, "algorithm=a2c", "model=auto", *TINY, "hydra.run.dir=run"]) == 0
    compared = ["-cn", "conf_compare", "policies=[random,{own: run}]", "runner.n_episodes=2"]
    for command in (compared, [*ROLLOUT, "input_dir=run"]):
        assert main([*command, "runner.max_episode_steps=3", "log_base_dir=log"]) == 0
    names = {path.name for path in Path("log").iterdir()}
    assert names == {f"comparison-{name}", f"rollout-{name}-torch_policy-sequential"}


def test_classes_of_policies_name_directories_and_need_no_sign() -> None:
    rule = "policy._target_=maze.core.agent.dummy_cartpole_policy.DummyCartPolePolicy"
    once = ["env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=1", "log_base_dir=log"]
    assert main([*once, rule]) == 0
    assert [path.name for path in Path("log").iterdir()] == ["rollout-gym_env-DummyCartPolePolicy-sequential"]
    assert main(["policy={masks: null, _target_: maze.core.agent.random_policy.RandomPolicy}", *once]) == 0
    assert Path("log/rollout-gym_env-RandomPolicy-sequential").is_dir()
    cloned = ["algorithm=a2c", "env.name=CartPole-v1", f"warm_start.{rule}", "warm_start.n_steps=40"]
    assert main(["-cn", "conf_train", *TINY, *cloned, "hydra.run.dir=out"]) == 0
    assert OmegaConf.load("out/hydra_config.yaml").warm_start.policy._target_ == rule.partition("=")[2]


def test_sections_named_by_the_command_are_not_inherited(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ROLLOUT, f"input_dir={run}", "env.name=CartPole-v1"]) == 1
    error = capfd.readouterr().err
    assert "observation 'observation' of sub-step 0: Box" in error
    assert "action 'action' of sub-step 0: Discrete(3) in training, Discrete(2) here" in error
    assert "Traceback" not in error


def test_training_in_an_environment_with_other_spaces_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [
        "-cn",
        "conf_train",
        "algorithm=a2c",
        *TINY,
        f"input_dir={run}",
        "env.name=CartPole-v1",
        "wrappers=default",
    ]
    assert main(command) == 1
    assert "action 'action' of sub-step 0: Discrete(3) in training, Discrete(2) here" in capfd.readouterr().err


def test_an_environment_of_an_untrusted_run_is_checked(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign"
    (foreign / ".hydra").mkdir(parents=True)
    for name in ("state_dict.pt", "spaces_config.pkl"):
        (foreign / name).write_bytes((run / name).read_bytes())
    config = OmegaConf.load(run / ".hydra" / "config.yaml")
    config.env._target_ = "os.system"
    OmegaConf.save(config, foreign / ".hydra" / "config.yaml")
    assert main([*ROLLOUT, f"input_dir={foreign}"]) == 1
    assert "names os.system" in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("runner", [["runner=sequential"], ["runner=parallel", "runner.n_processes=2"]], ids=str)
def test_a_rollout_reports_its_kind_of_actions_and_the_number_of_truncated_episodes(
    runner: list[str], run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = ["runner.record_trajectory=false", "runner.record_event_logs=false"]
    command = [*ROLLOUT[:1], *runner, *records, "runner.n_episodes=2", f"input_dir={run}"]
    assert main([*command, "runner.max_episode_steps=3"]) == 0
    said = capfd.readouterr().out
    assert "Rolling out with sampled actions of the policy" in said
    assert "\n2 of 2 episodes were truncated after 3 steps" in said
    assert main([*command, "runner.max_episode_steps=600", "runner.deterministic=true"]) == 0
    said = capfd.readouterr().out  # the environment itself ends its episodes after 500 steps
    assert "Rolling out with greedy actions" in said
    assert "truncated after" not in said


def test_a_run_is_played_without_a_display_as_a_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--play", str(run), "runner.max_episode_steps=4"]) == 0
    said = capfd.readouterr().out
    assert "Rolling out with greedy actions" in said
    (page,) = tmp_path.glob("outputs/*/*/episode_pages/*.html")
    assert f"Open the episode in a browser: {page}\n" in said
    text = page.read_text(encoding="utf-8")
    assert "Acrobot-v1, episode 1" in text
    assert '"picture": 4' in text  # drawn while it ran: gymnasium environments draw no earlier states


@pytest.mark.parametrize("display", [None, ":99"], ids=["no display", "display"])
def test_without_pygame_an_episode_is_shown_as_numbers(
    display: str | None, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setitem(sys.modules, "pygame", None)  # importing it fails, as where it is not installed
    render = ["runner=sequential", "runner.render=true", "runner.n_episodes=1", "runner.max_episode_steps=4"]
    for command in (["--play", str(run), "runner.max_episode_steps=4"], [*ROLLOUT, *render, f"input_dir={run}"]):
        assert main(command) == 0
        said = capfd.readouterr()
        assert said.out.count("without pictures: pygame is not installed") == 1
        assert "Traceback" not in said.err
        (page,) = tmp_path.glob("outputs/*/*/episode_pages/*.html")
        text = page.read_text(encoding="utf-8")
        assert '"reward": "-1"' in text
        assert '"picture": null' in text
        shutil.rmtree(tmp_path / "outputs")


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run in an environment of a module in the working directory; the module is not imported."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "lane.py").write_text(
        "import gymnasium\n\n\nclass Lane(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (1,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return self.observation_space.sample(), {}\n\n"
        "    def step(self, action):\n"
        "        return self.observation_space.sample(), 1.0, True, False, {}\n",
        encoding="utf-8",
    )
    assert main(["-cn", "conf_train", "env._target_=lane.Lane", "algorithm=a2c", *TINY, "hydra.run.dir=run"]) == 0
    del sys.modules["lane"]
    path = list(sys.path)
    yield
    assert sys.path == path
    sys.modules.pop("lane", None)


def test_modules_of_the_working_directory_are_found_if_the_command_names_them(
    lane: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(["--runs", "run"]) == 0
    assert capfd.readouterr().out.splitlines()[1].split()[:3] == ["run", "Lane", "a2c"]
    assert main(["--play", "run", "+trusted_packages=[lane]"]) == 0
    (page,) = tmp_path.glob("outputs/*/*/episode_pages/*.html")
    assert "Lane, episode 1" in page.read_text(encoding="utf-8")
    sys.modules.pop("lane")
    capfd.readouterr()
    assert main([*ROLLOUT, "input_dir=run"]) == 1  # names in a run are not imported from here
    assert "lane.Lane" in capfd.readouterr().err
    assert "lane" not in sys.modules


def test_modules_of_the_working_directory_are_found_by_the_name_of_an_environment(tmp_path: Path) -> None:
    (tmp_path / "levers.py").write_text(
        "import gymnasium\n\n\nclass Lever(gymnasium.Env):\n"
        "    observation_space = action_space = gymnasium.spaces.Discrete(2)\n\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 0, {}\n\n"
        "    def step(self, action):\n"
        "        return action, 1.0, bool(action), False, {}\n\n\n"
        "gymnasium.register('Lever-v0', Lever)\n",
        encoding="utf-8",
    )
    assert main(["-cn", "conf_check", "env.name=levers:Lever-v0", "runner.n_steps=10"]) == 0


@pytest.mark.slow
def test_the_printed_commands_run_as_they_are_in_an_environment_of_the_user(
    lane: None, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(["-cn", "conf_train", "env._target_=lane.Lane", "algorithm=a2c", *TINY, "hydra.run.dir=own"]) == 0
    lines = capfd.readouterr().out.partition("Next:")[2].splitlines()
    commands = [line.removeprefix("  maze-run ") for line in lines if line.startswith("  maze-run ")]
    assert len(commands) == 5
    for command in commands:
        sys.modules.pop("lane", None)
        assert main(shlex.split(command)) == 0, command


SHORT = ["runner.n_episodes=2", "runner.max_episode_steps=2"]
COMMANDS = {
    "rollout": [*ROLLOUT, "input_dir=run"],
    "parallel rollout": [*ROLLOUT, "input_dir=run", "runner=parallel", "runner.n_processes=1"],
    "play": ["--play", "run"],
    "resume": ["-cn", "conf_train", "algorithm=a2c", *TINY, "input_dir=run", "resume=true", "algorithm.n_epochs=2"],
    "gate": [
        "-cn",
        "conf_gate",
        "candidate=run",
        "baseline=random",
        "runner.n_episodes=200",
        "runner.max_episode_steps=2",
    ],
    "compare": ["-cn", "conf_compare", "policies=[random,run]", "runner.n_episodes=2", "runner.max_episode_steps=2"],
    "export": ["--export", "run", "--steps", "5"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_trust_is_given_to_every_command_in_the_same_way(
    lane: None, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    refused, passed_or_not = main(COMMANDS[command]), (0, 1) if command == "gate" else (0,)
    assert refused in (1, 2)
    assert re.search(r"lane\.Lane.*--trust lane on the command line", capfd.readouterr().err)
    for trusting in (["--trust", "lane", *COMMANDS[command]], [*COMMANDS[command], "--trust=lane"]):
        assert main(trusting) in passed_or_not
        assert "lane.Lane" not in capfd.readouterr().err
        del sys.modules["lane"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rollout", "gate", "compare"])
def test_a_command_that_names_the_environment_trusts_its_package(
    lane: None, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMANDS[command], "env._target_=lane.Lane"]) in ((0, 1) if command == "gate" else (0,))
    assert "--trust" not in capfd.readouterr().err


@pytest.mark.slow
def test_trust_is_stored_for_the_working_directory(
    lane: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trust", "lane"]) == 0
    assert f"Trusted in {tmp_path}: lane" in capfd.readouterr().out
    for command in ("rollout", "parallel rollout", "export"):
        assert main(COMMANDS[command]) == 0
        sys.modules.pop("lane", None)
    monkeypatch.syspath_prepend(tmp_path)
    AgentDeployment.from_run("run").close()
    del sys.modules["lane"]
    sys.path.remove(str(tmp_path))
    monkeypatch.chdir(tmp_path / "run")  # an untrusted directory, which may hold any file
    shutil.copytree(tmp_path / "settings", tmp_path / "run" / "settings")
    shutil.copy(tmp_path / "lane.py", tmp_path / "run")
    assert main([*ROLLOUT, "input_dir=."]) == 1
    with pytest.raises(CheckpointError, match=r"lane\.Lane"):
        AgentDeployment.from_run(".")
    assert "lane" not in sys.modules


def test_printed_commands_trust_packages_that_are_not_remembered_where_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_config.remember(tmp_path, ["lane"])
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")  # where the lines are printed
    with stored_config.trusting(["harbour"]):  # holds for this command only
        assert trust_arguments(["lane", "harbour"], tmp_path) == ["--trust", "harbour"]


@pytest.mark.parametrize("package", ["", "torch", "maze", "os", "not-a-name", "a.b"])
def test_only_the_users_packages_can_be_trusted(package: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--trust", package]) == 2
    assert "--trust: expected the name of your own package" in capfd.readouterr().err


def test_a_broken_configuration_is_named_with_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf" / "env").mkdir(parents=True)
    file = tmp_path / "conf" / "env" / "mine.yaml"
    file.write_text("name: [1\nkwargs: {")
    assert main(["-cd", str(tmp_path / "conf"), "env=mine"]) == 2
    error = capfd.readouterr().err
    assert f"{file}, line 2, column 7: this is not valid YAML" in error
    assert "Traceback" not in error


def test_playing_needs_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--play"]) == 2
    assert "--play: the following arguments are required: run" in capfd.readouterr().err
    assert main(["--play", "nowhere"]) == 2
    assert "nowhere is not a directory" in capfd.readouterr().err
