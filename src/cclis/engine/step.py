"""One step of training: augment, losses, gradients, update. The same code on a CPU and a GPU."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric

from cclis.data.augment import augment
from cclis.engine.devices import numerics
from cclis.engine.optimizer import Optimizer
from cclis.engine.recording import Recording, Tensors
from cclis.functional.gradients import inner_products
from cclis.methods import Batch, Method
from cclis.nn.compiling import compiled, compiled_for_all, compiles
from cclis.settings import Config

INPUTS = ("images", "labels", "proposal", "replayed", "padding", "uniforms")


class Step:
    """Runs steps; on a GPU it compiles the losses and replays the whole step as a CUDA graph, or as
    two where a method decides on the host by its gradients what to follow.

    A recording holds for one task: everything it reads and writes (weights, momentum, learning
    rates, batch statistics, inputs) keeps its place in memory, and shapes do not change. The steps
    before the recording are ordinary steps of training, so nothing is run twice.

    A loss or gradient that is not finite updates no weight, nor does any step after it.

    Args:
        method: Whose losses to minimise.
        optimizer: What updates the weights; on a GPU its learning rates are tensors.
        fabric: Where, and in which precision.
        config: What is drawn for augmentation, and whether to compile.
    """

    def __init__(
        self, method: Method[Any, Any], optimizer: Optimizer, fabric: Fabric, config: Config
    ):
        self._method, self._optimizer = method, optimizer
        self._fabric, self._config = fabric, config
        compiling = compiles(config, fabric.device)
        recorded = compiling and fabric.device.type == "cuda"
        self._recording = Recording(self._run) if recorded else None
        self._apply_recorded = Recording(self._apply, skip_memory_check=True)
        self._augment = compiled_for_all(augment) if compiling else augment
        self._losses = compiled(method.losses, compiling)
        self._auxiliary = compiled(method.auxiliary_losses, compiling)
        self._loss = torch.zeros((), device=fabric.device)
        self._number = torch.zeros((), dtype=torch.int64, device=fabric.device)
        self._finite = torch.ones_like(self._number, dtype=torch.bool)
        self.begin_task()

    def begin_task(self, done: int = 0, sizes: tuple[int, ...] = (), steps: int = 1) -> None:
        """Forget what was recorded: the next task may compute something else.

        Args:
            done: Steps of the task taken before.
            sizes: Samples of the task and of each replay in a batch, where they are kept apart.
            steps: Steps of an epoch.
        """
        self.sizes, self.steps = sizes, steps
        self.forget()
        self._number.fill_(done)
        self._finite.fill_(True)

    def forget(self) -> None:
        """Give back the memory that a recording holds."""
        self._gradients = self._products = torch.empty(0)
        self._apply_recorded.forget()
        if self._recording is not None:
            self._recording.forget()

    @property
    def failed(self) -> int | None:
        """The first step of the task, counted from 0, whose loss or gradient was not finite.

        On a GPU this waits for all steps so far.
        """
        return None if bool(self._finite) else int(self._number)

    def __call__(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """Take a step; returns the terms of the loss and what to keep, valid until the next one.

        Args:
            inputs: By name: images, uint8 (B, H, W, C); labels, proposal, replayed and padding, as
                in `Batch`; uniforms, random numbers for the augmentation, (UNIFORMS, B); and extras
                of the replayed samples.
        """
        with numerics(self._config, self._fabric.device):
            return self._step(inputs)

    def _step(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        results = (self._recording or self._run)(inputs)
        if len(self._gradients):
            # Outside the recording: what to follow is decided on the host.
            coefficients = self._method.gradient_coefficients(self._products.cpu()).to(
                self._gradients
            )
            # A recording of its own, as soon as the gradients keep their place.
            still = self._recording is not None and self._recording.recorded
            (self._apply_recorded if still else self._apply)({"coefficients": coefficients})
        return results

    def _run(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        extras = dict(inputs)
        images, labels, proposal, replayed, padding, uniforms = (
            extras.pop(name) for name in INPUTS
        )
        self._optimizer.zero_grad()
        with self._fabric.autocast():
            # Without gradients, as in inference: what is compiled for one serves the other.
            with torch.no_grad():
                augmented = self._augment(images, self._config, uniforms)
            batch = Batch(augmented, labels, proposal, replayed, padding, extras, self.sizes)
            self._method.before_step(batch)
            # Before the losses: the statistics of batch norm are the task's rather than these.
            auxiliary = self._auxiliary(batch)
            losses = self._losses(batch)
        loss = torch.stack(list(losses.values())).sum()
        self._fabric.backward(loss)
        self._loss = loss.detach()
        if auxiliary:
            others = [self._optimizer.gradient_of(other) for other in auxiliary]
            self._gradients = torch.stack([self._optimizer.gradient, *others])
            self._products = inner_products(self._gradients)
        else:
            self._gradients = torch.empty(0)
            self._update()
        return {name: value.detach() for name, value in losses.items()}, batch.to_store

    def _apply(self, inputs: Tensors) -> None:
        """Add the gradients of the auxiliary losses by their coefficients (T,), and update."""
        own, others = self._gradients[0], self._gradients[1:]
        self._optimizer.set_gradient(torch.addmv(own, others.T, inputs["coefficients"]))
        self._update()

    def _update(self) -> None:
        """Update the weights, unless this or an earlier step was not finite.

        All of it is on the device; the number stays at the first step that was not finite.
        """
        self._finite &= torch.isfinite(self._loss + self._optimizer.gradient_norm())
        self._number += self._finite
        self._optimizer.step(unless=~self._finite)
