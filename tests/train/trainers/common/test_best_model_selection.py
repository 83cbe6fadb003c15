"""The best model: kept exactly, written safely."""

import math

import pytest
import torch
from torch import nn

from maze.core.errors import CheckpointError
from maze.core.utils.checkpoint import load_state
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection, selected_score


def fill(model, value):
    with torch.no_grad():
        model.weight.fill_(value)


def test_the_best_model_is_announced_written_and_restored_exactly(tmp_path, capsys):
    model = nn.Linear(2, 1)
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), model)
    fill(model, 1.0)
    selection.update(28.1)
    fill(model, 2.0)
    selection.update(12.0)
    assert capsys.readouterr().out == "-> new overall best model 28.10000!\n"
    assert selection.last_improvement == 1
    assert torch.equal(load_state(tmp_path / "state_dict.pt")["weight"], torch.ones(1, 2))

    selection.reset_to_best()
    assert torch.equal(model.weight, torch.ones(1, 2))
    fill(model, 3.0)  # training goes on, the best stays what it was
    selection.reset_to_best()
    assert torch.equal(model.weight, torch.ones(1, 2))


def test_a_nan_score_is_never_the_best_and_causes_a_warning(caplog):
    selection = BestModelSelection(None, None)
    selection.update(math.nan)
    assert selection.best_reward == -math.inf
    selection.update(-5.0)
    selection.update(math.nan)
    assert selection.best_reward == -5.0
    assert selection.last_improvement == 1
    assert sum("NaN" in record.message for record in caplog.records) == 2


def test_an_equal_evaluation_is_no_improvement_but_the_later_model_is_kept(tmp_path, capsys):
    model = nn.Linear(2, 1)
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), model)
    selection.update(1.0)
    capsys.readouterr()
    fill(model, 2.0)
    selection.update(1.0)
    assert selection.last_improvement == 1
    assert capsys.readouterr().out == ""
    assert torch.equal(load_state(tmp_path / "state_dict.pt")["weight"], torch.full((1, 2), 2.0))


def test_keep_latest_keeps_the_latest_model_and_patience_still_counts(tmp_path, capsys):
    model = nn.Linear(2, 1)
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), model)
    selection.keeps_latest = True
    for value, score in ((1.0, 5.0), (2.0, 4.0), (3.0, math.nan)):
        fill(model, value)
        selection.update(score)
    assert torch.equal(load_state(tmp_path / "state_dict.pt")["weight"], torch.full((1, 2), 2.0))
    assert (selection.best_reward, selection.last_improvement) == (5.0, 2)
    resumed = BestModelSelection(None, None)
    resumed.load_state_dict(selection.state_dict())
    assert [selected_score(each) for each in (selection, resumed)] == [4.0, 4.0], "that of the kept model"


def test_keep_latest_does_not_replace_a_model_that_violates_constraints_less(tmp_path):
    model = nn.Linear(2, 1)
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), model)
    selection.keeps_latest = True
    for value, score, violation in ((1.0, 1.0, 0.5), (2.0, 9.0, 0.0), (3.0, 8.0, 0.0), (4.0, 9.5, 0.1)):
        fill(model, value)
        selection.update_constrained(score, violation)
    assert torch.equal(load_state(tmp_path / "state_dict.pt")["weight"], torch.full((1, 2), 3.0))


def test_weights_are_written_in_intervals(tmp_path):
    model = nn.Linear(1, 1)
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), model, dump_interval=2)
    for epoch in range(1, 5):
        fill(model, float(epoch))
        selection.update(-float(epoch))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "state_dict-epoch_2.pt",
        "state_dict-epoch_4.pt",
        "state_dict.pt",
    ]
    assert load_state(tmp_path / "state_dict-epoch_4.pt")["weight"].item() == 4.0
    assert load_state(tmp_path / "state_dict.pt")["weight"].item() == 1.0


def test_weights_are_dumped_by_epoch_for_every_evaluation_interval(tmp_path):
    model = nn.Linear(1, 1)
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), model, dump_interval=2)
    selection.training_started()
    for epoch in range(1, 5):
        for part in (0.25, 0.75):
            fill(model, epoch - 1 + part)
            selection.update(-float(epoch))
        fill(model, float(epoch))
        selection.epoch_completed(epoch)
    for epoch in (2, 4):
        assert load_state(tmp_path / f"state_dict-epoch_{epoch}.pt")["weight"].item() == epoch
    assert len(list(tmp_path.iterdir())) == 3


def test_a_run_without_a_best_model_keeps_the_last_one(tmp_path, caplog):
    model = nn.Linear(1, 1)
    selection = BestModelSelection(str(tmp_path / "state_dict.pt"), model)
    selection.update(math.nan)
    for value in (3.0, 4.0):  # a run that goes on, and finds none either
        fill(model, value)
        selection.training_ended()
        assert load_state(tmp_path / "state_dict.pt")["weight"].item() == value
    assert "the weights of the end of the run are kept" in caplog.text
    selection.update(1.0)
    fill(model, 5.0)
    selection.training_ended()
    assert load_state(tmp_path / "state_dict.pt")["weight"].item() == 4.0, "there is a best one now"


def test_without_an_evaluation_there_is_no_best_model_to_go_back_to():
    with pytest.raises(CheckpointError, match="no evaluation"):
        BestModelSelection(None, nn.Linear(1, 1)).reset_to_best()


def test_a_selection_continues_from_its_state(tmp_path):
    model = nn.Linear(1, 1)
    selection = BestModelSelection(None, model)
    fill(model, 1.0)
    selection.update(2.0)
    selection.update(1.0)
    continued = BestModelSelection(None, model)
    continued.load_state_dict(selection.state_dict())
    continued.update(1.5)
    assert (continued.best_reward, continued.last_improvement, continued.n_updates) == (2.0, 2, 3)
    fill(model, 7.0)
    continued.reset_to_best()
    assert model.weight.item() == 1.0


def test_verbose_selection_reports_evaluations_without_improvement(capsys):
    selection = BestModelSelection(None, None, verbose=True)
    selection.update(2.0)
    selection.update(1.0)
    assert "no improvement over 2.00000" in capsys.readouterr().out
