"""Environments of other packages train with one command each; `benchmarks/third_party.py` says which.

Those whose package is not installed are skipped: `make test-third-party` installs them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "third_party.py"


def _load():
    spec = importlib.util.spec_from_file_location("third_party", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["third_party"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


third_party = _load()
IN_SMALL = (
    "algorithm.n_epochs=1",
    "algorithm.epoch_length=1",
    "algorithm.n_rollout_steps=8",
    "algorithm.batch_size=8",
    "algorithm.rollout_evaluator.n_episodes=1",
    "runner.concurrency=2",
)
WITH_MASK = ("taxi", "job_shop")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Trains an example; returns its directory."""
    monkeypatch.syspath_prepend(str(FILE.parent))  # an environment of our own is there

    def run_example(name, *further):
        example = third_party.EXAMPLES[name]
        if not example.is_installed:
            pytest.skip(f"{example.distribution} is not installed")
        finished = third_party.train(example, tmp_path / "run", further)
        assert finished.returncode == 0, finished.stdout[-1500:] + finished.stderr[-3000:]
        return tmp_path / "run"

    return run_example


@pytest.mark.long
@pytest.mark.parametrize("name", third_party.EXAMPLES)
def test_every_example_trains_and_masks_are_recognised(name, run):
    directory = run(name, *IN_SMALL)
    facts = json.loads((directory / "run.json").read_text())
    assert facts["state"] == "ended"
    assert facts["n_env_steps"] == 16
    if name in WITH_MASK:
        model = yaml.safe_load((directory / "model.yaml").read_text())
        assert model["action_masks"] == {"action": "action_mask"}
        assert "action_mask" not in model["model_builder"]["observation_modality_mapping"]


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name, each in third_party.EXAMPLES.items() if each.at_least is not None])
def test_examples_reach_their_stated_returns(name, run):
    facts = json.loads((run(name) / "run.json").read_text())
    assert facts["best_score"] >= third_party.EXAMPLES[name].at_least


def test_the_guide_has_the_command_of_every_example():
    page = (ROOT / "docs" / "guide" / "third_party.md").read_text(encoding="utf-8")
    assert [name for name, example in third_party.EXAMPLES.items() if f"`{example.command}`" not in page] == []
