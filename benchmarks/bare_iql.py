"""An upper bound of IQL in eager torch: one update without a framework, for `benchmarks.offline_speed`.

Gradients are written by hand into buffers that are allocated once. There is no autograd graph, no module, no
statistics, no target for structured environments: nothing but the matrix products, activations, sums and optimizer
steps of the algorithm, and the draw of a batch.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from maze.perception.fast_layers import fast_products

N_DECISIONS, EXPECTILE, INVERSE_TEMPERATURE, MAX_WEIGHT, TAU, LEARNING_RATE = 20_000, 0.7, 3.0, 100.0, 0.005, 3e-4


class Network:
    """Two hidden layers with ReLU and a linear output; parameters and gradients are one tensor each."""

    def __init__(self, n_inputs: int, n_units: int, n_outputs: int, n_rows: int) -> None:
        shapes = [(n_units, n_inputs), (n_units,), (n_units, n_units), (n_units,), (n_outputs, n_units), (n_outputs,)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.parameters, self.gradient = torch.randn(sum(sizes)) * 0.05, torch.zeros(sum(sizes))
        parts = zip(torch.split(self.parameters, sizes), torch.split(self.gradient, sizes), shapes, strict=True)
        self.weights, self.gradients = zip(*((p.view(s), g.view(s)) for p, g, s in parts), strict=True)
        self.transposed = [weight.t() for weight in self.weights[::2]]
        self.first, self.second, self.d_first, self.d_second = (torch.empty(n_rows, n_units) for _ in range(4))
        self.output = torch.empty(n_rows, n_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs `[B, n_outputs]`, overwritten by the next call."""
        self.inputs = inputs
        torch.addmm(self.weights[1], inputs, self.transposed[0], out=self.first).clamp_min_(0)
        torch.addmm(self.weights[3], self.first, self.transposed[1], out=self.second).clamp_min_(0)
        return torch.addmm(self.weights[5], self.second, self.transposed[2], out=self.output)

    def backward(self, d_output: Tensor) -> None:
        """Write the gradients of the last forward pass.

        :param d_output: Gradients of the outputs, `[B, n_outputs]`.
        """
        weights, gradients = self.weights, self.gradients
        torch.mm(d_output.t(), self.second, out=gradients[4])
        torch.sum(d_output, 0, out=gradients[5])
        torch.mm(d_output, weights[4], out=self.d_second)
        self._through_relu(self.d_second, self.second)
        torch.mm(self.d_second.t(), self.first, out=gradients[2])
        torch.sum(self.d_second, 0, out=gradients[3])
        torch.mm(self.d_second, weights[2], out=self.d_first)
        self._through_relu(self.d_first, self.first)
        torch.mm(self.d_first.t(), self.inputs, out=gradients[0])
        torch.sum(self.d_first, 0, out=gradients[1])

    @staticmethod
    def _through_relu(gradient: Tensor, activations: Tensor) -> None:
        torch.ops.aten.threshold_backward.grad_input(gradient, activations, 0, grad_input=gradient)


class Adam:
    """Adam as one fused call."""

    def __init__(self, networks: list[Network]) -> None:
        self.parameters = [network.parameters for network in networks]
        self.gradients = [network.gradient for network in networks]
        self.means, self.squares = ([torch.zeros_like(each) for each in self.parameters] for _ in range(2))
        self.steps = [torch.zeros(()) for _ in networks]

    def step(self) -> None:
        """Update the parameters."""
        torch._foreach_add_(self.steps, 1)
        torch._fused_adam_(
            self.parameters,
            self.gradients,
            self.means,
            self.squares,
            [],
            self.steps,
            lr=LEARNING_RATE,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


@torch.no_grad()
def updates_per_cpu_second(n_updates: int, n_units: int, n_rows: int) -> float:
    """Measure updates of two action values, a state value and a Gaussian policy on random data of Pendulum's sizes."""
    first, second, first_target, second_target = (Network(4, n_units, 1, n_rows) for _ in range(4))
    value, policy = Network(3, n_units, 1, n_rows), Network(3, n_units, 2, n_rows)
    critic_adam, policy_adam = Adam([first, second, value]), Adam([policy])
    observations, following = torch.randn(2, N_DECISIONS, 3)
    actions, rewards = torch.rand(N_DECISIONS, 1) * 1.9 - 0.95, torch.randn(N_DECISIONS, 1)

    def update() -> None:
        drawn = torch.randint(N_DECISIONS, (n_rows,))
        seen, then, taken, reward = (
            column.index_select(0, drawn) for column in (observations, following, actions, rewards)
        )
        both = torch.cat([seen, taken], 1)
        logged = torch.minimum(first_target.forward(both), second_target.forward(both))
        target = reward + 0.99 * value.forward(then)
        difference = logged - value.forward(seen)
        value.backward(torch.where(difference < 0, EXPECTILE - 1.0, -EXPECTILE) * (2.0 / n_rows) * difference)
        for network in (first, second):
            network.backward((network.forward(both) - target) * (2.0 / n_rows))
        critic_adam.step()
        weights = (INVERSE_TEMPERATURE * (logged - value.forward(seen))).exp().clamp(max=MAX_WEIGHT) / n_rows
        mean, log_std = torch.split(policy.forward(seen), 1, 1)
        std = log_std.clamp(-20, 2).exp()
        scaled = (torch.atanh(taken) - mean) / std
        policy.backward(torch.cat([-weights * scaled / std, weights * (1.0 - scaled.square())], 1))
        policy_adam.step()
        targets, networks = [first_target, second_target], [first, second]
        torch._foreach_lerp_([each.parameters for each in targets], [each.parameters for each in networks], TAU)

    with fast_products(policy.weights, n_rows):
        for _ in range(n_updates // 10):
            update()
        begin = time.process_time()
        for _ in range(n_updates):
            update()
        return n_updates / (time.process_time() - begin)
