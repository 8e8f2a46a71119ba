"""Whole runs, on real images."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cclis
from cclis.cli import main
from cclis.engine.events import Event
from cclis.engine.trainer import Trainer
from cclis.errors import InputError
from cclis.experiment import loop as experiment
from cclis.experiment import versions
from cclis.experiment.loop import resume, train
from cclis.experiment.reevaluation import reevaluate
from cclis.methods import make_config
from cclis.progress import Progress
from cclis.runs.directory import Run
from cclis.runs.records import SCENARIOS, RunScores
from cclis.settings import read_yaml, recipe_settings
from tests.conftest import Bars
from tests.conftest import quick as known


def quick(folder: Path, method: str = "cclis", **settings: Any) -> Run:
    return train(make_config(method, {**known(method), "output": str(folder), **settings}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return quick(tmp_path_factory.mktemp("runs") / "run", memory=40, tasks=[3, 2, 4])


def numbers(result: RunScores) -> dict[str, Any]:
    return {scenario: result.scores(scenario) for scenario in SCENARIOS}


def test_cclis_learns_digits_without_forgetting(tmp_path) -> None:
    settings = recipe_settings("split-digits/cclis-100")
    settings |= {"heads": ["discriminant", "means"], "mean_passes": 3, "map_samples": 0}
    settings |= {"width": 32, "limit": 80}
    config = make_config(settings.pop("method"), {**settings, "output": str(tmp_path / "run")})
    result = train(config).result
    assert result.memory == 100
    assert max(head.accuracy for head in result.class_il.values()) >= 88
    assert min(head.accuracy for head in result.task_il.values()) >= 95
    assert max(head.forgetting for head in result.class_il.values()) <= 5


SMALLER: dict[str, dict[str, Any]] = {
    "co2l": {"width": 48, "probe_epochs": 30, "probe_learning_rate": 0.05, "mean_passes": 3},
    "der": {"width": 32},
    # By five epochs it got too little right to choose from: another CPU's rounding decides.
    "gcr": {"width": 32, "limit": 80, "epochs": 15},
    "gem": {"width": 32},
    "gss": {"width": 32},
}
"""Less work for the larger ones; accuracies stay well above what is asked for, for any seed."""


@pytest.mark.parametrize(
    ("method", "least"),
    [
        *[("co2l", 85), ("der", 75), ("derpp", 75), ("er", 75), ("gcr", 80), ("gem", 70)],
        *[("gss", 75), ("icarl", 85), ("joint", 95)],
    ],
)
def test_every_baseline_learns_digits_better_than_fine_tuning(
    method: str, least: float, tmp_path: Path
) -> None:
    memory = 0 if method == "joint" else 100
    settings = recipe_settings(f"split-digits/{method}-{memory}")
    settings |= SMALLER.get(method, {})
    settings |= {"map_samples": 0, "output": str(tmp_path / "run")}
    done = train(make_config(settings.pop("method"), settings))
    # Fine-tuning ends at 20 %: the last task alone.
    assert min(head.accuracy for head in done.result.class_il.values()) >= least
    assert min(head.accuracy for head in done.result.task_il.values()) >= 85
    # By one that keeps exemplars, one that fills its memory at every step, and all at once.
    if method in ("co2l", "er", "joint"):
        assert numbers(reevaluate(done)) == numbers(done.result)


def test_finetune_forgets(tmp_path) -> None:
    short = {"limit": 80, "probe_epochs": 10, "mean_passes": 2, "map_samples": 0}
    settings = {"flip": 0.0, "epochs": 20, **short, "output": str(tmp_path / "run")}
    result = train(make_config("finetune", settings)).result
    for head in result.class_il.values():
        assert head.accuracy < 30
        assert head.matrix[0][0] > 95
        assert head.forgetting > 60


def test_a_run_directory_is_complete(run: Run) -> None:
    assert {path.name for path in run.path.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "analysis.safetensors",
        "result.json",
        "report.html",
        "checkpoints",
        ".lock",
    }
    assert [name for name in run.checkpoints.names if "step" not in name] == [
        f"task-{index}" for index in range(3)
    ]
    result = json.loads((run.path / "result.json").read_text())
    assert {"benchmark", "method", "memory", "seed", "class_il", "task_il", "seconds"} <= set(
        result
    )
    assert {"images_per_second", "device", "versions", "peak_memory_bytes"} <= set(result)
    assert (
        set(result["class_il"])
        == set(result["task_il"])
        == {
            "linear",
            "discriminant",
            "means",
            "prototype",
        }
    )
    assert result["task_sizes"] == [3, 2, 4]
    assert 0 < result["seconds"]["train"] <= result["seconds"]["total"]
    for scenario in ("class_il", "task_il"):
        for head in result[scenario].values():
            for t, row in enumerate(head["matrix"]):
                assert [value is None for value in row] == [k > t for k in range(3)]
                assert all(0 <= value <= 100 for value in row[: t + 1])
            assert head["accuracy"] == pytest.approx(sum(head["matrix"][-1]) / 3)
    places = {"output": str(run.path), "data": None, "start_from": None}
    assert run.config.to_dict() == {**result["config"], **places}


def test_metrics_are_written_as_they_happen(run: Run) -> None:
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").open()]
    assert sum("loss" in record for record in records) == 3 * 2
    evaluations = [record["evaluation"] for record in records if "evaluation" in record]
    last = run.result.class_il["linear"].matrix[-1]
    assert evaluations[-1]["linear"]["class_il"] == last


def test_the_same_seed_gives_the_same_numbers(run: Run, tmp_path) -> None:
    again = quick(tmp_path / "again", memory=40, tasks=[3, 2, 4])
    other = quick(tmp_path / "other", memory=40, tasks=[3, 2, 4], seed=1)
    assert numbers(again.result) == numbers(run.result)
    assert numbers(other.result) != numbers(run.result)
    tensors, others = run.checkpoints.load("task-2")[0], again.checkpoints.load("task-2")[0]
    assert all(bool((tensors[name] == others[name]).all()) for name in tensors)


def test_evaluating_again_gives_the_same_numbers(run: Run) -> None:
    assert numbers(reevaluate(run)) == numbers(run.result)


def test_evaluating_with_other_settings_gives_other_numbers(run: Run) -> None:
    other = dataclasses.replace(run.config, probe_learning_rate=3.0, mean_passes=4)
    found = reevaluate(run, config=other)
    assert found.class_il["linear"] != run.result.class_il["linear"]


@pytest.mark.parametrize(
    "changed",
    [{"probe_epochs": 1}, {"probe_batch_size": 16}, {"probe_learning_rate": 1.0}],
    ids=str,
)
def test_every_setting_of_the_probe_changes_it(run: Run, changed: dict[str, Any]) -> None:
    found = reevaluate(run, config=dataclasses.replace(run.config, **changed))
    assert found.class_il["linear"].matrix != run.result.class_il["linear"].matrix
    assert found.class_il["means"] == run.result.class_il["means"]


def test_a_missing_checkpoint_is_named(run: Run, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    (copy / "checkpoints" / "task-1.safetensors").unlink()
    with pytest.raises(InputError, match=r"cannot read .*task-1\.safetensors: No such file"):
        reevaluate(Run.open(copy))


def test_two_tasks_of_real_cifar_with_a_resnet(real_cifar: Path, tmp_path) -> None:
    run = train(
        make_config(
            "cclis",
            {
                "benchmark": "seq-cifar10",
                "data": str(real_cifar),
                "tasks": [2, 2],
                "limit": 100,
                "memory": 20,
                "encoder": "resnet18",
                "width": 8,
                "epochs": 6,
                "learning_rate": 0.1,
                "batch_size": 25,
                "heads": ["means"],
                "mean_passes": 2,
                "map_samples": 0,
                "output": str(tmp_path / "run"),
            },
        )
    )
    result = run.result
    assert result.class_names == ["airplane", "automobile", "bird", "cat"]
    assert (run.path / "report.html").stat().st_size > 1000
    assert run.checkpoints.names[-1] == "task-1"
    memory = run.checkpoints.load("task-1")[0]
    assert memory["memory.images"].shape == (20, 32, 32, 3)
    assert memory["memory.labels"].bincount().tolist() == [5, 5, 5, 5]
    # Even so short a schedule tells planes from cars better than chance.
    assert result.task_il["prototype"].matrix[0][0] > 60


def test_classes_may_be_fewer_than_the_memory_holds(tmp_path) -> None:
    result = quick(tmp_path / "run", memory=3, tasks=[2, 2, 2]).result
    assert len(result.class_il["means"].matrix) == 3


def test_a_first_task_taken_over_gives_the_same_bits(run: Run, tmp_path) -> None:
    changed = {"memory": 30, "selection": "random", "distill_weight": 0.1, "probe_epochs": 1}
    common = {"tasks": [3, 2, 4], **changed}
    taken = quick(tmp_path / "taken", start_from=str(run.path), **common)
    own = quick(tmp_path / "own", **common)
    assert numbers(taken.result) == numbers(own.result)
    last, other = (r.checkpoints.load("task-2")[0] for r in (taken, own))
    assert last.keys() == other.keys()
    assert all(bool((last[name] == other[name]).all()) for name in last)


@pytest.mark.parametrize("method", ["er", "derpp", "gss", "gcr", "icarl"])
def test_a_first_task_of_a_baseline_is_taken_over(method: str, tmp_path) -> None:
    common = {"method": method, "memory": 20, "padding": 1, "tasks": [2, 2], "limit": 40}
    first = quick(tmp_path / "first", **common)
    taken = quick(tmp_path / "taken", start_from=str(first.path), **common)
    assert numbers(taken.result) == numbers(first.result)
    if method == "er":
        with pytest.raises(InputError, match="it was learned with memory 20, not 30"):
            quick(tmp_path / "no", start_from=str(first.path), **{**common, "memory": 30})


def test_a_first_task_of_other_settings_is_not_taken_over(run: Run, tmp_path) -> None:
    said = r"it was learned with seed 0, not 1; learning_rate 0\.1, not 0\.2"
    with pytest.raises(InputError, match=said):
        quick(
            tmp_path / "run",
            memory=40,
            tasks=[3, 2, 4],
            start_from=str(run.path),
            learning_rate=0.2,
            seed=1,
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changed", [{"epochs": 9}, {"class_order": 3}, {"encoder": "resnet18"}, {"tasks": [3, 6]}]
)
def test_a_run_is_resumed_with_its_own_settings_alone(run: Run, tmp_path, changed) -> None:
    copy = Run(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    (copy.path / "result.json").unlink()
    name = next(iter(changed))
    other = make_config("cclis", {**_settings(copy), **changed})
    with pytest.raises(InputError, match=f"cannot resume: the run used {name} .*, not "):
        resume(copy, other)
    # Nor does it help to change them in the run's own file.
    settings = read_yaml(copy.path / "config.yaml") | changed
    (copy.path / "config.yaml").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=f"the checkpoint was written with {name} .*, not "):
        resume(copy, other)


def test_a_run_is_resumed_on_its_own_data_alone(tmp_path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)

    def write(count: int) -> None:
        x = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        y = np.arange(count) % 4
        np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])

    write(40)
    done = quick(tmp_path / "run", benchmark="npz", data=str(tmp_path / "own.npz"))
    (done.path / "result.json").unlink()
    write(44)
    with pytest.raises(InputError, match="another stream: it had samples 40, not 44"):
        resume(done, done.config)


def test_other_test_samples_are_another_stream(tmp_path) -> None:
    import numpy as np

    x, y = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 4
    for name, tested in (("a", x[:8]), ("b", x[8:16])):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=tested, y_test=y[:8])
    done = quick(tmp_path / "run", benchmark="npz", data=str(tmp_path / "a.npz"))
    with pytest.raises(InputError, match="another stream: it had digest"):
        reevaluate(done, data=str(tmp_path / "b.npz"))
    (done.path / "result.json").unlink()
    with pytest.raises(InputError, match="another stream: it had digest"):
        resume(done, dataclasses.replace(done.config, data=str(tmp_path / "b.npz")))


def test_a_damaged_result_is_written_again(tmp_path) -> None:
    done = quick(tmp_path / "run", tasks=[2, 2])
    before = done.result
    (done.path / "result.json").write_text("{")
    said: list[str] = []
    progress = Progress(quiet=True)
    progress.say = said.append  # type: ignore[method-assign]
    again = resume(done, done.config, progress).result
    assert any("result.json" in line and "written again" in line for line in said)
    for key in ("class_il", "task_il", "config", "benchmark"):
        assert getattr(again, key) == getattr(before, key)


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_anew(tmp_path) -> None:
    done = quick(tmp_path / "run", tasks=[2, 2])
    before = done.result
    (done.path / "result.json").unlink()
    for path in done.checkpoints.folder.iterdir():
        path.unlink()
    said: list[str] = []
    progress = Progress(quiet=True)
    progress.say = said.append  # type: ignore[method-assign]
    assert resume(done, done.config, progress).result.class_il == before.class_il
    assert f"no checkpoint is left in {done.path}: it starts from the beginning" in said


def test_a_run_goes_on_with_as_many_threads_as_it_was_begun_with(tmp_path, monkeypatch) -> None:
    threads = torch.get_num_threads()

    def interrupt(*_: Any, **__: Any) -> None:
        raise InterruptedError

    try:
        torch.set_num_threads(3)
        with monkeypatch.context() as stopping:
            stopping.setattr(experiment, "evaluate_stage", interrupt)
            with pytest.raises(InterruptedError):
                quick(tmp_path / "run", tasks=[2, 2], threads=None)
        torch.set_num_threads(1)
        half = Run.open(tmp_path / "run")
        resume(half, half.config)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_a_head_that_is_not_finite_stops_the_run(tmp_path) -> None:
    with pytest.raises(InputError, match=r"head linear is not finite.*probe_learning_rate"):
        quick(tmp_path / "run", tasks=[2, 2], probe_learning_rate=1e38, probe_epochs=5)


def test_an_ended_run_is_left_as_it_is(run: Run) -> None:
    before = (run.path / "result.json").read_bytes()
    assert resume(run, run.config) is run
    assert (run.path / "result.json").read_bytes() == before


def _settings(run: Run) -> dict[str, Any]:
    return {k: v for k, v in run.config.to_dict().items() if k != "method"}


def test_a_first_task_of_other_data_is_not_taken_over(tmp_path) -> None:
    import numpy as np

    for name, seed in (("a", 0), ("b", 1)):
        x = np.random.default_rng(seed).integers(0, 256, (40, 8, 8), dtype=np.uint8)
        y = np.arange(40) % 4
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    first = quick(tmp_path / "run", benchmark="npz", data=str(tmp_path / "a.npz"))
    other = {"benchmark": "npz", "data": str(tmp_path / "b.npz")}
    with pytest.raises(InputError, match="another stream: it had digest"):
        quick(tmp_path / "other", start_from=str(first.path), **other)
    (first.path / "result.json").unlink()
    with pytest.raises(InputError, match="another stream: it had digest"):
        resume(first, dataclasses.replace(first.config, data=other["data"]))


def test_seconds_and_images_add_up_over_an_interruption(tmp_path, monkeypatch) -> None:
    whole = quick(tmp_path / "whole", tasks=[2, 2])

    def interrupt(*_: Any, **__: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(experiment, "evaluate_stage", interrupt)
    with pytest.raises(InterruptedError):
        quick(tmp_path / "half", tasks=[2, 2])
    monkeypatch.undo()
    half = Run.open(tmp_path / "half")
    resume(half, half.config)
    first, second = whole.result, half.result
    images = [r.images_per_second * r.seconds.train for r in (first, second)]
    assert images[0] == pytest.approx(images[1])
    assert second.seconds.train > first.seconds.train / 4


def test_bars_of_a_run_that_goes_on_begin_where_it_was(tmp_path, monkeypatch) -> None:
    learn = Trainer.learn

    def stopped(trainer: Trainer, *task: Any) -> Iterator[Event]:
        for event in learn(trainer, *task):
            yield event
            if len(trainer.task_sizes) == 1 and trainer.steps == 4:
                raise InterruptedError

    settings = {"tasks": [2, 2], "epochs": 2, "batch_size": 120, "limit": 180}
    with monkeypatch.context() as stopping:
        stopping.setattr(Trainer, "learn", stopped)
        with pytest.raises(InterruptedError):
            quick(tmp_path / "run", "er", checkpoint_minutes=0.0, **settings)
    half, bars = Run.open(tmp_path / "run"), Bars()
    resume(half, half.config, bars)
    # Three steps an epoch: one is over, and one step of the second is done.
    assert ("run", 4, pytest.approx(10 / 3)) in bars.begun
    assert ("task 2  training", 6, 4) in bars.begun


def test_runs_tell_one_code_from_another(run: Run, tmp_path, monkeypatch) -> None:
    digests = set()
    for number, (name, text) in enumerate([("a", "x"), ("a", "y"), ("b", "x"), ("b/a", "x")]):
        path = tmp_path / str(number) / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        digests.add(versions.source_digest(tmp_path / str(number)))
    assert len(digests) == 4
    assert run.result.versions["cclis"].startswith(f"{cclis.__version__}+")

    copy = Run(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    (copy.path / "result.json").unlink()
    said: list[str] = []
    progress = Progress(quiet=True)
    monkeypatch.setattr(progress, "say", said.append)
    resume(copy, copy.config, progress)
    assert not [line for line in said if "results may differ" in line]
    (copy.path / "result.json").unlink()
    monkeypatch.setattr(versions, "source_digest", lambda _: "another")
    resume(copy, copy.config, progress)
    assert [line for line in said if "another" in line and "results may differ" in line]


def test_a_description_of_anything_is_an_input_error(run: Run, tmp_path) -> None:
    def damage(value: Any) -> list[Any]:
        return [None, 3, "x", [], {}, [value]]

    _, description = run.checkpoints.load("task-1")
    tensors, _ = run.checkpoints.load("task-1")
    for key in ("config", "classes", "position", "chance", "journey", "task_sizes", "versions"):
        for other in damage(description[key]):
            copy = Run(tmp_path / "copy")
            shutil.rmtree(copy.path, ignore_errors=True)
            shutil.copytree(run.path, copy.path)
            (copy.path / "result.json").unlink()
            for name in copy.checkpoints.names:
                for suffix in (".json", ".safetensors"):
                    (copy.checkpoints.folder / f"{name}{suffix}").unlink()
            copy.checkpoints.save("task-1", (tensors, {**description, key: other}))
            with contextlib.suppress(InputError):
                resume(copy, copy.config)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b"not json\n"),
        ("metrics.jsonl", b"3\n"),
        ("metrics.jsonl", b'{"losses": 3}\n'),
        ("metrics.jsonl", b'{"task": 0, "diagnosis": {"effective": [1]}}\n'),
        ("metrics.jsonl", b"\xff\xfe\n"),
        ("analysis.safetensors", b"no tensors"),
        ("result.json", b'{"class_il": {}, "task_il": {}, "seconds": {}}'),
    ],
)
def test_a_report_of_damaged_files_is_refused_and_the_page_stays(
    run: Run, tmp_path, capsys, name: str, content: bytes
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    (copy / name).write_bytes(content)
    (copy / "report.html").write_text("as it was")
    assert main(["report", str(copy)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert (copy / "report.html").read_text() == "as it was"


def test_a_method_without_a_probe_is_evaluated_without_its_settings(tmp_path, capsys) -> None:
    path = quick(tmp_path / "er", "er", memory=8, tasks=[2, 2], limit=20).path
    assert main(["evaluate", str(path), "--probe_epochs", "3"]) == 2
    assert "er has no setting probe_epochs" in capsys.readouterr().err
    assert main(["evaluate", str(path)]) == 0


def test_a_report_can_go_elsewhere_and_a_cut_line_is_left_out(run: Run, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"task": 4, "los')
    before = (copy / "report.html").read_bytes()
    (copy / "report.html").write_text("as it was")
    assert main(["report", str(copy), "--output", str(tmp_path / "there")]) == 0
    assert (tmp_path / "there" / "report.html").read_bytes() == before
    assert (copy / "report.html").read_text() == "as it was"
    assert main(["report", str(copy), "--output", str(tmp_path / "there")]) == 0  # its own, anew


def test_a_run_that_ended_without_its_page_gets_it(run: Run, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    (copy / "report.html").unlink()
    resume(Run.open(copy), Run.open(copy).config)
    assert (copy / "report.html").read_bytes() == (run.path / "report.html").read_bytes()


def test_a_collapsed_representation_ends_with_a_result(tmp_path) -> None:
    found = quick(tmp_path / "run", embedding=1, map_samples=40, tasks=[2, 2])
    assert found.ended
    assert (found.path / "report.html").is_file()


def test_a_report_is_the_same_when_written_again(run: Run, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    before = (copy / "report.html").read_bytes()
    (copy / "report.html").unlink()
    assert main(["report", str(copy)]) == 0
    assert (copy / "report.html").read_bytes() == before
    (copy / "analysis.safetensors").unlink()
    (copy / "metrics.jsonl").unlink()
    assert main(["report", str(copy)]) == 0
