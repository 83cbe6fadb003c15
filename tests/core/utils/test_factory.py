"""Objects from configurations."""

import pickle

import pytest
from omegaconf import OmegaConf

from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.utils.factory import Factory
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.random_reset_wrapper import RandomResetWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import Wrapper
from maze.core.wrappers.wrapper_factory import WrapperFactory
from tests.core.utils.factory_targets import Circle, Drawing, Shape, Studio

HERE = "tests.core.utils.factory_targets"
CIRCLE = {"_target_": f"{HERE}.Circle", "size": 2}


def test_the_documented_examples_build_an_environment():
    target = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.GymMazeEnv"}
    assert isinstance(Factory(MazeEnv).instantiate({**target, "env": "CartPole-v1"}), GymMazeEnv)
    assert isinstance(Factory(MazeEnv).instantiate(target, env="CartPole-v1"), GymMazeEnv)


def test_instances_pass_through_and_only_of_the_right_type():
    circle = Circle(1)
    assert Factory(Shape).instantiate(circle) is circle
    with pytest.raises(ConfigError, match=r"model.shape: expected a Shape.*3"):
        Factory(Shape).instantiate(3, config_path="model.shape")
    with pytest.raises(ConfigError, match="_target_"):
        Factory(Shape).instantiate({"size": 1})


def test_functions_are_targets_and_what_they_return_is_checked():
    assert Factory(Shape).instantiate({"_target_": f"{HERE}.make_circle", "size": 4}).size == 4
    with pytest.raises(ConfigError, match=r"expected a Shape, but .*make_number` returned a int"):
        Factory(Shape).instantiate({"_target_": f"{HERE}.make_number"})


def test_a_class_of_the_wrong_type_is_refused_before_it_is_called():
    with pytest.raises(ConfigError, match=r"`tests.*Studio` is not a subclass of Shape"):
        Factory(Shape).instantiate({"_target_": f"{HERE}.Studio"})


def test_nested_targets_are_built_unless_the_parameter_takes_configurations():
    drawing = Factory(Drawing).instantiate(
        {"_target_": f"{HERE}.Drawing", "shape": CIRCLE, "others": [CIRCLE, CIRCLE], "by_name": {"a": CIRCLE}}
    )
    assert [type(s) for s in (drawing.shape, *drawing.others, drawing.by_name["a"])] == [Circle] * 4
    studio = Factory(Studio).instantiate({"_target_": f"{HERE}.Studio", "shape": CIRCLE, "options": {"a": CIRCLE}})
    assert (studio.shape, studio.options) == (CIRCLE, {"a": CIRCLE})
    # a subclass that passes its arguments on takes what its base class takes
    studio = Factory(Studio).instantiate({"_target_": f"{HERE}.OwnStudio", "shape": CIRCLE, "options": {"a": CIRCLE}})
    assert (studio.shape, studio.options) == (CIRCLE, {"a": CIRCLE})


def test_marker_decides_whether_nested_targets_are_built():
    target = {"_target_": f"{HERE}.ForTypeCheckers", "first": CIRCLE, "second": CIRCLE, "dictionary": CIRCLE}
    built = Factory(object).instantiate(target)
    assert isinstance(built.first, Circle)
    assert built.second == CIRCLE
    assert isinstance(built.dictionary, Circle)


def test_omegaconf_is_accepted_with_its_interpolations_and_its_gaps_are_named():
    config = OmegaConf.create({"size": 5, "shape": {**CIRCLE, "size": "${size}"}, "open": {**CIRCLE, "size": "???"}})
    circle = Factory(Shape).instantiate(config.shape)
    assert (type(circle), circle.size) == (Circle, 5)
    with pytest.raises(ConfigError, match=r"^open: .*size"):
        Factory(Shape).instantiate(config.open, config_path="open")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (f"{HERE}.Circel", f"Did you mean `{HERE}.Circle`"),
        ("tests.core.utils.factory_target.Circle", "Did you mean `tests.core.utils.factory_targets`"),
        ("gymnasum.Env", "no package `gymnasum`.*Did you mean `gymnasium.Env`"),
        ("Circle", "not a dotted path"),
        ("tests.core.utils.factory_targets", "is a module"),
        (3, "must name a class or function"),
    ],
)
def test_misspelt_targets_are_named_with_the_key_and_a_suggestion(target, message):
    with pytest.raises(ConfigError, match=rf"^algorithm.shape: .*{message}"):
        Factory(Shape).instantiate({"_target_": target}, config_path="algorithm.shape")


@pytest.mark.parametrize(
    "target",
    [
        *("os.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "shutil.rmtree", "pickle.loads"),
        *("posix.system", f"{HERE}.innocent_name", "builtins.__import__", "torch.load"),
    ],
)
def test_dangerous_targets_are_refused_under_every_name(target):
    with pytest.raises(ConfigError, match="refused"):
        Factory(object).instantiate({"_target_": target, "_args_": ["x"]})
    with pytest.raises(ConfigError, match=r"shape: .*refused"):
        Factory(Drawing).instantiate({"_target_": f"{HERE}.Drawing", "shape": {"_target_": target}})


def test_missing_and_unknown_arguments_are_named_with_the_signature():
    with pytest.raises(
        ConfigError,
        match=r"a: missing argument\(s\) `size`; unknown argument `color` \(did you mean `colour`\?\).*size, c",
    ):
        Factory(Shape).instantiate({"_target_": f"{HERE}.Circle", "color": 1}, config_path="a")


def test_an_unknown_argument_that_is_passed_on_is_named():
    with pytest.raises(ConfigError, match=r"env: unknown argument `n_jobz`: JobShops.__init__\(\) got an unexpected"):
        Factory(object).instantiate(
            {"_target_": "maze_envs.scheduling.job_shop.JobShopEnv", "n_jobz": 3}, config_path="env"
        )


def test_errors_inside_a_constructor_are_its_own():
    with pytest.raises(AssertionError, match="must not be called"):
        Factory(object).instantiate({"_target_": f"{HERE}.never"})


def test_collections_are_built_by_index_by_name_and_by_class():
    factory = Factory(Shape)
    assert {k: v.size for k, v in factory.instantiate_collection([CIRCLE, Circle(7)]).items()} == {0: 2, 1: 7}
    assert list(factory.instantiate_collection({"big": CIRCLE})) == ["big"]
    assert factory.instantiate_collection({Circle: {"size": 9}})["Circle"].size == 9
    assert factory.instantiate_collection(None) == {}
    with pytest.raises(ConfigError, match=r"^shapes.big: missing argument"):
        factory.instantiate_collection({"big": {"_target_": f"{HERE}.Circle"}}, config_path="shapes")


def test_types_are_found_by_name_and_checked():
    assert Factory(Shape).type_from_name(f"{HERE}.Circle") is Circle
    assert Factory(Shape).type_from_name(Circle) is Circle
    with pytest.raises(ConfigError, match="not a subclass of Shape"):
        Factory(Shape).type_from_name(f"{HERE}.Studio")


def cart_pole():
    return GymMazeEnv("CartPole-v1")


@pytest.mark.parametrize(
    "config",
    [
        {
            "RandomResetWrapper": {"min_skip_steps": 0, "max_skip_steps": 1},
            "maze.core.wrappers.time_limit_wrapper.TimeLimitWrapper": {"max_episode_steps": 3},
        },
        {RandomResetWrapper: {"min_skip_steps": 0, "max_skip_steps": 1}, TimeLimitWrapper: {"max_episode_steps": 3}},
        [
            {"_target_": "RandomResetWrapper", "min_skip_steps": 0, "max_skip_steps": 1},
            {"TimeLimitWrapper": {"max_episode_steps": 3}},
        ],
        OmegaConf.create(
            {
                "RandomResetWrapper": {"min_skip_steps": 0, "max_skip_steps": 1},
                "TimeLimitWrapper": {"max_episode_steps": 3},
            }
        ),
    ],
    ids=["names", "classes", "list", "omegaconf"],
)
def test_wrappers_are_applied_in_order_from_every_form_of_configuration(config):
    env = WrapperFactory.wrap_from_config(cart_pole(), config)
    assert [type(env), type(env.env), type(env.env.env)] == [TimeLimitWrapper, RandomResetWrapper, GymMazeEnv]
    assert env._max_episode_steps == 3


def test_no_wrappers_leave_the_environment_as_it_is_and_arguments_may_lack():
    env = cart_pole()
    assert WrapperFactory.wrap_from_config(env, None) is WrapperFactory.wrap_from_config(env, {}) is env
    assert type(WrapperFactory.wrap_from_config(env, {"SortedSpacesWrapper": None})).__name__ == "SortedSpacesWrapper"


class HomeMadeWrapper(Wrapper[MazeEnv]):
    def __init__(self, maze_env, factor):
        super().__init__(maze_env)
        self.factor = factor


def test_wrappers_of_a_user_have_short_names_once_imported_and_name_their_arguments_freely():
    env = WrapperFactory.wrap_from_config(cart_pole(), {"HomeMadeWrapper": {"factor": 2}})
    assert env.factor == 2
    assert isinstance(pickle.loads(pickle.dumps(env)), GymMazeEnv)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"RandomRestWrapper": {}}, "wrappers.RandomRestWrapper: .*Did you mean `RandomResetWrapper`"),
        ({"TimeLimitWrapper": {"max_steps": 3}}, "wrappers.TimeLimitWrapper: unknown argument `max_steps`"),
        ({"TimeLimitWrapper": 3}, "wrappers.TimeLimitWrapper: expected a mapping"),
        ([3], r"wrappers\[0\]: expected"),
        ({f"{HERE}.Circle": {}}, "is not a subclass of Wrapper"),
    ],
)
def test_faults_of_wrapper_configurations_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        WrapperFactory.wrap_from_config(cart_pole(), config)
