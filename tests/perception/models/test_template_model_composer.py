"""Template models for sub-steps, agents and all kinds of critics."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hydra import compose as compose_hydra
from hydra import initialize_config_module

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_state_action_critic import TorchSharedStateActionCritic, TorchStepStateActionCritic
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStepStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.utils.factory import Factory
from maze.perception.blocks import InferenceBlock, InferenceGraph
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.template_model_composer import TemplateModelComposer

CRITICS = "maze.perception.models.critics"
DENSE = {
    "block_type": "maze.perception.blocks.DenseBlock",
    "block_params": {"hidden_units": [6], "non_lin": "torch.nn.Tanh"},
}
MODEL = {
    "_target_": "maze.perception.models.template_model_composer.TemplateModelComposer",
    "distribution_mapper_config": [],
    "model_builder": {
        "_target_": "maze.perception.builders.ConcatModelBuilder",
        "shared_embedding_keys": None,
        "observation_modality_mapping": {"observation": "feature"},
        "modality_config": {"feature": DENSE, "hidden": copy.deepcopy(DENSE), "recurrence": {}},
    },
    "policy": {"_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer"},
    "critic": {"_target_": f"{CRITICS}.StateCriticComposer"},
}


def box(*shape):
    return spaces.Box(-1, 1, shape, np.float32)


FLAT = (
    {0: spaces.Dict({"observation": box(4)})},
    {0: spaces.Dict({"action": spaces.Discrete(2)})},
    {0: 1},
)
TWO_STEPS = (
    {"select": spaces.Dict({"observation": box(4)}), "cut": spaces.Dict({"piece": box(2), "observation": box(4)})},
    {"select": spaces.Dict({"action": spaces.Discrete(2)}), "cut": spaces.Dict({"angle": box(1)})},
    {"select": 1, "cut": 2},
)
BOTH = {"observation": "feature", "piece": "feature"}


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


def compose(config, env=FLAT):
    TemplateModelComposer.check_model_config(config)
    return Factory(BaseModelComposer).instantiate(
        config,
        config_path="model",
        observation_spaces_dict=env[0],
        action_spaces_dict=env[1],
        agent_counts_dict=env[2],
    )


def record_of(env, batch_size=3):
    return StructuredSpacesRecord(
        [
            SpacesRecord(
                ActorID(key, 0),
                observation={name: torch.randn(batch_size, *sub.shape) for name, sub in space.spaces.items()},
            )
            for key, space in env[0].items()
        ]
    )


# -- policies --------------------------------------------------------------------------------------


def test_each_substep_gets_a_network_for_its_own_spaces():
    composer = compose(model(model_builder__observation_modality_mapping=BOTH), TWO_STEPS)
    networks = composer.policy.networks
    assert networks["select"].in_keys == ["observation"]
    assert networks["select"].out_keys == ["action"]
    assert networks["cut"].in_keys == ["observation", "piece"]
    assert networks["cut"].out_keys == ["angle"]
    assert composer.policy is composer.policy
    assert composer.critic is composer.critic


def test_agents_with_separate_networks_start_with_different_weights():
    config = model(
        model_builder__observation_modality_mapping=BOTH,
        model_builder__shared_embedding_keys={"cut": ["hidden"]},
        policy__substeps_with_separate_agent_nets=["cut"],
    )
    composer = compose(config, TWO_STEPS)
    assert set(composer.policy.networks) == {"select", ("cut", 0), ("cut", 1)}
    first, second = (composer.policy.network_for(ActorID("cut", agent)) for agent in (0, 1))
    weights = [net.perception_blocks["hidden"].net[0].weight for net in (first, second)]
    assert not torch.equal(*weights)
    # the critic takes the embedding of the agent that acted
    assert composer.critic.networks["cut"].in_keys == ["hidden"]
    model_output = TorchActorCritic(composer.policy, composer.critic, "cpu")
    assert len(model_output.compute_actor_critic_output(record_of(TWO_STEPS))[1].values) == 2


def test_the_policy_starts_close_to_uniform_and_hidden_units_have_unit_weights():
    network = compose(MODEL).policy.networks[0]
    assert torch.allclose(network.perception_blocks["action"].net.weight.norm(dim=1), torch.full((2,), 0.01))
    assert torch.allclose(network.perception_blocks["hidden"].net[0].weight.norm(dim=1), torch.ones(6))


def test_logits_with_several_dimensions_get_their_shape():
    action_space = spaces.Dict({"grid": spaces.MultiBinary([2, 3]), "force": box(2, 2)})
    composer = compose(MODEL, (FLAT[0], {0: action_space}, FLAT[2]))
    logits = composer.policy.networks[0]({"observation": torch.randn(5, 4, 4)})
    assert {head: tuple(value.shape) for head, value in logits.items()} == {"grid": (5, 4, 2, 3), "force": (5, 4, 2, 4)}
    action = composer.policy.compute_action({"observation": np.zeros(4, np.float32)}, actor_id=ActorID(0, 0))
    assert action["grid"].shape == (2, 3)


def test_networks_that_a_part_names_are_taken():
    value_net = {
        "_target_": "maze.perception.models.built_in.flatten_concat.FlattenConcatStateValueNet",
        "non_lin": "torch.nn.Tanh",
        "hidden_units": [3],
    }
    composer = compose(model(critic__networks=[value_net]))
    assert type(composer.critic.networks[0]).__name__ == "FlattenConcatStateValueNet"
    assert isinstance(composer.policy.networks[0], InferenceBlock)


def test_the_policy_acts_in_numpy_with_the_logits_of_torch():
    composer = compose(model(model_builder__observation_modality_mapping=BOTH), TWO_STEPS)
    observation = {
        "piece": np.ones((3, 2), np.float32),
        "observation": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    }
    actor, logits = ActorID("cut", 1), {"angle": np.empty((3, 2), np.float32)}
    composer.policy.compute_actions(observation, actor, logits_out=logits)
    assert composer.policy._actors["cut"].runs_in_numpy
    expected = composer.policy.compute_substep_policy_output(observation, actor).action_logits["angle"]
    np.testing.assert_allclose(logits["angle"], expected.detach().numpy(), atol=1e-5)


# -- state critics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("composer_name", "critic_type"),
    [
        ("StateCriticComposer", TorchStepStateCritic),
        ("StepStateCriticComposer", TorchStepStateCritic),
        ("DeltaStateCriticComposer", TorchDeltaStateCritic),
        ("SharedStateCriticComposer", TorchSharedStateCritic),
    ],
)
@pytest.mark.parametrize("stack_observations", [False, True])
def test_every_state_critic_gets_template_networks(composer_name, critic_type, stack_observations):
    critic = {"_target_": f"{CRITICS}.{composer_name}"}
    if composer_name.startswith("Shared"):
        critic["stack_observations"] = stack_observations
    env = (TWO_STEPS[0], TWO_STEPS[1], {"select": 1, "cut": 1})
    composer = compose(model(critic=critic, model_builder__observation_modality_mapping=BOTH), env)
    assert type(composer.critic) is critic_type
    output = TorchActorCritic(composer.policy, composer.critic, "cpu").compute_actor_critic_output(record_of(env))[1]
    assert all(value.shape == (3,) for value in output.values)


def test_a_shared_critic_shares_embeddings_in_flat_environments_only():
    critic = {"_target_": f"{CRITICS}.SharedStateCriticComposer", "stack_observations": False}
    config = model(critic=critic, model_builder__shared_embedding_keys=["hidden"])
    assert compose(config).critic.networks[0].in_keys == ["hidden"]
    config["model_builder"]["observation_modality_mapping"] = BOTH
    with pytest.raises(ConfigError, match=r"shared_embedding_keys: a shared critic has one network"):
        compose(config, TWO_STEPS).critic


def test_a_perception_network_can_be_shared_as_a_whole():
    composer = compose(MODEL)
    policy_net, perception_net = composer.template_policy_net(FLAT[0][0], FLAT[1][0], [])
    value_net = composer.template_value_net(None, perception_net=perception_net)
    assert value_net.perception_blocks["hidden"] is policy_net.perception_blocks["hidden"]
    q_net = composer.template_q_value_net(None, FLAT[1][0], only_discrete_spaces=True, perception_net=perception_net)
    assert q_net.perception_blocks["hidden"] is policy_net.perception_blocks["hidden"]
    with pytest.raises(ConfigError, match="observation_space"):
        composer.template_value_net(None)


# -- state-action critics --------------------------------------------------------------------------


def q_model(name="StateActionCriticComposer", **changes):
    return model(critic={"_target_": f"{CRITICS}.{name}"}, **changes)


def test_values_of_all_discrete_actions_at_once():
    action_space = spaces.Dict({"move": spaces.Discrete(3), "use": spaces.Discrete(2)})
    critic = compose(q_model(), (FLAT[0], {0: action_space}, FLAT[2])).critic
    assert isinstance(critic, TorchStepStateActionCritic)
    assert critic.only_discrete_spaces == {0: True}
    first, second = critic.compute_state_action_values_step({"observation": torch.randn(5, 4)}, 0)
    assert {head: tuple(q.shape) for head, q in first.items()} == {"move": (5, 3), "use": (5, 2)}
    assert not torch.equal(first["move"], second["move"])


def test_values_of_joint_actions_depend_on_every_head():
    action_space = spaces.Dict({"steer": box(2), "gear": spaces.Discrete(3), "bits": spaces.MultiBinary(2)})
    critic = compose(q_model(), (FLAT[0], {0: action_space}, FLAT[2])).critic
    observation = {"observation": torch.randn(1, 4)}
    action = {"steer": torch.zeros(1, 2), "gear": torch.tensor([0]), "bits": torch.zeros(1, 2)}
    base = critic.compute_state_action_value_step(observation, action, 0)[0]
    assert base.shape == (1,)
    for head, other in (("steer", torch.ones(1, 2)), ("gear", torch.tensor([2])), ("bits", torch.ones(1, 2))):
        assert critic.compute_state_action_value_step(observation, {**action, head: other}, 0)[0] != base


def test_a_recurrent_state_action_critic_joins_the_action_behind_the_recurrence():
    lstm = {
        "block_type": "maze.perception.blocks.LSTMLastStepBlock",
        "block_params": {"hidden_size": 5, "num_layers": 1, "bidirectional": False, "non_lin": "torch.nn.Tanh"},
    }
    env = ({0: spaces.Dict({"observation": box(3, 4)})}, {0: spaces.Dict({"steer": box(1)})}, {0: 1})
    critic = compose(q_model(model_builder__modality_config__recurrence=lstm), env).critic
    value = critic.compute_state_action_value_step(
        {"observation": torch.randn(2, 3, 4)}, {"steer": torch.ones(2, 1)}, 0
    )
    assert value[0].shape == (2,)
    blocks = critic.networks[0][0].perception_blocks
    assert tuple(blocks["concat_action"].out_shapes()[0]) == (6,)


def test_step_and_shared_state_action_critics_of_substeps(tmp_path):
    for name, keys in (("StateActionCriticComposer", ["select", "cut"]), ("SharedStateActionCriticComposer", [0])):
        composer = compose(q_model(name, model_builder__observation_modality_mapping=BOTH), TWO_STEPS)
        assert list(composer.critic.networks) == keys
        observations = {
            key: {n: torch.randn(3, *s.shape) for n, s in sp.spaces.items()} for key, sp in TWO_STEPS[0].items()
        }
        actions = {"select": {"action": torch.tensor([0, 1, 1])}, "cut": {"angle": torch.zeros(3, 1)}}
        values = composer.critic.predict_q_values(observations, actions, gather_output=True)
        assert list(values) == keys
    assert isinstance(composer.critic, TorchSharedStateActionCritic)
    composer.save_models(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"policy_select.pdf", "policy_cut.pdf", "critic_0.pdf"}


def test_flatten_concat_networks_serve_state_action_critics():
    network = {
        "_target_": "maze.perception.models.built_in.flatten_concat.FlattenConcatStateActionValueNet",
        "non_lin": "torch.nn.ReLU",
        "hidden_units": [8],
    }
    config = model(critic={"_target_": f"{CRITICS}.StateActionCriticComposer", "networks": [network]})
    critic = compose(config).critic
    assert critic.compute_state_action_values_step({"observation": torch.randn(2, 4)}, 0)[0]["action"].shape == (2, 2)
    critic = compose(config, (FLAT[0], {0: spaces.Dict({"steer": box(1)})}, FLAT[2])).critic
    assert critic.networks[0][0].hidden[0].in_features == 5


# -- configurations --------------------------------------------------------------------------------

STACKED = {"vector": (4, 6), "pixel": (4, 3, 16, 16)}
SINGLE = {"vector": (6,), "pixel": (3, 16, 16)}


@pytest.mark.parametrize("model_name", ["vector_obs", "vector_obs_rnn", "pixel_obs", "pixel_obs_rnn"])
@pytest.mark.parametrize("critic_name", ["template_state", "template_state_action", "flatten_concat_shared"])
def test_the_configurations_of_template_models_build_models(model_name, critic_name):
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose_hydra("conf_train", overrides=["env.name=x", f"model={model_name}", f"critic={critic_name}"])
    shape = (STACKED if model_name.endswith("rnn") else SINGLE)[model_name.partition("_")[0]]
    env = ({0: spaces.Dict({"observation": box(*shape)})}, {0: spaces.Dict({"action": box(2)})}, {0: 1})
    composer = compose(cfg.model, env)
    action = composer.policy.compute_action({"observation": np.zeros(shape, np.float32)}, actor_id=ActorID(0, 0))
    assert action["action"].shape == (2,)
    observation = {"observation": torch.zeros(3, *shape)}
    if critic_name == "template_state_action":
        q_values = composer.critic.compute_state_action_value_step(observation, {"action": torch.zeros(3, 2)}, 0)
        assert [q.shape for q in q_values] == [(3,), (3,)]
    else:
        value = composer.critic.predict_value(observation, 0)
        assert (value if isinstance(value, torch.Tensor) else value["value"]).shape == (3,)


@pytest.mark.parametrize(
    ("changes", "env", "message"),
    [
        ({"modell_builder": {}}, FLAT, r"model.modell_builder: unknown key. Did you mean `model_builder`"),
        ({"model_builder": None}, FLAT, r"model.model_builder: missing"),
        ({"critic": {"networks": []}}, FLAT, r"model.critic._target_: missing"),
        ({"model_builder___target_": "maze.perception.blocks.DenseBlock"}, FLAT, r"model.model_builder"),
        (
            {"model_builder__observation_modality_mapping": {"observation": "feature", "obs": "feature"}},
            FLAT,
            r"observation_modality_mapping: observation 'obs' is unknown.*'observation'",
        ),
        ({}, TWO_STEPS, r"observation_modality_mapping: observation `piece` has no modality"),
        (
            {"model_builder__shared_embedding_keys": ["hiden"]},
            FLAT,
            r"shared_embedding_keys: no block produces `hiden`. There are: observation_DenseBlock, concat, hidden",
        ),
        ({"model_builder__shared_embedding_keys": {1: ["hidden"]}}, FLAT, "sub-step 1 is unknown"),
        (
            {"model_builder__modality_config__hidden__block_params__hidden_units": []},
            FLAT,
            r"model.model_builder.modality_config.hidden: .*`hidden_units` is empty",
        ),
        ({"action_masks": {"acton": "mask"}}, FLAT, "model.action_masks: action head 'acton' is unknown"),
        (
            {"action_masks": {"action": "mask"}},
            FLAT,
            "action_masks.action: observation of sub-step 0 'mask' is unknown",
        ),
    ],
)
def test_mistakes_are_named_by_their_key(changes, env, message):
    def build_everything():
        composer = compose(model(**changes), env)
        return composer.policy, composer.critic

    with pytest.raises(ConfigError, match=message):
        build_everything()


def test_joint_actions_need_a_hidden_stage():
    env = (FLAT[0], {0: spaces.Dict({"steer": box(1)})}, FLAT[2])
    with pytest.raises(ConfigError, match=r"modality_config.hidden: empty, but the critic"):
        compose(q_model(model_builder__modality_config__hidden={}), env).critic


def test_observations_and_actions_of_one_name_are_named():
    env = (FLAT[0], {0: spaces.Dict({"observation": box(1)})}, FLAT[2])
    with pytest.raises(ConfigError, match=r"\['observation'\] are both observations and action heads"):
        compose(q_model(), env).critic


# -- pictures --------------------------------------------------------------------------------------


def test_pictures_are_rendered_without_graphviz(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    compose(MODEL).save_models(tmp_path)
    assert all((tmp_path / name).read_bytes().startswith(b"%PDF") for name in ("policy_0.pdf", "critic_0.pdf"))


def test_a_picture_that_fails_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(InferenceGraph, "save", fail)
    compose(MODEL).save_models(tmp_path)
    assert "policy_0 could not be drawn: no fonts" in caplog.text
