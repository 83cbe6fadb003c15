"""The two tutorials on training in plain Python run as whole programs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials" / "plain_python"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TUTORIALS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # worker processes look the environment factory up by name
    monkeypatch.syspath_prepend(str(TUTORIALS))
    spec.loader.exec_module(module)
    return module


def test_the_low_level_tutorial_trains_and_keeps_the_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tutorial = load("low_level_training", monkeypatch)
    assert tutorial.train(n_epochs=1, epoch_length=1, n_rollout_steps=5, log_dir=str(tmp_path)) == 0
    assert (tmp_path / "params.pt").is_file()


@pytest.mark.long
def test_the_high_level_tutorial_trains_in_this_and_in_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tutorial = load("high_level_training", monkeypatch)
    assert tutorial.train(n_epochs=1, epoch_length=1, n_rollout_steps=5) == 0
    assert len(list(tmp_path.glob("outputs/*/*/state_dict.pt"))) == 2
    assert "-----------------\n" in capfd.readouterr().out
