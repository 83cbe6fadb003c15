"""The example of a user's own project: installed as such projects are, and run from somewhere else."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maze.serve.client import PolicyClient
from tests.serve.serving import command

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "own_project"
TRAIN = (
    *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=24", "algorithm.batch_size=24"),
    *("algorithm.rollout_evaluator.n_episodes=1", "runner.concurrency=2", "env.n_days=1"),
)
SEEDS = ("seeding.env_base_seed=1", "seeding.agent_base_seed=2")

# All in one process: importing torch for each command is what would take the time.
COMMANDS = f"""
import sys
from maze.maze_cli import main

train = {TRAIN!r}
seeds = {SEEDS!r}
battery = ("env=home_battery", "env.n_days=1", "wrappers=price_level", "runner.n_episodes=2")
for command in (
    ("-cn", "conf_train_own", *train, "hydra.run.dir=trained"),
    ("-cn", "conf_train", "+experiment=battery_ppo", *train, "hydra.run.dir=experiment"),
    (*battery, "runner=sequential", "policy=torch_policy", "input_dir=trained", "hydra.run.dir=rollout"),
    ("--export", "trained", "--out", "battery.maze", "--trust", "home_battery", "--steps", "200"),
    (*battery, "runner=parallel", "runner.n_processes=2", "policy=threshold", "hydra.run.dir=heuristic"),
    ("-cn", "conf_compare", "env=home_battery", "env.n_days=2", "wrappers=price_level", "runner.n_episodes=5",
     "policies=[random,threshold,{{trained: trained}}]", "runner.minimize=[cost_per_day]", *seeds,
     "hydra.run.dir=compared"),
    ("-cn", "conf_gate", "env=home_battery", "env.n_days=2", "wrappers=price_level", "runner.n_episodes=5", *seeds,
     "candidate=threshold", "baseline=random", "runner.minimize=[cost_per_day]", "hydra.run.dir=gate"),
    ("-cn", "conf_train_own", *train, "hydra/launcher=patient", "algorithm.lr=0.001,-1", "--multirun",
     "hydra.sweep.dir=sweep"),
):
    print("$ maze-run", *command, flush=True)
    if (status := main(command)) and "--multirun" not in command:
        sys.exit(f"status {{status}}: {{command}}")
"""


def run(arguments: list[str], cwd: Path, *python_path: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, python_path))}
    finished = subprocess.run(
        arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, f"{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
    return finished.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the project was installed, without network."""
    pytest.importorskip("hatchling", reason="builds the project")
    base = tmp_path_factory.mktemp("own_project")
    source = shutil.copytree(PROJECT, base / "source", ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*command, "--target", str(base / "installed"), str(source)], base)
    return base / "installed"


@pytest.fixture(scope="module")
def played(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which all commands were run."""
    directory = tmp_path_factory.mktemp("played")
    run([sys.executable, "-c", COMMANDS], directory, installed, ROOT)
    return directory


@pytest.mark.slow
def test_the_installed_project_brings_its_configurations_and_plugins(installed: Path) -> None:
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    assert {"home_battery/conf/conf_train_own.yaml", "home_battery/conf/env/home_battery.yaml"} <= files
    assert {"hydra_plugins/home_battery_search_path.py", "hydra_plugins/home_battery_launcher.py"} <= files
    assert "hydra_plugins/__init__.py" not in files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained", "experiment"])
def test_trainings_leave_the_documented_files(played: Path, name: str) -> None:
    names = {path.name for path in (played / name).iterdir()}
    assert {"state_dict.pt", "latest.pt", "spaces_config.pkl", "hydra_config.yaml", "command.txt"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rollout", "heuristic"])
def test_policies_of_the_project_are_rolled_out_with_kpis_in_the_event_logs(played: Path, name: str) -> None:
    with (played / name / "event_logs" / "BaseEnvEvents.kpi.tsv").open() as file:
        kpis = {row["name"] for row in csv.DictReader(file, delimiter="\t")}
    assert kpis == {"cost_per_day", "saved_per_day", "limits_hit_per_day"}
    assert len(list((played / name / "trajectory_data").iterdir())) == 2


@pytest.mark.slow
def test_its_policies_are_compared_on_the_same_days(played: Path) -> None:
    with (played / "compared" / "episodes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(dict.fromkeys(row["policy"] for row in rows)) == ["random", "threshold", "trained"]
    without: dict[str, set[float]] = {}
    for row in rows:
        price = round(float(row["cost_per_day"]) + float(row["saved_per_day"]), 6)
        without.setdefault(row["episode"], set()).add(price)
    assert [len(prices) for prices in without.values()] == [1] * 5, "without the battery, the same days cost the same"
    with (played / "compared" / "comparison.csv").open() as file:
        cost = {row["policy"]: row for row in csv.DictReader(file) if row["measure"] == "cost_per_day"}
    assert float(cost["threshold"]["difference_high"]) < 0
    assert cost["threshold"]["improvement"] == "1.0"


@pytest.mark.slow
def test_a_gate_stands_in_front_of_its_service(played: Path) -> None:
    report = (played / "gate" / "gate.md").read_text()
    assert report.startswith("# Gate: passed")
    assert report.count("| passed |") == 2, "the return, and the KPI of which less is better"


@pytest.mark.slow
def test_its_policy_ends_in_a_service(played: Path, installed: Path) -> None:
    provide = "PriceLevelWrapper.observation=home_battery.serving:price_level"
    drift = ("--on-drift", "fallback", "--fallback", "home_battery.serving:threshold")
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (installed, ROOT)))}
    bundle = played / "battery.maze"
    with command(str(bundle), "--provide", provide, *drift, environment=paths) as (url, _), PolicyClient(url) as client:
        usual = {"charge": [0.5], "hour": [0.0, 1.0], "market": [0.3, 0.1, 0.4]}
        answer = client.act(usual)
        assert answer.policy == "battery"
        assert answer.action["battery"] in (0, 1, 2)
        answer = client.act({**usual, "market": [9.0, 0.0, 0.4]})
        assert (answer.policy, answer.action) == ("fallback", {"battery": 0})


@pytest.mark.slow
def test_the_projects_own_launcher_goes_on_after_a_failed_job(played: Path) -> None:
    with (played / "sweep" / "jobs.csv").open() as file:
        jobs = list(csv.reader(file))
    assert [(number, status) for number, status, *_ in jobs] == [("0", "COMPLETED"), ("1", "FAILED")]
    assert "algorithm.lr" in jobs[1][2]


def test_the_simulation_conserves_energy_and_money() -> None:
    sys.path.insert(0, str(PROJECT))
    try:
        from home_battery.env.core_env import HomeBatteryCoreEnv
        from home_battery.env.state import BatteryCommand
    finally:
        sys.path.remove(str(PROJECT))
    env = HomeBatteryCoreEnv(capacity=4.0, power=3.0, n_days=1, feed_in_share=0.5, limit_fee=0.25)
    env.seed(7)
    state = env.reset()
    assert state.charge == 2.0
    after, reward, done, _ = env.step(BatteryCommand(5.0))  # more than its power, and more than fits
    assert after.charge == 4.0
    demand = state.demand - state.solar
    assert reward == pytest.approx(demand * state.price - (demand + 2.0) * state.price - 0.25)
    after, reward, done, _ = env.step(BatteryCommand(-3.0))
    assert after.charge == 1.0
    for _ in range(22):
        assert not done
        after, _, done, _ = env.step(BatteryCommand(0.0))
    assert done
    assert after.charge == 1.0
