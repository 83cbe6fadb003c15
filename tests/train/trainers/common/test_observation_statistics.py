"""Running normalization of observations: what is learned when, and where it goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.api.run_context import RunContext
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.utils.stats_utils import CumulativeMovingMeanStd
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main
from maze.perception.blocks import RunningNormalizationBlock
from maze.perception.models.auto_model_composer import AutoModelComposer
from maze.report.progress import read_progress
from maze.serve.bundle import PolicyBundle
from maze.serve.export import export_policy
from maze.train.trainers.common.observation_statistics import ObservationStatistics
from maze.train.trainers.es.es_trainer import ESTrainer

POLICY = {"_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer"}
CRITIC = {"_target_": "maze.perception.models.critics.StateCriticComposer"}
OBSERVATIONS = spaces.Dict(
    {
        "vector": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "number": spaces.Box(-np.inf, np.inf, (), np.float32),
        "direction": spaces.Discrete(4),
        "far": spaces.Box(-500.0, 500.0, (1, 2), np.float32),
    }
)
ACTIONS = spaces.Dict({"move": spaces.Box(-1.0, 1.0, (2,), np.float32)})


def composed(observations=None, actions=None, **arguments):
    observations, actions = observations or {0: OBSERVATIONS}, actions or {0: ACTIONS}
    arguments = {"policy": POLICY, "critic": CRITIC, "normalize_observations": True, **arguments}
    return AutoModelComposer(actions, observations, dict.fromkeys(actions, 1), **arguments)


def model_of(composer):
    return TorchActorCritic(composer.policy, composer.critic, "cpu")


def blocks_of(model):
    networks = [*model.policy.networks.values(), *model.critic.networks.values()]
    return [part for net in networks for part in net.modules() if isinstance(part, RunningNormalizationBlock)]


def rollout(observations, spaces_dict=None, valid=None):
    """Columns with observations `[n_rows + 1, n_envs, ...]` by name, the same for all sub-steps."""
    spaces_dict = spaces_dict or {0: OBSERVATIONS}
    n_rows, n_envs = (np.array(next(iter(observations.values()))).shape[i] for i in (0, 1))
    columns = RolloutColumns(spaces_dict, dict.fromkeys(spaces_dict, ACTIONS), n_envs, (n_rows - 1) * len(spaces_dict))
    columns.clear()
    actors, tick = [], 0
    for row in range(n_rows - 1):
        for key in spaces_dict:
            here = None if valid is None else valid[row]
            columns.substeps[key].add_row(tick, here, [0] * (n_envs if here is None else len(here)))
            actors.append(ActorID(key, 0) if here is None else None)
            tick += 1
    columns.finish([ActorID(next(iter(spaces_dict)), 0)] * n_envs, actors)
    for substep in columns.substeps.values():
        for name, array in observations.items():
            if name in substep.observations:
                substep.observations[name][...] = array
    return columns


def sample(n_rows, n_envs=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {key: OBSERVATIONS[key].shape for key in ("vector", "number", "far")}
    return {key: rng.normal(3.0, 5.0, (n_rows, n_envs, *shape)).astype(np.float32) for key, shape in shapes.items()}


def test_statistics_of_several_rollouts_are_those_of_all_that_was_acted_on_each_observation_once():
    model = model_of(composed())
    statistics = ObservationStatistics(model)
    first, second = sample(6, seed=1), sample(4, seed=2)
    for part in (first, second):
        statistics.learn(rollout(part))
    assert len(blocks_of(model)) == 2 * 3  # policy and critic; no category
    for block in blocks_of(model):
        key = block.in_keys[0]
        seen = np.concatenate([part[key][:-1].reshape(-1, *part[key].shape[2:]) for part in (first, second)])
        assert block.count.item() == 2 * (5 + 3)
        np.testing.assert_allclose(block.mean.numpy(), seen.mean(0, dtype=np.float64), rtol=1e-12)
        np.testing.assert_allclose(block.variance.numpy(), seen.var(0, dtype=np.float64), rtol=1e-9)
        normalized = block({key: torch.from_numpy(seen)})[block.out_keys[0]]
        np.testing.assert_allclose(normalized.mean(0).numpy(), 0.0, atol=1e-5)
        np.testing.assert_allclose(normalized.std(0, unbiased=False).numpy(), 1.0, rtol=1e-4)


def test_where_actors_vary_only_those_that_acted_count():
    model = model_of(composed())
    observations = sample(4)
    ObservationStatistics(model).learn(rollout(observations, valid=[[0], [0, 1], [1]]))
    seen = observations["vector"][[0, 1, 1, 2], [0, 0, 1, 1]]
    block = next(block for block in blocks_of(model) if block.in_keys == ["vector"])
    assert block.count.item() == 4
    np.testing.assert_allclose(block.mean.numpy(), seen.mean(0), rtol=1e-6)


def test_sub_steps_share_the_statistics_of_observations_of_the_same_name():
    spaces_dict = {0: OBSERVATIONS, "b": OBSERVATIONS}
    model = model_of(composed(spaces_dict, dict.fromkeys(spaces_dict, ACTIONS)))
    ObservationStatistics(model).learn(rollout(sample(3), spaces_dict))
    assert {block.count.item() for block in blocks_of(model)} == {2 * 2 * 2}
    assert len({tuple(block.mean.flatten().tolist()) for block in blocks_of(model)}) == 3


def test_agents_whose_observations_are_stacked_share_statistics():
    block, seen = RunningNormalizationBlock("x", "out", [(2, 3)]), np.random.default_rng(0).normal(size=(5, 3))
    observed = CumulativeMovingMeanStd(epsilon=0.0)
    observed.update(seen)
    block.learn(observed)
    np.testing.assert_allclose(block.mean.numpy(), [seen.mean(0)] * 2)


def test_entries_that_do_not_vary_are_shifted_and_large_values_clipped():
    model = model_of(composed())
    constant = {"vector": np.full((3, 2, 3), 1e6, np.float32)}
    ObservationStatistics(model).learn(rollout(constant))
    block = next(block for block in blocks_of(model) if block.in_keys == ["vector"])
    assert block({"vector": torch.full((3,), 1e6 + 2)})[block.out_keys[0]].tolist() == [2.0] * 3
    assert block({"vector": torch.full((3,), -1e6)})[block.out_keys[0]].tolist() == [-10.0] * 3


def test_acting_uses_new_statistics_immediately_and_in_numpy():
    model = model_of(composed())
    policy, seen = model.policy, sample(2)
    batch = {**{key: array[0] for key, array in seen.items()}, "direction": np.zeros(2, np.int64)}
    before = policy.compute_actions(batch, ActorID(0, 0), deterministic=True)["move"].copy()
    ObservationStatistics(model).learn(rollout(sample(9)))
    after = policy.compute_actions(batch, ActorID(0, 0), deterministic=True)["move"]
    assert next(iter(policy._actors.values())).runs_in_numpy
    assert not np.array_equal(before, after)
    expected = policy.networks[0]({key: torch.as_tensor(array) for key, array in batch.items()})["move"][:, :2]
    np.testing.assert_allclose(after, expected.detach().numpy(), atol=1e-6)


def test_networks_that_normalize_something_else_than_an_observation_are_refused():
    composer = composed()
    model = model_of(composer)
    blocks_of(model)[0].in_keys = ["latent"]
    with pytest.raises(ConfigError, match=r"`latent`.*direction"):
        ObservationStatistics(model).learn(rollout(sample(3)))


def test_normalization_requires_a_numeric_observation():
    with pytest.raises(ConfigError, match=r"normalize_observations.*category"):
        composed({0: spaces.Dict({"direction": spaces.Discrete(4)})})


TINY = (
    *("algorithm.n_epochs=1", "algorithm.epoch_length=2", "algorithm.rollout_evaluator.n_episodes=1"),
    *("env.name=CartPole-v1", "model=auto", "model.normalize_observations=true", "verbose=0"),
)
ON_POLICY = ("algorithm.n_rollout_steps=8", "runner.concurrency=2", "algorithm.reward_scaling=true")


def train(directory, *overrides):
    directory.mkdir()
    assert main(["-cn", "conf_train", f"hydra.run.dir={directory}", *TINY, *overrides]) == 0
    state = torch.load(directory / "state_dict.pt", weights_only=True)
    latest = torch.load(directory / "latest.pt", weights_only=True)
    return [next(iter(each["policies"].values())) for each in (state, latest["model"])]


def test_a_run_learns_from_each_rollout_once_and_the_best_model_has_the_statistics_of_its_epoch(tmp_path):
    best, latest = train(tmp_path / "run", "algorithm=ppo", *ON_POLICY)
    (name,) = [name for name in latest if name.endswith("count")]
    assert latest[name].item() == 2 * 8 * 2  # neither evaluations nor the bootstrap's observation
    assert best[name].item() in (0, 2 * 8 * 2)  # evaluated before the first update, and after the last


@pytest.mark.parametrize(
    ("overrides", "n_observations"),
    [
        (("algorithm=a2c", *ON_POLICY), 2 * 8 * 2),
        (
            (
                "algorithm=impala",
                "algorithm.n_rollout_steps=8",
                "algorithm.num_actors=2",
                "algorithm.actors_batch_size=2",
            ),
            2 * 8 * 2,
        ),
        (
            (
                "algorithm=dqn",
                "algorithm.initial_buffer_size=10",
                "algorithm.n_rollout_steps=3",
                "algorithm.batch_size=4",
            ),
            10 + 2 * 3,
        ),
    ],
    ids=["a2c", "impala", "dqn"],
)
def test_algorithms_learn_statistics(tmp_path, overrides, n_observations):
    _, latest = train(tmp_path / "run", *overrides)
    (count,) = [value.item() for name, value in latest.items() if name.endswith("count")]
    assert count == n_observations


ES = (
    *("algorithm=es", "algorithm.n_epochs=2", "algorithm.n_rollouts_per_update=4", "algorithm.max_steps=5"),
    *("algorithm.n_timesteps_per_update=0", "runner.shared_noise_table_size=100000", *TINY[3:]),
)


@pytest.mark.parametrize("runner", ["dev", pytest.param("local", marks=pytest.mark.slow)])
def test_evolution_strategies_learn_from_the_episodes_of_perturbed_policies(tmp_path, runner):
    seeds = ("seeding.env_base_seed=1", "seeding.agent_base_seed=2")
    states = []
    for name, where in (("one", "runner=dev"), ("other", f"runner={runner}")):
        path = tmp_path / name
        assert main(["-cn", "conf_train", *ES, *seeds, where, f"hydra.run.dir={path}"]) == 0
        latest = torch.load(path / "latest.pt", weights_only=True)["model"]
        states.append(next(iter(latest["policies"].values())))
    (count,) = [value.item() for name, value in states[0].items() if name.endswith("count")]
    assert count == 2 * 4 * 5  # two updates, and no evaluation
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_algorithm_without_observation_statistics_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ESTrainer, "learns_observation_statistics", False)
    assert main(["-cn", "conf_train", *ES, f"hydra.run.dir={tmp_path}"]) == 1
    assert "ESTrainer learns no statistics of observations" in capsys.readouterr().err


def test_episodes_without_variation_give_no_statistics():
    with pytest.raises(ConfigError, match=r"expected statistics of the observations .*'vector'.* reported none"):
        ObservationStatistics(model_of(composed())).learn_merged({})


def test_statistics_of_the_environment_keep_its_rewards(tmp_path):
    rc = RunContext(
        env="CartPole-v1",
        algorithm="ppo",
        silent=True,
        run_dir=str(tmp_path / "run"),
        overrides={
            "algorithm.n_rollout_steps": 64,
            "algorithm.epoch_length": 2,
            "algorithm.reward_scaling": True,
            "algorithm.rollout_evaluator.n_episodes": 1,
            "runner.concurrency": 2,
        },
    )
    rc.train(n_epochs=1)
    (row,) = [values for path, *_, values in read_progress(tmp_path / "run").rows() if path == "train"]
    steps, reward = (row[f"BaseEnvEvents/reward/{name}"] for name in ("mean_step_count", "mean"))
    assert reward == steps  # one for each step, as CartPole has it


@pytest.mark.slow
def test_an_exported_policy_normalizes_as_the_model_does():
    env = GymMazeEnv("Pendulum-v1")
    model = model_of(composed(env.observation_spaces_dict, env.action_spaces_dict, state_dependent_std=False))
    seen = np.random.default_rng(0).normal(2.0, 3.0, (50, 3)).astype(np.float32)
    ObservationStatistics(model).learn_from([{"observation": seen}])
    bundle = PolicyBundle(export_policy(model.policy, env, n_steps=30))
    batch = {"observation": seen}
    expected = model.policy.compute_actions(batch, ActorID(0, 0), deterministic=True)["action"]
    np.testing.assert_allclose(bundle.act_batch(0, batch).actions["action"], expected, atol=1e-5)
