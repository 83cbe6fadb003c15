"""Models that follow from spaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.utils.factory import Factory
from maze.perception.builders import BaseModelBuilder
from maze.perception.models.auto_model_composer import AutoModelComposer, image_layout, is_flat, recognised_masks
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.template_model_composer import TemplateModelComposer
from maze.perception.program.network_program import in_numpy

POLICY = {"_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer"}
CRITIC = {"_target_": "maze.perception.models.critics.StateCriticComposer"}
Q_CRITIC = {"_target_": "maze.perception.models.critics.StateActionCriticComposer"}
FLAT_CRITIC = {
    "_target_": "maze.perception.models.critics.SharedStateCriticComposer",
    "networks": [{"_target_": "maze.perception.models.built_in.flatten_concat.FlattenConcatStateValueNet"}],
    "stack_observations": False,
}
MIXTURE = spaces.Dict(
    {
        "vector": spaces.Box(-1.0, 1.0, (3,), np.float32),
        "number": spaces.Box(0.0, 1.0, (), np.float32),
        "direction": spaces.Discrete(4, start=-1),
        "cell": spaces.Discrete(500),
        "hand": spaces.MultiDiscrete([3, 2]),
        "flags": spaces.MultiBinary([2, 2]),
        "camera": spaces.Box(0, 255, (40, 44, 3), np.uint8),
        "grid": spaces.Box(0, 255, (7, 7, 3), np.uint8),
        "items": spaces.Box(0.0, 1.0, (5, 2), np.float32),
        "items_mask": spaces.Box(0.0, 1.0, (5,), np.float32),
        "nodes": spaces.Box(0.0, 1.0, (4, 2), np.float32),
        "nodes_adjacency": spaces.Box(0.0, 1.0, (4, 4), np.float32),
        "choice_mask": spaces.Box(0.0, 1.0, (6,), np.float32),
    }
)
ACTIONS = spaces.Dict({"choice": spaces.Discrete(6), "move": spaces.Box(-1.0, 1.0, (2,), np.float32)})


def composed(observations, actions, **arguments) -> AutoModelComposer:
    if not isinstance(observations, dict):
        observations, actions = {0: observations}, {0: actions}
    arguments = {"policy": POLICY, "critic": CRITIC, **arguments}
    return AutoModelComposer(actions, observations, dict.fromkeys(actions, 1), **arguments)


def some(space: spaces.Dict, n: int = 3) -> dict[str, np.ndarray]:
    space.seed(0)
    samples = [space.sample() for _ in range(n)]
    return {key: np.stack([np.asarray(sample[key]) for sample in samples]) for key in space.spaces}


def tensors(arrays):
    return {key: torch.as_tensor(array) for key, array in arrays.items()}


@pytest.mark.parametrize("critic", [CRITIC, FLAT_CRITIC, None])
def test_every_kind_of_observation_gets_a_network_that_acts_and_values(critic):
    model = composed(MIXTURE, ACTIONS, critic=critic)
    observation = some(MIXTURE)
    observation["choice_mask"][:] = [0, 1, 0, 0, 0, 0]
    model.policy.seed(0)
    actions = model.policy.compute_actions(observation, ActorID(0, 0), deterministic=False)
    assert actions["choice"].tolist() == [1, 1, 1]
    assert actions["move"].shape == (3, 2)
    if critic is not None:
        network = next(iter(model.critic.networks.values()))
        assert network(tensors(observation))["value"].shape == (3, 1)


def test_each_observation_changes_what_the_policy_prefers_except_masks_and_absent_items():
    model = composed(MIXTURE, ACTIONS)
    network = model.policy.networks[0]
    base = some(MIXTURE, 1)
    base["items_mask"][:] = [1, 1, 0, 1, 1]
    base["choice_mask"][:] = 1
    base["nodes_adjacency"][:] = 1

    def logits(**changes):
        return network(tensors({**base, **changes}))["move"].detach()

    for key in MIXTURE.spaces:
        other = 1 - base[key] if key not in ("direction", "cell") else (base[key] + 1) % 3
        if key == "choice_mask":
            other[:, 0] = 1
        is_mask = key == "choice_mask"
        assert torch.equal(logits(), logits(**{key: other})) == is_mask, key
    absent = base["items"].copy()
    absent[0, 2] += 1.0
    assert torch.equal(logits(), logits(items=absent))


def test_categories_are_unit_vectors_up_to_64_values_and_embedded_above():
    config = composed(MIXTURE, ACTIONS).template["model_builder"]["modality_config"]
    assert config["category_direction"]["block_params"] == {
        "num_categories": [4],
        "embedding_dim": None,
        "start": [-1],
    }
    assert config["category_cell"]["block_params"]["embedding_dim"] == 32
    encoded = composed(spaces.Dict({"x": spaces.Discrete(3, start=1)}), ACTIONS_ONE).policy.networks[0]
    block = encoded.perception_blocks["x_CategoryEncodingBlock"]
    out = block({"x_FlattenBlock": torch.tensor([[1], [3], [0], [4]])})["x_CategoryEncodingBlock"]
    assert out.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]


ACTIONS_ONE = spaces.Dict({"action": spaces.Discrete(2)})


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((84, 84, 3), np.uint8, "HWC"),
        ((3, 84, 84), np.uint8, "CHW"),
        ((4, 84, 84), np.uint8, "CHW"),  # stacked frames
        ((84, 84), np.uint8, "HW"),
        ((7, 7, 3), np.uint8, "HWC"),
        ((5, 2), np.float32, None),
        ((20, 20), np.float32, None),
        ((2, 3, 2), np.float32, None),
    ],
)
def test_layouts_of_images_are_recognised(shape, dtype, expected):
    assert image_layout(spaces.Box(0, 1, shape, dtype), shape) == expected


def test_bytes_are_scaled_to_one_and_codes_are_not():
    config = composed(MIXTURE, ACTIONS).template["model_builder"]["modality_config"]
    assert config["image_camera"]["block_params"]["scale"] == pytest.approx(1 / 255)
    assert config["image_grid"]["block_params"]["scale"] == 1.0


def test_masks_are_recognised_by_name_and_size_in_every_substep():
    observations = {
        0: spaces.Dict({"x": spaces.Box(0, 1, (2,)), "piece_mask": spaces.Box(0, 1, (4,))}),
        1: spaces.Dict({"x": spaces.Box(0, 1, (2,)), "action_mask": spaces.Box(0, 1, (5,))}),
        2: spaces.Dict({"x": spaces.Box(0, 1, (2,)), "size_mask": spaces.Box(0, 1, (3,))}),
        3: spaces.Dict({"x": spaces.Box(0, 1, (2,)), "action_mask": spaces.Box(0, 1, (2,))}),
        4: spaces.Dict({"x": spaces.Box(0, 1, (2,)), "view_mask": spaces.Box(0, 255, (17, 20, 3), np.uint8)}),
    }
    actions = {
        0: spaces.Dict({"piece": spaces.Discrete(4)}),
        1: spaces.Dict({"pair": spaces.MultiDiscrete([2, 3])}),
        2: spaces.Dict({"size": spaces.Discrete(2)}),  # of another size: no mask of it
        3: spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}),  # whose mask would it be?
        4: spaces.Dict({"view": spaces.MultiBinary(3)}),  # an image
    }
    assert recognised_masks(actions, observations) == {"piece": "piece_mask", "pair": "action_mask"}
    model = composed(observations, actions)
    for step_key in actions:
        model.policy.networks[step_key](tensors(some(observations[step_key])))


def test_the_written_template_builds_the_same_model(tmp_path):
    torch.manual_seed(0)
    model = composed(MIXTURE, ACTIONS)
    model.policy, model.critic  # both are built at first access
    model.save_models(tmp_path)
    config = OmegaConf.load(tmp_path / "model.yaml")
    assert config._target_ == f"{TemplateModelComposer.__module__}.TemplateModelComposer"
    torch.manual_seed(0)
    again = Factory(BaseModelComposer).instantiate(
        config, action_spaces_dict={0: ACTIONS}, observation_spaces_dict={0: MIXTURE}, agent_counts_dict={0: 1}
    )
    for part in ("policy", "critic"):
        mine, other = getattr(model, part).state_dict(), getattr(again, part).state_dict()
        assert list(mine) == list(other)
    assert {path.name for path in tmp_path.glob("*.pdf")} == {"policy_0.pdf", "critic_0.pdf"}


def test_recurrent_models_take_stacked_observations_of_every_kind():
    kinds = {key: MIXTURE[key] for key in ("vector", "direction", "grid", "flags")}
    stacked = BaseModelBuilder.to_recurrent_gym_space(spaces.Dict(kinds), 4)
    model = composed(stacked, ACTIONS_ONE, recurrence=True)
    out = model.policy.networks[0](tensors(some(stacked)))
    assert out["action"].shape == (3, 2)


def test_a_shared_embedding_is_computed_by_the_policy():
    observations = spaces.Dict({"observation": spaces.Box(-1, 1, (3,), np.float32)})
    model = composed(observations, ACTIONS_ONE, shared_embedding=True)
    assert model.policy.networks[0].out_keys == ["action", "hidden"]
    assert next(iter(model.critic.networks.values())).in_keys == ["hidden"]


def test_observations_and_actions_may_have_the_same_name():
    observations = spaces.Dict({"turn": spaces.Box(-1, 1, (3,), np.float32), "turn_mask": spaces.Box(0, 1, (8,))})
    model = composed(observations, spaces.Dict({"turn": spaces.Discrete(8)}))
    observation = some(observations)
    observation["turn_mask"][:] = np.eye(8)[5]
    model.policy.seed(0)
    assert model.policy.compute_actions(observation, ActorID(0, 0), deterministic=False)["turn"].tolist() == [5, 5, 5]


def test_state_action_critics_are_derived_as_well():
    model = composed(MIXTURE, ACTIONS, critic=Q_CRITIC)
    assert model.critic is not None
    observation = tensors(some(MIXTURE))
    action = {"choice": torch.tensor([[1.0, 0, 0, 0, 0, 0]] * 3), "move": torch.zeros(3, 2)}
    network = next(iter(model.critic.networks.values()))[0]  # one of the twins
    keys = set(network.in_keys)
    assert {"move", "choice"} <= keys
    assert network({**observation, **action})["q_value"].shape == (3, 1)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"x": spaces.Box(-1, 1, (3,))}, True),
        ({"x": spaces.MultiBinary(3), "y": spaces.Box(0, 1, ())}, True),
        ({"x": spaces.Discrete(3)}, False),
        ({"x": spaces.Box(0, 1, (3, 2))}, False),
    ],
)
def test_flat_vectors_are_distinguished_from_other_spaces(space, expected):
    assert all(map(is_flat, space.values())) == expected


INVENTORY = spaces.Dict(
    {
        "stock": spaces.Box(0.0, np.array([[50.0, 1.0]] * 80, np.float32)),
        "stock_mask": spaces.Box(0, 1, (80,), np.float32),
        "order": spaces.Box(0.0, 200.0, (2,), np.float32),
        "cut_mask": spaces.Box(0, 1, (2,), np.float32),
    }
)
CUT = spaces.Dict({"piece": spaces.Discrete(80), "turn": spaces.Discrete(2), "first": spaces.Discrete(2)})


def test_a_head_over_items_scores_all_items_with_the_same_weights():
    model = composed(INVENTORY, CUT, critic=Q_CRITIC)
    assert model.template["action_items"]["piece"]["observations"] == ["stock", "cut_mask", "order"]
    observation = tensors(some(INVENTORY))
    observation["stock_mask"][:] = 1.0
    order = torch.randperm(80)
    mixed = {**observation, "stock": observation["stock"][:, order], "stock_mask": observation["stock_mask"][:, order]}
    for network, key, places in (
        (model.policy.networks[0], "piece", "piece_logits_places"),
        (next(iter(model.critic.networks.values()))[0], "piece_q_values", "piece_q_values_places"),
    ):
        torch.nn.init.zeros_(network.perception_blocks[places].net.weight)  # what depends on the place alone
        scores = network(observation)[key].detach()
        assert scores.unique().numel() > 80
        torch.testing.assert_close(network(mixed)[key].detach(), scores[:, order])


def test_the_item_that_holds_an_order_is_learned_within_150_updates():
    """What decides is the comparison of an item with a vector; sizes differ by a few percent of their bounds."""
    n_slots, rng = 20, np.random.default_rng(0)
    observations = spaces.Dict(
        {
            "stock": spaces.Box(0.0, 101.0, (n_slots, 2), np.float32),
            "n_pieces": spaces.Box(0.0, 200.0, (1,), np.float32),
            "order": spaces.Box(0.0, 101.0, (2,), np.float32),
        }
    )

    def examples(n):
        """The smallest piece that holds the order is the one to choose."""
        sizes, n_pieces = rng.integers(1, 10, (n, n_slots, 2)) * 10.0, rng.integers(1, 12, n)
        sizes[np.arange(n), rng.integers(0, n_pieces)] = 90.0  # holds everything
        order = np.array([[60.0, 30.0], [40.0, 30.0]])[rng.integers(0, 2, n)]
        is_piece = np.arange(n_slots) < n_pieces[:, None]
        fits = is_piece & (sizes >= order[:, None]).all(-1)
        choice = np.where(fits, sizes.prod(-1), np.inf).argmin(-1)
        stock = np.where(is_piece[..., None], sizes, 0.0)
        arrays = {"stock": stock, "n_pieces": n_pieces[:, None], "order": order}
        return {key: torch.as_tensor(array, dtype=torch.float32) for key, array in arrays.items()}, torch.tensor(choice)

    torch.manual_seed(0)
    network = composed(observations, spaces.Dict({"piece": spaces.Discrete(n_slots)}), critic=None).policy.networks[0]
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(150):
        seen, choice = examples(128)
        torch.nn.functional.cross_entropy(network(seen)["piece"], choice).backward()
        optimizer.step()
        optimizer.zero_grad()
    unseen, choice = examples(1000)
    assert (network(unseen)["piece"].argmax(-1) == choice).float().mean() > 0.65


def test_vectors_meet_in_the_first_layer():
    observations = spaces.Dict(
        {"piece": spaces.Box(0.0, 1.0, (2,)), "order": spaces.Box(0.0, 1.0, (2,)), "table": spaces.Box(0, 1, (2, 3, 2))}
    )
    network = composed(observations, ACTIONS_ONE, hidden_units=[8, 6]).policy.networks[0]
    layers = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(16, 8), (8, 6), (6, 2)]


def test_large_sets_do_without_attention_and_act_in_numpy():
    model = composed(INVENTORY, CUT)
    block = model.template["model_builder"]["modality_config"]["set"]["block_params"]
    assert (block["num_heads"], block["hidden_units"], block["keep_places"]) == (0, [32, 32], False)
    network, observation = model.policy.networks[0], some(INVENTORY)
    observation["stock_mask"][:] = [1.0] * 20 + [0.0] * 60
    expected, found = network(tensors(observation)), in_numpy(network)(observation)
    for head in CUT.spaces:
        np.testing.assert_allclose(found[head], expected[head].detach().numpy(), rtol=1e-4, atol=1e-5)


def test_features_with_large_bounds_are_scaled_to_ten():
    config = composed(INVENTORY, CUT).template["model_builder"]
    assert config["observation_scales"] == {"stock": [0.2, 1.0], "order": 0.05}
    open_ended = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (3,)), "y": spaces.Box(-8.0, 8.0, (2,))})
    assert composed(open_ended, ACTIONS_ONE).template["model_builder"]["observation_scales"] == {}


def test_ambiguous_mask_is_a_feature_and_reported_until_its_action_is_configured(capsys):
    assert composed(INVENTORY, CUT).template["action_masks"] == {"piece": "stock_mask"}
    assert "sub-step 0: `cut_mask` fits several actions and masks none" in capsys.readouterr().out
    model = composed(INVENTORY, CUT, action_masks={"turn": "cut_mask"})
    assert not capsys.readouterr().out
    observation = some(INVENTORY)
    observation["stock_mask"][:], observation["cut_mask"][:] = 1.0, [0.0, 1.0]
    model.policy.seed(0)
    assert model.policy.compute_actions(observation, ActorID(0, 0), deterministic=False)["turn"].tolist() == [1, 1, 1]
    named = spaces.Dict({key.replace("cut_mask", "turn_mask"): space for key, space in INVENTORY.spaces.items()})
    assert composed(named, CUT).template["action_masks"]["turn"] == "turn_mask"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"observations": ["order"]}, "expected the key of an observation of the shape \\(80, features\\)"),
        ({"observations": ["stock", "stock"]}, "and those of vectors"),
        ({"observations": []}, "expected the key of an observation"),
        ({"observations": ["stok"]}, "found \\['stok'\\] in sub-step 0"),
    ],
)
def test_wrong_items_of_an_edited_template_are_named(items, message):
    config = {**composed(INVENTORY, CUT).template, "policy": POLICY, "critic": None, "distribution_mapper_config": []}
    config["action_items"] = {"piece": {**items, "hidden_units": [4], "non_lin": "torch.nn.Tanh"}}
    with pytest.raises(ConfigError, match=f"model.action_items.piece: .*{message}"):
        TemplateModelComposer({0: CUT}, {0: INVENTORY}, {0: 1}, **config)


NAMES = st.sampled_from(
    ["observation", "a", "b_mask", "turn", "items", "items_mask", "items_adjacency", "turn_mask", "concat", "value"]
)
SIZES = st.integers(1, 4)
BOUNDS = st.sampled_from([(-1.0, 1.0), (0.0, 300.0), (-np.inf, np.inf), (-3.4e38, 3.4e38)])


@st.composite
def boxes(draw):
    low, high = draw(BOUNDS)
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    return spaces.Box(low, high, shape, np.float32)


OBSERVATIONS = st.one_of(
    boxes(),
    st.builds(spaces.Discrete, st.sampled_from([1, 2, 5, 64, 65]), start=st.integers(-2, 2)),
    st.builds(spaces.MultiDiscrete, st.one_of(st.lists(SIZES, min_size=1, max_size=3), st.just([[2, 3], [4, 70]]))),
    st.builds(spaces.MultiBinary, st.one_of(SIZES, st.just([2, 2]))),
    st.sampled_from(
        [
            spaces.Box(0, 255, (17, 20, 3), np.uint8),
            spaces.Box(0, 255, (5, 6), np.uint8),
            spaces.Box(0, 9, (3,), np.int64),
            spaces.Box(0.0, 1.0, (66, 2), np.float32),
        ]
    ),
)
HEADS = st.one_of(
    st.builds(spaces.Discrete, st.sampled_from([1, 2, 4, 66])),
    st.builds(spaces.MultiDiscrete, st.lists(SIZES, min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, SIZES),
    st.just(spaces.Box(-2.0, 2.0, (2,), np.float32)),
)
CRITICS = {
    "StateCriticComposer": False,
    "SharedStateCriticComposer": True,
    "DeltaStateCriticComposer": False,
    "StateActionCriticComposer": False,
}


@given(
    observations=st.dictionaries(NAMES, OBSERVATIONS, min_size=1, max_size=4).filter(
        lambda found: any(not key.endswith("_mask") for key in found)
    ),
    heads=st.dictionaries(st.sampled_from(["turn", "b", "hidden"]), HEADS, min_size=1, max_size=3),
    critic=st.sampled_from(list(CRITICS)),
    shared=st.booleans(),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_a_model_acts_values_and_learns_for_generated_spaces(observations, heads, critic, shared):
    sees_actions = critic.startswith("StateAction")
    is_embedding_shared = shared and not sees_actions
    has_q_values = all(isinstance(space, spaces.Discrete) for space in heads.values())
    if sees_actions and not has_q_values:
        names_clash = {"hidden", *observations} & set(heads)
    else:
        names_clash = {"hidden"} & set(heads) if is_embedding_shared else set()
    config = {"_target_": f"maze.perception.models.critics.{critic}"}
    config |= {"stack_observations": False} if CRITICS[critic] else {}
    model = composed(
        spaces.Dict(observations),
        spaces.Dict(heads),
        critic=config,
        hidden_units=[8],
        shared_embedding=is_embedding_shared,
    )
    if names_clash:
        with pytest.raises(ConfigError, match=r"(?i)rename"):
            _ = model.policy, model.critic
        return
    arrays = some(spaces.Dict(observations))
    for key, array in arrays.items():
        if key.endswith("mask"):
            arrays[key] = np.ones_like(array)
        elif array.dtype.kind == "f":
            arrays[key] = np.clip(array, -300, 300)
    actions = model.policy.compute_actions(arrays, ActorID(0, 0), deterministic=False)
    for head, space in heads.items():
        assert isinstance(space, spaces.Box) or all(map(space.contains, map(space.dtype.type, actions[head])))
    outputs = model.policy.networks[0](tensors(arrays))
    loss = sum(logits.square().sum() for logits in outputs.values() if logits.abs().max() < 1e30)
    for network in model.critic.networks.values():
        twin = network[0] if isinstance(network, torch.nn.ModuleList) else network
        given = {**{key: outputs[key] for key in outputs if key not in heads}, **tensors(arrays)}
        shapes = dict(zip(twin.in_keys, twin.in_shapes, strict=True))
        inputs = {key: given.get(key, torch.zeros(3, *shape)) for key, shape in shapes.items()}
        loss = loss + sum(value.square().sum() for value in twin(inputs).values())
    loss.backward()
    parameters = [*model.policy.parameters(), *model.critic.parameters()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_an_environment_that_observes_masks_only_is_named():
    observations = spaces.Dict({"action_mask": spaces.Box(0, 1, (2,))})
    with pytest.raises(ConfigError, match="expected an observation other than masks"):
        composed(observations, ACTIONS_ONE)


PENDULUM = spaces.Dict({"observation": spaces.Box(-8.0, 8.0, (3,), np.float32)})
TORQUE = spaces.Dict({"torque": spaces.Box(-2.0, 2.0, (2,), np.float32), "gear": spaces.Discrete(3)})


def test_state_independent_standard_deviations_are_equal_in_every_state_and_learned():
    policy = composed(PENDULUM, TORQUE, state_dependent_std=False).policy
    network = policy.networks[0]
    logits = network(tensors(some(PENDULUM)))
    assert logits["gear"].shape == (3, 3)
    means, log_stds = logits["torque"].chunk(2, dim=-1)
    assert log_stds.tolist() == [[0.0, 0.0]] * 3
    assert len(set(means[:, 0].tolist())) == 3
    (-policy.compute_substep_policy_output(some(PENDULUM), ActorID(0, 0)).entropy.mean()).backward()
    head = network.perception_blocks["torque"]
    assert head.log_std_layer.bias.grad.tolist() == [-1.0, -1.0]  # the derivative of the entropy
    assert head.log_std_layer.weight.grad is None
    assert not head.log_std_layer.weight.any()


SQUASHED = [
    {
        "action_space": "gymnasium.spaces.Box",
        "distribution": "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution",
    }
]


@pytest.mark.parametrize("distributions", [[], SQUASHED], ids=["normal", "squashed"])
@pytest.mark.parametrize(("shape", "is_dependent"), [((2,), False), ((2,), True), ((), True), ((3, 2), True)])
def test_standard_deviations_start_at_the_configured_value(distributions, shape, is_dependent):
    actions = spaces.Dict({"torque": spaces.Box(-2.0, 2.0, shape, np.float32), "gear": spaces.Discrete(3)})
    settings = {"distribution_mapper_config": distributions, "state_dependent_std": is_dependent, "initial_std": 0.25}
    policy = composed(PENDULUM, actions, **settings).policy
    logits = policy.networks[0](tensors(some(PENDULUM)))
    means, log_stds = logits["torque"].chunk(2, dim=-1)
    torch.testing.assert_close(log_stds.exp(), torch.full_like(log_stds, 0.25), rtol=0.1, atol=0)
    assert means.abs().max() < 0.1, "the bias of the means stays 0"
    assert len(set(log_stds[:, ..., 0].flatten().tolist())) > 1 or not is_dependent
    assert logits["gear"].abs().max() < 0.1, "the other heads as well"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "wide"])
def test_a_standard_deviation_is_above_zero(value):
    with pytest.raises(ConfigError, match=r"model\.initial_std"):
        composed(PENDULUM, TORQUE, initial_std=value)


def test_a_model_has_dense_layers():
    with pytest.raises(ConfigError, match=r"^model\.hidden_units: expected one width"):
        composed(PENDULUM, TORQUE, hidden_units=[])


def test_the_smallest_number_of_a_type_is_a_large_bound():
    space = spaces.Dict({"x": spaces.Box(-128, 0, (2,), np.int8)})
    scales = composed(space, ACTIONS).template["model_builder"]["observation_scales"]
    assert scales == {"x": 10 / 128}


def test_initial_standard_deviations_need_a_normal_distribution():
    with pytest.raises(
        ConfigError, match=r"model\.initial_std: no action has a normal distribution.*Leave the default"
    ):
        composed(PENDULUM, spaces.Dict({"gear": spaces.Discrete(3)}), initial_std=0.5)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (spaces.Dict({"gear": spaces.Discrete(3)}), "no action has a normal distribution.*Categorical"),
        (
            spaces.Dict({"grid": spaces.Box(-1.0, 1.0, (2, 2), np.float32)}),
            "actions that are vectors, found \\['grid'\\]",
        ),
    ],
)
def test_standard_deviations_of_their_own_need_a_normal_distribution_over_a_vector(actions, message):
    with pytest.raises(ConfigError, match=rf"state_dependent_std: .*{message}"):
        composed(PENDULUM, actions, state_dependent_std=False)


def test_orthogonal_layers_have_the_lengths_of_the_literature():
    model = composed(PENDULUM, TORQUE, initialization="orthogonal", hidden_units=[8, 4])
    layers = [layer for layer in model.policy.networks[0].modules() if isinstance(layer, torch.nn.Linear)]
    *hidden, torque, gear = layers
    torch.testing.assert_close(hidden[1].weight @ hidden[1].weight.T, 2.0 * torch.eye(4), rtol=0, atol=1e-5)
    for head in (torque, gear):
        torch.testing.assert_close(head.weight.norm(dim=1), torch.full((len(head.weight),), 0.01))
    value = [layer for layer in model.critic.networks[0].modules() if isinstance(layer, torch.nn.Linear)][-1]
    assert value.weight.norm().item() == pytest.approx(1.0)
    assert not any(layer.bias.any() for layer in layers)


def test_an_unknown_initialization_is_named():
    with pytest.raises(ConfigError, match=r"model\.initialization 'xavier' is unknown. Known: 'normc', 'orthogonal'"):
        composed(PENDULUM, TORQUE, initialization="xavier")
