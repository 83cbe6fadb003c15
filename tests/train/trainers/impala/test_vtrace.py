"""V-trace against numbers worked out by hand, against the sum in the paper, and its laws."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from maze.core.agent.returns import gae, next_values_from
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.trainers.impala.impala_vtrace import (
    from_importance_weights,
    from_logits,
    get_log_rhos,
    log_probs_from_logits_and_actions_and_spaces,
    log_rhos_by_trajectory,
)

GAMMA = 0.9


def column(*values):
    return tensor(values, dtype=torch.float64).unsqueeze(1)


def on_policy_fixture(terminated=(), truncated=None, trace_lambda=0.8):
    """Four steps, values 10 to 40, 50 after the last, rewards of 1, an episode boundary after step 1."""
    discounts = column(*[0.0 if step in terminated else GAMMA for step in range(4)])
    return from_importance_weights(
        torch.zeros(4, 1, dtype=torch.float64),
        discounts,
        torch.ones(4, 1, dtype=torch.float64),
        column(10.0, 20.0, 30.0, 40.0),
        tensor([50.0], dtype=torch.float64),
        1.0,
        1.0,
        truncated=None if truncated is None else column(*[step in truncated for step in range(4)]).bool(),
        final_values=None if truncated is None else column(*[truncated.get(step, math.nan) for step in range(4)]),
        trace_lambda=trace_lambda,
    )


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [((1,), None, (-4.68, -19.0, 11.32, 6.0)), ((), {1: 25.0}, (11.52, 3.5, 11.32, 6.0))],
)
def test_on_policy_targets_are_those_of_generalized_advantage_estimation(terminated, truncated, expected):
    returns = on_policy_fixture(terminated, truncated)
    assert (returns.vs[:, 0] - tensor([10.0, 20.0, 30.0, 40.0])).tolist() == pytest.approx(expected)


def test_advantages_bootstrap_from_the_target_of_the_next_step_within_the_episode_only():
    # vs = 10 - 4.68, 20 - 19, 30 + 11.32, 40 + 6
    terminated = on_policy_fixture((1,), None)
    expected = (1 + GAMMA * 1.0 - 10, 1 - 20, 1 + GAMMA * 46 - 30, 1 + GAMMA * 50 - 40)
    assert terminated.pg_advantages[:, 0].tolist() == pytest.approx(expected)
    # vs = 10 + 11.52, 20 + 3.5, ...; the truncated step sees the value of the final observation, 25
    truncated = on_policy_fixture((), {1: 25.0})
    expected = (1 + GAMMA * 23.5 - 10, 1 + GAMMA * 25 - 20, 1 + GAMMA * 46 - 30, 1 + GAMMA * 50 - 40)
    assert truncated.pg_advantages[:, 0].tolist() == pytest.approx(expected)


def test_importance_weights_are_clipped_as_worked_out_by_hand():
    returns = from_importance_weights(
        log_rhos=column(math.log(0.5), math.log(4.0)),
        discounts=column(0.5, 0.5),
        rewards=column(1.0, 2.0),
        values=column(4.0, 6.0),
        bootstrap_value=tensor([8.0], dtype=torch.float64),
        clip_rho_threshold=2.0,
        clip_pg_rho_threshold=3.0,
    )
    # deltas: 0.5 * (1 + 3 - 4) = 0 and 2 * (2 + 4 - 6) = 0; traces 0.5 and 1
    assert returns.vs[:, 0].tolist() == [4.0, 6.0]
    returns = from_importance_weights(
        column(math.log(0.5), math.log(4.0)),
        column(0.5, 0.5),
        column(2.0, 3.0),
        column(4.0, 6.0),
        tensor([8.0], dtype=torch.float64),
        2.0,
        3.0,
    )
    # deltas: 0.5 * (2 + 3 - 4) = 0.5 and 2 * (3 + 4 - 6) = 2; vs[0] = 4 + 0.5 + 0.5 * 0.5 * 2
    assert returns.vs[:, 0].tolist() == [5.0, 8.0]
    # 0.5 * (2 + 0.5 * 8 - 4) and 3 * (3 + 0.5 * 8 - 6)
    assert returns.pg_advantages[:, 0].tolist() == pytest.approx([1.0, 3.0])


def test_without_thresholds_only_the_traces_are_clipped():
    arguments = (column(math.log(4.0), 0.0), column(0.5, 0.5), column(2.0, 3.0), column(4.0, 6.0))
    returns = from_importance_weights(*arguments, tensor([8.0], dtype=torch.float64), None, None)
    # deltas: 4 * (2 + 3 - 4) = 4 and 3 + 4 - 6 = 1; the trace of step 0 is min(1, 4) * 0.5
    assert returns.vs[:, 0].tolist() == [4.0 + 4.0 + 0.5, 7.0]
    assert returns.pg_advantages[:, 0].tolist() == [4 * (2 + 3.5 - 4), 1.0]


@st.composite
def rollouts(draw):
    n_steps, n_envs = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    terminated = rng.random((n_steps, n_envs)) < 0.2
    truncated = (rng.random((n_steps, n_envs)) < 0.2) & ~terminated
    numbers = {name: rng.normal(size=(n_steps, n_envs)) for name in ("log_rhos", "rewards", "values", "final")}
    return {
        **numbers,
        "last": rng.normal(size=n_envs),
        "terminated": terminated,
        "truncated": truncated,
        "clip": draw(st.sampled_from([None, 0.5, 1.0, 2.0])),
        "clip_pg": draw(st.sampled_from([None, 0.5, 1.0, 2.0])),
        "trace_lambda": draw(st.sampled_from([0.0, 0.7, 1.0])),
    }


def reference(rollout, env):
    """The paper's sum of discounted temporal differences, step by step and written out."""
    r, v, rho = rollout["rewards"][:, env], rollout["values"][:, env], np.exp(rollout["log_rhos"][:, env])
    n_steps = len(r)

    def after(step, of_steps):
        if rollout["terminated"][step, env]:
            return 0.0
        if rollout["truncated"][step, env]:
            return rollout["final"][step, env]
        return of_steps[step + 1] if step + 1 < n_steps else rollout["last"][env]

    def clip(value, limit):
        return value if limit is None else min(value, limit)

    vs = []
    for start in range(n_steps):
        total, weight = v[start], 1.0
        for step in range(start, n_steps):
            total += weight * clip(rho[step], rollout["clip"]) * (r[step] + GAMMA * after(step, v) - v[step])
            if rollout["terminated"][step, env] or rollout["truncated"][step, env]:
                break
            weight *= GAMMA * rollout["trace_lambda"] * min(1.0, rho[step])
        vs.append(total)
    advantages = [clip(rho[t], rollout["clip_pg"]) * (r[t] + GAMMA * after(t, vs) - v[t]) for t in range(n_steps)]
    return vs, advantages


def vtrace_of(rollout):
    discounts = np.where(rollout["terminated"], 0.0, GAMMA)
    return from_importance_weights(
        *(torch.from_numpy(a) for a in (rollout["log_rhos"], discounts, rollout["rewards"], rollout["values"])),
        torch.from_numpy(rollout["last"]),
        rollout["clip"],
        rollout["clip_pg"],
        truncated=torch.from_numpy(rollout["truncated"]),
        final_values=torch.from_numpy(rollout["final"]),
        trace_lambda=rollout["trace_lambda"],
    )


@settings(max_examples=60, deadline=None)
@given(rollouts())
def test_recursion_equals_the_sum_in_the_paper(rollout):
    returns = vtrace_of(rollout)
    for env in range(rollout["rewards"].shape[1]):
        vs, advantages = reference(rollout, env)
        assert returns.vs[:, env].tolist() == pytest.approx(vs)
        assert returns.pg_advantages[:, env].tolist() == pytest.approx(advantages)


@settings(max_examples=30, deadline=None)
@given(rollouts())
def test_on_policy_and_unclipped_it_is_generalized_advantage_estimation(rollout):
    rollout = {**rollout, "log_rhos": np.zeros_like(rollout["log_rhos"]), "clip": 1.0}
    final = {(int(t), int(e)): rollout["final"][t, e] for t, e in np.argwhere(rollout["truncated"])}
    next_values = next_values_from(rollout["values"], rollout["last"], final)
    expected = gae(
        rollout["rewards"],
        rollout["values"],
        next_values,
        rollout["terminated"],
        rollout["truncated"],
        GAMMA,
        rollout["trace_lambda"],
    )
    assert np.allclose(vtrace_of(rollout).vs.numpy() - rollout["values"], expected)


@settings(max_examples=30, deadline=None)
@given(rollouts(), st.integers(0, 2**32))
def test_no_value_leaks_across_the_end_of_an_episode(rollout, seed):
    ends = rollout["terminated"] | rollout["truncated"]
    if not ends.any():
        return
    step, env = (int(index) for index in np.argwhere(ends)[0])
    other = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in rollout.items()}
    rng = np.random.default_rng(seed)
    for name in ("log_rhos", "rewards", "values"):
        other[name][step + 1 :, env] = rng.normal(size=len(other[name]) - step - 1)
    other["last"][env] = 1e6 if step + 1 == len(ends) else other["last"][env]
    if rollout["terminated"][step, env]:
        other["final"][step, env] = math.nan  # means nothing, and need not be finite
    for left, right in zip(vtrace_of(rollout), vtrace_of(other), strict=True):
        assert torch.equal(left[: step + 1, env], right[: step + 1, env])


# -- logits and sub-steps ---------------------------------------------------------------------------

SPACE = gym.spaces.Dict({"item": gym.spaces.Discrete(2), "turn": gym.spaces.Discrete(3)})
MAPPER = DistributionMapper(action_space=SPACE, distribution_mapper_config={})


def test_log_rhos_sum_over_the_heads_of_a_sub_step():
    behaviour = [{"item": tensor([[0.0, 0.0]]), "turn": tensor([[0.0, 0.0, 0.0]])}]
    target = [{"item": tensor([[math.log(3.0), 0.0]]), "turn": tensor([[0.0, math.log(2.0), 0.0]])}]
    actions = [{"item": tensor([0]), "turn": tensor([1])}]
    old, _ = log_probs_from_logits_and_actions_and_spaces(behaviour, actions, MAPPER)
    new, distributions = log_probs_from_logits_and_actions_and_spaces(target, actions, MAPPER)
    assert old[0]["item"].exp().item() == pytest.approx(1 / 2)
    assert new[0]["turn"].exp().item() == pytest.approx(1 / 2)
    assert set(distributions[0].distribution_dict) == {"item", "turn"}
    (log_rho,) = get_log_rhos(new, old)
    assert log_rho.exp().item() == pytest.approx((0.75 / 0.5) * (0.5 / (1 / 3)))


def test_a_stream_counts_the_sub_steps_between_two_of_its_values():
    first, second = column(1.0, 2.0, 4.0), column(10.0, 20.0, 40.0)
    is_over = column(0, 1, 0).bool()
    (joint,) = log_rhos_by_trajectory([first, second], is_over, 1)
    assert joint[:, 0].tolist() == [11.0, 22.0, 44.0]
    _, of_second = log_rhos_by_trajectory([first, second], is_over, 2)
    # its own action and the first sub-step's of the next step; nothing of another episode, nothing unrecorded
    assert of_second[:, 0].tolist() == [12.0, 20.0, 40.0]


@pytest.mark.parametrize("n_streams", [1, 2])
def test_from_logits_agrees_with_its_parts(n_streams):
    generator = torch.Generator().manual_seed(0)

    def logits():
        return [{"item": torch.randn(4, 2, 2, generator=generator)} for _ in range(2)]

    mapper = DistributionMapper(gym.spaces.Dict({"item": gym.spaces.Discrete(2)}), {})
    behaviour, target = logits(), logits()
    actions = [{"item": torch.randint(2, (4, 2), generator=generator)} for _ in range(2)]
    rewards = torch.randn(4, 2, generator=generator)
    discounts = torch.full((4, 2), GAMMA)
    discounts[1, 0] = 0.0
    values = [torch.randn(4, 2, generator=generator) for _ in range(n_streams)]
    last = [torch.randn(2, generator=generator) for _ in range(n_streams)]
    returns = from_logits(behaviour, target, actions, mapper, discounts, rewards, values, last, 1.0, 1.0, "cpu")
    assert len(returns.vs) == n_streams
    assert len(returns.pg_advantages) == len(returns.log_rhos) == 2
    streams = log_rhos_by_trajectory(returns.log_rhos, discounts == 0.0, n_streams)
    for index, log_rhos in enumerate(streams):
        expected = from_importance_weights(log_rhos, discounts, rewards, values[index], last[index], 1.0, 1.0)
        assert torch.equal(returns.vs[index], expected.vs)
        assert torch.equal(returns.pg_advantages[index], expected.pg_advantages)


def test_equal_logits_have_importance_weights_of_one():
    logits = [{"item": torch.randn(3, 1, 2), "turn": torch.randn(3, 1, 3)}]
    actions = [{"item": tensor([[0], [1], [0]]), "turn": tensor([[2], [1], [0]])}]
    zeros = torch.zeros(3, 1)
    returns = from_logits(
        logits, logits, actions, MAPPER, zeros + GAMMA, zeros, [zeros], [torch.zeros(1)], 1.0, 1.0, None
    )
    assert returns.log_rhos[0].tolist() == [[0.0]] * 3


def test_importance_weights_that_do_not_fit_into_a_number_make_no_nan_of_nothing():
    nothing = torch.zeros(2, 1)
    returns = from_importance_weights(
        torch.full((2, 1), 200.0), torch.full((2, 1), 0.9), nothing, nothing, torch.zeros(1), None, None
    )
    assert torch.equal(returns.vs, nothing)
    assert torch.equal(returns.pg_advantages, nothing)
