"""The example of an own algorithm: the framework provides everything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from maze.api.run_context import RunContext
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.utils.checkpoint import load_state
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "own_algorithm"
PAGE = ROOT / "docs" / "guide" / "own_algorithm.md"

TRAIN = ("-cn", "conf_train", "-cd", str(PROJECT / "reinforce" / "conf"), "+experiment=cartpole_reinforce")
SEEDS = ("seeding.env_base_seed=1", "seeding.agent_base_seed=2")
SHORT = (
    *("algorithm.epoch_length=1", "algorithm.n_rollout_steps=40", "runner.concurrency=2"),
    "algorithm.rollout_evaluator.n_episodes=2",
)


@pytest.fixture(autouse=True)
def _beside_maze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PROJECT))
    monkeypatch.chdir(tmp_path)
    yield
    # A process of a user's own trains it either by its file or by its class; here one after the other.
    ConfigStore.instance().repo.get("algorithm", {}).pop("reinforce.yaml", None)


def train(name: str, *overrides: str) -> dict:
    assert main([*TRAIN, *SEEDS, *SHORT, f"hydra.run.dir={name}", *overrides]) == 0
    return load_state(Path(name) / "latest.pt")


def test_the_command_line_trains_evaluates_selects_and_reports(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    state = train("run", "algorithm.n_epochs=2", "verbose=2")
    printed = capfd.readouterr().out
    assert state["algorithm"] == "Reinforce"
    assert (tmp_path / "run" / "state_dict.pt").is_file()  # the best model
    for event in ("policy_loss", "policy_entropy", "baseline_loss"):
        assert re.search(rf"2\|train +ReinforceEvents +{event} .*\d", printed), event
    assert re.search(r"3\|eval +BaseEnvEvents +reward +mean ", printed)
    assert "new overall best model" in printed


def test_an_algorithm_given_by_its_class_learns_the_same_in_processes() -> None:
    by_name = train("by_name", "algorithm.n_epochs=1")
    in_processes = train("in_processes", "algorithm.n_epochs=1", "runner=local")
    command = ("-cn", "conf_train", "env.name=CartPole-v1", "model=flatten_concat", "critic=flatten_concat_shared")
    target = ("algorithm._target_=reinforce.config.ReinforceConfig", "algorithm.n_epochs=1", "hydra.run.dir=by_class")
    assert main([*command, *SEEDS, *SHORT, *target]) == 0
    by_class = load_state(Path("by_class") / "latest.pt")
    assert str(by_name["model"]) == str(in_processes["model"]) == str(by_class["model"])


def test_a_resumed_run_equals_an_uninterrupted_run() -> None:
    whole = train("whole", "algorithm.n_epochs=3")
    train("first", "algorithm.n_epochs=1")
    rest = train("rest", "algorithm.n_epochs=3", "input_dir=first", "resume=true")
    assert rest["epoch"] == whole["epoch"] == 3
    assert str(rest["model"]) == str(whole["model"])
    assert str(rest["parts"]["optimizer"]) == str(whole["parts"]["optimizer"])


def test_network_of_another_shape_cannot_resume(capfd: pytest.CaptureFixture) -> None:
    train("first", "algorithm.n_epochs=1")
    command = [*TRAIN, *SEEDS, *SHORT, "algorithm.n_epochs=2", "input_dir=first", "resume=true"]
    assert main([*command, "model.policy.networks.0.hidden_units=[8]"]) != 0
    assert "cannot be resumed with the configured algorithm and model" in capfd.readouterr().err


def test_a_policy_trained_by_a_user_algorithm_is_rolled_out_and_deployed(tmp_path: Path) -> None:
    train("run", "algorithm.n_epochs=1")
    command = ("env.name=CartPole-v1", "policy=torch_policy", "input_dir=run", "model=flatten_concat")
    assert main([*command, "runner=sequential", "runner.n_episodes=2", "hydra.run.dir=rollout"]) == 0
    assert len(list((tmp_path / "rollout" / "trajectory_data").iterdir())) == 2
    with AgentDeployment.from_run("run", deterministic=True) as deployment:
        assert deployment.act([0.0, 0.0, 0.1, 0.0], 0, False, {}) in (0, 1)


def test_the_configuration_file_has_the_defaults_of_the_class() -> None:
    from reinforce.config import ReinforceConfig

    stated = OmegaConf.load(PROJECT / "reinforce" / "conf" / "algorithm" / "reinforce.yaml")
    assert stated.pop("_target_") == "reinforce.config.ReinforceConfig"
    assert OmegaConf.to_container(stated) == asdict(ReinforceConfig())


def test_run_context_trains_it_and_the_cartpole_return_increases() -> None:
    from reinforce.config import ReinforceConfig

    torch.set_num_threads(1)
    with RunContext(
        env=lambda: GymMazeEnv("CartPole-v1"),
        algorithm=ReinforceConfig(),
        model="flatten_concat",
        critic="flatten_concat_shared",
        overrides={"runner.concurrency": 8, "seeding.env_base_seed": 1, "seeding.agent_base_seed": 2},
        silent=True,
    ) as run:
        run.train(n_epochs=2)  # 40,960 environment steps
        assert run.results.best_score > 150.0  # random actions: 22
        returns = {
            key.output_name: value
            for key, value in run.evaluate(n_episodes=4).items()
            if key.event.__name__ == "reward"
        }
        assert returns["mean"] > 150.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.gama=0.9",), "algorithm.gama"),
        (("algorithm.gamma=2",), "algorithm.gamma: expected a number of at least 0 and at most 1, found 2"),
        (("~critic",), "model.critic: Reinforce needs a model with a policy and a state critic, but no critic"),
        (
            ("critic=flatten_concat_state_action",),
            "model.critic: Reinforce needs a state critic, such as critic='flatten_concat_shared'",
        ),
    ],
)
def test_errors_are_those_of_the_algorithms_that_are_shipped(
    overrides: tuple[str, ...], message: str, capfd: pytest.CaptureFixture
) -> None:
    assert main([*TRAIN, *SEEDS, *SHORT, "algorithm.n_epochs=1", *overrides]) != 0
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_loss_that_is_not_finite_is_named_and_nothing_is_learned_from_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    from reinforce.trainer import Reinforce

    sound = Reinforce._losses

    def broken(self, batch):
        losses = sound(self, batch)
        losses.report("baseline_loss", torch.tensor(float("inf")), weight=1.0)
        return losses

    monkeypatch.setattr(Reinforce, "_losses", broken)
    assert main([*TRAIN, *SEEDS, *SHORT, "algorithm.n_epochs=1"]) != 0
    error = capfd.readouterr().err
    assert "Epoch 1, update 1: baseline_loss is inf; the step was not applied." in error


def test_the_listings_of_its_guide_page_are_its_code() -> None:
    listings = re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    shown = dict.fromkeys((name for name, _ in listings), "")
    for name, listing in listings:
        assert listing in (PROJECT / name).read_text(encoding="utf-8"), f"{name}:\n{listing}"
        shown[name] += listing
    for name in ("reinforce/config.py", "reinforce/trainer.py"):  # all of it, but for the docstring of the module
        code = (PROJECT / name).read_text(encoding="utf-8").partition("\n")[2]
        assert re.sub(r"\n+", "\n", code).strip() == re.sub(r"\n+", "\n", shown[name]).strip()
