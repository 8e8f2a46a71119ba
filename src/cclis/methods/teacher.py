"""What methods that distil the model of before have in common."""

from __future__ import annotations

from torch import Tensor

from cclis.methods.base import ConfigT, Method, NetworkT


class TeacherMethod(Method[ConfigT, NetworkT]):
    """From the second task on, the model so far is frozen and becomes the teacher.

    Attributes:
        teacher: In eval mode, or None; call it without gradients.
        distils: Whether there is to be one.
    """

    teacher: NetworkT | None = None
    distils: bool = True

    def begin_task(self, new_classes: int) -> None:
        """Renew the teacher."""
        super().begin_task(new_classes)
        if self.distils and self.old:
            self.load(dict(self.network.state_dict()))

    def state(self) -> dict[str, Tensor]:
        """The teacher."""
        return {} if self.teacher is None else dict(self.teacher.state_dict())

    def load(self, state: dict[str, Tensor]) -> None:
        """Make a teacher of this state of the network."""
        if not state:
            return
        if self.teacher is None or self.teacher.classes != self.network.classes:
            self.teacher = self.frozen_copy()
        # In place, so that what was compiled with this teacher serves for the next task.
        self.teacher.load_state_dict(state)
