"""A cutting environment in the style of the documentation: plain methods, no annotations of Maze's."""

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.env.structured_env import ActorID, StructuredEnv
from maze.core.env.structured_env_spaces_mixin import StructuredEnvSpacesMixin
from maze.core.events.pubsub import Pubsub
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze.core.rendering.renderer import Renderer
from maze.core.wrappers.wrapper import Wrapper

RAW_PIECE = (100, 100)


class InventoryEvents:
    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def piece_replenished(self):
        """A raw piece was added."""


class CuttingState:
    def __init__(self, inventory, demand):
        self.inventory = inventory.copy()
        self.demand = demand


class CuttingAction:
    def __init__(self, piece_id, rotate):
        self.piece_id = piece_id
        self.rotate = rotate


class CuttingRenderer(Renderer):
    @override(Renderer)
    def render(self, maze_state, maze_action, events):
        pass


class CuttingReward(RewardAggregatorInterface):
    def __init__(self, raw_piece_usage_penalty):
        super().__init__()
        self.raw_piece_usage_penalty = raw_piece_usage_penalty

    @override(RewardAggregatorInterface)
    def get_interfaces(self):
        return [InventoryEvents]

    @override(RewardAggregatorInterface)
    def summarize_reward(self, maze_state=None):
        return sum(self.raw_piece_usage_penalty for _ in self.query_events(InventoryEvents.piece_replenished))


class CuttingCoreEnv(CoreEnv):
    def __init__(self, max_pieces, demand):
        super().__init__()
        self.max_pieces = max_pieces
        self.demand = demand
        self.pubsub = Pubsub(self.context.event_service)
        self.reward_aggregator = CuttingReward(raw_piece_usage_penalty=-1)
        self.pubsub.register_subscriber(self.reward_aggregator)
        self.renderer = CuttingRenderer()
        self._setup_env()

    def _setup_env(self):
        self.inventory = []
        self.events = self.pubsub.create_event_topic(InventoryEvents)
        self._replenish()

    def _replenish(self):
        self.inventory.append(RAW_PIECE)
        self.events.piece_replenished()

    def step(self, maze_action):
        info = {}
        if maze_action.piece_id >= len(self.inventory):
            info["error"] = "piece_id_out_of_bounds"
        elif self.inventory.pop(maze_action.piece_id) == RAW_PIECE:
            self._replenish()
        state = self.get_maze_state()
        return state, self.reward_aggregator.summarize_reward(state), False, info

    def get_maze_state(self):
        return CuttingState(self.inventory, self.demand)

    def reset(self):
        self._setup_env()
        return self.get_maze_state()

    def close(self):
        pass

    def seed(self, seed):
        pass

    def get_renderer(self):
        return self.renderer

    def get_serializable_components(self):
        return {}

    def is_actor_done(self):
        return False

    def actor_id(self):
        return ActorID(step_key=0, agent_id=0)

    def agent_counts_dict(self):
        pass


class CuttingObservation(ObservationConversionInterface):
    def __init__(self, max_pieces):
        self.max_pieces = max_pieces

    def maze_to_space(self, maze_state):
        inventory = maze_state.inventory
        inventory += [(0, 0)] * (self.max_pieces - len(inventory))
        return {
            "inventory": np.asarray(inventory, dtype=np.float32),
            "ordered_piece": np.asarray(maze_state.demand, dtype=np.float32),
        }

    def space(self):
        return spaces.Dict(
            {
                "inventory": spaces.Box(low=np.float32(0), high=np.float32(101), shape=(self.max_pieces, 2)),
                "ordered_piece": spaces.Box(low=np.float32(0), high=np.float32(101), shape=(2,)),
            }
        )


class CuttingActionConversion(ActionConversionInterface):
    def __init__(self, max_pieces):
        self.max_pieces = max_pieces

    def space_to_maze(self, action, maze_state):
        return CuttingAction(action["piece_idx"], bool(action["cut_rotation"]))

    def maze_to_space(self, maze_action):
        return {"piece_idx": maze_action.piece_id, "cut_rotation": int(maze_action.rotate)}

    def space(self):
        return spaces.Dict({"piece_idx": spaces.Discrete(self.max_pieces), "cut_rotation": spaces.Discrete(2)})


class CuttingEnv(MazeEnv[CuttingCoreEnv]):
    def __init__(self, core_env, action_conversion, observation_conversion):
        super().__init__(
            core_env=core_env,
            action_conversion_dict={0: action_conversion},
            observation_conversion_dict={0: observation_conversion},
        )


def cutting_env_factory(max_pieces=5, demand=(30, 15)):
    return CuttingEnv(
        CuttingCoreEnv(max_pieces, demand), CuttingActionConversion(max_pieces), CuttingObservation(max_pieces)
    )


class StructuredCuttingEnv(Wrapper[MazeEnv], StructuredEnv, StructuredEnvSpacesMixin):
    """Two sub-steps on top of the flat environment, written as the documentation's tutorial does it."""

    def __init__(self, maze_env):
        Wrapper.__init__(self, maze_env)
        self._action_spaces_dict = {
            0: spaces.Dict({"piece_idx": maze_env.action_space["piece_idx"]}),
            1: spaces.Dict({"cut_rotation": maze_env.action_space["cut_rotation"]}),
        }
        flat_space = maze_env.observation_space
        self._observation_spaces_dict = {
            0: flat_space,
            1: spaces.Dict({"selected_piece": flat_space["ordered_piece"]}),
        }
        self._sub_step_key = 0
        self._last_reward = None

    def step(self, action):
        if self._sub_step_key == 0:
            self._action_0 = action
            result = {"selected_piece": self._flat_obs["inventory"][action["piece_idx"]]}, 0.0, False, {}
        else:
            self._flat_obs, self._last_reward, done, info = self.env.step({**self._action_0, **action})
            result = self._flat_obs, self._last_reward, done, info
        self._sub_step_key = (self._sub_step_key + 1) % 2
        return result

    def reset(self):
        self._flat_obs = self.env.reset()
        self._sub_step_key = 0
        return self._flat_obs

    def actor_id(self):
        return ActorID(step_key=self._sub_step_key, agent_id=0)

    def get_actor_rewards(self):
        return np.array([self._last_reward / 2.0] * 2)

    @property
    def agent_counts_dict(self):
        return {0: 1, 1: 1}

    def is_actor_done(self):
        return False

    @property
    def action_space(self):
        return self._action_spaces_dict[self._sub_step_key]

    @property
    def observation_space(self):
        return self._observation_spaces_dict[self._sub_step_key]

    @property
    def action_spaces_dict(self):
        return self._action_spaces_dict

    @property
    def observation_spaces_dict(self):
        return self._observation_spaces_dict

    def seed(self, seed=None):
        self.env.seed(seed)

    def close(self):
        self.env.close()

    def get_observation_and_action_dicts(self, maze_state, maze_action, first_step_in_episode):
        observations, actions = self.env.get_observation_and_action_dicts(
            maze_state, maze_action, first_step_in_episode
        )
        (flat_obs,), (flat_action,) = observations.values(), actions.values()
        return (
            {0: flat_obs, 1: {"selected_piece": flat_obs["inventory"][flat_action["piece_idx"]]}},
            {0: {"piece_idx": flat_action["piece_idx"]}, 1: {"cut_rotation": flat_action["cut_rotation"]}},
        )
