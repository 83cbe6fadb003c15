"""The learning kit: the gradient step, losses that are reported, and an algorithm written with nothing else."""

import math
from abc import ABC
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel
from maze.core.utils.checkpoint import load_state
from maze.core.utils.seeding import seeded_generator
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import Losses, UpdateStats, gradient_step, mean_of
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.trainer import EpochTrainer
from tests.train.parallelization.toy_envs import counting_env
from tests.train.trainers.common.test_structured_training import build_model


class ToyEvents(ABC):
    @define_epoch_stats(np.mean)
    @define_stats_grouping("key")
    def toy_loss(self, key, value):
        """Loss of a sub-step."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("key")
    def toy_grad_norm(self, key, value):
        """Norm of the gradient of its network."""

    @define_epoch_stats(np.mean)
    def penalty(self, value):
        """A number without a group."""

    @define_epoch_stats(np.mean, input_name="time", output_name="time")
    @define_epoch_stats(np.mean, input_name="percent", output_name="percent")
    def time_learning(self, time, percent):
        """Seconds, and percent of what is timed."""

    @define_epoch_stats(np.mean)
    def time_resting(self, value):
        """Seconds alone."""


def two_networks():
    torch.manual_seed(0)
    return {("toy_grad_norm", key): nn.Linear(2, 1, bias=False) for key in ("a", "b")}


def toy_losses(networks, factor=1.0):
    """The sum of all weights, times a factor: each gradient is ``factor``."""
    losses = Losses()
    for (_, key), network in networks.items():
        loss = factor * network.weight.sum()
        losses.report("toy_loss", loss, key, weight=1.0)
    return losses


def make_optimizer(networks):
    return FlatAdam(networks, lr=0.1, eps=1e-8)


def weights(networks):
    return [network.weight.detach().clone() for network in networks.values()]


def test_a_step_reports_the_norm_of_each_network_before_scaling():
    networks = two_networks()
    optimizer, before = make_optimizer(networks), weights(networks)
    norms = gradient_step(toy_losses(networks, 3.0), optimizer, max_grad_norm=0.5)
    assert {name: norm.item() for name, norm in norms.items()} == pytest.approx(
        dict.fromkeys(networks, 3.0 * math.sqrt(2))
    )
    after = optimizer.gradient_norms().values()
    assert math.hypot(*(norm.item() for norm in after)) == pytest.approx(0.5)
    for old, new in zip(before, weights(networks), strict=True):
        assert (old - new).tolist() == [pytest.approx([0.1, 0.1], rel=1e-4)]  # Adam's first step has the learning rate


def test_frozen_networks_stay_exactly_as_they_are():
    networks = two_networks()
    optimizer = make_optimizer(networks)
    gradient_step(toy_losses(networks), optimizer)  # momentum alone would move them
    before = weights(networks)
    gradient_step(toy_losses(networks), optimizer, frozen=[("toy_grad_norm", "a")])
    assert [torch.equal(*pair) for pair in zip(before, weights(networks), strict=True)] == [True, False]


@pytest.mark.parametrize("is_named", [True, False])
def test_non_finite_values_are_named_and_no_parameter_changes(is_named):
    networks = two_networks()
    optimizer, before = make_optimizer(networks), weights(networks)
    losses = toy_losses(networks)
    broken = losses.total * math.nan
    losses.add(broken)
    losses.terms = [losses.terms[0], ("toy_loss", "b", broken)] if is_named else []
    message = "toy_loss of sub-step 'b' is nan" if is_named else "the loss is nan"
    with pytest.raises(NonFiniteError, match=message):
        gradient_step(losses, optimizer)
    assert all(torch.equal(*pair) for pair in zip(before, weights(networks), strict=True))


def test_a_network_with_an_infinite_gradient_is_named():
    networks = two_networks()
    optimizer, losses = make_optimizer(networks), toy_losses(networks)
    weight = networks["toy_grad_norm", "b"].weight
    losses.add((weight - weight.detach()).abs().sqrt().sum())  # 0, with an infinite gradient
    with pytest.raises(NonFiniteError, match="toy_grad_norm of sub-step 'b' is nan"):
        gradient_step(losses, optimizer)


# -- statistics -------------------------------------------------------------------------------------


def published(stats):
    aggregator = LogStatsAggregator(LogStatsLevel.EPOCH)
    stats.publish(aggregator.create_event_topic(ToyEvents))
    return {(key.event.__name__, key.output_name, key.group): value for key, value in aggregator.reduce().items()}


def test_numbers_of_updates_are_averaged_by_event_and_group():
    networks, stats = two_networks(), UpdateStats(ToyEvents)
    sums = {key: network.weight.sum().item() for (_, key), network in networks.items()}
    for factor in (1.0, 3.0):
        losses = toy_losses(networks, factor)
        losses.report("penalty", torch.tensor(factor))
        stats.add(losses, {name: torch.tensor(factor) for name in networks})
    stats.add_value("time_learning", 3.0, 75.0)
    stats.add_value("time_resting", 1.0, 25.0)  # this event takes no percentage
    stats.add_value("no_such_event", 1.0)  # left out
    resumed = UpdateStats(ToyEvents)
    resumed.load_state_dict(stats.state_dict())
    for each in (stats, resumed):
        found = published(each)
        assert list(found) == [
            ("toy_loss", None, ("a",)),
            ("toy_grad_norm", None, ("a",)),
            ("toy_loss", None, ("b",)),
            ("toy_grad_norm", None, ("b",)),
            ("penalty", None, None),
            *[("time_learning", name, None) for name in ("percent", "time")],
            ("time_resting", None, None),
        ]
        assert found["toy_loss", None, ("b",)] == pytest.approx(2.0 * sums["b"])
        assert found["toy_grad_norm", None, ("a",)] == 2.0
        assert found["penalty", None, None] == 2.0
        assert found["time_learning", "percent", None] == 75.0
        assert published(each) == {}


@pytest.mark.parametrize(
    ("event", "key", "message"),
    [
        ("tow_loss", "a", r"expected an event `tow_loss` with a group and a value .* found only toy_loss"),
        ("toy_loss", None, r"expected an event `toy_loss` with a value in ToyEvents, found one with 2 arguments"),
    ],
)
def test_a_loss_that_no_event_reports_is_an_error_that_names_both(event, key, message):
    losses = Losses()
    losses.report(event, torch.zeros(()), key)
    with pytest.raises(ConfigError, match=message):
        UpdateStats(ToyEvents).add(losses)


# -- an algorithm of one's own ----------------------------------------------------------------------


@dataclass
class OwnConfig(AlgorithmConfig):
    lr: float = 0.1
    epoch_length: int = 3


class OwnTrainer(EpochTrainer):
    """Pulls all weights of a policy to random numbers: nothing but the kit's interface."""

    config_class = OwnConfig
    events_class = ToyEvents

    def __init__(self, *args, seed=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.networks = {("toy_grad_norm", key): network for key, network in self.policy.networks.items()}
        self.optimizer = FlatAdam(self.networks, lr=self.config.lr, eps=1e-8)
        self.generator = seeded_generator(seed)
        self.module = nn.Linear(1, 1)

    def _parts(self):
        return {"optimizer": self.optimizer, "generator": self.generator, "module": self.module}

    def _update(self):
        losses = Losses()
        for (_, key), network in self.networks.items():
            wanted = torch.rand((), generator=self.generator)
            loss = torch.stack([(p - wanted).square().mean() for p in network.parameters()]).sum()
            losses.report("toy_loss", loss, key, weight=1.0)
        self.stats.add(losses, gradient_step(losses, self.optimizer))


def own_trainer(directory=None, n_epochs=4, **config):
    model = build_model(counting_env(), "Shared")
    file = None if directory is None else directory / "latest.pt"
    selection = None if directory is None else BestModelSelection(str(directory / "state_dict.pt"), model)
    return OwnTrainer({"n_epochs": n_epochs, **config}, model, model_selection=selection, checkpoint_file=file)


def flat(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_an_own_algorithm_is_saved_and_resumed_exactly(tmp_path):
    uninterrupted = own_trainer()
    uninterrupted.train()
    own_trainer(tmp_path, n_epochs=2).train()
    resumed = own_trainer(tmp_path)
    resumed.resume(load_state(tmp_path / "latest.pt"), tmp_path / "latest.pt")
    resumed.train()
    assert resumed.epoch == 4
    assert torch.equal(flat(resumed), flat(uninterrupted))


def test_an_own_algorithm_names_what_is_not_finite_and_leaves_a_file(tmp_path):
    trainer = own_trainer(tmp_path)
    next(iter(trainer.policy.networks.values())).register_parameter("broken", nn.Parameter(torch.tensor(math.inf)))
    with pytest.raises(NonFiniteError, match=r"Epoch 1, update 1: toy_loss of sub-step .* is inf.*non_finite_"):
        trainer.train()
    assert len(list(tmp_path.glob("non_finite_*.pt"))) == 1


def test_a_field_that_an_own_configuration_lacks_is_named():
    with pytest.raises(ConfigError, match=r"algorithm.learning_rate: OwnConfig has no such field"):
        own_trainer(learning_rate=0.1)


def test_elements_without_weight_have_no_part_in_a_mean_and_get_no_gradient():
    values = torch.tensor([1.0, -math.inf, 3.0, math.nan], requires_grad=True)
    mean = mean_of(values, torch.tensor([1.0, 0.0, 1.0, 0.0]))
    mean.backward()
    assert mean.item() == 2.0
    assert values.grad.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert mean_of(values, torch.zeros(4)).item() == 0.0
