"""DQN: values by hand, exploration, targets, and runs."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hydra import compose, initialize_config_module
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.api.run_context import RunContext
from maze.api.utils import RunMode
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import StatsContext
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.factory import Factory
from maze.distributions.distribution_mapper import DistributionMapper
from maze.maze_cli import main
from maze.runner import Runner
from maze.train.parallelization.distributed_actors.env_groups import (
    bytes_of,
    copied_to_cpu,
    packed_weights,
    unpack_weights,
)
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.replay_buffer.rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import (
    TransitionBatch,
    TransitionColumns,
    TransitionRows,
    bellman_targets,
)
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from maze.train.trainers.dqn.dqn_algorithm_config import DQNAlgorithmConfig
from maze.train.trainers.dqn.dqn_trainer import (
    DQN,
    DQNEvents,
    EpsilonGreedyPolicy,
    best_value,
    dueling,
    factors_of,
    linear_schedule,
)
from maze.train.trainers.sac.sac_runners import SACDevRunner
from tests.train.parallelization.toy_envs import Observe, PassOn, ToyCoreEnv

MASKED = torch.finfo(torch.float32).min


def test_dueling_values_match_hand_worked_values_with_and_without_mask():
    value = torch.tensor([[10.0], [10.0]])
    advantages = torch.tensor([[1.0, 2.0, 6.0], [1.0, MASKED, 6.0]])
    found = dueling(value, advantages)
    assert found[0].tolist() == [8.0, 9.0, 13.0]  # mean 3
    assert found[1].tolist() == [7.5, MASKED, 12.5]  # mean 3.5 of the two that are allowed


def test_double_q_values_come_from_the_other_network():
    chooser = [torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 0.0, 1.0]])]
    estimates = [torch.tensor([[7.0, 3.0]]), torch.tensor([[9.0, 20.0, 0.0]])]
    assert best_value(chooser, estimates).tolist() == [(3.0 + 9.0) / 2]
    assert best_value(estimates, estimates).tolist() == [(7.0 + 20.0) / 2]


def test_factors_of_actions():
    choices = spaces.Dict(a=spaces.Discrete(3), b=spaces.MultiDiscrete([2, 4]))
    assert factors_of(choices) == [("a", slice(0, 3), 0), ("b", slice(0, 2), 0), ("b", slice(2, 6), 1)]
    with pytest.raises(ConfigError, match=r"action head `c` is Box.*Discretise it"):
        factors_of(spaces.Dict(c=spaces.Box(0, 1, (1,))))


def test_actions_of_a_factor_are_a_view_of_the_actions():
    actions = {"a": np.array([1, 2]), "b": np.array([[0, 3], [1, 2]])}
    single, _, second = factors_of(spaces.Dict(a=spaces.Discrete(3), b=spaces.MultiDiscrete([2, 4])))
    assert single.of(actions).tolist() == [1, 2]
    assert second.of({"b": torch.from_numpy(actions["b"])}).tolist() == [3, 2]
    second.of(actions)[:] = 0
    assert actions["b"].tolist() == [[0, 0], [1, 0]]


@pytest.mark.parametrize(("step", "expected"), [(0, 1.0), (50, 0.55), (100, 0.1), (1000, 0.1)])
def test_the_share_of_random_actions_falls_linearly(step, expected):
    assert linear_schedule(1.0, 0.1, 100, step) == pytest.approx(expected)


# -- exploration -----------------------------------------------------------------------------------


class Fixed(nn.Module):
    """The same logits for every observation."""

    def __init__(self, logits: dict[str, list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.logits = {head: torch.tensor(values) for head, values in logits.items()}

    def forward(self, x):
        n = len(x["x"])
        return {head: values.expand(n, -1) + self.weight for head, values in self.logits.items()}


ACTIONS = spaces.Dict(one=spaces.Discrete(4), two=spaces.MultiDiscrete([2, 3]))


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_actions_are_the_best_or_with_probability_epsilon_any_that_is_allowed(epsilon):
    network = Fixed({"one": [0.0, 3.0, MASKED, 1.0], "two": [1.0, 0.0, MASKED, 0.0, 2.0]})
    base = TorchPolicy({0: network}, DistributionMapper(ACTIONS, []), "cpu")
    policy = EpsilonGreedyPolicy(base)
    assert policy.shares_networks_with(base)
    policy.seed(1)
    policy.epsilon = epsilon
    n = 6000
    actions = policy.compute_actions({"x": np.zeros((n, 1), np.float32)}, ActorID(0, 0))
    shares = np.bincount(actions["one"], minlength=4) / n
    np.testing.assert_allclose(shares, [epsilon / 3, 1 - 2 * epsilon / 3, 0, epsilon / 3], atol=0.02)
    second = np.bincount(actions["two"][:, 1], minlength=3) / n
    np.testing.assert_allclose(second, [0, epsilon / 2, 1 - epsilon / 2], atol=0.02)
    greedy = policy.compute_actions({"x": np.zeros((5, 1), np.float32)}, ActorID(0, 0), deterministic=True)
    assert greedy["one"].tolist() == [1] * 5
    assert greedy["two"].tolist() == [[0, 2]] * 5


def test_copies_in_workers_explore_as_much_as_the_policy_whose_weights_they_get():
    network = Fixed({"one": [0.0, 3.0, 2.0, 1.0], "two": [1.0, 0.0, 3.0, 0.0, 2.0]})
    policy = EpsilonGreedyPolicy(TorchPolicy({0: network}, DistributionMapper(ACTIONS, []), "cpu"))
    policy.epsilon = 1.0
    copied = copied_to_cpu(policy)
    policy.epsilon = 0.05
    unpack_weights(packed_weights(policy.state_dict()), bytes_of(copied.state_dict()))
    assert copied.epsilon == 0.05


# -- targets ---------------------------------------------------------------------------------------


def states(*values: int):
    return {"state": torch.tensor(values, dtype=torch.float32)[:, None]}


def batch_of(n_actors, rewards, terminated, n_substeps=None, observations=None, following=None) -> TransitionBatch:
    n, actors = len(terminated), [ActorID(key, 0) for key in range(n_actors)]
    return TransitionBatch(
        actors=actors,
        observations=observations or [states(*[0] * n) for _ in actors],
        actions=[],
        rewards=torch.tensor(rewards),
        next_observations=[following or states(*[1] * n)],
        terminated=torch.tensor(terminated),
        n_substeps=None if n_substeps is None else torch.tensor(n_substeps),
        has_next_step=None,
    )


def value_of(position, observation):
    return torch.tensor([20.0, 30.0])[observation["state"][:, 0].long()]


def test_the_target_of_a_step_is_discounted_unless_it_terminated():
    batch = batch_of(1, [[1.0], [1.0]], [False, True])
    assert bellman_targets(batch, None, 0.5, value_of)[0].tolist() == [1.0 + 0.5 * 30.0, 1.0]


def test_the_target_of_a_sub_step_is_the_next_one_without_discount():
    batch = batch_of(
        2,
        [[1.0, 2.0], [1.0, 0.0], [1.0, 0.0]],
        [False, True, False],
        n_substeps=[2, 1, 1],  # a whole step, one that terminated and one that was cut off after its first sub-step
        observations=[states(0, 0, 0), states(1, 1, 0)],
        following=states(0, 0, 0),
    )
    first, second = bellman_targets(batch, None, 0.5, value_of)
    assert first.tolist() == [1.0 + 30.0, 1.0, 1.0 + 20.0]
    assert second[0].item() == 2.0 + 0.5 * 20.0


# -- structured environments whose episodes end between sub-steps ------------------------------------


class ScriptedCoreEnv(ToyCoreEnv):
    """Plays given episodes: rewards of their sub-steps, and whether the last one terminates. Observes a number that no
    other sub-step has; an action mask allows the second action only.

    :param episodes: Rewards and whether the episode terminates; truncated otherwise. Played over and over.
    """

    def __init__(self, n_actors: int, episodes) -> None:
        self.step_keys = tuple(range(n_actors))
        super().__init__()
        self.episodes, self.episode, self.number = episodes, -1, 0

    def reset(self):
        self.episode = (self.episode + 1) % len(self.episodes)
        self.time = 0
        return self._move_on(0)

    def step(self, maze_action):
        rewards, terminates = self.episodes[self.episode]
        reward = rewards[self.time]
        self.time += 1
        done = self.time == len(rewards)
        info = {"TimeLimit.truncated": True} if done and not terminates else {}
        return self._move_on(self.time % len(self.step_keys)), reward, done, info

    def _move_on(self, key):
        self.actor, self.number = ActorID(key, 0), self.number + 1
        return self.get_maze_state()

    def is_step_complete(self):
        return self.actor.step_key == 0

    def get_maze_state(self):
        return {"number": [self.number], "action_mask": [0, 1, 0]}


def scripted_env(n_actors, episodes):
    observation = spaces.Dict(
        number=spaces.Box(0, 1e6, (1,), np.float32), action_mask=spaces.Box(0, 1, (3,), np.float32)
    )
    keys = range(n_actors)
    actions = {key: spaces.Dict({f"action_{key}": spaces.Discrete(3)}) for key in keys}
    return MazeEnv(
        ScriptedCoreEnv(n_actors, episodes),
        {key: PassOn(actions[key]) for key in keys},
        {key: Observe(observation) for key in keys},
    )


def buffer_of(env, n_rollouts: int, n_steps: int) -> UniformReplayBuffer:
    vector_env = SequentialVectorEnv([lambda: env])
    policy, generator = RandomPolicy(vector_env.action_spaces_dict), RolloutGenerator(vector_env)
    policy.seed(0)
    actors, all_spaces = (
        list(map(ActorID, env.agent_counts_dict, [0] * len(env.agent_counts_dict))),
        (
            vector_env.observation_spaces_dict,
            vector_env.action_spaces_dict,
        ),
    )
    buffer, rows = UniformReplayBuffer(1000, seed=0), RolloutRows(actors, *all_spaces, 1)
    buffer.allocate(actors, *all_spaces)
    for _ in range(n_rollouts):
        buffer.add_rows(rows.convert(generator.collect(policy, generator.allocate(n_steps)), buffer.n_rows_added))
    return buffer


GAMMA = 0.5


def number_value(position, observation):
    """A different value for each observation of each actor."""
    return 7.0 * (position + 1) + observation["number"][:, 0]


def derived_targets(n_actors, episodes, n_steps):
    """Targets by the definition, sub-step after sub-step; keys are the numbers that the sub-steps observed.

    :param episodes: All episodes that were played, in order; the last one may be unfinished (`None`).
    """
    targets, number = {}, 0
    for rewards, terminates in episodes:
        n = len(rewards)
        first = number + 1  # number of the episode's first observation
        for begin in range(n):
            total, discount, end = 0.0, 1.0, begin
            n_completed = 0
            while end < n:
                total += discount * rewards[end]
                end += 1
                if end % n_actors == 0:
                    n_completed += 1
                    discount *= GAMMA
                if n_steps in (n_completed, 1):
                    break
            if end < n or not terminates:
                position = end % n_actors
                total += discount * (7.0 * (position + 1) + first + end)
            targets[first + begin] = total
        number += n + 1
    return targets


@given(
    n_actors=st.integers(1, 3),
    episodes=st.lists(
        st.tuples(st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=8), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    n_steps=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_n_step_targets_equal_their_definition_for_every_end_of_episodes(n_actors, episodes, n_steps):
    buffer = buffer_of(scripted_env(n_actors, episodes), 1, 12)
    columns, slots = buffer.columns, np.arange(len(buffer))
    batch = columns.read(slots, "cpu")
    n_step = columns.n_step_returns(slots, n_steps, GAMMA, "cpu") if n_steps > 1 else None
    found = bellman_targets(batch, n_step, GAMMA, number_value)
    expected = derived_targets(n_actors, episodes * 40, n_steps)
    n_checked = 0
    for row in slots[: len(slots) - n_steps]:  # what follows the latest rows is not known yet
        for position in range(int(columns.n_substeps[row]) if n_actors > 1 else 1):
            number = int(batch.observations[position]["number"][row])
            assert found[position][row].item() == pytest.approx(expected[number], rel=1e-5)
            n_checked += 1
    assert n_checked


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_the_greedy_policy_is_the_same_for_every_number_of_steps(n_steps):
    """The second of two actions earns 1 more at once, in a state that is worth less; every other time the episode is
    truncated in that state, between the sub-steps."""
    # number of the state: 1 first sub-step, 2 second sub-step after action 0 (worth 7), 3 after action 1 (worth 5)
    columns = TransitionColumns(
        6,
        [ActorID(0, 0), ActorID(1, 0)],
        [{"state": np.float32([3])}] * 2,
        [{"action": np.array(0)}] * 2,
    )
    state, action = (lambda *values: {"state": np.float32(values)[:, None]}), (lambda *v: {"action": np.array(v)})
    columns.add(
        TransitionRows(
            observations=[state(1, 1, 1), state(2, 3, 3)],
            actions=[action(0, 1, 1), action(0, 0, 0)],
            rewards=np.float32([[0, 7], [1, 5], [1, 0]]),
            next_observation=state(1, 1, 1),
            terminated=np.array([True, True, False]),
            n_substeps=np.array([2, 2, 1]),
            follows=np.array([-1, -1, -1]),
        )
    )
    slots, values = np.arange(3), torch.zeros(4, 2)
    batch = columns.read(slots, "cpu")
    for _ in range(100):
        n_step = columns.n_step_returns(slots, n_steps, 0.9, "cpu") if n_steps > 1 else None

        def best(position, observation):
            return values[observation["state"][:, 0].long()].max(-1).values

        first, second = bellman_targets(batch, n_step, 0.9, best)
        values[1] = torch.stack([first[0], first[1:].mean()])
        values[2, 0], values[3, 0] = second[0], second[1]
    torch.testing.assert_close(values[1], torch.tensor([7.0, 6.0]))


@pytest.mark.parametrize("n_steps", [1, 2])
def test_sub_steps_that_were_not_taken_have_no_part_in_losses_and_statistics(n_steps, tmp_path, monkeypatch):
    """The placeholder of their action is one that the mask forbids, so that its value is not finite."""
    monkeypatch.chdir(tmp_path)
    episodes = [([1.0, 1.0, 1.0], False), ([1.0], False), ([1.0, 1.0, 1.0, 1.0], True)]
    config = DQNAlgorithmConfig(
        n_epochs=1, epoch_length=20, initial_buffer_size=40, batch_size=16, n_step_returns=n_steps, lr=1e-4,
        rollout_evaluator=None,
    )  # fmt: skip
    with StatsContext():
        context = RunContext(
            env=partial(scripted_env, 2, episodes), algorithm=config, model="auto", critic="template_state",
            overrides={"model.action_masks": {"action_0": "action_mask", "action_1": "action_mask"}}, silent=True,
        )  # fmt: skip
        with context:
            context.train()
            stats = context.runner.trainer.train_stats.last_stats
            parameters = context.runner.trainer.model.parameters()
            assert all(bool(torch.isfinite(p).all()) for p in parameters)
    values = {key.group: value for key, value in stats.items() if key.event is DQNEvents.action_value}
    assert set(values) == {(0,), (1,)}
    assert all(abs(value) < 1e3 for value in values.values())


# -- runs -------------------------------------------------------------------------------------

SHORT = (
    *("algorithm=dqn", "algorithm.n_epochs=2", "algorithm.epoch_length=20", "algorithm.initial_buffer_size=40"),
    *("algorithm.rollout_evaluator.n_episodes=1", "algorithm.batch_size=16", "algorithm.replay_buffer_size=500"),
)


def trained(directory, monkeypatch, *overrides: str) -> DQN:
    directory.mkdir()
    monkeypatch.chdir(directory)
    seeds = ("seeding.env_base_seed=3", "seeding.agent_base_seed=4")
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", overrides=[*SHORT, *seeds, *overrides])
    with StatsContext():
        runner = Factory(Runner).instantiate(cfg.runner)
        runner.setup(cfg)
        runner.run()
        runner.close()
    return runner.trainer


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (
            "algorithm.double=false",
            "algorithm.dueling=false",
            "algorithm.tau=0.01",
            "algorithm.target_update_interval=1",
        ),
        ("algorithm.prioritized=true", "algorithm.n_step_returns=3", "model=auto"),
        ("model=vector_obs", "critic=template_state"),
        ("model=flatten_concat_shared_embedding",),
        ("algorithm.risk=cvar:0.2", "algorithm.n_step_returns=3", "algorithm.prioritized=true"),
        ("algorithm.risk=0.5*mean+0.5*cvar:0.1", "algorithm.double=false", "algorithm.dueling=false"),
        ("algorithm.num_actors=2", "algorithm.rollouts_per_iteration=2", "algorithm.num_batches_per_iter=2"),
    ],
)
def test_every_combination_trains(overrides, tmp_path, monkeypatch):
    trainer = trained(tmp_path / "run", monkeypatch, "env.name=CartPole-v1", *overrides)
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


def test_the_documented_runner_of_replay_algorithms_learns_the_same(tmp_path, monkeypatch):
    one = trained(tmp_path / "one", monkeypatch, "env.name=CartPole-v1")
    target = f"{SACDevRunner.__module__}.{SACDevRunner.__qualname__}"
    other = trained(tmp_path / "other", monkeypatch, "env.name=CartPole-v1", f"runner._target_={target}")
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("ahead", ["false", "true"])
def test_worker_processes_give_the_same_weights(ahead, tmp_path, monkeypatch):
    several = ("env.name=CartPole-v1", "algorithm.num_actors=2", "algorithm.rollouts_per_iteration=2")
    several = (*several, "algorithm.risk=cvar:0.5")
    several = (*several, f"algorithm.collect_ahead={ahead}")
    one = trained(tmp_path / "dev", monkeypatch, *several, "runner=dev")
    other = trained(tmp_path / "local", monkeypatch, *several, "runner=local")
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_share_of_random_actions_follows_the_steps_that_have_arrived(tmp_path, monkeypatch):
    collect = DQN._collect

    def with_late_rollouts(self):
        waiting = collect(self)
        self.workers.n_env_steps = 3
        return waiting

    monkeypatch.setattr(DQN, "_collect", with_late_rollouts)
    arguments = ("env.name=CartPole-v1", "algorithm.epsilon_decay_steps=1000", "algorithm.n_rollout_steps=5")
    epsilons = []
    for name, more in (("run", ()), ("resumed", (f"input_dir={tmp_path / 'run'}", "resume=true"))):
        n_epochs = 2 + len(more) // 2
        trainer = trained(tmp_path / name, monkeypatch, *arguments, *more, f"algorithm.n_epochs={n_epochs}")
        epsilons.append(trainer.workers.worker_policy.epsilon)
    assert epsilons == [linear_schedule(1.0, 0.05, 1000, 3 * n_updates) for n_updates in (39, 59)]


def test_a_trained_policy_acts_greedily_in_every_loader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    assert main(["-cn", "conf_train", *SHORT, "env.name=CartPole-v1", f"hydra.run.dir={run}"]) == 0
    policy = AgentDeployment.from_run(run).policy
    observation = {"observation": np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)}
    drawn = [policy.compute_actions(observation, ActorID(0, 0))["action"].copy() for _ in range(2)]
    best = policy.compute_actions(observation, ActorID(0, 0), deterministic=True)["action"]
    assert drawn[0].tolist() == drawn[1].tolist() == best.tolist()
    with StatsContext():
        context = RunContext(env="CartPole-v1", algorithm=DQNAlgorithmConfig(), run_dir=str(tmp_path / "context"))
        entries = context.config[RunMode.TRAINING].model.distribution_mapper_config
    assert [entry["action_space"].rpartition(".")[2] for entry in entries] == ["Discrete", "MultiDiscrete"]


def test_target_networks_follow_after_each_interval_and_stay_in_between(tmp_path, monkeypatch):
    arguments = ("env.name=CartPole-v1", "algorithm.epoch_length=7", "algorithm.n_epochs=1")
    trainer = trained(tmp_path / "seven", monkeypatch, *arguments, "algorithm.target_update_interval=7")
    pairs = [*zip(trainer._networks[0].parameters(), trainer._targets[0].parameters(), strict=True)]
    assert all(torch.equal(mine, target) for mine, target in pairs)
    trainer = trained(tmp_path / "eight", monkeypatch, *arguments, "algorithm.target_update_interval=8")
    pairs = [*zip(trainer._networks[0].parameters(), trainer._targets[0].parameters(), strict=True)]
    assert not all(torch.equal(mine, target) for mine, target in pairs)


def test_exact_values_of_a_small_problem_are_learned(tmp_path, monkeypatch):
    """A corridor without slipping: the value of each state is the discounted reward of the way to the goal."""
    trainer = trained(
        tmp_path / "run",
        monkeypatch,
        *("env.name=FrozenLake-v1", "env.kwargs={is_slippery: false, desc: [SFFFG]}", "model=auto"),
        *("algorithm.gamma=0.5", "algorithm.lr=0.01", "algorithm.epoch_length=400", "algorithm.n_epochs=1"),
        *("algorithm.target_update_interval=20", "algorithm.final_epsilon=1.0", "algorithm.initial_buffer_size=400"),
    )
    observation = {"observation": torch.arange(4.0)}
    (values,) = trainer._networks[0](observation)
    best = values.max(-1).values.detach()
    assert values.argmax(-1).tolist() == [2] * 4  # to the right
    torch.testing.assert_close(best, torch.tensor([0.125, 0.25, 0.5, 1.0]), atol=0.05, rtol=0.0)
    assert all(first < second for first, second in pairwise(best.tolist()))


MASKED_CUTTING = ("env=tutorial_cutting_2d_struct_masked", "wrappers=tutorial_cutting_2d", "critic=flatten_concat_step")


@pytest.mark.parametrize("risk", ["null", "cvar:0.1"])
def test_two_masked_sub_steps_train_without_an_invalid_action(risk, tmp_path, monkeypatch):
    masks = "model.action_masks={cut_rotation: cutting_mask}"  # two actions have its size
    trainer = trained(tmp_path / "run", monkeypatch, *MASKED_CUTTING, "model=auto", masks, f"algorithm.risk={risk}")
    buffer = trainer.workers.replay_buffer
    columns, n = buffer.columns, len(buffer)
    assert n == 80
    for position, mask in enumerate(("inventory_mask", "cutting_mask")):
        masks, actions = columns.observations[position], columns.actions[position]
        head = next(head for head in actions if actions[head].ndim == 1 and head in ("piece_idx", "cut_rotation"))
        assert (masks[mask][np.arange(n), actions[head][:n]] > 0).all()


def test_duelling_heads_need_a_value_for_each_sub_step(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments = [*MASKED_CUTTING[:-1], "critic=flatten_concat_shared"]
    assert main(["-cn", "conf_train", *SHORT, "model=auto", *arguments]) == 1
    assert "found a TorchSharedStateCritic for 2 sub-steps. Use critic=flatten_concat_step" in capfd.readouterr().err


def test_continuous_actions_are_refused_in_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["-cn", "conf_train", *SHORT, "env.name=Pendulum-v1"]) == 1
    assert "action head `action` is Box" in capfd.readouterr().err
