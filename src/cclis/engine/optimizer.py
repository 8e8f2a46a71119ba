"""SGD with momentum for all tasks; parameters may grow between tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cclis.engine.schedule import Schedule
from cclis.methods import ParameterGroup
from cclis.settings import TrainingOptions


class Optimizer:
    """SGD with momentum and a learning rate per parameter group.

    Attributes:
        learning_rate: Of the first group, in the newest step.

    Args:
        groups: Groups of parameters that share a learning rate.
        options: Momentum and weight decay.
        device: Device of the parameters.
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], options: TrainingOptions, device: torch.device
    ):
        self._on_gpu = on_gpu = device.type == "cuda"
        self._groups = tuple(groups)
        self.learning_rate = 0.0
        self._sgd = torch.optim.SGD(
            [
                # A tensor, because a recorded step reads the learning rate from GPU memory.
                {"params": g.parameters, "lr": torch.zeros((), device=device) if on_gpu else 0.0}
                for g in groups
            ],
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            fused=on_gpu,
        )

    def set_learning_rates(self, schedule: Schedule, step: int) -> None:
        """Set all learning rates for a step.

        Args:
            schedule: The schedule of the task.
            step: The step, counted from the start of the task.
        """
        rates = [g.learning_rate * schedule.factor(step, g.warmup_from) for g in self._groups]
        for group, rate in zip(self._sgd.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.learning_rate = rates[0]

    def zero_grad(self) -> None:
        """Delete all gradients."""
        self._sgd.zero_grad(set_to_none=True)

    def gradient_norm(self) -> Tensor:
        """L2 norm of the gradient of all parameters."""
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        norm: Tensor = torch.stack(torch._foreach_norm(gradients)).norm()
        return norm

    def gradient_of(self, loss: Tensor) -> Tensor:
        """Gradient of a loss, as one vector (P,) of all trainable parameters.

        The `grad` of the parameters does not change.
        """
        gradients = torch.autograd.grad(loss, self._trainable(), allow_unused=True)
        return self._concatenate(gradients)

    @property
    def gradient(self) -> Tensor:
        """The `grad` of all trainable parameters, as one vector (P,)."""
        return self._concatenate([parameter.grad for parameter in self._trainable()])

    def set_gradient(self, gradient: Tensor) -> None:
        """Set the `grad` of all trainable parameters from one vector (P,)."""
        parts = torch.split(gradient, [p.numel() for p in self._trainable()])
        for parameter, part in zip(self._trainable(), parts, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(_unflatten(part, parameter))

    def step(self, *, unless: Tensor) -> None:
        """Update the parameters, unless the boolean tensor `unless` is true."""
        if self._on_gpu:
            # The fused update reads this flag, meant for loss scaling, without a synchronisation.
            self._sgd.found_inf = unless.float()  # type: ignore[attr-defined]
            self._sgd.step()
        elif not unless:
            self._sgd.step()

    def replace(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters by others with more or fewer rows; common rows keep their momentum.

        Args:
            replaced: Old to new parameters.
        """
        for group in self._sgd.param_groups:
            for index, old in enumerate(group["params"]):
                if old not in replaced:
                    continue
                group["params"][index] = new = replaced[old]
                momentum = self._sgd.state.pop(old, {}).get("momentum_buffer")
                if momentum is not None:
                    resized = torch.zeros_like(new)
                    rows = min(len(momentum), len(resized))
                    resized[:rows] = momentum[:rows]
                    self._sgd.state[new] = {"momentum_buffer": resized}

    def state(self) -> dict[str, Tensor]:
        """Momentum of each parameter that has any, by the parameter's index."""
        momenta = {
            str(index): self._sgd.state.get(parameter, {}).get("momentum_buffer")
            for index, parameter in enumerate(self._parameters())
        }
        return {index: momentum for index, momentum in momenta.items() if momentum is not None}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state`."""
        self._sgd.state.clear()
        for index, parameter in enumerate(self._parameters()):
            if str(index) in state:
                # In the parameter's memory format, which the fused update relies on.
                momentum = torch.empty_like(parameter).copy_(state[str(index)])
                self._sgd.state[parameter] = {"momentum_buffer": momentum}

    def _concatenate(self, gradients: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(gradients, self._trainable(), strict=True)
        return torch.cat([_flatten(torch.zeros_like(p) if g is None else g, p) for g, p in pairs])

    def _trainable(self) -> list[nn.Parameter]:
        """All parameters but frozen ones, which a custom encoder may have."""
        return [parameter for parameter in self._parameters() if parameter.requires_grad]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._sgd.param_groups for parameter in group["params"]]


def _flatten(values: Tensor, parameter: Tensor) -> Tensor:
    """Flatten values of the parameter's shape in the parameter's memory order.

    On a GPU convolutions are channels-last. Permuting them would take longer than concatenating.
    """
    return (values.permute(0, 2, 3, 1) if _channels_last(parameter) else values).flatten()


def _unflatten(vector: Tensor, parameter: Tensor) -> Tensor:
    """The inverse of `_flatten`."""
    if not _channels_last(parameter):
        return vector.view(parameter.shape)
    filters, channels, height, width = parameter.shape
    return vector.view(filters, height, width, channels).permute(0, 3, 1, 2)


def _channels_last(parameter: Tensor) -> bool:
    return parameter.is_contiguous(memory_format=torch.channels_last)
