"""SGD with momentum, one for all tasks, whose parameters may grow between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cclis.engine.schedule import Schedule
from cclis.methods import ParameterGroup
from cclis.settings import TrainingOptions


class Optimizer:
    """Updates parameters by their groups' learning rates.

    Args:
        groups: Parameters that share a learning rate.
        options: Momentum and weight decay.
        device: Where the parameters lie.
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], options: TrainingOptions, device: torch.device
    ):
        self._on_gpu = on_gpu = device.type == "cuda"
        self._groups = tuple(groups)
        self._sgd = torch.optim.SGD(
            [
                # A recorded step reads its learning rate from memory.
                {"params": g.parameters, "lr": torch.zeros((), device=device) if on_gpu else 0.0}
                for g in groups
            ],
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            fused=on_gpu,
        )

    def set_learning_rates(self, schedule: Schedule, step: int) -> float:
        """Set the rates of a step counted from the task's start; returns the first group's."""
        rates = [g.learning_rate * schedule.factor(step, g.warmup_from) for g in self._groups]
        for group, rate in zip(self._sgd.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rates[0]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._sgd.zero_grad(set_to_none=True)

    def gradient_norm(self) -> Tensor:
        """Length of the whole gradient."""
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        length: Tensor = torch.stack(torch._foreach_norm(gradients)).norm()
        return length

    def gradient_of(self, loss: Tensor) -> Tensor:
        """The gradient of a loss, as one vector (P,) over what learns; parameters keep theirs."""
        found = torch.autograd.grad(loss, self._learning(), allow_unused=True)
        return self._joined(found)

    @property
    def gradient(self) -> Tensor:
        """The gradients of the parameters that learn, as one vector (P,)."""
        return self._joined([parameter.grad for parameter in self._learning()])

    def set_gradient(self, gradient: Tensor) -> None:
        """Take a vector (P,) for these gradients."""
        parts = torch.split(gradient, [p.numel() for p in self._learning()])
        for parameter, part in zip(self._learning(), parts, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(_shaped(part, parameter))

    def step(self, *, unless: Tensor) -> None:
        """Update the parameters by their gradients, unless told not to, on the device."""
        if self._on_gpu:
            # The fused update reads this flag, made for loss scaling, without asking the host.
            self._sgd.found_inf = unless.float()  # type: ignore[attr-defined]
            self._sgd.step()
        elif not unless:
            self._sgd.step()

    def replace(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Go on with parameters of more or fewer rows, and with the momentum of those that stay."""
        for group in self._sgd.param_groups:
            for place, old in enumerate(group["params"]):
                if old not in replaced:
                    continue
                group["params"][place] = new = replaced[old]
                momentum = self._sgd.state.pop(old, {}).get("momentum_buffer")
                if momentum is not None:
                    resized = torch.zeros_like(new)
                    rows = min(len(momentum), len(resized))
                    resized[:rows] = momentum[:rows]
                    self._sgd.state[new] = {"momentum_buffer": resized}

    def state(self) -> dict[str, Tensor]:
        """The momentum of each parameter that has any, by its number."""
        found = {
            str(number): self._sgd.state.get(parameter, {}).get("momentum_buffer")
            for number, parameter in enumerate(self._parameters())
        }
        return {number: momentum for number, momentum in found.items() if momentum is not None}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self._sgd.state.clear()
        for number, parameter in enumerate(self._parameters()):
            if str(number) in state:
                # Laid out in memory as the parameter is, which a fused update relies on.
                momentum = torch.empty_like(parameter).copy_(state[str(number)])
                self._sgd.state[parameter] = {"momentum_buffer": momentum}

    def _joined(self, gradients: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(gradients, self._learning(), strict=True)
        return torch.cat([_flat(torch.zeros_like(p) if g is None else g, p) for g, p in pairs])

    def _learning(self) -> list[nn.Parameter]:
        """Those that are not frozen, as an encoder of one's own may be."""
        return [parameter for parameter in self._parameters() if parameter.requires_grad]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._sgd.param_groups for parameter in group["params"]]


def _flat(values: Tensor, parameter: Tensor) -> Tensor:
    """As one vector, in the order in which a parameter of the same shape lies in memory.

    On a GPU the channels of convolutions come last: to turn them takes longer than to join them.
    """
    return (values.permute(0, 2, 3, 1) if _channels_last(parameter) else values).flatten()


def _shaped(vector: Tensor, parameter: Tensor) -> Tensor:
    """What `_flat` made a vector of."""
    if not _channels_last(parameter):
        return vector.view(parameter.shape)
    filters, channels, height, width = parameter.shape
    return vector.view(filters, height, width, channels).permute(0, 3, 1, 2)


def _channels_last(parameter: Tensor) -> bool:
    return parameter.is_contiguous(memory_format=torch.channels_last)
