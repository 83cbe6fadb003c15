"""Recurrent models in rollouts and in learning: the states that acted are the states that are learned from."""

import numpy as np
import pytest
import torch

from maze.core.agent.policy import HiddenStates
from maze.core.agent.returns import GAE
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.wrappers.gym_vector_env import GymBatch
from maze.perception.blocks.recurrent.recurrent_cell import PackedRows, SequenceRun, recurrent_cells, running
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.actor_critic.sequences import SequencedRollout
from maze.train.trainers.common.actor_critic.valuation import decisions_by_policy, value_rollout
from maze.train.trainers.impala.impala_trainer import IMPALA
from maze.train.trainers.ppo.ppo_trainer import PPO
from tests.train.parallelization.test_gym_vector_env import Counters
from tests.train.parallelization.toy_envs import (
    coming_and_going_env,
    counting_env,
    hierarchical_env,
    random_walk_env,
    two_step_env,
)
from tests.train.trainers.common.recurrent_models import SHARED, STEP_CRITIC, recurrent_model

ENDINGS = ((3, "terminated"), (4, "truncated"), (9, "truncated"), (1, "terminated"))
ENVS = {
    "flat": lambda: counting_env(ENDINGS),
    "sub-steps": two_step_env,
    "cut off in mid-step": lambda: two_step_env(length=4, breaks_at=2),
    "hierarchy": hierarchical_env,
    "agents come and go": coming_and_going_env,
    "continuous": random_walk_env,
    "episodes begin with the step after": None,
}
every_kind = pytest.mark.parametrize("kind", ENVS)
LENGTHS = pytest.mark.parametrize("length", [0, 3])


def vector_env_of(kind, n_envs):
    make = ENVS[kind]
    return SequentialVectorEnv([make] * n_envs) if make else BatchedVectorEnv(GymBatch(Counters(n_envs)))


def generator_of(kind, n_envs=3):
    env = vector_env_of(kind, n_envs)
    env.seed(list(range(n_envs)))
    return RolloutGenerator(env, record_logits=True)


def memory_of(model, n_envs=3):
    return HiddenStates(n_envs, model.critic.state_sizes)


@LENGTHS
@every_kind
def test_unrolled_policy_gives_the_logits_of_acting(kind, length):
    generator = generator_of(kind)
    model = recurrent_model(generator.env)
    columns = generator.allocate(5, model.policy)
    memory = memory_of(model)
    for _ in range(4):  # rollouts begin and end in the middle of episodes
        generator.collect(model.policy, columns)
        sequenced = SequencedRollout(model, columns, memory, length)
        with torch.no_grad():
            for substeps, index in decisions_by_policy(columns, [], "cpu"):
                sequences, runs = sequenced.sequences(substeps, index)
                assert sorted(sequences.order) == list(range(len(sequences.order)))
                assert not length or sequences.lengths.max() <= length
                output, _ = model.evaluate(substeps, runs=runs)
                again, _ = model.evaluate(substeps, runs=sequences.all_at_once("cpu"))
                for substep, found, once_more in zip(substeps, output.action_logits, again.action_logits, strict=True):
                    for head, expected in substep.logits.items():
                        torch.testing.assert_close(found[head], expected, rtol=1e-4, atol=1e-5)
                        torch.testing.assert_close(once_more[head], expected, rtol=1e-4, atol=1e-5)


@every_kind
def test_actions_of_a_recurrent_policy_depend_on_earlier_observations(kind):
    """The law above would hold for a policy that forgets everything."""
    generator = generator_of(kind)
    model = recurrent_model(generator.env)
    columns = generator.collect(model.policy, generator.allocate(8, model.policy))
    differences = []
    with torch.no_grad():
        for substeps, index in decisions_by_policy(columns, [], "cpu"):
            runs = SequencedRollout(model, columns, memory_of(model), 1).sequences(substeps, index)[0]
            for states in (*runs.policy_states, *runs.critic_states):
                for tensor in states.values():
                    tensor.zero_()
            output, _ = model.evaluate(substeps, runs=runs.all_at_once("cpu"))
            for substep, found in zip(substeps, output.action_logits, strict=True):
                differences += [(found[head] - substep.logits[head]).abs().max() for head in found]
    assert max(differences) > 0.01


@LENGTHS
@pytest.mark.parametrize("shared_embedding", [False, True])
@pytest.mark.parametrize("kind", ["flat", "sub-steps", "hierarchy", "episodes begin with the step after"])
def test_the_value_after_a_rollout_is_that_of_the_next_ones_first_step(kind, shared_embedding, length):
    generator = generator_of(kind)
    model = recurrent_model(generator.env, shared_embedding=shared_embedding)
    columns, memory = generator.allocate(4, model.policy), memory_of(model)
    following = Recorded(0.9, 0.9)
    expected = None
    for _ in range(3):
        generator.collect(model.policy, columns)
        value_rollout(model, columns, following, memory, length)
        streams = following.streams
        if expected is not None:
            torch.testing.assert_close(streams.values[0][0], expected, rtol=1e-4, atol=1e-5)
        expected = streams.next_values[0][-1].clone()
        ended = torch.from_numpy(columns.terminated | columns.truncated)[-1]
        if ended.any():  # what follows an end belongs to the episode that is over
            expected = None


class Recorded(GAE):
    """GAE that remembers what it was given."""

    def __call__(self, streams):
        object.__setattr__(self, "streams", streams)
        return super().__call__(streams)


def test_a_truncated_episode_is_bootstrapped_from_its_own_last_observation():
    generator = generator_of("flat", 1)
    model = recurrent_model(generator.env)
    columns = generator.allocate(14, model.policy)
    generator.collect(model.policy, columns)  # episodes of 3, 4 (cut off) and 9 steps
    returns = Recorded(0.9, 0.9)
    value_rollout(model, columns, returns, memory_of(model, 1))
    (entry,) = columns.final_observations
    assert entry.tick == 6
    observations = columns.substeps[0].observations
    seen = {key: np.concatenate([array[3:7, 0], entry.observation[key][None]]) for key, array in observations.items()}
    network = model.critic.networks[0]
    cells = recurrent_cells(network)
    states = {key: torch.zeros(1, cell.state_size) for key, cell in cells.items()}
    packed = PackedRows(np.arange(5), np.array([0]), np.array([5]), "cpu")
    with torch.no_grad(), running(cells.values(), SequenceRun([packed], states)):
        by_hand = network({key: torch.from_numpy(array).float() for key, array in seen.items()})["value"]
    torch.testing.assert_close(returns.streams.next_values[0][6, 0], by_hand[4, 0])
    torch.testing.assert_close(returns.streams.values[0][3:7, 0], by_hand[:4, 0])


def batch_of(kind, length=0, n_steps=20):
    generator = generator_of(kind)
    model = recurrent_model(generator.env)
    columns = generator.collect(model.policy, generator.allocate(n_steps, model.policy))
    return model, columns, value_rollout(model, columns, GAE(0.9, 0.9), memory_of(model), length)


@pytest.mark.parametrize("kind", ["flat", "hierarchy", "agents come and go"])
def test_minibatches_consist_of_whole_sequences_and_leave_none_out(kind):
    model, _, batch = batch_of(kind, length=4)
    generator = torch.Generator().manual_seed(0)
    minibatches = list(batch.shuffled(16, generator))
    assert len(minibatches) > 2
    assert sum(minibatch.n_rows for minibatch in minibatches) == batch.n_rows
    advantages = torch.cat([part.advantages[0] for each in minibatches for part in each.parts])
    assert torch.equal(advantages.sort()[0], torch.cat([part.advantages[0] for part in batch.parts]).sort()[0])
    for part in [part for minibatch in minibatches for part in minibatch.parts]:
        with torch.no_grad():
            output, critic = part.evaluate(model)
        log_probs = output.joint_log_probs_for_actions([one.action for one in part.substeps])
        torch.testing.assert_close(log_probs, part.old_log_probs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(critic.detached_values, part.old_values, rtol=1e-4, atol=1e-5)


def test_gradients_flow_back_through_a_sequence_and_no_further():
    model, _, batch = batch_of("flat", length=4, n_steps=12)
    (part,) = batch.parts
    for observation in [substep.observation for substep in part.substeps]:
        for key in observation:
            observation[key] = observation[key].float().requires_grad_()
    _, critic = part.evaluate(model)
    order, starts, lengths = part.sequences.order, part.sequences.starts, part.sequences.lengths
    longest = int(np.argmax(lengths))
    own = order[starts[longest] : starts[longest] + lengths[longest]]
    assert len(own) == 4
    (gradient,) = torch.autograd.grad(critic.values[0][own[-1]], part.substeps[0].observation["count"])
    reached = np.flatnonzero(gradient.abs().sum(-1).numpy())
    assert sorted(reached) == sorted(own)


def test_unknown_rewards_shorten_sequences():
    _, columns, batch = batch_of("agents come and go", length=3)
    n_acted = sum(int(substep.valid.sum()) for substep in columns.substeps.values())
    assert batch.n_rows < n_acted
    for part in batch.parts:
        assert sorted(part.sequences.order) == list(range(part.n_rows))
        assert part.sequences.lengths.sum() == part.n_rows
        assert part.sequences.lengths.min() > 0


CONFIG = {"n_epochs": 1, "epoch_length": 2, "patience": 0, "n_rollout_steps": 6, "lr": 0.01}


def trained(trainer_class, env, critic=STEP_CRITIC, **settings):
    env.seed([1, 2])
    model = recurrent_model(env, critic)
    trainer = trainer_class({**CONFIG, **settings}, RolloutGenerator(env), None, model, None, seed=5)
    before = [parameter.clone() for parameter in model.parameters()]
    trainer.train()
    assert all((old != new).any() for old, new in zip(before, model.parameters(), strict=True))
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


PPO_SETTINGS = {"batch_size": 4, "n_optimization_epochs": 1, "sequence_length": 4}


@every_kind
def test_ppo_learns_in_environments_of_every_kind(kind):
    trained(PPO, vector_env_of(kind, 2), **PPO_SETTINGS)


@pytest.mark.parametrize("kind", ["flat", "episodes begin with the step after"])
def test_with_one_actor_a_shared_critic_learns_what_its_own_one_does(kind):
    shared, own = (trained(PPO, vector_env_of(kind, 2), critic, **PPO_SETTINGS) for critic in (SHARED, STEP_CRITIC))
    torch.testing.assert_close(shared, own)


@pytest.mark.parametrize("kind", ["sub-steps", "agents come and go"])
def test_a2c_learns_the_same_twice(kind):
    first, second = (trained(A2C, SequentialVectorEnv([ENVS[kind]] * 2)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "agents come and go"])
def test_worker_processes_learn_the_same(kind):
    env = SubprocVectorEnv([ENVS[kind]] * 2)
    try:
        in_processes = trained(PPO, env, **PPO_SETTINGS)
    finally:
        env.close()
    assert torch.equal(in_processes, trained(PPO, SequentialVectorEnv([ENVS[kind]] * 2), **PPO_SETTINGS))


def test_unsupported_training_setups_are_refused_in_one_sentence():
    env = SequentialVectorEnv([ENVS["flat"]] * 2)
    with pytest.raises(ConfigError, match="IMPALA does not learn networks that carry hidden states"):
        IMPALA({"n_epochs": 1}, RolloutGenerator(env), None, recurrent_model(env), None)
    with pytest.raises(ConfigError, match="kl_to_initial_coef"):
        PPO({**CONFIG, "kl_to_initial_coef": 0.1}, RolloutGenerator(env), None, recurrent_model(env), None)
    env = SequentialVectorEnv([ENVS["hierarchy"]] * 2)
    trainer = PPO(CONFIG, RolloutGenerator(env), None, recurrent_model(env, critic=SHARED), None)
    with pytest.raises(ConfigError, match="shared critic with hidden states"):
        trainer.train()


@pytest.mark.parametrize(("kind", "critic"), [("flat", STEP_CRITIC), ("sub-steps", STEP_CRITIC), ("sub-steps", SHARED)])
def test_two_rollouts_are_valued_as_one_of_their_length(kind, critic):
    def values(n_steps):
        generator = generator_of(kind)
        model = recurrent_model(generator.env, critic=critic)
        columns, memory, returns = generator.allocate(n_steps, model.policy), memory_of(model), Recorded(0.9, 0.9)
        found = []
        for _ in range(12 // n_steps):
            generator.collect(model.policy, columns)
            value_rollout(model, columns, returns, memory)
            found.append(torch.stack(returns.streams.values, -1))
        return torch.cat(found)

    torch.testing.assert_close(values(4), values(12), rtol=1e-4, atol=1e-5)


def test_actor_absent_from_a_rollout_keeps_its_hidden_state_until_the_episode_ends():
    """In a hierarchy a single step at a time is the hardest case: the one to act next has not acted in the rollout."""

    def valued(n_steps):
        generator = generator_of("hierarchy", 1)
        model = recurrent_model(generator.env)
        columns, memory, returns = generator.allocate(n_steps, model.policy), memory_of(model, 1), Recorded(0.9, 0.9)
        found = []
        for _ in range(60 // n_steps):
            generator.collect(model.policy, columns)
            value_rollout(model, columns, returns, memory)
            streams = returns.streams
            following = torch.where(streams.terminated, 0.0, streams.next_values[0])
            found.append(torch.stack([streams.values[0], following], -1))
        return torch.cat(found)

    torch.testing.assert_close(valued(1), valued(60), rtol=1e-4, atol=1e-5)
