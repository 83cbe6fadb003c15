"""What all trainers share: evaluations, the kept model, what is said about the progress."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.console.runs import TrainingProgress
from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.checkpoint import load_state
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common import trainer as trainer_module
from maze.train.trainers.common.actor_critic.valuation import PolicyBatch, RolloutBatch, SubstepRows
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.ppo.ppo_trainer import PPO
from tests.train.parallelization.toy_envs import counting_env, hierarchical_env
from tests.train.trainers.common.test_structured_training import build_model
from tests.train.trainers.common.test_structured_training import train as train_structured

ENDLESS = partial(counting_env, ((100_000, "terminated"),))


def build_trainer(make_env=counting_env, evaluation=None, directory=None, dump_interval=None, **config):
    """A tiny A2C training.

    :param evaluation: Arguments of the evaluator; None: there is none.
    """
    env = SequentialVectorEnv([make_env] * 2)
    env.seed([0, 1])
    model = build_model(env, "Shared")
    selection = evaluator = checkpoint_file = None
    if directory is not None:
        selection = BestModelSelection(str(directory / "state_dict.pt"), model, dump_interval)
        checkpoint_file = directory / "latest.pt"
    if evaluation is not None:
        eval_env = SequentialVectorEnv([make_env])
        eval_env.seed([2])
        evaluator = RolloutEvaluator(eval_env, model_selection=selection, **evaluation)
    values = {"n_epochs": 3, "epoch_length": 1, "n_rollout_steps": 5, "lr": 0.01, **config}
    return A2C(values, RolloutGenerator(env), evaluator, model, selection, seed=0, checkpoint_file=checkpoint_file)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in flat(trainer.model.state_dict())}


def flat(state, prefix=""):
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        else:
            yield from flat(value, f"{prefix}{name}/")


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_epochs_in_which_no_episode_ends_are_no_evaluations(tmp_path, caplog):
    trainer = build_trainer(ENDLESS, directory=tmp_path, n_epochs=6, patience=2)
    trainer.train()
    assert trainer.epoch == 6
    assert trainer.model_selection.n_updates == 0
    assert are_equal(dict(flat(load_state(tmp_path / "state_dict.pt"))), weights(trainer))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["No evaluation has found a best model"]


@pytest.mark.parametrize("evaluation", [None, {"n_episodes": 2}])
def test_a_run_with_a_best_model_restores_it(tmp_path, caplog, evaluation):
    trainer = build_trainer(directory=tmp_path, evaluation=evaluation)
    trainer.train()
    assert trainer.model_selection.best_reward > 0
    assert not caplog.records


@pytest.mark.parametrize(("evaluation", "expected"), [(None, [1, 2, 3]), ({"n_episodes": 2}, [1, 2, 3, 3])])
def test_the_last_epoch_is_saved_before_its_evaluation_and_at_the_end(tmp_path, monkeypatch, evaluation, expected):
    trainer, saved = build_trainer(directory=tmp_path, evaluation=evaluation), []
    write = trainer_module.save_state
    monkeypatch.setattr(
        trainer_module, "save_state", lambda file, state: (write(file, state), saved.append(state["epoch"]))
    )
    trainer.train()
    assert saved == expected
    assert load_state(tmp_path / "latest.pt")["is_finished"]


def test_learning_is_independent_of_the_evaluation():
    found = []
    for evaluation in (
        None,
        {"n_episodes": 2, "deterministic": True},
        {"n_episodes": 2, "deterministic": False},
        {"n_episodes": 5, "deterministic": False},
    ):
        trainer = build_trainer(evaluation=evaluation)
        trainer.train()
        found.append(weights(trainer))
    assert all(are_equal(found[0], other) for other in found[1:])


def test_numbered_models_are_those_of_their_epochs(tmp_path):
    trainer = build_trainer(directory=tmp_path, evaluation={"n_episodes": 1}, dump_interval=2, n_epochs=5)
    trainer.train()
    assert len(list(tmp_path.glob("state_dict-epoch_*.pt"))) == 2
    for epoch in (2, 4):
        shorter = build_trainer(n_epochs=epoch)
        shorter.train()
        assert are_equal(dict(flat(load_state(tmp_path / f"state_dict-epoch_{epoch}.pt"))), weights(shorter))


def test_resumed_run_without_remaining_epochs_is_reported(tmp_path, capsys):
    build_trainer(directory=tmp_path).train()
    assert "nothing left" not in capsys.readouterr().out
    for n_epochs, n_trained in ((2, 3), (3, 3), (4, 4)):
        resumed = build_trainer(n_epochs=n_epochs)
        resumed.resume(load_state(tmp_path / "latest.pt"), tmp_path / "latest.pt")
        resumed.train()
        assert resumed.epoch == n_trained
        is_said = f"nothing left to train: 3 of algorithm.n_epochs={n_epochs} are done" in capsys.readouterr().out
        assert is_said == (n_epochs <= 3)


@pytest.mark.parametrize(
    ("steps_per_update", "remaining", "ending"),
    [(10, 0, " environment steps/s)"), (0, 0, "s"), (0, 2, "s (about 0 s left)"), (10, 2, "steps/s, about 0 s left)")],
)
def test_the_rate_is_that_of_environment_steps_where_there_are_any(steps_per_update, remaining, ending, capsys):
    progress = TrainingProgress(3, 2, steps_per_update)
    progress.start_epoch(0)
    progress.update_done()
    progress.epoch_done(1, 3 - remaining)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.endswith(ending)
    assert line.count("environment steps") == bool(steps_per_update)


def part_of(n_rows, offset):
    rows = torch.arange(offset, offset + n_rows)
    return PolicyBatch([SubstepRows(ActorID(0, 0), {"o": rows}, {"a": rows})], *([[rows]] * 4))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 30), st.integers(0, 9))
def test_minibatches_are_never_empty_and_have_every_row_once(sizes, batch_size, n_more_steps):
    parts = [part_of(size, 10 * index) for index, size in enumerate(sizes)]
    batch = RolloutBatch(parts, max(sizes) + n_more_steps)
    minibatches = list(batch.shuffled(batch_size, torch.Generator()))
    assert all(minibatch.n_rows > 0 for minibatch in minibatches)
    found = [row for minibatch in minibatches for part in minibatch.parts for row in part.advantages[0].tolist()]
    assert sorted(found) == sorted(row for part in parts for row in part.advantages[0].tolist())


@given(st.integers(1, 5), st.integers(0, 3000))
@settings(deadline=None)
def test_large_minibatches_have_few_sizes_and_leave_out_less_than_one_unit(n, n_more_rows):
    n_rows = 1024 * n + n_more_rows
    minibatches = list(part_of(n_rows, 0).minibatches(n, torch.Generator()))
    sizes = [minibatch.n_rows for minibatch in minibatches]
    assert all(size % 64 == 0 for size in sizes)
    assert max(sizes) - min(sizes) in {0, 64}
    rows = torch.cat([minibatch.advantages[0] for minibatch in minibatches])
    assert n_rows - 64 < len(rows) == len(rows.unique()) <= n_rows


def test_ppo_learns_from_single_steps_where_each_step_is_of_another_policy():
    trainer, before = train_structured(hierarchical_env, "Step", PPO, batch_size=1)
    assert all(not torch.equal(p, before[id(p)]) for p in trainer.model.policy.parameters())
