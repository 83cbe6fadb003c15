"""Wrappers are overridden by their class, whose path Hydra would split at its dots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from maze.cli.hydra_setup import apply_overrides, as_written, changed_wrappers, for_hydra, split_wrapper_path
from maze.core.errors import ConfigError
from maze.maze_cli import main

NORMALIZATION = (
    "maze.core.wrappers.observation_normalization.observation_normalization_wrapper.ObservationNormalizationWrapper"
)


def wrappers_of(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", overrides=for_hydra(["wrappers=vector_obs", *overrides]))
    apply_overrides(cfg)
    return OmegaConf.to_container(cfg.wrappers)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["ObservationNormalizationWrapper", NORMALIZATION])
def test_a_configured_wrapper_is_found_by_its_class_and_by_its_path(name: str) -> None:
    wrappers = wrappers_of(f"wrappers.{name}.default_strategy_config.clip_range=[-5,5]", f"+wrappers.{name}.new=1")
    assert list(wrappers) == [NORMALIZATION], "one wrapper, changed in its place"
    assert wrappers[NORMALIZATION]["default_strategy_config"] == {"clip_range": [-5, 5], "axis": 0}
    assert wrappers[NORMALIZATION]["new"] == 1
    assert wrappers_of(f"~wrappers.{name}") == {}
    assert "statistics_dump" not in wrappers_of(f"~wrappers.{name}.statistics_dump")[NORMALIZATION]


@pytest.mark.parametrize("name", ["TimeLimitWrapper", "my_project.wrappers.Patient"])
def test_a_further_wrapper_is_added_behind_them(name: str) -> None:
    assert list(wrappers_of(f"+wrappers.{name}.steps=5").items())[1:] == [(name, {"steps": 5})]
    assert list(wrappers_of(f"+wrappers.{name}={{}}").items())[1:] == [(name, {})]


@pytest.mark.parametrize(
    "text",
    [
        "wrappers.TimeLimitWrapper.max_episode_steps=1,2",
        "+wrappers.my_project.wrappers.Patient.steps=interval(1,5)",
        "~wrappers.TimeLimitWrapper",
        "wrappers=vector_obs",
        "policy.base={_target_: my_project.Rule, level: 1}",
        "env.name=x",
        "--cfg",
    ],
)
def test_an_override_is_recorded_as_it_was_written(text: str) -> None:
    assert as_written(for_hydra([text])) == [text]


@pytest.mark.parametrize("key", ["warm_start.policy", "policy@warm_start.policy", "++warm_start.policy"])
def test_a_class_stands_for_an_option_of_policies(key: str) -> None:
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", overrides=for_hydra([f"{key}={{_target_: my_project.Rule, level: 1}}"]))
    assert cfg.warm_start.policy == {"_target_": "my_project.Rule", "level": 1}


@pytest.mark.parametrize("name", ["shelf:lost_sales", "mine.maze", "out puts/mine.maze"])
def test_a_bundle_stands_for_an_option_of_policies(name: str) -> None:
    with initialize_config_module("maze.conf", version_base="1.3"):
        assert compose("conf_rollout", overrides=for_hydra([f"policy={name}"])).policy.bundle == name
        cfg = compose("conf_train", overrides=for_hydra([f"policy@warm_start.policy='{name}'"]))
    assert cfg.warm_start.policy.bundle == name


def test_values_refer_to_other_keys_and_a_later_override_wins() -> None:
    wrappers = wrappers_of(
        "+wrappers.TimeLimitWrapper.steps=${algorithm.n_epochs}", "+wrappers.TimeLimitWrapper.steps=7"
    )
    assert wrappers["TimeLimitWrapper"] == {"steps": 7}
    reference = "+wrappers.TimeLimitWrapper.steps=${algorithm.n_epochs}"
    assert wrappers_of(reference)["TimeLimitWrapper"] == {"steps": "${algorithm.n_epochs}"}
    assert wrappers_of(reference, "+wrappers.TimeLimitWrapper.steps=7")["TimeLimitWrapper"] == {"steps": 7}


def test_the_printed_configuration_has_the_overrides(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["-cn", "conf_train", "--cfg", "job", "wrappers=vector_obs", "+wrappers.TimeLimitWrapper.steps=5"]
    assert main([*arguments, "~wrappers.ObservationNormalizationWrapper"]) == 0
    printed = OmegaConf.create(capfd.readouterr().out)
    assert printed.wrappers == {"TimeLimitWrapper": {"steps": 5}}


@pytest.mark.parametrize(
    ("path", "configured", "expected"),
    [
        ("a.b.C.x.y", ["a.b.C"], ["a.b.C", "x", "y"]),
        ("C.x", ["a.b.C"], ["a.b.C", "x"]),
        ("C.x", ["a.b.C", "C"], ["C", "x"]),  # what is written like that already
        ("own_name.x", ["own_name"], ["own_name", "x"]),
        ("z.C.x", ["a.b.C"], ["z.C", "x"]),  # another class of that name
        ("C", [], ["C"]),
        ("name.x", [], ["name", "x"]),
    ],
)
def test_a_path_is_split_behind_the_wrapper(path: str, configured: list[str], expected: list[str]) -> None:
    assert split_wrapper_path(path.split("."), configured) == expected


def test_a_name_that_several_wrappers_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wrappers\.C: the name fits a\.C, b\.C; write the path"):
        split_wrapper_path(["C", "x"], ["a.C", "b.C"])


def test_changes_are_merged_and_further_wrappers_follow() -> None:
    wrappers = {"a.C": {"x": {"y": 1, "z": 2}}, "a.D": None}
    changes = {"C": {"x": {"y": 3}}, "D": {"k": 1}, "E": None}
    expected = {"a.C": {"x": {"y": 3, "z": 2}}, "a.D": {"k": 1}, "E": {}}
    assert changed_wrappers(wrappers, changes) == expected
    assert changed_wrappers([{"_target_": "a.C"}], {"E": {}}) == [{"_target_": "a.C"}, {"E": {}}]


@pytest.mark.parametrize("launcher", ["basic", "local"])
def test_a_sweep_over_an_argument_of_a_wrapper(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fixed = ["env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=1", f"hydra/launcher={launcher}"]
    swept = "+wrappers.TimeLimitWrapper.max_episode_steps=2,3"
    assert main(["-m", swept, *fixed, "hydra.sweep.dir=sweep"]) == 0
    for number, steps in enumerate((2, 3)):
        run = tmp_path / "sweep" / str(number)
        for file in ("hydra_config.yaml", ".hydra/config.yaml"):
            assert OmegaConf.load(run / file).wrappers == {"TimeLimitWrapper": {"max_episode_steps": steps}}
        assert f"+wrappers.TimeLimitWrapper.max_episode_steps={steps}" in OmegaConf.load(run / ".hydra/overrides.yaml")
    assert main(["-m", "wrappers.TimeLimitWrapper.max_episode_steps=2,3", *fixed]) != 0
    assert "no such wrapper is configured" in capfd.readouterr().err
