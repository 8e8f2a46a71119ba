"""What a trainer knew at the end of a task, as one value that later tasks leave alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from cclis.engine.devices import make_fabric
from cclis.engine.inference import Inference
from cclis.engine.trainer import Description, Trainer
from cclis.methods import Method
from cclis.nn.compiling import compiles
from cclis.nn.network import Network
from cclis.progress import QUIET, Progress
from cclis.settings import Config


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of all that a trainer knows between two tasks.

    Attributes:
        config: All settings.
        network: In eval mode.
        tensors: Those of `Trainer.state`, the network's included.
        description: That of `Trainer.state`.
    """

    config: Config
    network: Network
    tensors: Mapping[str, Tensor]
    description: Description

    @classmethod
    def of(cls, trainer: Trainer) -> Snapshot:
        """Copy what a trainer knows: every tensor once."""
        # An encoder may hold on to what it has computed, which cannot be copied while gradients
        # belong to it: heads have been fitted by now, which takes passes without gradients.
        network = trainer.method.frozen_copy()
        copied = {f"network.{name}": value for name, value in network.state_dict().items()}
        tensors, description = trainer.state()
        others = {name: value.clone() for name, value in tensors.items() if name not in copied}
        return cls(trainer.config, network, {**copied, **others}, description)

    @cached_property
    def inference(self) -> Inference:
        """The network, applied to images."""
        fabric = make_fabric(self.config)
        if compiles(self.config, fabric.device):
            self.network.compile_encoder()
        return Inference(self.network, fabric, self.config)

    def free(self) -> None:
        """Give back the memory that passes need; they take it again when they are asked for."""
        if "inference" in vars(self):
            self.inference.forget()

    def trainer(
        self,
        method: type[Method[Any, Any]],
        encoder: nn.Module | None,
        progress: Progress = QUIET,
    ) -> Trainer:
        """A trainer that continues from here.

        Args:
            method: The class of the method.
            encoder: An encoder of the user's own, such as the network has; None for one of ours.
            progress: Where to show progress.
        """
        tensors = dict(self.tensors)
        return Trainer.from_state(
            tensors, self.description, method=method, encoder=encoder, progress=progress
        )

    def __getstate__(self) -> dict[str, Any]:
        # What applies the network holds the device; it is made anew.
        return {name: value for name, value in vars(self).items() if name != "inference"}
