"""Results and records for tests of reports, with what they do not care about filled in."""

from __future__ import annotations

from typing import Any

from cclis.engine.records import Epoch
from cclis.runs.records import Evaluation, Result, Scores, Seconds


def result(**changes: Any) -> Result:
    """The result of a run with one head; `heads` gives scores by head, the same in both ways."""
    heads = changes.pop("heads", {"linear": Scores([[50.0]], 50.0, 0.0, 0.0)})
    usual: dict[str, Any] = {
        **{"benchmark": "seq-cifar10", "method": "cclis", "memory": 200, "seed": 0},
        **{"main_head": list(heads)[-1], "class_il": heads, "task_il": heads},
        **{"recipe": None, "changed": {}, "task_sizes": [2], "class_names": ["a", "b"]},
        **{"seconds": Seconds(1.0), "images_per_second": 1.0, "peak_memory_bytes": 0},
        **{"device": "", "versions": {}, "date": "", "config": {}},
    }
    return Result(**{**usual, **changes})


def accuracy(value: float) -> Scores:
    """Scores of one task."""
    return Scores([[value]], value, 0.0, 0.0)


def epoch(task: int, number: int, **losses: float) -> Epoch:
    """An epoch of ten steps."""
    return Epoch(task, number, 10 * (number + 1), sum(losses.values()), losses, 0.1, 1000.0)


def evaluation(task: int, diagnosis: dict[str, Any]) -> Evaluation:
    """An evaluation of which only the diagnosis is shown."""
    return Evaluation(task, {}, "linear", 1.0, diagnosis)
