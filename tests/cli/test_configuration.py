"""Every shipped option composes, and the files have the documented values."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from maze.cli.checks import complete
from maze.cli.hydra_setup import SHIPPED_ALGORITHMS
from maze.core.utils.config_utils import config_to_yaml
from tests.configs import composed

CONF = Path(str(resources.files("maze.conf")))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def run_dir(cfg: DictConfig) -> str:
    HydraConfig.instance().set_config(cfg)
    try:
        return str(OmegaConf.select(cfg, "hydra.run.dir"))
    finally:
        HydraConfig.instance().cfg = None


@pytest.mark.parametrize("group", ["critic", "env", "model", "seeding", "wrappers"])
def test_every_option_of_a_training_run_composes(group: str) -> None:
    for option in options(group):
        cfg = composed("conf_train", f"{group}={option}")
        OmegaConf.resolve(cfg.model)


@pytest.mark.parametrize("model", options("model"))
def test_the_configuration_is_written_unresolved(model: str) -> None:
    cfg = composed("conf_train", f"model={model}")
    written = yaml.safe_load(config_to_yaml(cfg))
    assert written["model"] == OmegaConf.to_container(cfg.model)
    assert "<" not in str(written["model"]), "such as <builtins.list> in place of hidden_units"


@pytest.mark.parametrize("algorithm", SHIPPED_ALGORITHMS)
@pytest.mark.parametrize("runner", ["dev", "local"])
def test_every_algorithm_has_its_runners(algorithm: str, runner: str) -> None:
    runner_cfg = composed("conf_train", f"algorithm={algorithm}", f"runner={runner}").runner
    assert runner_cfg._target_.startswith("maze.train.trainers.")
    assert runner_cfg.state_dict_dump_file == "state_dict.pt"


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes(experiment: str) -> None:
    composed("conf_train", f"+experiment={experiment}")


@pytest.mark.parametrize("policy", options("policy"))
@pytest.mark.parametrize("runner", ["parallel", "sequential"])
def test_every_policy_can_be_rolled_out_by_every_runner(policy: str, runner: str) -> None:
    cfg = composed("conf_rollout", f"policy={policy}", f"runner={runner}")
    places = ("maze.core.agent.", "maze.interop.", "maze.offline.", "maze.planning.", "maze.serve.policy.")
    assert cfg.policy._target_.startswith(places)
    assert cfg.runner._target_.startswith("maze.core.rollout.")


def test_parallel_rollouts_have_the_documented_defaults() -> None:
    runner = composed("conf_rollout").runner
    documented = {
        "_target_": "maze.core.rollout.parallel_rollout_runner.ParallelRolloutRunner",
        "n_processes": 5,
        "n_episodes": 50,
        "max_episode_steps": 200,
        "record_trajectory": True,
        "record_event_logs": True,
    }
    assert {key: runner[key] for key in documented} == documented


def test_the_directory_of_a_training_run_is_named_after_its_choices() -> None:
    name, stamp = run_dir(composed("conf_train", "algorithm=a2c")).split("/")[-2:]
    assert name == "gym_env-flatten_concat-a2c-flatten_concat_shared-dev"
    assert len(stamp) == len("2021-02-23_23-09-25")


def test_the_directory_of_a_rollout_is_named_after_its_choices() -> None:
    cfg = composed("conf_rollout", "policy=torch_policy", "runner=sequential", "log_base_dir=elsewhere")
    assert run_dir(cfg).split("/")[:-1] == ["elsewhere", "rollout-gym_env-torch_policy-sequential"]


def test_the_chosen_critic_is_the_models_critic() -> None:
    cfg = composed("conf_train", "critic=flatten_concat_step")
    assert cfg.model.critic._target_.endswith("StepStateCriticComposer")


def test_ppo_auto_initialises_automatic_models_orthogonally_unless_another_is_chosen() -> None:
    choices = ("algorithm=ppo_auto", "model=auto")
    assert composed("conf_train", *choices).model.initialization == "orthogonal"
    assert composed("conf_train", *choices, "model.initialization=normc").model.initialization == "normc"
    assert composed("conf_train", "algorithm=ppo", "model=auto").model.initialization == "normc"


def test_paths_of_data_and_files_refer_to_the_directory_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "policy.maze").touch()
    data = "runner.initial_demonstration_trajectories"
    cfg = composed(
        "conf_train", "algorithm=sacfd", f"{data}.input_data=[mine/trajectory_data,minari:pendulum/expert-v0]"
    )
    complete(cfg, tmp_path)
    assert list(cfg.runner.initial_demonstration_trajectories.input_data) == [
        str(tmp_path / "mine" / "trajectory_data"),
        "minari:pendulum/expert-v0",
    ]
    cfg = composed("conf_rollout", "policy=bundle", "policy.bundle=policy.maze")
    complete(cfg, tmp_path)
    assert cfg.policy.bundle == str(tmp_path / "policy.maze")
    cfg = composed("conf_rollout", "policy=bundle", "policy.bundle=other.maze")  # perhaps in `input_dir`
    complete(cfg, tmp_path)
    assert cfg.policy.bundle == "other.maze"


def test_no_file_leaves_a_group_key_behind() -> None:
    # `# @package _group_` is the syntax of Hydra 1.0: a warning at best, a key of that name otherwise.
    assert not [path for path in CONF.rglob("*.yaml") if "_group_" in path.read_text().replace("_group_by", "")]
