"""The rows of the table in docs/architecture.md: what is added works where the page says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cclis
from cclis import ContinualLearner, load_benchmark
from cclis.cli import main
from cclis.data.augment import augment, draw_uniforms
from cclis.data.benchmarks import BENCHMARKS, Spec
from cclis.data.readers.dataset import Dataset, Split
from cclis.evaluation.heads import HEADS, Head, View
from cclis.experiment.loop import train
from cclis.methods import Batch, make_config
from cclis.methods.er import ER
from cclis.methods.finetune import Finetune, FinetuneConfig
from cclis.progress import Progress
from cclis.settings import AugmentationOptions, StudyOptions, info_of, names_of, setting
from cclis.study.plan import Planned
from cclis.study.run import run_study
from tests.conftest import quick

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SMALL = {**quick("er"), "tasks": 2, "limit": 10, "memory": 10}


def test_every_row_names_a_test_that_is_there() -> None:
    rows = re.findall(r"^\| an? .*`(tests/[\w/]+\.py)::(\w+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for file, name in rows:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> Dataset:
        images = np.arange(6 * 64, dtype=np.uint8).reshape(6, 8, 8, 1)
        split = Split(images, np.array([0, 0, 1, 1, 2, 2]))
        return Dataset(split, split, ("a", "b", "c"))

    monkeypatch.setitem(BENCHMARKS, "letters", Spec("three letters", read, (1, 2)))
    benchmark = load_benchmark("letters")
    assert benchmark.task_sizes == (1, 2)
    assert [task.names for task in benchmark] == [("a",), ("b", "c")]


def test_a_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fit_first(view: View) -> Head:
        width = view.check_batch.features.shape[1]
        weight = torch.zeros(view.classes, width)
        return Head("features", weight, F.one_hot(torch.tensor(0), view.classes).float())

    class FirstClass(ER):
        heads = ("first", "classifier")

    monkeypatch.setitem(HEADS, "first", fit_first)
    config = make_config(FirstClass, {**SMALL, "output": str(tmp_path / "run")})
    result = train(config).result
    assert result.main_head == "classifier"
    assert result.class_il["first"].matrix[1] == [20.0, 0.0]


def test_a_loss() -> None:
    class WithPenalty(ER):
        def losses(self, batch: Batch) -> dict[str, Tensor]:
            penalty = self.network.logits(batch.images).square().mean()
            return {**super().losses(batch), "penalty": penalty}

    config = make_config(WithPenalty, {**SMALL, "output": None})
    terms: list[set[str]] = []
    from cclis.engine.events import EpochEnded
    from cclis.engine.trainer import Trainer

    task = load_benchmark("split-digits", limit=10)[0]
    for event in Trainer(config, (8, 8, 1), 10).learn(task.train, 2):
        if isinstance(event, EpochEnded):
            terms.append(set(event.record.losses))
    assert terms == [{"cross_entropy", "penalty"}] * config.epochs


def other_value(name: str) -> Any:
    """A value of an augmentation setting that is not neutral."""
    hint = get_type_hints(AugmentationOptions)[name]
    if get_origin(hint) is Literal:
        return next(v for v in get_args(hint) if v != "none")
    return {"padding": 9, "crop_scale": 0.9}.get(name, 1.0)


NEUTRAL = {"crop": "none", "flip": 0.0, "jitter": 0.0, "grayscale": 0.0, "blur": 0.0}
BESIDE = {
    "padding": {"crop": "padded"},
    "crop_scale": {"crop": "resized"},
    "jitter_strength": {"jitter": 1.0},
}
"""What another setting has to be for a setting to matter."""


@pytest.mark.parametrize("name", sorted(names_of(AugmentationOptions)))
def test_every_augmentation_changes_images(name: str) -> None:
    images = torch.randint(0, 256, (4, 40, 40, 3), dtype=torch.uint8)
    without = AugmentationOptions(**{**NEUTRAL, **BESIDE.get(name, {})})  # type: ignore[arg-type]
    value = 2.0 if name == "jitter_strength" else other_value(name)
    changed = {**NEUTRAL, **BESIDE.get(name, {}), name: value}
    with_it = AugmentationOptions(**changed)  # type: ignore[arg-type]
    uniforms = draw_uniforms(4, torch.Generator().manual_seed(0))
    assert not torch.equal(augment(images, without, uniforms), augment(images, with_it, uniforms))


@dataclass(frozen=True)
class SmoothedConfig(FinetuneConfig):
    """Settings of `Smoothed`."""

    smoothing: float = setting(0.0, "Label smoothing.", minimum=0, maximum=1)


class Smoothed(Finetune):
    """Fine-tuning with a setting of its own."""

    settings = SmoothedConfig


def test_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    method = "tests.test_additions:Smoothed"
    assert info_of(SmoothedConfig, "smoothing").doc == "Label smoothing."
    with pytest.raises(SystemExit):
        main(["train", "--method", method, "--help"])
    assert "Label smoothing." in capsys.readouterr().out
    assert main(["train", "--method", method, "--smoothing", "2"]) == 2
    assert "smoothing must be between 0 and 1, not 2.0" in capsys.readouterr().err
    Path("own.yaml").write_text("smoothing: 0.25\n")
    small = [f"--{k}={v}" for k, v in {**quick("finetune"), "tasks": 2, "limit": 10}.items()]
    flags = ["--method", method, "--config", "own.yaml", *small, "--output", "run"]
    assert main(["train", *flags]) == 0
    resume = ["train", "--resume", "run", "--method", method]
    assert main(resume) == 0
    capsys.readouterr()
    assert main([*resume, "--smoothing", "0.5"]) == 2
    assert "cannot resume: the run used smoothing 0.25, not 0.5" in capsys.readouterr().err
    learner = ContinualLearner(Smoothed, smoothing=0.5, **quick("finetune") | {"device": "cpu"})
    assert learner.config.to_dict()["smoothing"] == 0.5


def test_every_panel_has_its_figure() -> None:
    page = Path(cclis.__file__).parent / "report"
    shown = re.findall(r"panel\(\"(\w+)\"", (page / "templates" / "page.html").read_text())
    made = re.findall(r"^        \"(\w+)\": .*figures\.", (page / "page.py").read_text(), re.M)
    assert len(shown) > 5
    assert sorted(shown) == sorted(made)


def test_a_launcher(tmp_path: Path) -> None:
    launched: list[str] = []

    def nowhere(
        todo: Sequence[Planned], planned: Sequence[Planned], jobs: int, progress: Progress
    ) -> dict[str, str]:
        launched.extend(run.name for run in todo)
        assert jobs == 3
        return {run.name: "no machine was free" for run in todo}

    options = StudyOptions(
        method=["er"], scale="smoke", jobs=3, device="cpu", output=str(tmp_path / "study")
    )
    written, failed = run_study("methods", options, launch=nowhere)
    assert launched == list(failed) == ["split-digits-er-200-seed0"]
    page = next(path for path in written if path.suffix == ".html")
    assert "no machine was free" in page.read_text()
