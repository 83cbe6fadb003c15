"""From model configurations to policies and critics, and back from their files."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional

from maze.core.agent.serialized_torch_policy import SerializedTorchPolicy
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStepStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils.factory import Factory
from maze.distributions.beta import BetaProbabilityDistribution
from maze.perception.models.critics import StateCriticComposer, StepStateCriticComposer
from maze.perception.models.critics.shared_state_critic_composer import SharedStateCriticComposer
from maze.perception.models.custom_model_composer import CustomModelComposer
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.policies import ProbabilisticPolicyComposer
from maze.perception.models.space_config import SpacesConfig

OBSERVATION = spaces.Dict({"observation": spaces.Box(-1, 1, (4,), np.float32)})
ACTION = spaces.Dict({"action": spaces.Discrete(2)})
FLAT = {"action_spaces_dict": {0: ACTION}, "observation_spaces_dict": {0: OBSERVATION}, "agent_counts_dict": {0: 1}}
TWO_STEPS = {
    "action_spaces_dict": {"select": ACTION, "cut": spaces.Dict({"angle": spaces.Box(-1, 1, (1,), np.float32)})},
    "observation_spaces_dict": {
        "select": OBSERVATION,
        "cut": spaces.Dict({"piece": spaces.Box(-1, 1, (3,), np.float32)}),
    },
    "agent_counts_dict": {"select": 1, "cut": 2},
}
BUILT_IN = "maze.perception.models.built_in.flatten_concat"
DENSE = {"non_lin": "torch.nn.Tanh", "hidden_units": [8, 8]}
POLICY_NET = {"_target_": f"{BUILT_IN}.FlattenConcatPolicyNet", **DENSE}
VALUE_NET = {"_target_": f"{BUILT_IN}.FlattenConcatStateValueNet", **DENSE}
MODEL = {
    "_target_": "maze.perception.models.custom_model_composer.CustomModelComposer",
    "distribution_mapper_config": [],
    "policy": {
        "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
        "networks": [POLICY_NET],
        "substeps_with_separate_agent_nets": [],
    },
    "critic": {"_target_": "maze.perception.models.critics.StateCriticComposer", "networks": [VALUE_NET]},
}


class CustomPlainPolicyNet(nn.Module):
    """A plain network as the documentation writes them."""

    def __init__(self, obs_shapes, action_logits_shapes, hidden_layer_0: int, use_bias: bool):
        nn.Module.__init__(self)
        self.observation_name = next(iter(obs_shapes))
        self.action_name = next(iter(action_logits_shapes))
        self.l0 = nn.Linear(4, hidden_layer_0, bias=use_bias)
        self.l1 = nn.Linear(hidden_layer_0, 2, bias=use_bias)

    def forward(self, in_tensor_dict):
        return {self.action_name: self.l1(functional.relu(self.l0(in_tensor_dict[self.observation_name])))}


def model(**changes):
    """The model's configuration with values replaced at dotted keys (written with two underscores)."""
    config = copy.deepcopy(MODEL)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = config
        for parent in parents:
            place = place[parent]
        place[last] = value
    return config


def compose(config, arguments=None):
    CustomModelComposer.check_model_config(config)
    return Factory(BaseModelComposer).instantiate(config, config_path="model", **(arguments or FLAT))


def test_the_built_in_model_is_composed_for_the_spaces():
    composer = compose(MODEL)
    assert composer.policy is composer.policy
    assert isinstance(composer.critic, TorchStepStateCritic)
    assert StateCriticComposer is StepStateCriticComposer
    policy = composer.policy
    policy.seed(0)
    action = policy.compute_action({"observation": np.zeros(4, np.float32)}, actor_id=ActorID(0, 0))
    assert ACTION.contains(action)


def test_omegaconf_and_plain_networks_are_composed_as_well(tmp_path):
    from omegaconf import OmegaConf

    network = {"_target_": f"{__name__}.CustomPlainPolicyNet", "hidden_layer_0": 16, "use_bias": True}
    composer = compose(OmegaConf.create(model(policy__networks=[network])))
    assert type(composer.policy.networks[0]).__name__ == "CustomPlainPolicyNet"
    composer.save_models(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["critic_0.pdf"]  # plain networks cannot be drawn


def test_instantiated_networks_and_composers_pass_through():
    composer = compose(MODEL)
    policy_composer = ProbabilisticPolicyComposer(
        **FLAT,
        distribution_mapper=composer.distribution_mapper,
        networks=[composer.policy.networks[0]],
        substeps_with_separate_agent_nets=[],
    )
    critic_composer = SharedStateCriticComposer(
        observation_spaces_dict=FLAT["observation_spaces_dict"],
        agent_counts_dict={0: 1},
        networks={0: composer.critic.networks[0]},
        stack_observations=True,
    )
    joined = CustomModelComposer(**FLAT, distribution_mapper_config=[], policy=policy_composer, critic=critic_composer)
    assert joined.policy.networks[0] is composer.policy.networks[0]
    assert isinstance(joined.critic, TorchSharedStateCritic)


def test_the_distribution_mapper_config_decides_the_logits():
    box = spaces.Dict({"action": spaces.Box(-1, 1, (3,), np.float32)})
    config = model(
        distribution_mapper_config=[
            {"action_space": "gym.spaces.Box", "distribution": "maze.distributions.beta.BetaProbabilityDistribution"}
        ]
    )
    composer = compose(config, {**FLAT, "action_spaces_dict": {0: box}})
    assert composer.distribution_mapper.distribution_class("action") is BetaProbabilityDistribution
    assert composer.policy.networks[0].heads[0].out_features == 6


def test_substeps_get_networks_by_key_or_order_and_agents_their_own():
    config = model(
        policy__networks={"cut": POLICY_NET, "select": POLICY_NET},
        policy__substeps_with_separate_agent_nets=["cut"],
        critic__networks=[VALUE_NET, VALUE_NET],
        critic___target_="maze.perception.models.critics.DeltaStateCriticComposer",
    )
    composer = compose(config, TWO_STEPS)
    assert set(composer.policy.networks) == {"select", ("cut", 0), ("cut", 1)}
    first, second = (composer.policy.network_for(ActorID("cut", agent)) for agent in (0, 1))
    assert first is not second
    assert first.hidden[0].in_features == 3
    assert isinstance(composer.critic, TorchDeltaStateCritic)
    assert composer.critic.networks["select"].hidden[0].in_features == 4


@pytest.mark.parametrize(("stack", "expected"), [(False, 4), (True, 12)])
def test_a_shared_critic_gets_the_merged_shapes(stack, expected):
    config = model(
        critic={
            "_target_": "maze.perception.models.critics.SharedStateCriticComposer",
            "networks": [VALUE_NET],
            "stack_observations": stack,
        }
    )
    composer = compose(config, {**FLAT, "agent_counts_dict": {0: 3}})
    assert composer.critic.networks[0].hidden[0].in_features == expected


def test_a_model_without_critic_has_none():
    assert compose(model(critic=None)).critic is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"polizy": {}}, r"model.polizy: unknown key. Did you mean `policy`"),
        ({"policy": None}, r"model.policy: missing"),
        ({"policy": {"_target_": "x"}}, r"model.policy.networks: missing"),
        (
            {"policy__networks": [{**POLICY_NET, "_target_": f"{BUILT_IN}.FlattenConcatPolicyNett"}]},
            r"model.policy.networks\[0\]",
        ),
        (
            {"policy__networks": [{**POLICY_NET, "hiden_units": [3]}]},
            r"model.policy.networks\[0\].*did you mean `hidden_units`",
        ),
        (
            {"policy__networks": [{"_target_": f"{BUILT_IN}.FlattenConcatPolicyNet"}]},
            r"model.policy.networks\[0\].*`hidden_units`",
        ),
        ({"policy__networks": [POLICY_NET, POLICY_NET]}, r"model.policy.networks: expected one network for each"),
        ({"policy__networks": {1: POLICY_NET}}, r"model.policy.networks: .* sub-steps \[0\].*found \{1: "),
        ({"policy__substeps_with_separate_agent_nets": [5]}, "sub-step 5 is unknown"),
        ({"policy__networks": [{"_target_": "collections.OrderedDict"}]}, r"model.policy.networks\[0\].*Module"),
        ({"critic__networks": [POLICY_NET]}, r"model.critic.networks\[0\].*`action_logits_shapes`"),
        (
            {"distribution_mapper_config": [{"action_head": "acton", "distribution": "x"}]},
            r"distribution_mapper_config\[0\]",
        ),
    ],
)
def test_mistakes_are_named_by_their_place(changes, message):
    def build_everything():
        composer = compose(model(**changes))
        return composer.policy, composer.critic

    with pytest.raises(ConfigError, match=message):
        build_everything()


def test_one_head_name_with_two_spaces_is_refused():
    clash = {**TWO_STEPS, "action_spaces_dict": {"select": ACTION, "cut": spaces.Dict({"action": spaces.Discrete(9)})}}
    with pytest.raises(ConfigError, match=r"`action` of sub-step 'cut' has the space Discrete\(9\), but Discrete"):
        compose(model(), clash)


@pytest.fixture
def files(tmp_path):
    composer = compose(MODEL)
    actor_critic = TorchActorCritic(composer.policy, composer.critic, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in actor_critic.parameters():
            parameter.normal_(generator=generator)
    torch.save(actor_critic.state_dict(), tmp_path / "state_dict.pt")
    torch.save(composer.policy.state_dict(), tmp_path / "policy.pt")
    SpacesConfig(**FLAT).save(tmp_path / "spaces_config.pkl")
    return tmp_path, composer.policy


@pytest.mark.parametrize("name", ["state_dict.pt", "policy.pt"])
def test_a_serialized_policy_acts_like_the_trained_one(files, name):
    directory, trained = files
    policy = SerializedTorchPolicy(MODEL, str(directory / name), str(directory / "spaces_config.pkl"), "cpu")
    observation = {"observation": np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)}
    for deterministic in (False, True):
        policy.seed(1)
        trained.seed(1)
        expected = trained.compute_actions(observation, ActorID(0, 0), deterministic)
        found = policy.compute_actions(observation, ActorID(0, 0), deterministic)
        np.testing.assert_array_equal(expected["action"], found["action"])


def test_a_serialized_policy_samples_at_its_temperature(files):
    directory, trained = files
    arguments = (MODEL, str(directory / "state_dict.pt"), str(directory / "spaces_config.pkl"), "cpu")
    policy = SerializedTorchPolicy(*arguments, temperature=3.0)
    row = np.random.default_rng(0).normal(size=4).astype(np.float32)
    observation = {"observation": np.tile(row, (40_000, 1))}
    (logits,) = trained.compute_substep_policy_output({"observation": row[None]}, ActorID(0, 0)).action_logits.values()
    flattened = torch.softmax(logits[0] / 3.0, -1).detach().numpy()
    policy.seed(1)
    drawn = policy.compute_actions(observation, ActorID(0, 0))["action"]
    shares = np.bincount(drawn, minlength=len(flattened)) / len(drawn)
    np.testing.assert_allclose(shares, flattened, atol=0.01)
    assert np.abs(torch.softmax(logits[0], -1).detach().numpy() - flattened).max() > 0.02
    for wrong in (0.0, -1.0, float("inf"), "hot", True):
        with pytest.raises(ConfigError, match=r"policy\.temperature: expected a number above 0"):
            SerializedTorchPolicy(*arguments, temperature=wrong)


def test_files_that_are_missing_damaged_or_of_another_model_are_named(files):
    directory, _ = files
    spaces_file, state_file = str(directory / "spaces_config.pkl"), directory / "state_dict.pt"
    with pytest.raises(CheckpointError, match=r"nowhere.pt"):
        SerializedTorchPolicy(MODEL, str(directory / "nowhere.pt"), spaces_file, "cpu")
    wider = model(policy__networks=[{**POLICY_NET, "hidden_units": [9, 8]}])
    with pytest.raises(CheckpointError, match=r"state_dict.pt.*\(8, 4\), the model has \(9, 4\)"):
        SerializedTorchPolicy(wider, str(state_file), spaces_file, "cpu")
    state_file.write_bytes(state_file.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"state_dict.pt"):
        SerializedTorchPolicy(MODEL, str(state_file), spaces_file, "cpu")
