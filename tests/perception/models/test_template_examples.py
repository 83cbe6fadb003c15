"""The documented template and custom models, from their YAML to actions, values and gradients."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.utils.factory import Factory
from maze.distributions.beta import BetaProbabilityDistribution
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.general.concat import ConcatenationBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.blocks.joint_blocks.lstm_last_step import LSTMLastStepBlock
from maze.perception.blocks.joint_blocks.vgg_conv_dense import VGGConvolutionDenseBlock
from maze.perception.blocks.output.linear import LinearOutputBlock
from maze.perception.builders import BaseModelBuilder
from maze.perception.builders.base import embedding_spaces
from maze.perception.models.custom_model_composer import CustomModelComposer
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.template_model_composer import TemplateModelComposer
from maze.perception.weight_init import make_module_init_normc

ACTOR = ActorID(0, 0)
GAME_OBSERVATION = spaces.Dict(
    {
        "observation_inventory": spaces.Box(0, 1, (16,), np.float32),
        "observation_screen": spaces.Box(0, 1, (3, 64, 64), np.float32),
    }
)
SMALL_SCREEN = spaces.Dict({**GAME_OBSERVATION.spaces, "observation_screen": spaces.Box(0, 1, (3, 8, 8), np.float32)})
GAME_ACTION = spaces.Dict({"action_move": spaces.Discrete(4), "action_use": spaces.MultiBinary(16)})
CARTPOLE_OBSERVATION = spaces.Dict({"observation": spaces.Box(-1, 1, (4,), np.float32)})
CARTPOLE_ACTION = spaces.Dict({"action": spaces.Discrete(2)})

TEMPLATE = """
_target_: maze.perception.models.template_model_composer.TemplateModelComposer
distribution_mapper_config: []
model_builder:
  _target_: maze.perception.builders.ConcatModelBuilder
  shared_embedding_keys: ~
  observation_modality_mapping:
    observation_inventory: feature
    observation_screen: image
  modality_config:
    feature:
      block_type: maze.perception.blocks.DenseBlock
      block_params:
        hidden_units: [32, 32]
        non_lin: torch.nn.ReLU
    image:
      block_type: maze.perception.blocks.VGGConvolutionDenseBlock
      block_params:
        hidden_channels: [8, 16, 32]
        hidden_units: [32]
        non_lin: torch.nn.ReLU
    hidden:
      block_type: maze.perception.blocks.DenseBlock
      block_params:
        hidden_units: [128]
        non_lin: torch.nn.ReLU
    recurrence: {}
policy:
  _target_: maze.perception.models.policies.ProbabilisticPolicyComposer
critic:
  _target_: maze.perception.models.critics.StateCriticComposer
"""
RECURRENCE = """
block_type: maze.perception.blocks.LSTMLastStepBlock
block_params:
  hidden_size: 32
  num_layers: 1
  bidirectional: False
  non_lin: torch.nn.SELU
"""
CUSTOM = """
_target_: maze.perception.models.custom_model_composer.CustomModelComposer
distribution_mapper_config: []
policy:
  _target_: maze.perception.models.policies.ProbabilisticPolicyComposer
  networks: []
  substeps_with_separate_agent_nets: []
critic:
  _target_: maze.perception.models.critics.StateCriticComposer
  networks: []
"""


def template_config():
    return yaml.safe_load(TEMPLATE)


def custom_config(policy_net, critic_net, **arguments):
    config = yaml.safe_load(CUSTOM)
    config["policy"]["networks"] = [{"_target_": f"{__name__}.{policy_net.__name__}", **arguments}]
    config["critic"]["networks"] = [{"_target_": f"{__name__}.{critic_net.__name__}", **arguments}]
    return config


def compose(config, observation_space, action_space):
    composer_type = Factory(BaseModelComposer).type_from_name(config["_target_"])
    composer_type.check_model_config(config)
    return Factory(BaseModelComposer).instantiate(
        config,
        config_path="model",
        action_spaces_dict={0: action_space},
        observation_spaces_dict={0: observation_space},
        agent_counts_dict={0: 1},
    )


def check_that_it_acts_and_learns(composer, tmp_path=None, batch_size=3):
    """Acts, computes values, sends gradients to every parameter, and draws its graphs."""
    observation_space, action_space = composer.observation_spaces_dict[0], composer.action_spaces_dict[0]
    observation_space.seed(0)
    samples = [observation_space.sample() for _ in range(batch_size)]
    batch = {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    policy = composer.policy
    policy.seed(0)
    actions = policy.compute_actions(batch, ACTOR)
    for row in range(batch_size):
        row_actions = {head: action[row] for head, action in actions.items()}
        assert all(row_actions[head].shape == space.shape for head, space in action_space.spaces.items())
    record = StructuredSpacesRecord(
        [SpacesRecord(ACTOR, observation={key: torch.as_tensor(value) for key, value in batch.items()})]
    )
    model = TorchActorCritic(policy, composer.critic, "cpu")
    policy_output, critic_output = model.compute_actor_critic_output(record)
    assert critic_output.values[0].shape == (batch_size,)
    log_prob = policy_output.joint_log_probs_for_actions(
        [{head: torch.as_tensor(action) for head, action in actions.items()}]
    )[0]
    (log_prob.sum() + critic_output.values[0].sum() + policy_output.entropies[0].sum()).backward()
    without = [p.shape for p in model.parameters() if p.grad is None]
    assert not without, f"parameters without gradient: {without}"
    if tmp_path is not None:
        composer.save_models(tmp_path)
        pictures = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert set(pictures) == {"policy_0.pdf", "critic_0.pdf"}
        assert all(content.startswith(b"%PDF") for content in pictures.values())


# -- template models -------------------------------------------------------------------------------


def test_the_feed_forward_template(tmp_path):
    composer = compose(template_config(), GAME_OBSERVATION, GAME_ACTION)
    assert isinstance(composer, TemplateModelComposer)
    check_that_it_acts_and_learns(composer, tmp_path)
    shapes = composer.policy.networks[0].tensor_shapes()
    assert tuple(shapes["concat"]) == (64,)
    assert tuple(shapes["hidden"]) == (128,)
    assert (tuple(shapes["action_move"]), tuple(shapes["action_use"])) == ((4,), (16,))


@pytest.mark.parametrize(
    "target",
    [
        "maze.perception.models.template_model_composer.TemplateModelComposer",
        "maze.perception.models.default_model_composer.DefaultModelComposer",  # as the documentation has it once
    ],
)
def test_the_recurrent_template(target, tmp_path):
    config = {**template_config(), "_target_": target}
    config["model_builder"]["modality_config"]["recurrence"] = yaml.safe_load(RECURRENCE)
    stacked = BaseModelBuilder.to_recurrent_gym_space(SMALL_SCREEN, rnn_steps=3)
    composer = compose(config, stacked, GAME_ACTION)
    check_that_it_acts_and_learns(composer, tmp_path)
    assert tuple(composer.policy.networks[0].tensor_shapes()["recurrence"]) == (32,)


def test_the_single_observation_template(tmp_path):
    config = template_config()
    modalities = config["model_builder"]["modality_config"]
    modalities.update(hidden={}, recurrence={})
    del modalities["image"]
    config["model_builder"]["observation_modality_mapping"] = {"observation": "feature"}
    composer = compose(config, CARTPOLE_OBSERVATION, CARTPOLE_ACTION)
    check_that_it_acts_and_learns(composer, tmp_path)
    assert list(composer.policy.networks[0].perception_blocks) == ["observation_DenseBlock", "concat", "action"]


@pytest.mark.parametrize("shared", [["latent"], ["hidden"], ["concat"], ["observation_inventory_DenseBlock"]])
def test_shared_embeddings_are_computed_once_and_learn_from_the_critic(shared, tmp_path):
    config = template_config()
    config["model_builder"]["shared_embedding_keys"] = shared
    composer = compose(config, SMALL_SCREEN, GAME_ACTION)
    policy_net, critic_net = composer.policy.networks[0], composer.critic.networks[0]
    key = "hidden" if shared == ["latent"] else shared[0]
    assert policy_net.out_keys == ["action_move", "action_use", key]
    assert key in critic_net.in_keys
    assert key not in [name for block in critic_net.perception_blocks.values() for name in block.out_keys]
    check_that_it_acts_and_learns(composer, tmp_path)

    composer.policy.networks[0].zero_grad()
    x = {name: torch.rand(2, *space.shape) for name, space in SMALL_SCREEN.spaces.items()}
    record = StructuredSpacesRecord([SpacesRecord(ACTOR, observation=x)])
    calls = []
    producer = next(block for block in policy_net.perception_blocks.values() if key in block.out_keys)
    hook = producer.register_forward_hook(lambda *_: calls.append(1))
    _, critic_output = TorchActorCritic(composer.policy, composer.critic, "cpu").compute_actor_critic_output(record)
    hook.remove()
    assert len(calls) == 1
    critic_output.values[0].sum().backward()
    first_layer = policy_net.perception_blocks["observation_inventory_DenseBlock"].net[0].weight
    assert first_layer.grad is not None
    assert bool(first_layer.grad.abs().sum() > 0)


# -- custom models ---------------------------------------------------------------------------------


class SmallPolicyNet(nn.Module):
    """One dense block and one head."""

    def __init__(self, obs_shapes, action_logits_shapes, non_lin, hidden_units):
        super().__init__()
        self.perception_dict = OrderedDict()
        latent = DenseBlock(
            in_keys="observation",
            out_keys="latent",
            in_shapes=obs_shapes["observation"],
            hidden_units=hidden_units,
            non_lin=non_lin,
        )
        self.perception_dict["latent"] = latent
        self.perception_dict["action"] = LinearOutputBlock(
            in_keys="latent",
            out_keys="action",
            in_shapes=latent.out_shapes(),
            output_units=int(np.prod(action_logits_shapes["action"])),
        )
        self.perception_net = InferenceBlock(
            in_keys="observation",
            out_keys="action",
            in_shapes=obs_shapes["observation"],
            perception_blocks=self.perception_dict,
        )
        self.perception_net.apply(make_module_init_normc(1.0))
        self.perception_dict["action"].apply(make_module_init_normc(0.01))

    def forward(self, in_tensor_dict):
        return self.perception_net(in_tensor_dict)


class SmallCriticNet(nn.Module):
    def __init__(self, obs_shapes, non_lin, hidden_units):
        super().__init__()
        latent = DenseBlock("observation", "latent", obs_shapes["observation"], hidden_units, non_lin)
        value = LinearOutputBlock("latent", "value", latent.out_shapes(), output_units=1)
        self.perception_net = InferenceBlock(
            "observation", "value", obs_shapes["observation"], OrderedDict(latent=latent, value=value)
        )
        value.apply(make_module_init_normc(0.01))

    def forward(self, in_tensor_dict):
        return self.perception_net(in_tensor_dict)


class LatentNet:
    """What policy and critic of the complex example have in common."""

    def __init__(self, obs_shapes, non_lin, hidden_units):
        self.obs_shapes = obs_shapes
        blocks = self.perception_dict = OrderedDict()
        blocks["latent_inventory"] = DenseBlock(
            "observation_inventory", "latent_inventory", obs_shapes["observation_inventory"], [128], non_lin
        )
        blocks["latent_screen"] = VGGConvolutionDenseBlock(
            "observation_screen",
            "latent_screen",
            obs_shapes["observation_screen"],
            non_lin=non_lin,
            hidden_channels=[8, 16, 32],
            hidden_units=[32],
        )
        blocks["latent_concat"] = ConcatenationBlock(
            in_keys=["latent_inventory", "latent_screen"],
            out_keys="latent_concat",
            in_shapes=blocks["latent_inventory"].out_shapes() + blocks["latent_screen"].out_shapes(),
            concat_dim=-1,
        )
        blocks["latent_dense"] = DenseBlock(
            "latent_concat", "latent_dense", blocks["latent_concat"].out_shapes(), hidden_units, non_lin
        )
        blocks["latent"] = LSTMLastStepBlock(
            in_keys="latent_dense",
            out_keys="latent",
            in_shapes=blocks["latent_dense"].out_shapes(),
            hidden_size=32,
            num_layers=1,
            bidirectional=False,
            non_lin=non_lin,
        )

    def inference_block(self, outputs):
        for key, units in outputs.items():
            self.perception_dict[key] = LinearOutputBlock(
                "latent", key, self.perception_dict["latent"].out_shapes(), units
            )
        in_keys = list(self.obs_shapes)
        return InferenceBlock(in_keys, list(outputs), [self.obs_shapes[key] for key in in_keys], self.perception_dict)


class ComplexPolicyNet(nn.Module, LatentNet):
    def __init__(self, obs_shapes, action_logits_shapes, non_lin, hidden_units):
        nn.Module.__init__(self)
        LatentNet.__init__(self, obs_shapes, non_lin, hidden_units)
        self.perception_net = self.inference_block(
            {head: int(np.prod(shape)) for head, shape in action_logits_shapes.items()}
        )

    def forward(self, in_tensor_dict):
        return self.perception_net(in_tensor_dict)


class ComplexCriticNet(nn.Module, LatentNet):
    def __init__(self, obs_shapes, non_lin, hidden_units):
        nn.Module.__init__(self)
        LatentNet.__init__(self, obs_shapes, non_lin, hidden_units)
        self.perception_net = self.inference_block({"value": 1})

    def forward(self, in_tensor_dict):
        return self.perception_net(in_tensor_dict)


class PlainPolicyNet(nn.Module):
    """Nothing but PyTorch."""

    def __init__(self, obs_shapes, action_logits_shapes, hidden_layer_0, hidden_layer_1, use_bias):
        nn.Module.__init__(self)
        self.observation_name = next(iter(obs_shapes))
        self.action_name = next(iter(action_logits_shapes))
        self.l0 = nn.Linear(4, hidden_layer_0, bias=use_bias)
        self.l1 = nn.Linear(hidden_layer_0, hidden_layer_1, bias=use_bias)
        self.l2 = nn.Linear(hidden_layer_1, 2, bias=use_bias)

    def forward(self, in_tensor_dict):
        x = torch.relu(self.l0(in_tensor_dict[self.observation_name]))
        return {self.action_name: self.l2(torch.relu(self.l1(x)))}


class PlainCriticNet(nn.Module):
    def __init__(self, obs_shapes, hidden_layer_0, hidden_layer_1, use_bias):
        nn.Module.__init__(self)
        self.observation_name = next(iter(obs_shapes))
        self.l0 = nn.Linear(4, hidden_layer_0, bias=use_bias)
        self.l1 = nn.Linear(hidden_layer_0, hidden_layer_1, bias=use_bias)
        self.l2 = nn.Linear(hidden_layer_1, 1, bias=use_bias)

    def forward(self, in_tensor_dict):
        x = torch.relu(self.l0(in_tensor_dict[self.observation_name]))
        return {"value": self.l2(torch.relu(self.l1(x)))}


class EmbeddingPolicyNet(PlainPolicyNet):
    """Shares what its second layer returns."""

    def forward(self, in_tensor_dict):
        embedding = torch.relu(self.l1(torch.relu(self.l0(in_tensor_dict[self.observation_name]))))
        return {self.action_name: self.l2(embedding), "embedding": embedding}


class EmbeddingCriticNet(nn.Module):
    def __init__(self, obs_shapes, **_):
        super().__init__()
        self.head = nn.Linear(obs_shapes["embedding"][0], 1)

    def forward(self, in_tensor_dict):
        return {"value": self.head(in_tensor_dict["embedding"])}


PLAIN = {"hidden_layer_0": 16, "hidden_layer_1": 32, "use_bias": True}


def test_the_custom_cartpole_model(tmp_path):
    config = custom_config(SmallPolicyNet, SmallCriticNet, non_lin="torch.nn.ReLU", hidden_units=[16, 32])
    composer = compose(config, CARTPOLE_OBSERVATION, CARTPOLE_ACTION)
    assert isinstance(composer, CustomModelComposer)
    check_that_it_acts_and_learns(composer, tmp_path)


def test_the_custom_complex_model(tmp_path):
    config = custom_config(ComplexPolicyNet, ComplexCriticNet, non_lin="torch.nn.ReLU", hidden_units=[128])
    stacked = BaseModelBuilder.to_recurrent_gym_space(SMALL_SCREEN, rnn_steps=3)
    check_that_it_acts_and_learns(compose(config, stacked, GAME_ACTION), tmp_path)


def test_the_plain_pytorch_model():
    config = custom_config(PlainPolicyNet, PlainCriticNet, **PLAIN)
    check_that_it_acts_and_learns(compose(config, CARTPOLE_OBSERVATION, CARTPOLE_ACTION))


def test_custom_networks_share_what_the_policy_returns_besides_its_actions():
    config = custom_config(EmbeddingPolicyNet, EmbeddingCriticNet, **PLAIN)
    composer = compose(config, CARTPOLE_OBSERVATION, CARTPOLE_ACTION)
    assert composer.critic.networks[0].head.in_features == 32
    check_that_it_acts_and_learns(composer)


def test_finding_out_what_a_network_shares_leaves_no_trace():
    config = custom_config(EmbeddingPolicyNet, EmbeddingCriticNet, **PLAIN)
    composer = compose(config, CARTPOLE_OBSERVATION, CARTPOLE_ACTION)
    network = composer.policy.networks[0].train()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    embedding_spaces(composer.policy, composer.observation_spaces_dict)
    assert torch.equal(torch.rand(1), expected)
    assert network.training
    assert network.l0.weight.grad is None


class ListPolicyNet(PlainPolicyNet):
    """Forgets the dictionary."""

    def forward(self, in_tensor_dict):
        return self.l0(in_tensor_dict[self.observation_name])


@pytest.mark.parametrize(
    ("policy_net", "n_features", "message"),
    [
        (PlainPolicyNet, 5, r"model.policy.networks\[0\]: PlainPolicyNet cannot process .*'observation': \(5,\).*5"),
        (ListPolicyNet, 4, r"model.policy.networks\[0\]: ListPolicyNet .* returns no dictionary"),
    ],
)
def test_networks_that_do_not_fit_the_observations_are_named(policy_net, n_features, message):
    observation_space = spaces.Dict({"observation": spaces.Box(-1, 1, (n_features,), np.float32)})
    composer = compose(custom_config(policy_net, PlainCriticNet, **PLAIN), observation_space, CARTPOLE_ACTION)
    with pytest.raises(ConfigError, match=message):
        composer.critic


def test_the_built_in_shared_embedding_acts_in_numpy_and_learns():
    built_in = "maze.perception.models.built_in.flatten_concat.FlattenConcat"
    config = yaml.safe_load(CUSTOM)
    sizes = {"head_units": [6], "non_lin": "torch.nn.Tanh"}
    config["policy"]["networks"] = [{"_target_": f"{built_in}SharedEmbeddingPolicyNet", "hidden_units": [8], **sizes}]
    config["critic"]["networks"] = [{"_target_": f"{built_in}SharedEmbeddingStateValueNet", **sizes}]
    composer = compose(config, GAME_OBSERVATION, GAME_ACTION)
    check_that_it_acts_and_learns(composer)
    policy = composer.policy
    assert policy._actors[0].runs_in_numpy
    x = {key: np.full((2, *space.shape), 0.5, np.float32) for key, space in GAME_OBSERVATION.spaces.items()}
    logits = {"action_move": np.empty((2, 4), np.float32), "action_use": np.empty((2, 16), np.float32)}
    policy.compute_actions(x, ACTOR, logits_out=logits)
    expected = policy.compute_substep_policy_output(x, ACTOR)
    for head, value in expected.action_logits.items():
        np.testing.assert_allclose(logits[head], value.detach().numpy(), atol=1e-5)
    assert expected.embedding_logits["latent"].shape == (2, 8)

    config["policy"]["networks"] = [{"_target_": f"{built_in}PolicyNet"}]
    config["policy"]["networks"][0].update(hidden_units=[8], non_lin="torch.nn.Tanh")
    with pytest.raises(ConfigError, match=r"model.critic.networks\[0\]: .*does not return `latent`"):
        compose(config, GAME_OBSERVATION, GAME_ACTION).critic


# -- distributions ---------------------------------------------------------------------------------


class CustomCategoricalProbabilityDistribution(CategoricalProbabilityDistribution):
    """A distribution of a user's project."""


@pytest.mark.parametrize(
    ("mapper_config", "expected"),
    [
        (
            [{"action_space": "gym.spaces.Box", "distribution": "maze.distributions.beta.BetaProbabilityDistribution"}],
            {"steer": BetaProbabilityDistribution, "special_action": BetaProbabilityDistribution},
        ),
        (
            [
                {
                    "action_space": "gym.spaces.Box",
                    "distribution": "maze.distributions.beta.BetaProbabilityDistribution",
                },
                {
                    "action_head": "special_action",
                    "distribution": ("maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution"),
                },
            ],
            {"steer": BetaProbabilityDistribution, "special_action": SquashedGaussianProbabilityDistribution},
        ),
        (
            [
                {
                    "action_space": "gym.spaces.Discrete",
                    "distribution": f"{__name__}.CustomCategoricalProbabilityDistribution",
                }
            ],
            {"gear": CustomCategoricalProbabilityDistribution},
        ),
    ],
)
def test_distributions_by_space_by_head_and_of_a_users_project(mapper_config, expected):
    config = {**template_config(), "distribution_mapper_config": mapper_config}
    config["model_builder"]["observation_modality_mapping"] = {"observation": "feature"}
    action_space = spaces.Dict(
        {
            "steer": spaces.Box(-2, 3, (2,), np.float32),
            "special_action": spaces.Box(0, 1, (1,), np.float32),
            "gear": spaces.Discrete(3),
        }
    )
    composer = compose(config, CARTPOLE_OBSERVATION, action_space)
    check_that_it_acts_and_learns(composer)
    for head, distribution in expected.items():
        name = distribution.__name__
        assert composer.distribution_mapper.distribution_class(head).__name__ == name
    bounded = composer.policy.compute_action({"observation": np.zeros(4, np.float32)}, actor_id=ACTOR)
    for head in expected.keys() - {"gear"}:
        assert action_space[head].contains(bounded[head])
