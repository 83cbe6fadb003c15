"""IQL, CQL and TD3+BC: single updates worked out independently, masks, ends of episodes, better than the log."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from maze.api.run_context import RunContext
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import TorchStepStateActionCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.trainers.offline.offline_algorithm_configs import CQLConfig, IQLConfig, OfflineConfig, TD3BCConfig
from maze.train.trainers.offline.offline_trainers import (
    CQL,
    IQL,
    TD3BC,
    LoggedBatches,
    OfflineTrainer,
    advantage_weights,
    conservative_loss,
    expectile_loss,
    policy_loss,
)

PICK, PLACE = spaces.Dict(item=spaces.Discrete(3)), spaces.Dict(side=spaces.Discrete(2))
STRUCTURED = {"pick": PICK, "place": PLACE}
VALVE = {0: spaces.Dict(valve=spaces.Box(np.float32([-2.0]), np.float32([6.0])))}
MINIMUM = torch.finfo(torch.float32).min


class Net(nn.Module):
    """Two dense layers from all observations (but masks) to outputs by name, the first of which may be masked."""

    def __init__(self, n_in: int, outputs: dict[str, int], mask: str = "") -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(n_in, 16), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(16, n_out) for name, n_out in outputs.items()})
        self.mask = mask

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        features = self.hidden(torch.cat([value for name, value in inputs.items() if name != "mask"], -1))
        found = {name: head(features) for name, head in self.heads.items()}
        if self.mask:
            first = next(iter(found))
            found[first] = found[first].masked_fill(inputs[self.mask] == 0, MINIMUM)
        return found


def structured_episode(rng: np.random.Generator, n_steps: int) -> list[tuple[int, SpacesRecord]]:
    """Any allowed action; item 1 (in even steps, when item 2 is masked) or 2 on side 1 is worth 1, all else nothing."""
    records = []
    for step in range(n_steps):
        mask = np.array([1, 1, step % 2], np.float32)
        item, side = int(rng.choice(np.flatnonzero(mask))), int(rng.integers(2))
        observed = {"step": np.array([step], np.float32), "mask": mask}
        placed = {"item": np.eye(3, dtype=np.float32)[item], "parity": np.array([step % 2], np.float32)}
        reward = float(item == 1 + step % 2 and side == 1)
        place = SpacesRecord(ActorID("place", 0), placed, {"side": np.int64(side)}, reward, step == n_steps - 1, {})
        pick = SpacesRecord(ActorID("pick", 0), observed, {"item": np.int64(item)}, 0.0, False, {})
        records += [(step, pick), (step, place)]
    return records


def structured_log(n_episodes: int = 200) -> LoggedSteps:
    rng = np.random.default_rng(0)
    return LoggedSteps.of_episodes(structured_episode(rng, 2) for _ in range(n_episodes))


def valve_log(n_episodes: int = 500) -> LoggedSteps:
    """One decision; openings around 1, of which those near 3 are the best."""
    rng = np.random.default_rng(0)
    openings = rng.normal(1.0, 2.5, (n_episodes, 1)).clip(-2, 6).astype(np.float32)
    observed = {"load": np.ones(1, np.float32)}
    return LoggedSteps.of_episodes(
        [(0, SpacesRecord(ActorID(0, 0), observed, {"valve": opening}, -0.1 * float((opening[0] - 3) ** 2), True, {}))]
        for opening in openings
    )


def trainer(
    trainer_class: type[OfflineTrainer], config: OfflineConfig, data: LoggedSteps, action_spaces: Any
) -> OfflineTrainer:
    """Trainer with tiny networks, seeded."""
    torch.manual_seed(0)
    heads = spaces.Dict({head: part for space in action_spaces.values() for head, part in space.spaces.items()})
    mapper = DistributionMapper(heads, list(config.distributions))
    policies, critics = {}, {}
    for key, space in action_spaces.items():
        n_in = sum(values.shape[1] for name, values in data.tables[key].observations.items() if name != "mask")
        mask = "mask" if "mask" in data.tables[key].observations else ""
        policies[key] = Net(n_in, {head: mapper.required_logits_shape(head)[0] for head in space.spaces}, mask)
        discrete = {f"{head}_q_values": int(part.n) for head, part in space.spaces.items() if hasattr(part, "n")}
        critics[key] = Net(n_in, discrete) if discrete else Net(n_in + 1, {"q_value": 1})
    policy = TorchPolicy(policies, mapper, "cpu", [])
    policy.seed(0)
    is_discrete = {key: hasattr(next(iter(space.values())), "n") for key, space in action_spaces.items()}
    critic = TorchStepStateActionCritic(critics, len(critics), "cpu", is_discrete, action_spaces)
    return trainer_class(config, policy, data, action_spaces, critic, seed=0)


def one_update(offline: OfflineTrainer) -> list[Any]:
    """Learn from one batch, which is returned."""
    batches = offline.batches.draw()
    offline.batches.draw = lambda: batches  # type: ignore[method-assign]
    offline.train(n_epochs=1)
    return batches


def weights(networks: Any) -> list[Tensor]:
    return [parameter.detach() for network in networks for parameter in network.parameters()]


def test_losses_equal_numbers_worked_out_by_hand() -> None:
    # log(e^1 + e^2) - 1; the masked third action has no part in it
    values = [torch.tensor([[1.0, 2.0, MINIMUM]])]
    assert conservative_loss(values, torch.tensor([[1.0]])).item() == pytest.approx(1.3132617)
    # 0.7 * 2^2 and 0.3 * 1^2, averaged
    assert expectile_loss(torch.tensor([2.0, -1.0]), 0.7).item() == pytest.approx(1.55)
    assert advantage_weights(torch.tensor([0.5, 9.0]), 2.0, 100.0).tolist() == pytest.approx([2.7182817, 100.0])
    # 0.25 - 2.5 * mean(1, -3) / mean(1, 3)
    assert policy_loss(torch.tensor([1.0, -3.0]), torch.tensor(0.25), 2.5).item() == pytest.approx(1.5)


def test_an_update_of_cql_equals_plain_torch() -> None:
    config = CQLConfig(epoch_length=1, batch_size=8, lr=0.01, rollout_evaluator=None, gamma=0.9)
    offline = trainer(CQL, config, structured_log(), STRUCTURED)
    before = copy.deepcopy(offline.model.networks)
    pick, place = one_update(offline)
    optimizer = torch.optim.Adam(weights_with_gradients(before.values()), lr=0.01)
    loss = torch.zeros(())
    for batch, head, following, other, discount in (
        (pick, "item", "place", "side", 1.0),
        (place, "side", "pick", "item", 0.9),
    ):
        values = before[batch.actor.step_key](batch.observations)[head]
        with torch.no_grad():
            ((_, rows, observations),) = batch.following
            best = before[following](observations)[other].max(-1).values
            next_values = torch.zeros(8)
            next_values[rows] = best
            target = batch.rewards + discount * torch.where(batch.discounts == 0, 0.0, next_values)
        taken = values.gather(1, batch.actions[head][:, None])[:, 0]
        loss = loss + functional.smooth_l1_loss(taken, target) + (values.exp().sum(1).log() - taken).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for found, expected in zip(weights(offline.model.networks.values()), weights(before.values()), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0.0)


def weights_with_gradients(networks: Any) -> list[nn.Parameter]:
    return [parameter for network in networks for parameter in network.parameters()]


def test_an_update_of_iql_equals_plain_torch() -> None:
    config = IQLConfig(epoch_length=1, batch_size=8, lr=0.01, rollout_evaluator=None, inverse_temperature=2.0, tau=0.1)
    offline = trainer(IQL, config, valve_log(), VALVE)
    assert isinstance(offline, IQL)
    policy, value = copy.deepcopy(offline.model.networks[0]), copy.deepcopy(offline.value_networks[0])
    pair, target_pair = copy.deepcopy(offline.critic.networks[0]), copy.deepcopy(offline.critic.target_networks[0])
    (batch,) = one_update(offline)
    observed, action = batch.observations, batch.actions["valve"]  # scaled to [-1, 1]
    inputs = {**observed, "action": action}

    optimizer = torch.optim.Adam([*pair.parameters(), *value.parameters()], lr=0.01)
    with torch.no_grad():
        logged = torch.minimum(*(network(inputs)["q_value"][:, 0] for network in target_pair))
    difference = logged - value(observed)
    loss = ((0.7 - (difference < 0).float()).abs() * difference**2).mean()
    for network in pair:  # all episodes end here: the target is the reward
        loss = loss + ((network(inputs)["q_value"][:, 0] - batch.rewards) ** 2).mean()
    loss.backward()
    optimizer.step()

    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    with torch.no_grad():
        weight = (2.0 * (logged - value(observed))).exp().clamp(max=100.0)
    mean, log_std = policy(observed)["valve"].chunk(2, -1)
    before_tanh = torch.atanh(action.clamp(-0.999, 0.999))
    density = torch.distributions.Normal(mean, log_std.exp()).log_prob(before_tanh)  # the rest has no gradient
    (-(weight * density[:, 0]).mean()).backward()
    optimizer.step()

    learned = [offline.model.networks[0], offline.value_networks[0], offline.critic.networks[0]]
    for found, expected in zip(weights(learned), weights([policy, value, pair]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
    targets = zip(weights([offline.critic.target_networks[0]]), weights([target_pair]), weights([pair]), strict=True)
    for found, old, new in targets:
        torch.testing.assert_close(found, 0.9 * old + 0.1 * new, atol=1e-5, rtol=0.0)


def test_a_critic_update_of_td3_bc_equals_plain_torch() -> None:
    rng = np.random.default_rng(1)

    def decision(is_last: bool) -> SpacesRecord:
        observed, opening = {"load": rng.random(1, np.float32)}, rng.uniform(-2, 6, 1).astype(np.float32)
        return SpacesRecord(ActorID(0, 0), observed, {"valve": opening}, float(rng.random()), is_last, {})

    data = LoggedSteps.of_episodes([(0, decision(False)), (1, decision(True))] for _ in range(20))
    noise = {"target_noise": 0.5, "target_noise_clip": 0.3}
    config = TD3BCConfig(epoch_length=1, batch_size=8, lr=0.01, rollout_evaluator=None, gamma=0.9, **noise)
    offline = trainer(TD3BC, config, data, VALVE)
    policy, pair = copy.deepcopy(offline.model.networks[0]), copy.deepcopy(offline.critic.networks[0])
    target_pair, batches = copy.deepcopy(offline.critic.target_networks[0]), offline.batches.draw()
    generator = torch.Generator().set_state(offline.generator.get_state())
    offline.batches.draw = lambda: batches  # type: ignore[method-assign]
    offline.train(n_epochs=1)

    (batch,) = batches
    ((_, rows, following),) = batch.following
    assert 0 < len(rows) < 8
    with torch.no_grad():  # in the first update the target policy is the policy
        chosen = torch.tanh(policy(following)["valve"][:, :1])
        drawn = (0.5 * torch.randn(chosen.shape, generator=generator)).clamp(-0.3, 0.3)
        inputs = {**following, "action": (chosen + drawn).clamp(-1, 1)}
        target = batch.rewards.clone()
        target[rows] += 0.9 * torch.minimum(*(network(inputs)["q_value"][:, 0] for network in target_pair))
    optimizer = torch.optim.Adam(pair.parameters(), lr=0.01)
    values = [network({**batch.observations, "action": batch.actions["valve"]})["q_value"][:, 0] for network in pair]
    torch.stack([((value - target) ** 2).mean() for value in values]).sum().backward()
    optimizer.step()
    for found, expected in zip(weights([offline.critic.networks[0]]), weights([pair]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("trainer_class", "config"),
    [
        (CQL, CQLConfig(epoch_length=300, lr=0.01, batch_size=64, rollout_evaluator=None, tau=0.1)),
        (IQL, IQLConfig(epoch_length=300, lr=0.01, batch_size=64, rollout_evaluator=None, tau=0.1, expectile=0.9)),
    ],
)
def test_masked_sub_steps_are_learned_from_random_actions(trainer_class: Any, config: Any) -> None:
    offline = trainer(trainer_class, config, structured_log(), STRUCTURED)
    offline.train(n_epochs=1)
    for step in (0, 1):
        observed = {"step": np.array([step], np.float32), "mask": np.array([1, 1, step], np.float32)}
        item = offline.policy.compute_action(observed, actor_id=ActorID("pick", 0), deterministic=True)["item"]
        assert item == 1 + step
        placed = {"item": np.eye(3, dtype=np.float32)[item], "parity": np.array([step], np.float32)}
        assert offline.policy.compute_action(placed, actor_id=ActorID("place", 0), deterministic=True)["side"] == 1


@pytest.mark.parametrize(
    ("trainer_class", "config"),
    [
        (IQL, IQLConfig(epoch_length=500, lr=0.01, batch_size=64, rollout_evaluator=None, tau=0.1)),
        (TD3BC, TD3BCConfig(epoch_length=500, lr=0.01, batch_size=64, rollout_evaluator=None, tau=0.1)),
    ],
)
def test_continuous_actions_become_better_than_the_logged_ones(trainer_class: Any, config: Any) -> None:
    offline = trainer(trainer_class, config, valve_log(), VALVE)
    offline.train(n_epochs=1)
    observed = {"load": np.ones(1, np.float32)}
    opening = offline.policy.compute_action(observed, actor_id=ActorID(0, 0), deterministic=True)["valve"]
    assert 2.0 < float(opening[0]) < 4.5  # logged: 1 on average, best: 3


def test_a_value_follows_a_truncation_and_not_a_termination() -> None:
    observed, after = ({"load": np.array([load], np.float32)} for load in (1.0, 2.0))

    def ending(info: dict[str, bool], following: Any) -> list[tuple[int, SpacesRecord]]:
        record = SpacesRecord(ActorID(0, 0), observed, {"valve": np.float32([0.0])}, 1.0, True, info)
        record.next_observation = following
        return [(0, record)]

    truncated = {"TimeLimit.truncated": True}
    for data, expected in (
        (LoggedSteps.of_episodes([ending({}, after)]), 1.0),
        (LoggedSteps.of_episodes([ending(truncated, after)]), 1.0 + 0.9 * 2.0),
        (LoggedSteps.of_episodes([ending(truncated, None), ending({}, after)]), 1.0),  # unknown: not drawn
    ):
        (batch,) = LoggedBatches(data, VALVE, 0.9, 4, "cpu", torch.Generator()).draw()
        targets = batch.targets(lambda _, observations: observations["load"][:, 0])
        assert targets.tolist() == pytest.approx([expected] * 4)
        assert batch.actions["valve"].flatten().tolist() == [-0.5] * 4  # 0 between -2 and 6


@pytest.mark.parametrize(
    ("n_decisions", "following"),
    [(3, {"item": np.eye(3, dtype=np.float32)[0], "parity": np.zeros(1, np.float32)}), (3, "of pick"), (4, "of place")],
    ids=["cut off between sub-steps", "with the same entries", "the last actor observes its end"],
)
def test_what_another_actor_observed_after_a_truncation_is_no_value_of_the_first_one(
    n_decisions: int, following: Any
) -> None:
    rng = np.random.default_rng(0)
    cut_off, complete = structured_episode(rng, 2)[:n_decisions], structured_episode(rng, 2)
    last = cut_off[-1][1]
    observed = {"of pick": cut_off[0][1].observation, "of place": cut_off[1][1].observation}
    last.next_observation = observed[following] if isinstance(following, str) else following
    last.done, last.info = True, {"TimeLimit.truncated": True}
    data = LoggedSteps.of_episodes([cut_off, complete])
    assert data.has_target.tolist() == [True] * (n_decisions - 1) + [False] + [True] * 4
    assert data.truncated.sum() == 1
    batches = LoggedBatches(data, STRUCTURED, 0.9, 64, "cpu", torch.Generator()).draw()
    assert {float(batch.discounts.min()) for batch in batches} == {0.0, 1.0}


def test_a_run_that_begins_with_weights_has_targets_of_these_weights() -> None:
    offline, earlier = (trainer(CQL, CQLConfig(), structured_log(3), STRUCTURED) for _ in range(2))
    assert isinstance(offline, CQL)
    for parameter in weights(earlier.model.networks.values()):
        parameter.add_(1.0)
    offline.load_state_dict(earlier.state_dict())
    targets = weights(offline.target_networks.values())
    for target, loaded in zip(targets, weights(earlier.model.networks.values()), strict=True):
        assert torch.equal(target, loaded)


@pytest.mark.parametrize(("trainer_class", "config"), [(IQL, IQLConfig()), (TD3BC, TD3BCConfig())])
def test_loaded_policy_weights_leave_critics_as_they_are(trainer_class: Any, config: Any) -> None:
    offline, earlier = (trainer(trainer_class, config, valve_log(8), VALVE) for _ in range(2))
    for parameter in weights(earlier.model.networks.values()):
        parameter.add_(1.0)
    state_values = offline.value_networks.values() if isinstance(offline, IQL) else ()
    critics = [*offline.critic.networks.values(), *state_values]
    before = [each.clone() for each in weights(critics)]
    offline.load_state_dict(earlier.state_dict())
    assert all(map(torch.equal, before, weights(critics)))
    if isinstance(offline, TD3BC):
        targets = weights(offline._target_policy.networks.values())
        assert all(map(torch.equal, targets, weights(earlier.model.networks.values())))


def test_unsupported_training_setups_are_refused_with_their_key() -> None:
    data = structured_log(3)
    data.tables["pick"].observations["mask"][:] = [1, 0, 0]
    with pytest.raises(ConfigError, match=r"sub-step 'pick': the action masks .* exclude \d+ of"):
        trainer(IQL, IQLConfig(), data, STRUCTURED)
    with pytest.raises(ConfigError, match=r"action head `item` is Discrete.*TD3.BC learns Box actions"):
        trainer(TD3BC, TD3BCConfig(), structured_log(3), STRUCTURED)
    unbounded = {0: spaces.Dict(valve=spaces.Box(-np.inf, np.inf, (1,)))}
    half_bounded = {0: spaces.Dict(valve=spaces.Box(0.0, np.inf, (1,)))}
    for box in (VALVE, half_bounded):
        with pytest.raises(ConfigError, match=r"action head `valve` is Box.*CQL choose among Discrete"):
            trainer(CQL, CQLConfig(), valve_log(3), box)
    with pytest.raises(ConfigError, match=r"`valve`: .*Give the action space finite bounds"):
        LoggedBatches(valve_log(3), unbounded, 0.9, 4, "cpu", torch.Generator())


class RecordedPolicy(nn.Module):
    """Policy of d3rlpy's IQL: tanh of the means, standard deviations that do not depend on the observation."""

    def __init__(self) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(1, 1))
        self.mean = dense(3, 1)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        mean = self.mean(inputs["seen"]).tanh()
        log_std = -5.0 + 7.0 * self.log_std.sigmoid()  # in [-5, 2]
        return {"move": torch.cat([mean, log_std.expand_as(mean)], -1)}


class RecordedValues(nn.Module):
    """Values of observations, or of observations and actions."""

    def __init__(self, n_in: int, n_out: int, name: str) -> None:
        super().__init__()
        self.layers, self.name = dense(n_in, n_out), name

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        values = self.layers(torch.cat(list(inputs.values()), -1))
        return {self.name: values} if self.name else values.squeeze(-1)


def dense(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_in, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, n_out))


def recorded_log(recorded: Any, algorithm: str) -> LoggedSteps:
    """An episode for each transition of the batch; those without termination are truncated."""
    columns = [recorded[f"{algorithm}/{name}"] for name in ("observations", "actions", "rewards", "next_observations")]
    episodes = []
    for row, (seen, action, reward, following) in enumerate(zip(*columns, strict=True)):
        info = {} if recorded[f"{algorithm}/terminals"][row] else {"TimeLimit.truncated": True}
        taken = action if algorithm == "iql" else np.int64(action[0])
        record = SpacesRecord(ActorID(0, 0), {"seen": seen}, {"move": taken}, float(reward[0]), True, info)
        record.next_observation = {"seen": following}
        episodes.append([(0, record)])
    return LoggedSteps.of_episodes(episodes)


@pytest.mark.parametrize("algorithm", ["iql", "cql"])
def test_an_update_equals_that_of_d3rlpy(algorithm: str) -> None:
    # recorded by benchmarks/d3rlpy_updates.py
    with np.load(Path(__file__).with_name("d3rlpy_updates.npz")) as recorded:

        def copy_weights(network: nn.Module, name: str) -> None:
            arrays = [values for key, values in recorded.items() if key.startswith(f"{algorithm}/before/{name}.")]
            with torch.no_grad():
                for parameter, values in zip(network.parameters(), arrays, strict=True):
                    parameter.copy_(torch.from_numpy(values))

        def require_equal(network: nn.Module, name: str) -> None:
            arrays = [values for key, values in recorded.items() if key.startswith(f"{algorithm}/after/{name}.")]
            for parameter, values in zip(network.parameters(), arrays, strict=True):
                torch.testing.assert_close(parameter.detach(), torch.from_numpy(values), atol=1e-5, rtol=0.0)

        data = recorded_log(recorded, algorithm)
        common: dict[str, Any] = {"epoch_length": 1, "batch_size": 12, "lr": 0.01, "gamma": 0.9}
        learned: dict[str, nn.Module] = {}
        if algorithm == "iql":
            action_spaces: Any = {0: spaces.Dict(move=spaces.Box(-1.0, 1.0, (1,)))}
            policy: Any = TorchPolicy({0: RecordedPolicy()}, DistributionMapper(action_spaces[0], []), "cpu", [])
            pair = {0: RecordedValues(4, 1, "q_value")}
            critic = TorchStepStateActionCritic(pair, 1, "cpu", {0: False}, action_spaces)
            iql_config = IQLConfig(tau=0.1, expectile=0.7, inverse_temperature=3.0, rollout_evaluator=None, **common)
            values = RecordedValues(3, 1, "")
            offline: OfflineTrainer = IQL(
                iql_config, policy, data, action_spaces, critic, seed=0, value_networks={0: values}
            )
            learned = {"policy": policy.networks[0], "value_func": values}
            learned |= {"q_funcs": critic.networks[0], "targ_q_funcs": critic.target_networks[0]}
        else:
            action_spaces = {0: spaces.Dict(move=spaces.Discrete(2))}
            network = RecordedValues(3, 2, "move")
            policy = TorchPolicy({0: network}, DistributionMapper(action_spaces[0], []), "cpu", [])
            cql = CQL(CQLConfig(alpha=0.5, tau=1.0, rollout_evaluator=None, **common), policy, data, action_spaces)
            offline, learned = cql, {"q_funcs": network, "targ_q_funcs": cql.target_networks[cql.actors[0]]}
        for name, each in learned.items():
            copy_weights(each, name)
        each_once = [offline.batches.at(ActorID(0, 0), torch.arange(12))]
        offline.batches.draw = lambda: each_once  # type: ignore[method-assign]
        offline.train(n_epochs=1)
        for name, each in learned.items():
            require_equal(each, name)


SMALL = {
    "ppo": {"algorithm.n_rollout_steps": 10, "algorithm.batch_size": 20, "runner.concurrency": 2},
    "sac": {"algorithm.initial_buffer_size": 20, "algorithm.batch_size": 8, "algorithm.num_actors": 2},
}


@pytest.mark.parametrize(("offline", "online"), [("iql", "ppo"), ("iql", "sac"), ("cql", "ppo")])
def test_a_policy_learned_from_a_log_is_tuned_online_close_to_where_it_began(
    tmp_path: Path, offline: str, online: str
) -> None:
    rng = np.random.default_rng(0)
    records = [
        SpacesRecord(
            ActorID(0, 0),
            {"observation": rng.normal(size=4).astype(np.float32)},
            {"action": np.int64(rng.integers(2))},
            1.0,
            True,
            {},
        )
        for _ in range(20)
    ]
    log = LoggedSteps.of_episodes([[(0, record)] for record in records])
    options: dict[str, Any] = {"model": "flatten_concat", "silent": True}
    common: dict[str, Any] = {
        "env.name": "CartPole-v1",
        "algorithm.rollout_evaluator": None,
        "algorithm.epoch_length": 2,
    }
    before = RunContext(
        "gym_env",
        algorithm=offline,
        run_dir=str(tmp_path / "offline"),
        overrides={**common, "runner.dataset": log, "algorithm.lr": 0.01},
        **options,
    )
    before.train(n_epochs=1)
    further = {"algorithm.lr": 1e-8, "algorithm.kl_to_initial_coef": 1.0, "input_dir": str(tmp_path / "offline")}
    further |= SMALL[online]
    after = RunContext(
        "gym_env", algorithm=online, run_dir=str(tmp_path / "online"), overrides={**common, **further}, **options
    )
    after.train(n_epochs=1)
    for record in records:
        observed = record.observation
        one, two = (run.policy.compute_action(observed, deterministic=True)["action"] for run in (before, after))
        assert one == two
