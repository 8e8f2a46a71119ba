"""A run evaluated again, from its checkpoints."""

from __future__ import annotations

import dataclasses

from cclis.engine.trainer import Trainer
from cclis.errors import as_input_errors
from cclis.evaluation.heads import chosen_heads
from cclis.experiment.stages import benchmark_of, evaluate_stage, rows_by_task, stages
from cclis.experiment.state import refuse_other_stream
from cclis.progress import QUIET, Progress
from cclis.runs import Run
from cclis.runs.records import RunScores, summarise
from cclis.settings import Config


def reevaluate(
    run: Run,
    *,
    data: str | None = None,
    device: str | None = None,
    config: Config | None = None,
    progress: Progress = QUIET,
) -> RunScores:
    """Evaluate the checkpoints of a run again; with the same settings, the same numbers.

    Args:
        run: The run.
        data: Where the datasets lie now [default: where they lay].
        device: Where to compute now [default: where it was computed].
        config: Other settings of the evaluation [default: the run's].
        progress: Where to show progress.

    Returns:
        The scores, as in result.json.
    """
    config = config or run.config
    benchmark = benchmark_of(dataclasses.replace(config, data=data or config.data), progress)
    first = run.checkpoints.load("task-0")
    with as_input_errors("not a checkpoint that this cclis wrote"):
        refuse_other_stream(first[1]["journey"]["stream"], benchmark)
    trainer = Trainer.from_state(*first, device=device)
    heads = chosen_heads(trainer.method.heads, config, config.heads)
    rows = []
    for stage in stages(benchmark, joint=trainer.method.joint):
        # Heads are fitted to what was visible during the task: the memory as it was before it.
        task = stage.task.train.to(trainer.fabric.device)
        visible = trainer.memory.visible(task) if stage.task.index else task
        trainer.restore(*run.checkpoints.load(f"task-{stage.task.index}"))
        visible = trainer.head_samples(visible)
        evaluation = evaluate_stage(trainer, stage, visible, heads, config, progress)
        rows.append(evaluation.accuracies)
    by_task = rows_by_task(rows, len(benchmark))
    which = config.benchmark, config.method, config.memory, config.seed, trainer.method.main_head()
    scores = (summarise(by_task, scenario) for scenario in ("class_il", "task_il"))
    return RunScores(*which, *scores)
