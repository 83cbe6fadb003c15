"""Adam over flattened networks does what Adam does."""

import copy

import pytest
import torch
from torch import nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.utils.checkpoint import load_state, save_state


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(*networks):
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    return sum((network(x) - 0.5).square().sum() for network in networks)


def step(optimizer, *networks, frozen=()):
    optimizer.zero_grad()
    loss_of(*networks).backward()
    optimizer.step(frozen)


def test_steps_equal_those_of_torch_adam():
    networks = [build(1), build(2)]
    reference = copy.deepcopy(networks)
    flat = FlatAdam({"policy": networks[0], "critic": networks[1]}, lr=0.01, eps=1e-5)
    adam = torch.optim.Adam([p for network in reference for p in network.parameters()], lr=0.01, eps=1e-5)
    for _ in range(20):
        step(flat, *networks)
        adam.zero_grad()
        loss_of(*reference).backward()
        adam.step()
    for network, other in zip(networks, reference, strict=True):
        for parameter, expected in zip(network.parameters(), other.parameters(), strict=True):
            assert torch.allclose(parameter, expected, atol=1e-6)


def test_gradient_norms_are_those_of_the_networks():
    networks = {"policy": build(1), "critic": build(2)}
    optimizer = FlatAdam(networks, lr=0.01, eps=1e-5)
    optimizer.zero_grad()
    loss_of(*networks.values()).backward()
    norms = optimizer.gradient_norms()
    for name, network in networks.items():
        assert norms[name].item() == pytest.approx(nn.utils.get_total_norm([p.grad for p in network.parameters()]))
    optimizer.scale_gradients(0.5)
    assert optimizer.gradient_norms()["policy"].item() == pytest.approx(norms["policy"].item() / 2)


def test_gradients_do_not_pile_up():
    network = build()
    optimizer = FlatAdam({"policy": network}, lr=0.01, eps=1e-5)
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(network).backward()
        norms.append(optimizer.gradient_norms()["policy"])
    assert torch.equal(*norms)


def test_a_shared_module_belongs_to_the_first_network_and_is_trained_once():
    shared = nn.Linear(3, 3)
    policy, critic = nn.Sequential(shared, nn.Linear(3, 2)), nn.Sequential(shared, nn.Linear(3, 2))
    reference = copy.deepcopy([policy, critic])  # keeps the module shared
    optimizer = FlatAdam({"policy": policy, "critic": critic}, lr=0.01, eps=1e-5)
    unique = list({id(p): p for network in reference for p in network.parameters()}.values())
    adam = torch.optim.Adam(unique, lr=0.01, eps=1e-5)
    for _ in range(3):
        step(optimizer, policy, critic)
        adam.zero_grad()
        loss_of(*reference).backward()
        adam.step()
    assert torch.allclose(shared.weight, reference[0][0].weight, atol=1e-6)


def test_frozen_networks_stay_exactly_as_they_are():
    policy, critic = build(1), build(2)
    optimizer = FlatAdam({"policy": policy, "critic": critic}, lr=0.01, eps=1e-5)
    step(optimizer, policy, critic)
    before = [copy.deepcopy(network.state_dict()) for network in (policy, critic)]
    step(optimizer, policy, critic, frozen=["policy"])
    assert all(torch.equal(value, before[0][name]) for name, value in policy.state_dict().items())
    assert not any(torch.equal(value, before[1][name]) for name, value in critic.state_dict().items())


def test_a_restored_optimizer_takes_the_same_steps(tmp_path):
    network = build()
    optimizer = FlatAdam({"policy": network}, lr=0.01, eps=1e-5)
    step(optimizer, network)
    save_state(tmp_path / "latest.pt", {"model": network.state_dict(), "optimizer": optimizer.state_dict()})
    step(optimizer, network)

    continued = build(5)
    other = FlatAdam({"policy": continued}, lr=0.01, eps=1e-5)
    state = load_state(tmp_path / "latest.pt")
    continued.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    step(other, continued)
    for parameter, expected in zip(continued.parameters(), network.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_moments_are_restored_by_name_of_the_network():
    networks = {("cost", name): build(seed) for seed, name in enumerate(["late", "waste"])}
    optimizer = FlatAdam(networks, lr=0.01, eps=1e-5)
    step(optimizer, *networks.values())
    remaining = ("cost", "waste")
    fewer = FlatAdam({remaining: copy.deepcopy(networks[remaining])}, lr=0.01, eps=1e-5)
    fewer.load_state_dict(optimizer.state_dict())
    for name, value in fewer.state_dict()[str(remaining)].items():
        assert torch.equal(value, optimizer.state_dict()[str(remaining)][name])


def test_replaced_parameters_are_tied_again():
    network = build()
    optimizer = FlatAdam({"policy": network}, lr=0.01, eps=1e-5)
    for parameter in network.parameters():
        parameter.data = torch.ones_like(parameter)
    optimizer.tie()
    assert all(bool((parameter == 1).all()) for parameter in network.parameters())
    step(optimizer, network)
    assert not any(bool((parameter == 1).all()) for parameter in network.parameters())


def test_parameters_without_gradient_are_left_alone():
    network = build()
    network[0].weight.requires_grad_(False)
    before = network[0].weight.clone()
    optimizer = FlatAdam({"policy": network}, lr=0.01, eps=1e-5)
    step(optimizer, network)
    assert torch.equal(network[0].weight, before)
