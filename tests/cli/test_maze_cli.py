"""The command line: its output, its files, and its error messages."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maze.maze_cli import main, maze_run

QUICK = ("env.name=CartPole-v1", "runner.n_episodes=2", "runner.max_episode_steps=5")
SEQUENTIAL = (*QUICK, "runner=sequential")


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def only_run(root: Path) -> Path:
    (run,) = {path.parent for path in root.rglob("command.txt")}
    return run


def test_a_rollout_leaves_everything_that_makes_it_repeatable(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(SEQUENTIAL) == 0
    run = only_run(tmp_path)
    assert run.parent.name == "rollout-gym_env-random_policy-sequential"
    assert run.parent.parent == tmp_path / "outputs"
    names = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    assert {"hydra_config.yaml", "versions.json", ".hydra/config.yaml", ".hydra/overrides.yaml"} <= names
    assert (run / "command.txt").read_text() == f"maze-run {' '.join(SEQUENTIAL)}\n"
    assert json.loads((run / "versions.json").read_text())["versions"]["gymnasium"]
    assert len(list((run / "trajectory_data").iterdir())) == 2
    assert (run / "event_logs" / "BaseEnvEvents.reward.tsv").is_file()
    output = capfd.readouterr().out
    first, second = output.splitlines()[:2]
    assert first == "-> starting -cn conf_rollout env=gym_env policy=random_policy runner=sequential"
    assert second == f"-> writing into {run.relative_to(tmp_path)}"
    assert f"Results are in {run.relative_to(tmp_path)}.\n" in output
    assert "_target_" not in output, "the configuration is in files, and printed with verbose=2"
    assert output.count("total_episode_count") == 1
    assert "rollout_stats" in output


def test_a_run_of_an_own_environment_is_named_after_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = ["env._target_=gymnasium.envs.classic_control.AcrobotEnv", *SEQUENTIAL[1:]]
    assert main(own) == 0
    run = only_run(tmp_path)
    assert run.parent.name == "rollout-AcrobotEnv-random_policy-sequential"
    capfd.readouterr()
    assert main(["--info", str(run)]) == 0
    assert re.search(r"env +AcrobotEnv\n", capfd.readouterr().out)


def test_generated_seeds_are_recorded_and_repeat_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from omegaconf import OmegaConf

    main(SEQUENTIAL)
    first = capfd.readouterr().out
    seeding = OmegaConf.load(only_run(tmp_path) / "hydra_config.yaml").seeding
    main([*SEQUENTIAL, *(f"seeding.{key}={seeding[key]}" for key in ("env_base_seed", "agent_base_seed"))])
    second = capfd.readouterr().out
    assert table(first) == table(second)


def table(output: str) -> list[str]:
    return [line for line in output.splitlines() if "rollout_stats" in line]


def test_sequential_and_parallel_rollouts_give_the_same_results(capfd: pytest.CaptureFixture[str]) -> None:
    seeds = ("seeding.env_base_seed=1", "seeding.agent_base_seed=2", "runner.n_episodes=5")
    tables = []
    for runner in (("runner=sequential",), ("runner.n_processes=2",), ("runner.n_processes=3",)):
        assert main([*QUICK, *runner, *seeds]) == 0
        tables.append(table(capfd.readouterr().out))
    assert tables[0] == tables[1] == tables[2]
    assert len(tables[0]) >= 9


USAGE_ERRORS = [
    (["env=gim_env"], "env=gim_env: there is no such option. Did you mean `gym_env`?"),
    (["policy=torch"], "policy=torch: there is no such option. Did you mean `torch_policy`?"),
    (["policy=my_project.Rule"], "A class of your own: 'policy={_target_: my_project.Rule}'."),
    (["env=my_project.envs.Stock"], "A class of your own: 'env={_target_: my_project.envs.Stock}'."),
    (
        ["policy=/tmp"],
        "policy=/tmp: this is no option. The policy of a training run is policy=torch_policy input_dir=/tm",
    ),
    (["-cn", "conf_train", "algorithm=pp0"], "Did you mean `ppo`? Options of algorithm: a2c,"),
    (["-cn", "conf_train", "model=flat"], "Did you mean `flatten_concat`? Options of model: "),
    (["-cn", "conf_train", "tracking=[wanb]"], "Did you mean `wandb`? Options of tracking: csv, mlflow,"),
    (["-cn", "conf_train", "wrappers=vector"], "wrappers=vector: there is no such option"),
    (["-cn", "conf_train", "algorithm=ppo", "runner=sequential"], "runner=sequential does not fit algorithm=ppo"),
    (["-cn", "conf_trian"], "Did you mean `conf_train`?"),
    (
        ["-cn", "conf_train", "algorithm=ppo", "algorithm.lrr=1"],
        "algorithm.lrr: unknown key. Did you mean `algorithm.lr`?",
    ),
    (["-cn", "conf_train", "algorithm=ppo", "algorithm.learning_rate=1"], "Did you mean `algorithm.lr`?"),
    (["-cn", "conf_train", "algorithm=sac", "algorithm.buffer_size=9"], "Did you mean `algorithm.replay_buffer_size`?"),
    (
        ["-cn", "conf_train", "wrappers={maze.some.Wrapper:{scale:2}}"],
        "wrappers.maze.some.Wrapper: unknown key. To add a new key, write +wrappers.maze.some.W",
    ),
    (["wrappers.TimeLimitWrapper.max_episode_steps=5"], "no such wrapper is configured. To add a wrapper, write +wr"),
    (["wrappers=vector_obs", "~wrappers.ObservationNormalisation"], "Did you mean `ObservationNormalizationWrapper`?"),
    (
        ["wrappers=vector_obs", "wrappers.ObservationNormalizationWrapper.exclud=[x]"],
        "ObservationNormalizationWrapper.exclude`?",
    ),
    (["wrappers=vector_obs", "+env.name=Acrobot-v1"], "An item is already at 'env.name'"),
    (["runner.n_episode=1"], "Did you mean `runner.n_episodes`?"),
    (["-cn", "conf_train", "experiment=cartpole_ppo"], "+experiment=cartpole_ppo"),
    (["-cn", "conf_train", "+experiment=cartpole_pp0"], "Did you mean `cartpole_ppo`?"),
    (["-cn", "conf_train", "algorithm.lr=[1"], "Cannot read the argument 'algorithm.lr=[1'"),
    (["input_dir=läufe"], "values with brackets, commas or letters such as ä in quotes"),
    (["-cn", "conf_train", "algorithm.lr=1,2"], "--multirun"),
    (["--multirun", "--cfg", "job"], "Only one of --run, --multirun, --cfg"),
    (["-cn", "conf_train", "model=~"], "model: cannot be left empty"),
    (["-cn", "conf_train", "~model"], "model: cannot be left empty"),
    (["runner=dev"], "rollouts take runner=parallel, runner=sequential or runner=ray"),
    (["input_dir=nowhere", "policy=torch_policy"], "nowhere is not a directory. Train first: maze-run -cn conf_train"),
    (["policy=torch_policy"], "input_dir: maze.core.agent.serialized_torch_policy.SerializedTorchPolicy needs"),
    (["input_dir=.", "policy=torch_policy"], "there is no state_dict.pt in it"),
    (["-cn", "conf_train", "input_dir=."], "there is no state_dict.pt or latest.pt in it"),
]

CONFIG_ERRORS = [
    (["env.name=CartPole-v99"], "CartPole-v99"),
    (["env.name=CardPole-v1"], "CartPole-v1"),
    (["env.name=CardPole-v1", "runner=parallel", "runner.n_processes=2"], "CartPole-v1"),
    (["env._target_=no_such_package.make"], "no_such_package"),
    (["env._target_=os.system"], "refused"),
    (["-cn", "conf_train", "+model.modality_config={}"], "ConfigError: model: unknown argument `modality_config`"),
    (["+runner.renderr=1"], "unknown argument `renderr` (did you mean `render`?)"),
    (["+wrappers.NoSuchWrapper={}"], "wrappers.NoSuchWrapper: there is no built-in or imported wrapper"),
    (["+wrappers.TimeLimitWraper.max_episode_steps=5"], "Did you mean `TimeLimitWrapper`?"),
    (["+wrappers.TimeLimitWrapper.max_steps=5"], "unknown argument `max_steps` (did you mean `max_episode_steps`?)"),
    (["-cn", "conf_check", "+wrappers.TimeLimitWraper.max_episode_steps=5"], "Did you mean `TimeLimitWrapper`?"),
    (["runner.n_episodes=0"], "runner.n_episodes: expected a whole number of at least 1, found 0"),
    (["runner.n_episodes=many"], "runner.n_episodes: expected a whole number of at least 1, found 'many'"),
    (
        ["runner.n_processes=1.5", "runner=parallel"],
        "runner.n_processes: expected a whole number of at least 1, found",
    ),
    (
        ["-cn", "conf_train", "algorithm=ppo", "algorithm.lr=abc"],
        "algorithm.lr: expected a number of at least 0, found",
    ),
    (
        ["-cn", "conf_train", "algorithm.n_epochs=1.5"],
        "algorithm.n_epochs: expected a whole number of at least 0",
    ),
]


def check_error(arguments: list[str], message: str, status: int, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    captured = capfd.readouterr()
    assert message in captured.err
    assert captured.err.startswith("ConfigError: ")
    assert "Traceback" not in captured.err
    assert list(root.iterdir()) == [], "a failed command leaves something behind"


@pytest.mark.parametrize(("arguments", "message"), USAGE_ERRORS, ids=str)
def test_a_wrong_command_gives_one_message_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_error(arguments, message, 2, tmp_path, capfd)


@pytest.mark.parametrize(("arguments", "message"), CONFIG_ERRORS, ids=str)
def test_a_wrong_value_gives_one_message_and_status_1(
    arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = [] if "-cn" in arguments or "runner=parallel" in arguments else ["runner=sequential"]
    env = [] if any("env" in argument for argument in arguments) else ["env.name=CartPole-v1"]
    check_error([*root, *env, *arguments], message, 1, tmp_path, capfd)


def test_the_log_of_a_run_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = list(logging.getLogger().handlers)
    assert main([*QUICK, "runner=sequential", "hydra.run.dir=run"]) == 0
    first, *_, last = Path("run/maze_cli.log").read_text().splitlines()
    assert re.fullmatch(r"\[[\d :,-]+\]\[maze\]\[INFO\] - maze-run .*runner=sequential.*", first)
    assert last.endswith("[maze][INFO] - The run has ended.")
    assert list(logging.getLogger().handlers) == before, "the logging of the process is as it was"


def test_the_traceback_of_a_run_that_failed_is_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("broken_policy.py").write_text(
        "from maze.core.agent.random_policy import RandomPolicy\n\n\n"
        "class Broken(RandomPolicy):\n"
        "    n = 0\n\n"
        "    def compute_action(self, *args, **kwargs):\n"
        "        Broken.n += 1\n"
        "        if Broken.n > 12:\n"
        "            raise RuntimeError('no more ideas')\n"
        "        return super().compute_action(*args, **kwargs)\n"
    )
    command = [*QUICK, "runner=sequential", "runner.n_episodes=50", "policy._target_=broken_policy.Broken"]
    assert main([*command, "hydra.run.dir=run"]) == 1
    log = Path("run/maze_cli.log").read_text()
    assert "[maze][ERROR] - The run has failed or was interrupted.\nTraceback" in log
    assert "no more ideas" in log.splitlines()[-1]
    assert "Traceback" not in capfd.readouterr().out


def test_a_full_traceback_is_shown_on_demand(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAZE_FULL_ERROR", "1")
    assert main(["env=gim_env"]) == 2
    assert "Traceback" in capfd.readouterr().err


def test_help_names_commands_options_and_results(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    for wanted in ("maze-run -cn conf_train", "dummy_cartpole", "outputs/rollout-", "MAZE_FULL_ERROR"):
        assert wanted in text
    assert "rllib/algorithm: appo, dqn, impala, ppo, sac\n" in text, "what RLlib has dropped is not a choice"


def test_hydra_prints_help_whose_template_has_its_other_variables(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = "defaults: [conf_rollout, _self_]\nhydra:\n  help:\n    template: 'mine\n\n      $FLAGS_HELP'\n"
    (tmp_path / "conf_mine.yaml").write_text(root, encoding="utf-8")
    assert main(["-cd", str(tmp_path), "-cn", "conf_mine", "--help"]) == 0
    assert "mine\n--help" in capfd.readouterr().out
    assert main(["--help", "hydra.help.template=mine $FLAGS_HELP"]) == 0
    assert "mine --help" in capfd.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["--runs"], ["--shelf"]])
def test_commands_that_neither_train_nor_act_do_without_torch(arguments: list[str]) -> None:
    code = f"import sys; from maze.maze_cli import main; main({arguments}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_an_unknown_flag_is_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--renderr"]) == 2
    assert "maze-run: error: unrecognized arguments: --renderr" in capfd.readouterr().err


def test_the_command_line_of_the_process_is_left_as_it_was() -> None:
    before = list(sys.argv)
    main(["env=gim_env"])
    assert sys.argv == before


def test_maze_run_takes_a_composed_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from hydra import compose, initialize_config_module

    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_rollout", overrides=list(SEQUENTIAL))
    assert maze_run(cfg) is None
    assert len(table(capfd.readouterr().out)) >= 9


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


def test_a_random_rollout_as_a_process_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from maze.maze_cli import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    result = run_python(code, *QUICK)
    modules = result.stdout.splitlines()[-1]
    assert "'gymnasium'" in modules
    assert "'torch'" not in modules
    assert "'pandas'" not in modules
    assert "'matplotlib'" not in modules


@pytest.mark.parametrize("place", ["file/run", "/proc/run", "/sys/run"])
@pytest.mark.parametrize("mode", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_directory_that_cannot_be_made_is_one_message(
    mode: str, place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    arguments = [*SEQUENTIAL, f"{mode}={place}", *(["-m", "seeding.env_base_seed=1"] if "sweep" in mode else [])]
    assert main(arguments) == 1
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith(f"ConfigError: Cannot create the run directory {(tmp_path / place)}: ")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_start_names_no_directory_of_results(
    signum: int, status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("maze.maze_cli._run", lambda *arguments: os.kill(os.getpid(), signum))
    assert main(SEQUENTIAL) == status
    assert "Results are in" not in capfd.readouterr().out
    assert not Path("outputs").exists()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_failure_after_an_interruption_is_reported_as_interruption(
    signum: int, status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As libraries do that clean up in a ``finally`` which relies on what was interrupted."""

    def fragile(cfg: object) -> None:
        try:
            os.kill(os.getpid(), signum)
        finally:
            raise AttributeError("'NoneType' object has no attribute 'flags'")

    monkeypatch.setattr("maze.maze_cli.maze_run", fragile)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(SEQUENTIAL) == status
    assert capfd.readouterr().err == f"maze-run: interrupted by {signal.Signals(signum).name}.\n"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


LEAVES_RUNNING = """
import multiprocessing, sys, threading, time
import maze.command, maze.maze_cli

def run():
    threading.Thread(target=time.sleep, args=(300,), name="telemetry").start()
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), name="simulator").start()
    return 3

maze.maze_cli.main = run
sys.exit(maze.command.main())
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_threads_and_processes_of_an_environment_do_not_keep_the_command_running() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_RUNNING], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 3
    assert re.search(r"maze-run ends without telemetry, simulator, which did not end in 30 s\.", ended.stderr)
