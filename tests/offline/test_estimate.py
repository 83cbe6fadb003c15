"""Estimates from logs with known truth: two masked sub-steps, and reasons to refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy.stats import norm

from maze.core.agent.action_distribution import ExploringPolicy, action_distribution, log_probabilities
from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.distributions.distribution_mapper import DistributionMapper
from maze.offline.estimate import EstimationConfig, PolicyEstimate, Weighting, cloned_propensities, estimate
from maze.offline.estimation import EvidenceGateRunner
from maze.offline.fitted_q import FittedQConfig, FittedValues, candidates

ACTION_SPACES = {"pick": spaces.Dict(item=spaces.Discrete(3)), "place": spaces.Dict(side=spaces.Discrete(2))}
GAUSSIAN = "maze.distributions.gaussian.DiagonalGaussianProbabilityDistribution"
FAST = FittedQConfig(n_updates=200, hidden_units=16)


class Constant(Policy):
    """Picks item 1 and places it on side 1."""

    def compute_action(
        self, observation: Any, maze_state: Any, env: Any, actor_id: Any = None, deterministic: bool = False
    ) -> Any:
        return {"item": np.int64(1)} if actor_id.step_key == "pick" else {"side": np.int64(1)}


class Outside(Constant):
    """Picks an item that does not exist."""

    def compute_action(self, *arguments: Any, **options: Any) -> Any:
        return {"item": np.int64(3), "side": np.int64(0)}


BEHAVIOUR = ExploringPolicy(Constant(), 0.5, ACTION_SPACES)


def episode(rng: np.random.Generator, n_steps: int, last: str = "terminated") -> list[tuple[int, SpacesRecord]]:
    """Item 1 is worth 1 (2 on side 1), others nothing; item 2 is masked in every second step."""
    records = []
    for step in range(n_steps):
        mask = np.array([1, 1, step % 2], np.float32)
        item = 1 if rng.random() < 0.5 else int(rng.choice(np.flatnonzero(mask)))
        side = 1 if rng.random() < 0.5 else int(rng.integers(2))
        is_last = step == n_steps - 1
        info = {"TimeLimit.truncated": True} if is_last and last == "truncated" else {}
        observed = {"step": np.array([step], np.float32), "item_mask": mask}
        records += [
            (step, SpacesRecord(ActorID("pick", 0), observed, {"item": np.int64(item)}, 0.0, False, {})),
            (
                step,
                SpacesRecord(
                    ActorID("place", 0),
                    {"item": np.eye(3, dtype=np.float32)[item]},
                    {"side": np.int64(side)},
                    float((item == 1) * (1 + side)),
                    is_last,
                    info,
                    next_observation=observed,
                ),
            ),
        ]
    return records


def log(n_episodes: int = 400, n_steps: int = 2, last: str = "terminated", known: bool = True) -> LoggedSteps:
    rng = np.random.default_rng(0)
    data = LoggedSteps.of_episodes(episode(rng, n_steps, last) for _ in range(n_episodes))
    if known:
        data.propensities = np.exp(log_probabilities(data, BEHAVIOUR, ACTION_SPACES))
    return data


def by_estimator(entries: list[PolicyEstimate], policy: str) -> dict[str, PolicyEstimate]:
    return {entry.estimator: entry for entry in entries if entry.policy == policy}


def test_columns_are_those_of_the_records() -> None:
    data = log(3, 2, "truncated")
    assert (len(data), data.n_episodes) == (12, 3)
    assert data.step_keys[:4] == ["pick", "place", "pick", "place"]
    assert data.steps[:4].tolist() == [0, 0, 1, 1]
    assert data.discounts(0.5)[:4].tolist() == [1.0, 0.5, 1.0, 0.5]
    assert data.truncated.tolist() == [False, False, False, True] * 3
    assert not data.terminated.any()
    assert data.next_rows[:4].tolist() == [0, 1, 1, 6]  # the seventh row of `pick` is what was seen after the end
    assert data.next_step_keys[3] == "pick"
    assert data.tables["pick"].n_actions == 6
    assert len(data.tables["pick"].observations["step"]) == 9
    np.testing.assert_allclose(data.returns(0.5), data.rewards.reshape(3, 4) @ [1.0, 1.0, 0.5, 0.5])


def test_the_value_after_a_termination_is_zero() -> None:
    data = log(2, 1, "terminated")
    assert data.discounts(0.9).tolist() == [1.0, 0.0] * 2
    assert data.next_rows.tolist() == [0, -1, 1, -1]


def test_exploration_probabilities_match_hand_worked_values() -> None:
    data = log(1, 2)
    ratios = np.exp(log_probabilities(data, BEHAVIOUR, ACTION_SPACES))
    items = data.tables["pick"].actions["item"]
    by_hand = [(0.5 if item == 1 else 0.0) + 0.5 / (2 + step % 2) for step, item in enumerate(items)]
    np.testing.assert_allclose(ratios[::2], by_hand)
    uniform = np.exp(log_probabilities(data, RandomPolicy(dict(ACTION_SPACES)), ACTION_SPACES))
    np.testing.assert_allclose(uniform, [1 / 2, 1 / 2, 1 / 3, 1 / 2])


def test_all_estimators_find_the_value_of_another_policy() -> None:
    entries = estimate({"constant": Constant()}, log(), ACTION_SPACES, EstimationConfig(gamma=1.0, fitted_q=FAST))
    found = by_estimator(entries, "constant")
    assert set(found) == {"fqe", "is", "wis", "pdis", "wpdis", "dr", "wdr", "magic"}
    for name, entry in found.items():
        assert entry.refusal == ""
        assert entry.estimate.low - 0.05 <= 4.0 <= entry.estimate.high + 0.05, name
    assert found["is"].bernstein is not None
    assert found["is"].bernstein[0] < 4.0 < found["is"].bernstein[1]
    assert 50 < found["is"].effective_episodes < 400


def test_behaviour_return_is_reported_with_the_estimates() -> None:
    data = log()
    entry = estimate({}, data, ACTION_SPACES, EstimationConfig(gamma=1.0))[0]
    assert entry.estimate.value == pytest.approx(data.returns().mean())


@pytest.mark.parametrize("n_episodes", [400, 4000])
def test_the_interval_of_fitted_values_is_that_of_the_mean_where_nothing_but_the_rewards_varies(
    n_episodes: int,
) -> None:
    noise = np.random.default_rng(0).normal(size=n_episodes)
    observed, action = {"x": np.ones(1, np.float32)}, {"a": np.int64(0)}
    data = LoggedSteps.of_episodes(
        [(0, SpacesRecord(ActorID(0, 0), observed, action, float(reward), True, {}))] for reward in noise
    )
    one_action = {0: spaces.Dict(a=spaces.Discrete(1))}
    config = EstimationConfig(estimators=("fqe",), n_bootstrap=400, fitted_q=FittedQConfig(n_updates=1))
    behaviour, fitted = estimate({"same": RandomPolicy(one_action)}, data, one_action, config)
    width = behaviour.estimate.high - behaviour.estimate.low
    assert fitted.estimate.high - fitted.estimate.low == pytest.approx(width, rel=0.2)


def test_truncated_episodes_bootstrap_from_fitted_values() -> None:
    # reward 2 in each step for ever: 2 / (1 - 0.5)
    config = EstimationConfig(gamma=0.5, estimators=("fqe", "dr"), fitted_q=FAST)
    found = by_estimator(estimate({"c": Constant()}, log(400, 3, "truncated"), ACTION_SPACES, config), "c")
    assert found["fqe"].estimate.value == pytest.approx(4.0, abs=0.4)
    assert found["dr"].estimate.value == pytest.approx(4.0, abs=0.4)


def test_episodes_may_end_with_their_truncations() -> None:
    # reward 2 in each of 3 steps: 2 + 1 + 0.5, without what follows. `fqe` is biased, as placing observes no step.
    data = log(400, 3, "truncated").ended_by_truncations()
    config = EstimationConfig(gamma=0.5, estimators=("dr", "wis"), fitted_q=FAST)
    found = by_estimator(estimate({"c": Constant()}, data, ACTION_SPACES, config), "c")
    assert [found[name].estimate.value for name in ("dr", "wis")] == pytest.approx([3.5, 3.5], abs=0.1)
    assert data.has_target.all()


def test_fitted_values_beyond_all_returns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = log(40, 3, "truncated")
    assert data.largest_return(0.5) == 4.0  # the sub-steps of a step earn 0 and 2: 2 + 1 + 0.5 + ...
    assert data.largest_return(1.0) == np.inf
    settings = EstimationConfig(estimators=("fqe",), gamma=1.0, fitted_q=FAST, n_bootstrap=20)
    _, endless = estimate({"c": Constant()}, data, ACTION_SPACES, settings)
    assert "infinite" in endless.refusal
    constant = [np.ones((n, 1)) for n in (len(data), len(data), data.n_episodes)]
    for value, is_refused in ((7.0, False), (-9.0, True)):  # up to 8, as fits deviate
        values = FittedValues(np.full((21, 1), value), *constant)
        monkeypatch.setattr("maze.offline.estimate.fit_q", lambda *_, values=values: values)
        _, found = estimate({"c": Constant()}, data, ACTION_SPACES, replace(settings, gamma=0.5))
        assert ("The fitted values diverge" in found.refusal) == is_refused
    for low, is_refused in ((0.5, False), (-1.0, True)):  # rewards of at least 0 allow returns from 0 to 4
        values = FittedValues(np.linspace(low, 5.0, 21)[:, None], *constant)
        monkeypatch.setattr("maze.offline.estimate.fit_q", lambda *_, values=values: values)
        _, found = estimate({"c": Constant()}, data, ACTION_SPACES, replace(settings, gamma=0.5))
        assert ("the rewards of the log allow returns from 0 to 4" in found.refusal) == is_refused


def test_truncations_without_an_observation_after_them_do_not_count_as_terminations() -> None:
    records = [
        SpacesRecord(ActorID(0, 0), {"x": np.ones(1, np.float32)}, {"a": np.int64(step % 2)}, 1.0, False, {})
        for step in range(3)
    ]
    data = LoggedSteps.of_episodes([list(enumerate(records))] * 50)
    assert data.has_target[:3].tolist() == [True, True, False]
    spaces_of_actions = {0: spaces.Dict(a=spaces.Discrete(2))}
    config = EstimationConfig(gamma=0.5, estimators=("fqe",), fitted_q=FAST)
    _, found = estimate({"random": RandomPolicy(dict(spaces_of_actions))}, data, spaces_of_actions, config)
    assert found.estimate.value == pytest.approx(2.0, abs=0.05)  # 1 / (1 - 0.5); 1.5 if episodes ended


def test_without_probabilities_only_fitted_values_are_given() -> None:
    config = EstimationConfig(fitted_q=FAST, estimators=("fqe", "wis"))
    found = by_estimator(estimate({"c": Constant()}, log(known=False), ACTION_SPACES, config), "c")
    assert found["fqe"].refusal == ""
    assert "no probabilities of its actions" in found["wis"].refusal
    assert np.isnan(found["wis"].estimate.value)


def test_choices_that_were_never_logged_refuse_fitted_values_without_probabilities() -> None:
    data = log(known=False)
    data.tables["place"].actions["side"][:] = 1  # RandomPolicy places on side 0 in half of the placements
    config = EstimationConfig(gamma=1.0, fitted_q=FAST, estimators=("fqe",), n_bootstrap=20)
    found = estimate({"random": RandomPolicy(ACTION_SPACES), "constant": Constant()}, data, ACTION_SPACES, config)
    random, constant = found[1:]
    assert random.unsupported == pytest.approx(0.25, abs=0.03)
    assert "decisions are actions that the log does not contain" in random.refusal
    assert (constant.unsupported, constant.refusal) == (0.0, "")


def test_sampled_actions_of_fitted_values_are_clipped_as_environments_clip_them() -> None:
    class Wide:
        def sample(self, rng: np.random.Generator) -> dict[str, Any]:
            return {"power": rng.normal(0.0, 9.0, (5, 1))}

        def log_prob(self, actions: Any) -> Any:
            raise NotImplementedError

    space = spaces.Dict(power=spaces.Box(0.0, 1.0, (1,)))
    actions, _ = candidates(Wide(), space, 5, 8, np.random.default_rng(0))
    assert actions["power"].shape == (5, 8, 1)
    assert (actions["power"].min(), actions["power"].max()) == (0.0, 1.0)


def test_without_what_follows_any_decision_no_values_are_fitted() -> None:
    info = {"propensity": 0.5, "TimeLimit.truncated": True}
    records = [
        SpacesRecord(ActorID(0, 0), {"x": np.zeros(1, np.float32)}, {"a": np.int64(action)}, 1.0, True, info)
        for action in (0, 1)
    ]
    data = LoggedSteps.of_episodes([[(0, records[index % 2])] for index in range(100)])
    spaces_of_actions = {0: spaces.Dict(a=spaces.Discrete(2))}
    entries = estimate({"random": RandomPolicy(dict(spaces_of_actions))}, data, spaces_of_actions)
    found = by_estimator(entries, "random")
    assert found["wis"].estimate.value == pytest.approx(1.0)
    assert all("truncated after their first decision" in found[name].refusal for name in ("fqe", "dr", "wdr", "magic"))


def test_long_episodes_are_refused_by_their_effective_sample_size() -> None:
    config = EstimationConfig(fitted_q=FAST, estimators=("fqe", "pdis"))
    found = by_estimator(estimate({"c": Constant()}, log(200, 12), ACTION_SPACES, config), "c")
    assert found["fqe"].refusal == ""
    assert "equally weighted" in found["pdis"].refusal


def test_choices_need_not_begin_with_zero_where_values_are_fitted() -> None:
    class Shifted(Constant):
        def compute_action(self, *arguments: Any, **options: Any) -> Any:
            return {head: choice + 5 for head, choice in super().compute_action(*arguments, **options).items()}

    data, shifted = log(100), log(100, known=False)
    for table in shifted.tables.values():
        table.actions = {head: choices + 5 for head, choices in table.actions.items()}
    spaces_from_5 = {
        "pick": spaces.Dict(item=spaces.Discrete(3, start=5)),
        "place": spaces.Dict(side=spaces.Discrete(2, start=5)),
    }
    config = EstimationConfig(estimators=("fqe",), n_bootstrap=2, fitted_q=FittedQConfig(n_updates=20, hidden_units=8))
    expected = by_estimator(estimate({"c": Constant()}, data, ACTION_SPACES, config), "c")["fqe"]
    found = by_estimator(estimate({"c": Shifted()}, shifted, spaces_from_5, config), "c")["fqe"]
    np.testing.assert_allclose(found.estimate, expected.estimate, rtol=1e-4)


def test_a_deterministic_log_does_not_support_other_actions() -> None:
    data = log()
    data.propensities = np.ones(len(data))  # as if the heuristic had not explored
    found = Weighting.of(data, log_probabilities(data, RandomPolicy(dict(ACTION_SPACES)), ACTION_SPACES))
    assert found.unsupported > 0.4
    entries = estimate({"random": RandomPolicy(dict(ACTION_SPACES))}, data, ACTION_SPACES)
    assert all("more exploration" in entry.refusal for entry in by_estimator(entries, "random").values())


def canary_episode(rng: np.random.Generator) -> list[tuple[int, SpacesRecord]]:
    """Four decisions of one of two policies, which always choose 1 or 0 apart from 5 % exploration; 1 is worth 1."""
    own, records = int(rng.random() < 0.5), []
    for step in range(4):
        item = int(rng.integers(4)) if rng.random() < 0.05 else own
        info = {"propensity": 0.05 / 4 + 0.95 * (item == own)}
        seen, action = {"step": np.array([step], np.float32)}, {"item": np.int64(item)}
        records.append((step, SpacesRecord(ActorID("pick", 0), seen, action, float(item == 1), step == 3, info)))
    return records


def test_weights_that_do_not_add_up_refuse_the_estimates_that_rely_on_their_sum() -> None:
    """In the log of a canary, episodes of one route hardly ever have all actions of the other one. The value is 4."""
    rng = np.random.default_rng(0)
    data = LoggedSteps.of_episodes(canary_episode(rng) for _ in range(400))
    config = EstimationConfig(gamma=1.0, estimators=("is", "pdis", "wis", "wpdis"), n_bootstrap=20)
    spaces_of_both = {"pick": spaces.Dict(item=spaces.Discrete(4))}
    found = by_estimator(estimate({"c": Constant()}, data, spaces_of_both, config), "c")
    for name in ("is", "pdis"):
        assert "lack 4" in found[name].refusal  # about half of the weights belong to the other route
    assert [found[name].estimate.value for name in ("wis", "wpdis")] == pytest.approx([4.0, 4.0])
    assert found["wis"].unsupported == 0.0


def test_cloning_needs_choices_that_the_masks_allow() -> None:
    data = log(20)
    data.tables["pick"].observations["item_mask"][:] = [0.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match=r"behaviour=cloned: masks exclude .* of 80 logged actions"):
        cloned_propensities(data, ACTION_SPACES, seed=0, n_updates=1)
    continuous = {key: spaces.Dict({head: spaces.Box(0, 2) for head in space}) for key, space in ACTION_SPACES.items()}
    with pytest.raises(ConfigError, match="`item`: random or cloned actions need Discrete from 0 on, found Box"):
        cloned_propensities(data, continuous, seed=0, n_updates=1)


def test_candidates_are_all_actions_with_the_probabilities_of_the_policy() -> None:
    observations = {"step": np.zeros((2, 1), np.float32), "item_mask": np.array([[1, 1, 0], [1, 1, 1]], np.float32)}
    actor, space = ActorID("pick", 0), ACTION_SPACES["pick"]
    distribution = action_distribution(BEHAVIOUR, observations, actor, space)
    actions, weights = candidates(distribution, space, 2, 8, np.random.default_rng(0))
    assert actions["item"].tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, [[0.25, 0.75, 0.0], [1 / 6, 2 / 3, 1 / 6]])


class Constants(torch.nn.Module):
    """The same logits of all heads for all observations."""

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits = {"item": torch.tensor([0.0, np.log(3.0), -1e9]), "flow": torch.tensor([1.0, np.log(0.5)])}
        return {head: values.expand(len(x["step"]), -1) for head, values in logits.items()}


@pytest.mark.parametrize("policy", ["exploring", "network"])
def test_samples_have_the_stated_probabilities(policy: str) -> None:
    n, rng, space = 20_000, np.random.default_rng(0), ACTION_SPACES["pick"]
    observations = {"step": np.zeros((n, 1), np.float32), "item_mask": np.tile(np.float32([1, 1, 0]), (n, 1))}
    acting: Policy = BEHAVIOUR
    if policy == "network":
        space = spaces.Dict(**space, flow=spaces.Box(-9, 9, (1,)))
        mapper = DistributionMapper(space, [{"action_space": spaces.Box, "distribution": GAUSSIAN}])
        acting = TorchPolicy({"pick": Constants()}, mapper, "cpu")
    distribution = action_distribution(acting, observations, ActorID("pick", 0), space)
    drawn = distribution.sample(rng)
    for item, probability in enumerate([0.25, 0.75, 0.0]):
        assert np.mean(drawn["item"] == item) == pytest.approx(probability, abs=0.02)
    density = distribution.log_prob(drawn) - np.log(np.where(drawn["item"] == 1, 0.75, 0.25))
    if policy == "exploring":
        assert density.tolist() == pytest.approx([0.0] * n)
        return
    flow = drawn["flow"][:, 0].astype(float)
    assert (flow.mean(), flow.std()) == (pytest.approx(1.0, abs=0.02), pytest.approx(0.5, abs=0.02))
    np.testing.assert_allclose(density, norm(1.0, 0.5).logpdf(flow), atol=1e-4)


def test_policies_that_need_a_simulator_are_refused() -> None:
    class NeedsEnv(Constant):
        def needs_env(self) -> bool:
            return True

    with pytest.raises(ConfigError, match="NeedsEnv needs the simulator"):
        estimate({"c": NeedsEnv()}, log(), ACTION_SPACES)


def test_a_log_of_another_environment_is_refused_with_its_place() -> None:
    seen = {
        "pick": spaces.Dict(step=spaces.Box(0, 9, (1,)), item_mask=spaces.Box(0, 1, (3,))),
        "place": spaces.Dict(item=spaces.Box(0, 1, (3,))),
    }
    data = log(20)
    data.require_spaces(seen, ACTION_SPACES)
    for wrong, message in (
        (
            {**ACTION_SPACES, "pick": spaces.Dict(item=spaces.Discrete(2))},
            "action `item`: expected values of .*found 2",
        ),
        ({**ACTION_SPACES, "pick": spaces.Dict(box=spaces.Discrete(3))}, r"entries \['box'\], found \['item'\]"),
        ({"place": ACTION_SPACES["place"]}, "sub-step 'pick' is unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            data.require_spaces(seen, wrong)
    data.tables["pick"].observations["step"][3] = np.nan
    with pytest.raises(ConfigError, match=r"'pick', observation `step`: .* finite values, found \[nan\] in row 3"):
        data.require_spaces(seen, ACTION_SPACES)


def test_impossible_probabilities_are_refused_with_their_place() -> None:
    records = episode(np.random.default_rng(0), 1)
    records[1][1].info["propensity"] = 0.0
    with pytest.raises(ConfigError, match=r"episode 0, decision 1: expected the probability .* found 0.0"):
        LoggedSteps.of_episodes([records])


def test_policies_that_leave_their_action_space_are_refused() -> None:
    data = LoggedSteps.of_episodes(episode(np.random.default_rng(0), 2) for _ in range(3))
    with pytest.raises(ConfigError, match=r"Outside: expected actions of Discrete\(3\) for the head `item`, found 3"):
        log_probabilities(data, Outside(), ACTION_SPACES)


class Named(Constant):
    """Gives its action these names, whatever the sub-step."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def compute_action(self, *args: Any, **kwargs: Any) -> Any:
        return dict.fromkeys(self._names, np.int64(1))


def test_actions_of_other_names_are_ignored_as_in_environments_and_missing_ones_refused() -> None:
    data = LoggedSteps.of_episodes(episode(np.random.default_rng(0), 2) for _ in range(3))
    found = log_probabilities(data, Named("item", "side", "other"), ACTION_SPACES)
    assert set(found) == {0.0, -np.inf}
    with pytest.raises(ConfigError, match=r"Named, sub-step 'place': expected actions \['side'\], found \['item'\]"):
        log_probabilities(data, Named("item"), ACTION_SPACES)


class Fickle(Constant):
    """Samples its item, and states no probability of it."""

    _rng = np.random.default_rng(0)

    def compute_action(
        self, observation: Any, maze_state: Any, env: Any, actor_id: Any = None, deterministic: bool = False
    ) -> Any:
        head = "item" if actor_id.step_key == "pick" else "side"
        return {head: np.int64(0 if deterministic else self._rng.integers(2))}


def test_the_samples_of_a_heuristic_are_not_taken_for_its_deterministic_actions() -> None:
    data = LoggedSteps.of_episodes(episode(np.random.default_rng(0), 2) for _ in range(10))
    for policy in (Fickle(), ExploringPolicy(Fickle(), 0.5, ACTION_SPACES)):
        with pytest.raises(ConfigError, match="Fickle samples its actions with unknown probabilities"):
            log_probabilities(data, policy, ACTION_SPACES)
    found = log_probabilities(data, Fickle(), ACTION_SPACES, greedy=True)
    assert set(np.exp(found).tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, "gamma: expected a number of at least 0 and at most 1, found 1.5"),
        ({"gamma": "high"}, "gamma: expected a number of at least 0 and at most 1, found 'high'"),
        ({"estimators": ("fqe", "guess")}, r"\['guess'\] are unknown"),
        ({"n_bootstrap": 0}, "n_bootstrap: expected a whole number of at least 2, found 0"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EstimationConfig(**settings)


@pytest.mark.parametrize("share", [-0.1, 1.5, "half"])
def test_an_exploration_outside_its_range_is_refused(share) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.epsilon: expected a number .*, found {share!r}"):
        ExploringPolicy(Constant(), share, ACTION_SPACES)


def test_a_margin_that_is_no_number_is_refused_before_anything_is_estimated() -> None:
    policies = {"baseline": {"_target_": "some.Policy"}, "candidate": {"_target_": "some.Policy"}}
    with pytest.raises(ConfigError, match=r"runner\.margin: expected a number, found 'much'"):
        EvidenceGateRunner(policies, "log", margin="much")
