"""The life cycle of actor-critic runs, on CartPole with tiny networks."""

import copy
import math
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchSharedStateCritic
from maze.core.errors import CheckpointError, ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsWriter, StatsContext, register_log_stats_writer
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.checkpoint import load_state, save_state
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet, FlattenConcatStateValueNet
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.actor_critic.actor_critic_events import ActorCriticEvents
from maze.train.trainers.common.actor_critic.actor_critic_trainer import SurrogateLoss
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
from maze.train.trainers.ppo.ppo_trainer import PPO
from maze.train.utils.run_process import TrainingInterrupted

TRAINERS = {A2C: A2CAlgorithmConfig, PPO: PPOAlgorithmConfig}


class Net(nn.Module):
    def __init__(self, key, n_outputs):
        super().__init__()
        self.key = key
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, n_outputs))

    def forward(self, x):
        return {self.key: self.net(x["observation"])}


def make_env():
    return GymMazeEnv("CartPole-v1")


def make_model(seed=0):
    torch.manual_seed(seed)
    env = make_env()
    mapper = DistributionMapper(action_space=env.action_space, distribution_mapper_config={})
    policy = TorchPolicy({0: Net("action", 2)}, mapper, "cpu")
    policy.seed(seed)
    critic = TorchSharedStateCritic({0: Net("value", 1)}, env.observation_spaces_dict, "cpu", False)
    return TorchActorCritic(policy, critic, "cpu")


def make_trainer(
    trainer_class=PPO, *, env=None, evaluator=None, selection=None, checkpoint_file=None, model=None, seed=7, **config
):
    values = {"n_epochs": 2, "epoch_length": 2, "n_rollout_steps": 8, "lr": 0.01, **config}
    if trainer_class is PPO:
        values = {"batch_size": 8, "n_optimization_epochs": 2, **values}
    if env is None:
        env = SequentialVectorEnv([make_env] * 2)
        env.seed([1, 2])
    model = model or make_model()
    return trainer_class(
        algorithm_config=trainer_class.config_class(**values),
        rollout_generator=RolloutGenerator(env),
        evaluator=evaluator,
        model=model,
        model_selection=selection,
        seed=seed,
        checkpoint_file=checkpoint_file,
    )


def make_evaluator(selection=None, n_episodes=2):
    env = SequentialVectorEnv([make_env] * 2)
    env.seed([11, 12])
    return RolloutEvaluator(env, n_episodes, selection)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- reproducibility --------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_two_runs_with_the_same_seeds_are_bit_identical(trainer_class):
    results = []
    for _ in range(2):
        trainer = make_trainer(trainer_class, evaluator=make_evaluator(), max_grad_norm=0.5)
        trainer.train()
        results.append(weights(trainer.model))
    assert same(*results)
    assert not same(results[0], weights(make_model()))


class EvaluatesAgain(A2C):
    learns_at_once = False


def test_outputs_kept_from_the_valuation_of_a_rollout_learn_the_same_as_new_ones():
    results = []
    # once in each of three updates, and once more, as long as it is unknown whether the critic shares embeddings
    for trainer_class, n_evaluations in ((A2C, 3), (EvaluatesAgain, 4)):
        model = make_model()
        shapes = {"observation": (4,)}
        torch.manual_seed(0)
        policy = FlattenConcatPolicyNet(shapes, {"action": (2,)}, hidden_units=[8], non_lin=nn.Tanh)
        critic = FlattenConcatStateValueNet(shapes, hidden_units=[8], non_lin=nn.Tanh)
        env_spaces = make_env().observation_spaces_dict
        model = TorchActorCritic(
            TorchPolicy({0: policy}, model.policy.distribution_mapper, "cpu"),
            TorchSharedStateCritic({0: critic}, env_spaces, "cpu", False),
            "cpu",
        )
        model.policy.seed(0)
        evaluated = []
        policy.register_forward_hook(lambda *_, found=evaluated: found.append(1))
        trainer = make_trainer(trainer_class, model=model, n_epochs=1, epoch_length=3, max_grad_norm=0.5)
        trainer.train()
        n_acted = 8  # a network with hooks also acts in torch
        assert len(evaluated) == 3 * n_acted + n_evaluations
        results.append(weights(model))
    assert same(*results)


def test_another_seed_shuffles_minibatches_differently():
    results = []
    for seed in (1, 2):
        trainer = make_trainer(PPO, seed=seed)
        trainer.train()
        results.append(weights(trainer.model))
    assert not same(*results)


def test_training_is_independent_of_the_placement_of_environments():
    results = []
    for env_class in (SequentialVectorEnv, SubprocVectorEnv):
        env = env_class([make_env] * 2)
        try:
            env.seed([1, 2])
            trainer = make_trainer(PPO, env=env)
            trainer.train()
            results.append(weights(trainer.model))
        finally:
            env.close()
    assert same(*results)


# -- epochs --------------------------------------------------------------------------------


class Recorder(LogStatsWriter):
    def __init__(self):
        self.rows = []

    def write(self, path, step, stats):
        self.rows += [(path, step, key, value) for key, value in stats.items()]


@pytest.fixture
def recorder():
    with StatsContext():
        writer = Recorder()
        register_log_stats_writer(writer)
        yield writer


def event_rows(recorder, step):
    return [
        (key.event.__name__, key.group)
        for path, at, key, _ in recorder.rows
        if path == "train" and at == step and hasattr(ActorCriticEvents, key.event.__name__)
    ]


def test_every_epoch_reports_the_documented_statistics_in_order(recorder):
    make_trainer(A2C).train()
    expected = [
        ("time_rollout", None),
        ("learning_rate", None),
        ("policy_loss", (0,)),
        ("policy_grad_norm", (0,)),
        ("policy_entropy", (0,)),
        ("critic_value", (0,)),
        ("critic_value_loss", (0,)),
        ("critic_grad_norm", (0,)),
        ("time_update", None),
    ]
    assert event_rows(recorder, step=1) == expected
    assert event_rows(recorder, step=2) == [("time_epoch", None), *expected]
    assert all(
        math.isfinite(value) for _, _, key, value in recorder.rows if hasattr(ActorCriticEvents, key.event.__name__)
    )


def test_evaluations_come_before_each_epoch_and_at_the_end():
    calls = []

    class Counting(RolloutEvaluator):
        def evaluate(self, policy):
            calls.append(trainer.epoch)

    trainer = make_trainer(evaluator=Counting(None, 1, None), n_epochs=3)
    trainer.train()
    assert calls == [0, 1, 2, 3]


def test_number_of_epochs_can_be_given_to_train():
    trainer = make_trainer(n_epochs=5)
    trainer.train(n_epochs=1)
    assert trainer.epoch == 1


def test_early_stopping_ends_a_run_without_limit(capsys):
    class NeverBetter(RolloutEvaluator):
        def evaluate(self, policy):
            selection.update(1.0)

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    selection = BestModelSelection(None, None)
    trainer = make_trainer(evaluator=NeverBetter(None, 1, selection), selection=selection, n_epochs=0, patience=3)
    trainer.train()
    assert trainer.epoch == 3  # the evaluations before epochs 2, 3 and 4 were no better than the first
    assert "early stopping" in capsys.readouterr().out
    state = trainer.training_state()
    trainer.train()
    assert trainer.epoch == 6, "a further call counts patience anew"
    trainer.resume(state, "the stopped run")
    trainer.train()
    assert trainer.epoch == 3, "a resumed run remains stopped"


def test_without_evaluator_the_training_episodes_select_the_model():
    selection = BestModelSelection(None, None)
    trainer = make_trainer(selection=selection, n_rollout_steps=60)
    trainer.train()
    assert selection.n_updates == 2
    assert 5 < selection.best_reward < 200


def test_an_evaluator_without_model_selection_reports_to_that_of_the_trainer():
    selection = BestModelSelection(None, None)
    trainer = make_trainer(evaluator=make_evaluator(), selection=selection, n_epochs=1)
    trainer.train()
    assert selection.n_updates == 2
    own = BestModelSelection(None, None)
    assert make_trainer(evaluator=make_evaluator(own), selection=selection).evaluator.model_selection is own


def test_policy_can_be_evaluated_as_documented():
    evaluator = make_evaluator(BestModelSelection(None, None))
    trainer = make_trainer(evaluator=evaluator)
    trainer.evaluate(deterministic=True, repeats=2)
    assert evaluator.model_selection.n_updates == 2
    assert evaluator.deterministic is False
    with pytest.raises(ConfigError, match="no evaluator"):
        make_trainer().evaluate()


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_in_burn_in_epochs_only_the_critic_learns(trainer_class):
    trainer = make_trainer(trainer_class, critic_burn_in_epochs=1, n_epochs=1)
    policy, critic = weights(trainer.model.policy), weights(trainer.model.critic)
    trainer.train()
    assert same(weights(trainer.model.policy), policy)
    assert not same(weights(trainer.model.critic), critic)
    trainer.train(n_epochs=1)  # trains on
    assert trainer.epoch == 2
    assert not same(weights(trainer.model.policy), policy)


def test_learning_rate_follows_its_schedule():
    rates = []

    class Recording(PPO):
        def _optimize(self, batch):
            rates.append(self.optimizer.lr)

    trainer = make_trainer(PPO)
    recording = Recording(
        PPOAlgorithmConfig(n_epochs=2, epoch_length=2, n_rollout_steps=4, lr=0.1, lr_schedule="linear"),
        trainer.rollout_generator,
        None,
        make_model(),
        None,
    )
    recording.train()
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
    with pytest.raises(ConfigError, match=r"algorithm\.lr_schedule"):
        recording.train(n_epochs=0)


def test_large_gradients_are_scaled_down_before_the_step():
    trainer = make_trainer(A2C, max_grad_norm=0.001)
    applied = []
    step = trainer.optimizer.step

    def spy(frozen=()):
        applied.append(torch.stack(list(trainer.optimizer.gradient_norms().values())).norm().item())
        step(frozen)

    trainer.optimizer.step = spy
    trainer.train(n_epochs=1)
    assert applied == pytest.approx([0.001] * len(applied), rel=1e-3)


def test_a_rollout_is_used_no_further_when_the_policy_has_moved_too_far():
    steps = []
    for target_kl in (None, 1e-6):  # float32 tells equal policies apart by about 1e-7
        trainer = make_trainer(PPO, target_kl=target_kl)
        taken = []
        step = trainer.optimizer.step
        trainer.optimizer.step = lambda frozen=(), step=step, taken=taken: (taken.append(1), step(frozen))
        trainer.train(n_epochs=1)
        steps.append(len(taken))
    assert steps[0] == 2 * 2 * 2  # updates, passes, minibatches
    assert 2 <= steps[1] < steps[0]


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:1"])
def test_a_device_that_is_unknown_or_not_there_is_refused_by_its_key(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"algorithm\.device: '{device}'"):
        make_trainer(device=device)


def test_a_single_environment_is_trained_in_as_well():
    trainer = make_trainer()
    single = A2C(
        A2CAlgorithmConfig(n_epochs=1, epoch_length=1, n_rollout_steps=4),
        RolloutGenerator(make_env()),
        None,
        trainer.model,
        None,
    )
    single.train()
    assert single.epoch == 1


# -- faults --------------------------------------------------------------------------------


class BrokenAfter(gym.Env):
    """Gives a reward of NaN in its 20th step."""

    observation_space = gym.make("CartPole-v1").observation_space
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.n_steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        return np.zeros(4, np.float32), math.nan if self.n_steps == 20 else 1.0, False, False, {}


def test_a_reward_that_is_not_finite_is_named_before_any_parameter_changes(tmp_path):
    env = SequentialVectorEnv([make_env, lambda: GymMazeEnv(env=BrokenAfter())])
    env.seed([1, 2])
    trainer = make_trainer(env=env, checkpoint_file=tmp_path / "latest.pt", epoch_length=2)
    after_updates = []
    update = trainer._update

    def spy():
        update()
        after_updates.append(weights(trainer.model))

    trainer._update = spy
    message = r"Epoch 2, update 1: environment 1, tick 3 of 8.* 19 ticks after it was seeded with 2\): reward is nan"
    with pytest.raises(NonFiniteError, match=message):
        trainer.train()
    assert same(after_updates[-1], weights(trainer.model))
    (file,) = tmp_path.glob("non_finite_*.pt")
    reproduction = load_state(file)
    assert math.isnan(reproduction["rollout"]["rewards"][3, 1])
    assert load_state(tmp_path / "latest.pt")["epoch"] == 1  # of the last good epoch


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("policy", r"policy_loss of sub-step 0 is nan"),
        ("gradient", r"policy_grad_norm of sub-step 0 is (nan|inf)"),
    ],
)
def test_a_loss_or_gradient_that_is_not_finite_is_named_and_the_step_not_taken(tmp_path, broken, message):
    trainer = make_trainer(A2C, checkpoint_file=tmp_path / "latest.pt")
    loss = trainer._policy_loss

    def infect(log_prob, old_log_prob, advantage):
        if broken == "policy":
            return loss(log_prob, old_log_prob, advantage * math.nan)
        return SurrogateLoss((log_prob - log_prob.detach()).abs().sqrt().mean())  # 0, with an infinite gradient

    trainer._policy_loss = infect
    before = weights(trainer.model)
    with pytest.raises(NonFiniteError, match=f"Epoch 1, update 1: .*{message}.*the step was not applied"):
        trainer.train()
    assert same(weights(trainer.model), before)
    assert len(list(tmp_path.glob("non_finite_*.pt"))) == 1


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_update_with_its_state_saved(tmp_path, signum, status):
    trainer = make_trainer(checkpoint_file=tmp_path / "latest.pt", epoch_length=5)
    update = trainer._update

    def interrupted_update():
        if trainer.update == 1:
            os.kill(os.getpid(), signum)
        update()

    trainer._update = interrupted_update
    before = signal.getsignal(signum)
    with pytest.raises(TrainingInterrupted, match=r"epoch 1 after update 2.*latest.pt") as interruption:
        trainer.train()
    assert interruption.value.exit_status == status
    assert signal.getsignal(signum) is before
    state = load_state(tmp_path / "latest.pt")
    assert (state["epoch"], state["update"]) == (0, 2)
    trainer._update = update
    trainer.train()  # does what was left
    assert trainer.epoch == 2


# -- state --------------------------------------------------------------------------------


def test_the_latest_state_holds_the_complete_run(tmp_path):
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), None)
    model = make_model()
    selection.model = model
    trainer = make_trainer(
        evaluator=make_evaluator(), selection=selection, checkpoint_file=tmp_path / "latest.pt", model=model
    )
    trainer.train()

    other_selection = BestModelSelection(None, None)
    other = make_trainer(selection=other_selection, model=make_model(5), seed=9)
    other_selection.model = other.model
    other.load_state(tmp_path / "latest.pt")
    assert same(weights(other.model), weights(trainer.model))
    assert other.epoch == trainer.epoch == 2
    assert torch.equal(other.generator.get_state(), trainer.generator.get_state())
    observation = {"observation": np.zeros((64, 4), np.float32)}
    actions = [t.model.policy.compute_actions(observation)["action"].copy() for t in (trainer, other)]
    assert np.array_equal(*actions)
    assert other_selection.best_reward == selection.best_reward
    for name, moments in trainer.optimizer.state_dict().items():
        assert torch.equal(moments["mean"], other.optimizer.state_dict()[name]["mean"])


def test_resumed_run_continues_at_the_interrupted_update(tmp_path):
    """Same collected data, so that the rest of the state decides: weights, moments, generators."""

    def run(trainer, n_epochs):
        rollouts = np.random.default_rng(trainer.epoch)

        def collect():
            columns = original()
            columns.rewards[:] = rollouts.random(columns.rewards.shape)
            return columns

        original, trainer._collect = trainer._collect, collect
        trainer.rollout_generator.env.seed([5, 6])
        trainer.rollout_generator.reset()
        trainer.train(n_epochs)
        trainer._collect = original

    whole = make_trainer(checkpoint_file=tmp_path / "latest.pt")
    run(whole, 1)
    resumed = make_trainer(model=make_model(3), seed=1)
    resumed.load_state(tmp_path / "latest.pt")
    run(whole, 1)
    run(resumed, 1)
    assert same(weights(whole.model), weights(resumed.model))


def test_weights_alone_can_be_loaded_also_of_a_policy_alone(tmp_path):
    source = make_model(3)
    save_state(tmp_path / "state_dict.pt", source.state_dict())
    save_state(tmp_path / "policy.pt", source.policy.state_dict())
    trainer = make_trainer()
    critic = weights(trainer.model.critic)
    trainer.load_state(str(tmp_path / "policy.pt"))
    assert same(weights(trainer.model.policy), weights(source.policy))
    assert same(weights(trainer.model.critic), critic)
    with (tmp_path / "state_dict.pt").open("rb") as file:
        trainer.load_state(file)
    assert same(weights(trainer.model), weights(source))
    assert trainer.epoch == 0


def test_weights_that_do_not_fit_leave_the_model_as_it_is(tmp_path):
    trainer = make_trainer()
    state = copy.deepcopy(trainer.state_dict())
    state["policies"][0]["net.0.weight"] = torch.zeros(8, 3)
    save_state(tmp_path / "state_dict.pt", state)
    before = weights(trainer.model)
    message = r"`policies` do not fit the model: 0: `net.0.weight` is \(8, 3\), the model has \(8, 4\)"
    with pytest.raises(CheckpointError, match=message):
        trainer.load_state(tmp_path / "state_dict.pt")
    assert same(weights(trainer.model), before)


def test_the_best_model_is_restored_after_training(tmp_path):
    model = make_model()
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), model)
    make_trainer(evaluator=make_evaluator(), selection=selection, model=model).train()
    selection.reset_to_best()
    assert same(weights(model), [t for n in load_state(tmp_path / "state_dict.pt").values() for t in n[0].values()])


def test_configuration_can_be_a_mapping():
    trainer = make_trainer()
    built = A2C({"n_epochs": 1, "lr": 0.5}, trainer.rollout_generator, None, trainer.model, None)
    assert built.config == A2CAlgorithmConfig(n_epochs=1, lr=0.5)
