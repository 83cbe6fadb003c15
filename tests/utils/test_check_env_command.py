"""The checker as a command."""

from __future__ import annotations

from maze.maze_cli import main

COMMAND = ["-cn", "conf_check", "env=tutorial_cutting_2d_struct_masked", "runner.n_steps=30"]


def test_a_sound_environment_is_reported_as_such(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, "wrappers=tutorial_cutting_2d", "+runner.masks.cutting_mask=cut_rotation"]) == 0
    assert "Cutting2DEnvironment: 0 finding(s) in 30 sub-steps." in capsys.readouterr().out


def test_findings_end_the_command_with_status_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # A mask that is said to be for the wrong action: the order of cuts is always free.
    assert main([*COMMAND, "env.raw_piece_size=[50,100]", "+runner.masks.cutting_mask=cut_order"]) == 1
    message = capsys.readouterr().err
    assert "[mask-legal] Cutting2DEnvironment, sub-step 1, observation `cutting_mask`: it forbids cut_order=" in message
