"""The torch policy: acting in NumPy and in torch, learning, weights and generators."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats
from torch import nn

from maze.core.agent.torch_model import resolve_device, threads_for
from maze.core.agent.torch_policy import ActionHeads, Actor, TorchPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet

ACTOR = ActorID(0, 0)
HEADS = spaces.Dict(
    {
        "move": spaces.Discrete(3),
        "use": spaces.MultiBinary((2, 2)),
        "tune": spaces.MultiDiscrete([2, 4]),
        "steer": spaces.Box(-1, 1, (2,), np.float32),
    }
)
OBS_SHAPES = {"position": (3,), "map": (2, 4), "level": ()}


class FixedLogits(nn.Module):
    """A network that only torch can run; its logits do not depend on the observation."""

    def __init__(self, **logits):
        super().__init__()
        self.logits = nn.ParameterDict({key: nn.Parameter(torch.tensor(value)) for key, value in logits.items()})

    def forward(self, x):
        batch_shape = next(iter(x.values())).shape[:-1]
        return {key: value.expand(*batch_shape, *value.shape) for key, value in self.logits.items()}


def flatten_concat(heads=HEADS, obs_shapes=OBS_SHAPES, non_lin=nn.Tanh, hidden_units=(16, 16), mapper_config=()):
    mapper = DistributionMapper(heads, list(mapper_config))
    shapes = {head: mapper.required_logits_shape(head) for head in heads.spaces}
    torch.manual_seed(0)
    network = FlattenConcatPolicyNet(obs_shapes, shapes, list(hidden_units), non_lin)
    for parameter in network.parameters():  # far from the uniform initial policy
        nn.init.normal_(parameter, std=0.5)
    policy = TorchPolicy({0: network}, mapper, "cpu")
    policy.seed(0)
    return policy


def observations(batch_size, obs_shapes=OBS_SHAPES, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {key: rng.normal(size=(batch_size, *shape)).astype(dtype) for key, shape in obs_shapes.items()}


def policy_with(network, space, config=()):
    policy = TorchPolicy({0: network}, DistributionMapper(space, list(config)), "cpu")
    policy.seed(1)
    return policy


def logits_of(policy, observation, **arguments):
    batch_size = len(next(iter(observation.values())))
    mapper = policy.distribution_mapper
    logits = {
        head: np.empty((batch_size, *mapper.required_logits_shape(head)), np.float32) for head in mapper.action_heads
    }
    policy.compute_actions(observation, ACTOR, logits_out=logits, **arguments)
    return logits


@pytest.mark.parametrize("non_lin", [nn.Tanh, nn.ReLU, nn.ELU, nn.SELU, nn.Sigmoid, nn.LeakyReLU, nn.Identity, nn.GELU])
@pytest.mark.parametrize("hidden_units", [(), (8,), (64, 64)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_the_logits_of_acting_are_those_of_learning(non_lin, hidden_units, dtype):
    policy = flatten_concat(non_lin=non_lin, hidden_units=hidden_units)
    for batch_size in (1, 7):
        observation = observations(batch_size, dtype=dtype)
        acting = logits_of(policy, observation)
        learning = policy.compute_substep_policy_output(observation, ACTOR).action_logits
        for head, logits in learning.items():
            expected = logits.detach().numpy()
            tolerance = 1e-5 * max(1.0, float(np.abs(expected).max()))  # bytes make large sums
            np.testing.assert_allclose(acting[head], expected, atol=tolerance)
    assert policy._actors[0].runs_in_numpy == (non_lin is not nn.GELU or not hidden_units)


def test_one_flat_observation_goes_through_numpy_as_well():
    policy = flatten_concat(obs_shapes={"observation": (4,)}, heads=spaces.Dict({"action": spaces.Discrete(2)}))
    observation = observations(8, {"observation": (4,)})
    expected = policy.compute_substep_policy_output(observation, ACTOR).action_logits["action"].detach().numpy()
    np.testing.assert_allclose(logits_of(policy, observation)["action"], expected, atol=1e-5)


def test_acting_uses_every_change_of_the_weights():
    policy = flatten_concat()
    observation = observations(3)
    logits_of(policy, observation)

    def in_place():
        with torch.no_grad():
            policy.parameters()[0].add_(1.0)

    def optimiser_step():
        optimiser = torch.optim.Adam(policy.parameters(), lr=0.1)
        policy.compute_substep_policy_output(observation, ACTOR).action_logits["move"].sum().backward()
        optimiser.step()

    def loading():
        policy.load_state_dict({"policies": {0: {k: v + 1 for k, v in policy.networks[0].state_dict().items()}}})

    def flat_vector():
        vector = nn.utils.parameters_to_vector(policy.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, policy.parameters())

    def replacing():
        policy.networks[0].heads[0].weight = nn.Parameter(torch.ones(3, 16))

    for change in (in_place, optimiser_step, loading, flat_vector, replacing):
        before = logits_of(policy, observation)["move"]
        change()
        after = logits_of(policy, observation)["move"]
        assert not np.allclose(before, after), change.__name__
        expected = policy.compute_substep_policy_output(observation, ACTOR).action_logits["move"].detach().numpy()
        np.testing.assert_allclose(after, expected, atol=1e-4, err_msg=change.__name__)


def test_a_subclass_with_a_forward_of_its_own_is_not_run_in_numpy():
    class Doubled(FlattenConcatPolicyNet):
        def forward(self, x):
            return {head: 2.0 * logits for head, logits in super().forward(x).items()}

    mapper = DistributionMapper(spaces.Dict({"action": spaces.Discrete(2)}), [])
    network = Doubled({"observation": (3,)}, {"action": (2,)}, [4], nn.Tanh)
    actor = Actor(network, ActionHeads(mapper, np.random.default_rng(0), torch.Generator(), "0"), "cpu")
    assert not actor.runs_in_numpy
    logits = {"action": np.empty((2, 2), np.float32)}
    actor.act({"observation": np.ones((2, 3), np.float32)}, logits_out=logits)
    expected = network({"observation": torch.ones(2, 3)})["action"].detach().numpy()
    np.testing.assert_allclose(logits["action"], expected, atol=1e-6)


def test_a_forward_hook_keeps_the_network_in_torch():
    policy = flatten_concat()
    policy.networks[0].heads[0].register_forward_hook(lambda module, args, output: output + 1.0)
    observation = observations(2)
    expected = policy.compute_substep_policy_output(observation, ACTOR).action_logits["move"].detach().numpy()
    np.testing.assert_allclose(logits_of(policy, observation)["move"], expected, atol=1e-5)


def test_action_frequencies_match_the_probabilities():
    logits = [0.0, 1.0, -2.0, torch.finfo(torch.float32).min]
    policy = policy_with(FixedLogits(action=logits), spaces.Dict({"action": spaces.Discrete(4)}))
    n = 20_000
    drawn = policy.compute_actions({"observation": np.zeros((n, 1), np.float32)}, ACTOR)["action"]
    counts = np.bincount(drawn, minlength=4)
    assert counts[3] == 0
    expected = n * torch.softmax(torch.tensor(logits), 0).numpy()[:3].astype(np.float64)
    assert stats.chisquare(counts[:3], expected * n / expected.sum()).pvalue > 0.001


def test_samples_of_all_default_distributions_follow_them():
    logits = {"move": [0.0, 1.0, 2.0], "use": [[0.0, 2.0], [-1.0, 9.0]], "tune": [1.0, 0.0, 0.0, 0.0, 1.0, 2.0]}
    logits["steer"] = [0.5, -3.0, -1.0, 0.0]
    policy = policy_with(FixedLogits(**logits), HEADS)
    n = 20_000
    drawn = policy.compute_actions({"observation": np.zeros((n, 1), np.float32)}, ACTOR)
    for head, space in HEADS.spaces.items():
        assert drawn[head].shape == (n, *space.shape)
        assert drawn[head].dtype == space.dtype
    np.testing.assert_allclose(drawn["use"].mean(0), torch.sigmoid(torch.tensor(logits["use"])), atol=0.02)
    for part, first, last in ((0, 0, 2), (1, 2, 6)):
        expected = torch.softmax(torch.tensor(logits["tune"][first:last]), 0).numpy()
        observed = np.bincount(drawn["tune"][:, part], minlength=last - first) / n
        np.testing.assert_allclose(observed, expected, atol=0.02)
    np.testing.assert_allclose(drawn["steer"].mean(0), [0.5, -3.0], atol=0.03)
    np.testing.assert_allclose(drawn["steer"].std(0), np.exp([-1.0, 0.0]), atol=0.03)
    best = policy.compute_actions({"observation": np.zeros((1, 1), np.float32)}, ACTOR, deterministic=True)
    assert best["move"].tolist() == [2]
    assert best["use"].tolist() == [[[0, 1], [0, 1]]]
    assert best["tune"].tolist() == [[0, 3]]
    assert best["steer"].tolist() == [[0.5, -3.0]]


SQUASHED = "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution"


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_squashed_samples_are_those_of_the_distribution(shape):
    space = spaces.Box(np.full(shape, -2.0, np.float32), np.full(shape, 6.0, np.float32))
    mapper_config = [{"action_space": "gym.spaces.Box", "distribution": SQUASHED}]
    logits_shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    logits = torch.linspace(0.5, -1.5, int(np.prod(logits_shape))).reshape(logits_shape)
    policy = policy_with(FixedLogits(action=logits.tolist()), spaces.Dict({"action": space}), mapper_config)
    n = 5_000
    batch = {"observation": np.zeros((n, 1), np.float32)}
    drawn = policy.compute_actions(batch, ACTOR)["action"]
    assert drawn.shape == (n, *shape)
    assert drawn.dtype == space.dtype
    mean, log_std = (part.numpy().reshape(shape) for part in logits.chunk(2, -1))
    standardised = (np.arctanh((drawn - 2.0) / 4.0) - mean) / np.exp(log_std)
    for component in standardised.reshape(n, -1).T:
        assert stats.kstest(component, "norm").pvalue > 1e-4
    best = policy.compute_actions(batch, ACTOR, deterministic=True)["action"]
    np.testing.assert_allclose(best[0], 2.0 + 4.0 * np.tanh(mean), rtol=1e-5)


def test_squashed_samples_stay_within_bounds_that_are_no_float32_numbers():
    space = spaces.Box(np.array([-0.1]), np.array([0.3]), dtype=np.float64)
    mapper_config = [{"action_space": "gym.spaces.Box", "distribution": SQUASHED}]
    for mean in (-30.0, 30.0):
        policy = policy_with(FixedLogits(action=[mean, 9.0]), spaces.Dict({"action": space}), mapper_config)
        drawn = policy.compute_actions({"observation": np.zeros((100, 1), np.float32)}, ACTOR)["action"]
        assert drawn.min() >= space.low[0]
        assert drawn.max() <= space.high[0]


class AlwaysLast(CategoricalProbabilityDistribution):
    """A user's distribution with the documented signature: its ``sample`` knows no generators."""

    def sample(self):
        torch.rand(1)
        return torch.full(self.logits.shape[:-1], self.logits.shape[-1] - 1)


def test_custom_distributions_sample_and_leave_the_global_generator_unchanged():
    config = [{"action_head": "action", "distribution": AlwaysLast}]
    policy = policy_with(FixedLogits(action=[9.0, 0.0]), spaces.Dict({"action": spaces.Discrete(2)}), config)
    before = torch.get_rng_state()
    drawn = policy.compute_actions({"observation": np.zeros((3, 1), np.float32)}, ACTOR)["action"]
    assert drawn.tolist() == [1, 1, 1]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "distribution", ["beta.Beta", "squashed_gaussian.SquashedGaussian", "gaussian.DiagonalGaussian"]
)
def test_the_same_seed_gives_the_same_actions(distribution):
    config = [
        {"action_space": "gym.spaces.Box", "distribution": f"maze.distributions.{distribution}ProbabilityDistribution"}
    ]
    policies = [flatten_concat(mapper_config=config) for _ in range(2)]
    observation = observations(5)
    policies[0].compute_actions(observation, ACTOR)
    for policy in policies:
        policy.seed(7)
    for _ in range(3):
        first, second = (policy.compute_actions(observation, ACTOR) for policy in policies)
        for head in HEADS.spaces:
            np.testing.assert_array_equal(first[head], second[head])


def test_generator_states_survive_a_weights_only_file():
    policy = flatten_concat(
        mapper_config=[{"action_head": "steer", "distribution": "maze.distributions.beta.BetaProbabilityDistribution"}]
    )
    observation = observations(4)
    policy.compute_actions(observation, ACTOR)
    file = io.BytesIO()
    torch.save(policy.rng_state(), file)
    expected = policy.compute_actions(observation, ACTOR)
    file.seek(0)
    policy.set_rng_state(torch.load(file, weights_only=True))
    repeated = policy.compute_actions(observation, ACTOR)
    for head in HEADS.spaces:
        np.testing.assert_array_equal(expected[head], repeated[head])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_copies_act_equally_and_independently(clone):
    policy = flatten_concat()
    observation = observations(4)
    policy.compute_actions(observation, ACTOR)
    other = clone(policy)
    expected, found = policy.compute_actions(observation, ACTOR), other.compute_actions(observation, ACTOR)
    for head in HEADS.spaces:
        np.testing.assert_array_equal(expected[head], found[head])
    with torch.no_grad():
        other.parameters()[0].add_(1.0)
    assert not np.allclose(logits_of(policy, observation)["move"], logits_of(other, observation)["move"])


def test_actions_are_written_into_the_arrays_that_are_given():
    policy = flatten_concat()
    out = {head: np.full((5, *space.shape), 77, space.dtype) for head, space in HEADS.spaces.items()}
    policy.seed(3)
    returned = policy.compute_actions(observations(5), ACTOR, out=out)
    assert returned is out
    policy.seed(3)
    fresh = policy.compute_actions(observations(5), ACTOR)
    for head in HEADS.spaces:
        np.testing.assert_array_equal(out[head], fresh[head])


def test_results_are_not_overwritten_by_the_next_call():
    policy = flatten_concat()
    first = policy.compute_actions(observations(2), ACTOR, deterministic=True)
    kept = copy.deepcopy(first)
    policy.compute_actions(observations(2, seed=5), ACTOR, deterministic=True)
    for head in HEADS.spaces:
        np.testing.assert_array_equal(first[head], kept[head])


def test_a_single_action_is_an_element_of_the_space():
    policy = flatten_concat()
    observation = {key: value[0] for key, value in observations(1).items()}
    for deterministic in (True, False):
        action = policy.compute_action(observation, actor_id=ACTOR, deterministic=deterministic)
        for head in ("move", "use", "tune"):
            assert HEADS[head].contains(action[head])
        assert action["steer"].shape == (2,)


def test_logits_that_are_not_finite_are_named():
    policy = flatten_concat()
    observation = observations(4)
    observation["position"][2, 0] = np.nan
    with pytest.raises(NonFiniteError, match=r"networks\[0\].*`move`.*row 2 of 4"):
        policy.compute_actions(observation, ACTOR)
    with torch.no_grad():
        policy.networks[0].heads[1].bias[0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"networks\[0\].*`steer`.*row 0 of 4"):
        policy.compute_actions(observations(4), ACTOR)


def test_a_row_without_valid_action_is_named():
    fill = torch.finfo(torch.float32).min
    policy = policy_with(FixedLogits(piece=[fill, fill]), spaces.Dict({"piece": spaces.Discrete(2)}))
    with pytest.raises(EnvironmentContractError, match="`piece`"):
        policy.compute_actions({"observation": np.zeros((1, 1), np.float32)}, ACTOR)


def test_minus_infinity_masks_a_choice():
    policy = policy_with(FixedLogits(piece=[-torch.inf, 0.0]), spaces.Dict({"piece": spaces.Discrete(2)}))
    drawn = policy.compute_actions({"observation": np.zeros((50, 1), np.float32)}, ACTOR)["piece"]
    assert drawn.tolist() == [1] * 50


def test_candidates_are_ranked_by_their_joint_probability():
    heads = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)})
    network = FixedLogits(a=np.log([0.9, 0.1]).astype("f").tolist(), b=np.log([0.4, 0.6]).astype("f").tolist())
    policy = policy_with(network, heads)
    actions, probabilities = policy.compute_top_action_candidates({"observation": np.zeros(1)}, 3, None, None, ACTOR)
    assert [(int(action["a"]), int(action["b"])) for action in actions] == [(0, 1), (0, 0), (1, 1)]
    assert probabilities == pytest.approx([0.54, 0.36, 0.06])
    everything, total = policy.compute_top_action_candidates({"observation": np.zeros(1)}, None, None, None)
    assert len(everything) == 4
    assert sum(total) == pytest.approx(1.0)


def test_candidates_of_vectors_of_choices_are_ranked_as_well():
    """0.8 * 0.7 for the choices (1, 0), then 0.8 * 0.2 for (1, 2); each times 0.9 for the set bit."""
    heads = spaces.Dict({"a": spaces.MultiDiscrete([[2, 3]]), "b": spaces.MultiBinary(1)})
    logits = {"a": np.log([0.2, 0.8, 0.7, 0.1, 0.2]).astype("f").tolist(), "b": [float(np.log(9.0))]}
    policy = policy_with(FixedLogits(**logits), heads)
    actions, probabilities = policy.compute_top_action_candidates({"observation": np.zeros(1)}, 2, None, None, ACTOR)
    assert [action["a"].tolist() for action in actions] == [[[1, 0]], [[1, 2]]]
    assert [action["b"].tolist() for action in actions] == [[1], [1]]
    assert all(heads.contains({**action, "b": action["b"].astype(np.int8)}) for action in actions)
    assert probabilities == pytest.approx([0.504, 0.144])
    box = policy_with(FixedLogits(force=[0.0, 0.0]), spaces.Dict({"force": spaces.Box(-1, 1, (1,))}))
    with pytest.raises(ConfigError, match="Action head `force` is continuous; its actions cannot be ranked"):
        box.compute_top_action_candidates({"observation": np.zeros(1)}, 2, None, None, ACTOR)


def two_step_policy(separate=()):
    heads = spaces.Dict({"action": spaces.Discrete(2)})
    networks = {0: FixedLogits(action=[9.0, 0.0]), 1: FixedLogits(action=[0.0, 9.0])}
    if separate:
        networks = {0: networks[0], (1, 0): networks[1], (1, 1): FixedLogits(action=[9.0, 0.0])}
    return TorchPolicy(networks, DistributionMapper(heads, []), "cpu", list(separate))


def test_each_actor_has_its_network():
    observation = {"observation": np.zeros((1, 1), np.float32)}
    policy = two_step_policy()
    choices = [policy.compute_actions(observation, ActorID(key, 5), True)["action"].item() for key in (0, 1)]
    assert choices == [0, 1]
    separate = two_step_policy(separate=[1])
    choices = [separate.compute_actions(observation, ActorID(1, agent), True)["action"].item() for agent in (0, 1)]
    assert choices == [1, 0]
    assert separate.network_for(ActorID(1, 1)) is separate.networks[1, 1]


def test_unknown_actors_are_named():
    with pytest.raises(ConfigError, match=r"step key 2 is unknown.*0, 1"):
        two_step_policy().network_for(ActorID(2, 0))
    with pytest.raises(ConfigError, match=r"\(1, 7\) is unknown"):
        two_step_policy(separate=[1]).network_for(ActorID(1, 7))
    with pytest.raises(ConfigError, match="actor_id"):
        two_step_policy().network_for(None)


def test_outputs_that_are_no_action_heads_are_embeddings():
    policy = policy_with(
        FixedLogits(action=[0.0, 0.0], latent=[1.0, 2.0, 3.0]), spaces.Dict({"action": spaces.Discrete(2)})
    )
    output = policy.compute_substep_policy_output({"observation": torch.zeros(4, 1)}, ACTOR)
    assert list(output.action_logits) == ["action"]
    assert output.embedding_logits["latent"].shape == (4, 3)
    plain = flatten_concat().compute_substep_policy_output(observations(2), ACTOR)
    assert plain.embedding_logits is None


def test_a_network_without_action_heads_is_named():
    policy = policy_with(FixedLogits(akshun=[0.0, 0.0]), spaces.Dict({"action": spaces.Discrete(2)}))
    for call in (policy.compute_substep_policy_output, policy.compute_actions):
        with pytest.raises(ConfigError, match=r"akshun.*Expected some of: action"):
            call({"observation": np.zeros((1, 1), np.float32)}, ACTOR)


def test_a_record_gives_the_outputs_of_its_substeps():
    policy = two_step_policy()
    batch = {"observation": torch.zeros(5, 2, 1)}  # steps and environments
    record = StructuredSpacesRecord([SpacesRecord(ActorID(key, 0), observation=batch) for key in (0, 1)])
    output = policy.compute_policy_output(record, temperature=2.0)
    assert output.actor_ids() == [ActorID(0, 0), ActorID(1, 0)]
    assert [entropy.shape for entropy in output.entropies] == [(5, 2)] * 2
    actions = [{"action": torch.ones(5, 2)}, {"action": torch.ones(5, 2)}]
    first, second = output.joint_log_probs_for_actions(actions)
    assert torch.allclose(second - first, torch.tensor(4.5))  # the logits differ by 9, halved
    assert torch.equal(output.log_probs_for_actions(actions)[0]["action"], first)
    assert torch.equal(output[0].entropy, output.prob_dist[0].joint_entropy())


def test_weights_that_do_not_fit_change_nothing_and_are_listed():
    policy = flatten_concat()
    before = copy.deepcopy(policy.state_dict())
    bad = copy.deepcopy(before)
    bad["policies"][0]["heads.0.bias"] = torch.zeros(9)
    bad["policies"][0]["surplus"] = bad["policies"][0].pop("heads.1.bias")
    with pytest.raises(CheckpointError) as error:
        policy.load_state_dict(bad)
    for expected in (
        "`heads.0.bias` is (9,), the model has (3,)",
        "`heads.1.bias` is missing",
        "`surplus` is left over",
    ):
        assert expected in str(error.value)
    for name, tensor in policy.state_dict()["policies"][0].items():
        assert torch.equal(tensor, before["policies"][0][name])
    with pytest.raises(CheckpointError, match="no `policies`"):
        policy.load_state_dict({"critics": {}})


def test_cuda_without_a_device_is_an_error_unless_it_is_the_default(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "coda"):
        with pytest.raises(ConfigError, match=f"device: '{device}'"):
            two_step_policy().to(device)
    with caplog.at_level("INFO"):
        assert resolve_device("cuda", "algorithm.device", default="cuda") == "cpu"
    assert "algorithm.device: the default cuda needs a CUDA device" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_network_used_twice_counts_once():
    network = FixedLogits(action=[0.0, 0.0])
    policy = TorchPolicy(
        {0: network, 1: network}, DistributionMapper(spaces.Dict({"action": spaces.Discrete(2)}), []), "cpu"
    )
    assert len(policy.parameters()) == 1
    assert policy.num_params == 2


@pytest.mark.parametrize(
    ("network", "n_threads"),
    [(nn.Linear(256, 256), 1), (nn.Linear(256, 257), 2), (nn.Conv2d(1, 1, 2), 2)],
    ids=["small", "large", "convolution"],
)
def test_networks_of_small_dense_layers_learn_with_one_thread(
    network: nn.Module, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, before_learning = torch.get_num_threads(), 2
    torch.set_num_threads(before_learning)
    try:
        with threads_for(network.parameters()):
            assert torch.get_num_threads() == n_threads
        assert torch.get_num_threads() == before_learning
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with threads_for(network.parameters()):
            assert torch.get_num_threads() == before_learning
    finally:
        torch.set_num_threads(before)
