"""Trainings with RLlib, as the command line runs them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maze.core.agent.serialized_torch_policy import SerializedTorchPolicy
from maze.core.utils.checkpoint import load_state
from maze.core.utils.config_utils import read_config
from maze.maze_cli import main
from maze.report.progress import read_progress
from tests.scripts import run_script

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, which only its processes import"),
    pytest.mark.filterwarnings("ignore"),
]

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    *("rllib/runner=dev", "runner.num_workers=0", "runner.log_level=ERROR", "runner.eval_episodes=2"),
    "runner.normalization_samples=500",
]
OFF_POLICY = [f"algorithm.config.{key}" for key in ("min_sample_timesteps_per_iteration=300", "train_batch_size=32")]
LEARNING_STARTS = "algorithm.config.num_steps_sampled_before_learning_starts"
SMALL_PPO = ["algorithm.config.train_batch_size=400", "algorithm.config.num_epochs=4"]
NORMALIZED = ["model=auto", "model.normalize_observations=true"]
SEEDS = ["seeding.env_base_seed=1", "seeding.agent_base_seed=2"]
SQUASHED = (
    "model.distribution_mapper_config=[{action_space:gym.spaces.Box,distribution:"
    "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution}]"
)


def command(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "maze.maze_cli", *arguments, f"hydra.run.dir={directory}"]


def environment(address: str = "") -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    cluster = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"} if address else {}
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **cluster}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster that runs join; starting Ray takes as long as most of them."""
    from ray.cluster_utils import Cluster

    no_services = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        head = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **no_services})
        yield head.address
        head.shutdown()


def train(directory: Path, *arguments: str, iterations: int = 2, address: str = "") -> str:
    stop = f"runner.tune_config.stop.training_iteration={iterations}"
    whole = ["-cn", "conf_rllib", *QUICK, *SEEDS, stop, *arguments, f"hydra.run.dir={directory}"]
    script = directory.parent / "train.py"
    script.write_text(f"import sys\nfrom maze.maze_cli import main\n\nsys.exit(main({whole!r}))\n", encoding="utf-8")
    finished = run_script(script, directory.parent, environment(address), timeout=280)
    assert finished.returncode == 0, finished.stdout[-1500:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cluster: str) -> Path:
    directory = tmp_path_factory.mktemp("rllib") / "run"
    ppo = ["env.name=CartPole-v1", "rllib/algorithm=ppo", *SMALL_PPO, *NORMALIZED, "wrappers=vector_obs"]
    train(directory, *ppo, address=cluster)
    return directory


def test_a_run_leaves_the_files_for_rollouts_and_deployment(trained: Path) -> None:
    files = {path.name for path in trained.iterdir()}
    expected = {"state_dict.pt", "spaces_config.pkl", "statistics.pkl", "hydra_config.yaml", "run.json"}
    assert expected <= files
    assert [path for path in trained.iterdir() if path.name.startswith("events.out.tfevents")]
    assert list((trained / "rllib_results").iterdir())
    assert [path.name for path in (trained / "rllib_checkpoints").iterdir()] == ["iteration_000002"]
    model = read_config(trained / "hydra_config.yaml")["model"]
    policy = SerializedTorchPolicy(model, str(trained / "state_dict.pt"), str(trained / "spaces_config.pkl"), "cpu")
    assert policy.num_params > 0


def test_an_rllib_run_has_the_standard_run_report(trained: Path, tmp_path: Path) -> None:
    statistics = read_progress(trained).paths["train"]
    steps = list(statistics.env_steps)
    assert {"RLlibEvents", "BaseEnvEvents"} <= {name.partition("/")[0] for name in statistics.columns}
    assert len(steps) == 2
    assert 0 < steps[0] < steps[1]
    assert main(["--report", str(trained), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert 'state ended">' in page
    assert "rllib/algorithm</th><td>ppo</td>" in page


def test_the_trained_policy_is_rolled_out_and_described(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rollout = ["env.name=CartPole-v1", "wrappers=vector_obs", "policy=torch_policy", f"input_dir={trained}"]
    few = ["runner=sequential", "runner.n_episodes=2", f"hydra.run.dir={tmp_path / 'rollout'}"]
    assert main([*rollout, *few]) == 0
    assert "total_episode_count   |               2.000" in capfd.readouterr().out
    assert main(["--info", str(trained)]) == 0
    described = capfd.readouterr().out
    assert "ended, 2 iterations, " in described
    assert "Missing" not in described


def test_running_statistics_are_learned_between_iterations(trained: Path) -> None:
    check_running_statistics(trained, n_seen=800)


@pytest.mark.parametrize(
    ("arguments", "n_seen"),
    [
        (["rllib/algorithm=ppo", *SMALL_PPO, "rllib/runner=local", "runner.num_workers=2"], 800),
        (["rllib/algorithm=dqn", *OFF_POLICY, f"{LEARNING_STARTS}=590"], 600),
    ],
    ids=["ppo with workers", "dqn"],
)
def test_workers_and_target_networks_use_the_running_statistics(
    tmp_path: Path, cluster: str, arguments: list[str], n_seen: int
) -> None:
    train(tmp_path / "run", "env.name=CartPole-v1", *NORMALIZED, *arguments, address=cluster)
    check_running_statistics(tmp_path / "run", n_seen)


def check_running_statistics(directory: Path, n_seen: int) -> None:
    state = load_state(directory / "state_dict.pt")
    ((name, count),) = [(name, value) for name, value in state["policies"][0].items() if name.endswith("count")]
    assert 0.5 * n_seen <= count.item() <= n_seen  # the best model may be that of the first iteration
    block = name.removesuffix("count")
    deviation = np.sqrt(state["policies"][0][f"{block}variance"].numpy())
    np.testing.assert_allclose(state["policies"][0][f"{block}scale"].numpy(), deviation, rtol=1e-6)
    assert (deviation < 1.5).all()
    for others in state.get("critics", {}).values():
        assert all(float(value) == count.item() for key, value in others.items() if key.endswith("count"))


def test_the_same_seeds_give_the_same_weights(trained: Path, cluster: str, tmp_path: Path) -> None:
    common = ["env.name=CartPole-v1", "rllib/algorithm=ppo", *SMALL_PPO, *NORMALIZED, "wrappers=vector_obs"]
    train(tmp_path / "again", *common, address=cluster)
    first, second = (load_state(path / "state_dict.pt")["policies"][0] for path in (trained, tmp_path / "again"))
    assert all((value == second[key]).all() for key, value in first.items())


@pytest.mark.parametrize(
    "arguments",
    [
        ["rllib/algorithm=appo", "algorithm.config.min_time_s_per_iteration=1"],
        ["rllib/algorithm=impala", "algorithm.config.min_time_s_per_iteration=1"],
        [
            "rllib/algorithm=sac",
            "critic=flatten_concat_state_action",
            "env.name=Pendulum-v1",
            SQUASHED,
            *OFF_POLICY,
            f"{LEARNING_STARTS}=290",
        ],
        ["model=rllib", "model.fcnet_hiddens=[16,16]", "model.vf_share_layers=False", *SMALL_PPO],
        [
            "env=tutorial_cutting_2d_struct_masked",
            "wrappers=tutorial_cutting_2d",
            "model=tutorial_cutting_2d_struct_masked",
            *SMALL_PPO,
        ],
    ],
    ids=["appo", "impala", "sac", "model of RLlib", "structured"],
)
def test_rllib_trains_with_the_composed_configuration(tmp_path: Path, cluster: str, arguments: list[str]) -> None:
    if not any(argument.startswith(("env.name", "env=")) for argument in arguments):
        arguments = ["env.name=CartPole-v1", *arguments]
    output = train(tmp_path / "run", *arguments, iterations=1, address=cluster)
    assert "training_iteration has reached 1" in output
    assert (tmp_path / "run" / "state_dict.pt").exists() == ("model=rllib" not in arguments)


def test_a_terminated_run_is_saved_and_ends_with_the_status_of_the_signal(tmp_path: Path) -> None:
    arguments = ["-cn", "conf_rllib", *QUICK, *SMALL_PPO, "env.name=CartPole-v1"]
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command(tmp_path / "run", *arguments), stdout=file, stderr=subprocess.STDOUT, env=environment()
        )
        try:
            deadline = time.monotonic() + 120
            while "iteration 1, " not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=60)
        finally:
            process.kill()
    assert status == 128 + signal.SIGTERM, log.read_text()[-3000:]
    assert (tmp_path / "run" / "state_dict.pt").exists()
    assert list((tmp_path / "run" / "rllib_checkpoints").glob("iteration_*"))


@pytest.mark.learning
def test_ppo_of_rllib_learns_cartpole_within_fifteen_iterations(tmp_path: Path) -> None:
    stop = "runner.tune_config.stop.episode_return_mean=150"
    output = train(tmp_path / "run", "env.name=CartPole-v0", "rllib/algorithm=ppo", stop, iterations=15)
    assert "episode_return_mean has reached 150" in output
