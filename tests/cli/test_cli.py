"""The command as a person types it: in one process for speed, in a real one where that matters."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cclis
from cclis.cli import main
from tests.conftest import CONFIGS, QUICK, at_once, quick

FLAGS = [f"--{name}={value}" for name, value in QUICK.items()]
FINETUNE_FLAGS = [f"--{name}={value}" for name, value in quick("finetune").items()]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CCLIS_DATA", str(tmp_path / "datasets"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says, in one line, as it refuses with exit code 2."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    assert error.startswith("cclis: error: ")
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["train", "--benchmark", "seq-cifar11"], "Did you mean 'seq-cifar10'?"),
        (["train", "--benchmrk", "x"], "Did you mean --benchmark"),
        (["report"], "arguments are required: runs"),
        (["study", "lambda", "--dry-rnu"], "Did you mean --dry_run?"),
        (["train", "--learning-rat", "1"], "Did you mean --learning_rate, --"),
        (["study", "lambda", "--epochs", "3"], "a setting of train and tune"),
        (["train", "--method", "er", "--probe_epochs", "5"], "a setting of cclis, co2l and"),
        (["train", "--method", "gem", "--replay_share", "0.5"], "a setting of cclis, co2l and"),
        (["train", "--method", "icarl", "--embedding", "9"], "a setting of cclis and co2l alone"),
        (["train", "--epoch", "3"], "unrecognized arguments: --epoch 3. Did you mean --epochs, --"),
        (["train", "--bench", "npz"], "unrecognized arguments: --bench npz"),
        (["data", "--thor"], "unrecognized arguments: --thor"),
        (["train", "--memory", "-1"], "memory must be 0 or more, not -1"),
        (["train", "--memory", "many"], "--memory: Expected int. Got value: many"),
        (["train", "--tasks", "x"], "--tasks: Expected one of int, list[int], NoneType."),
        (["train", "--encoder", "vit"], "Expected one of 'auto', 'conv', 'resnet18'"),
        (["train", "--method", "cclsi"], "Did you mean 'cclis'?"),
        (["train", "--benchmark", "seq-cifar10"], "no CIFAR-10 in"),
        (["train", "--benchmark", "seq-cifar100", "--data", "gone"], "no CIFAR-100 in gone"),
        (["train", "--benchmark", "seq-tinyimagenet"], "cclis data seq-tinyimagenet --download"),
        (["train", "--benchmark", "npz"], "npz needs --data"),
        (["train", "--benchmark", "image-folder", "--data", "gone"], "gone"),
        (["train", "--device", "cuda"], "no cuda device"),
        (["train", "--device", "abacus"], "device must be one of"),
        (["train", "--config", "gone.yaml"], "there is no file gone.yaml"),
        (["train", "--config", "seq-cifar10/cclis-20"], "unknown recipe"),
        (["train", "--config"], "expected one argument"),
        (["train", "--batch_size", "1"], "batch_size must be at least 2"),
        (["train", "--image_size", "9"], "image_size is for image-folder only"),
        (["evaluate", "gone"], "not a run directory"),
        (["evaluate"], "required"),
        (["data", "cifar"], "unknown dataset 'cifar'"),
        (["data", "--download"], "say which one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_a_sentence(arguments, part, capsys, monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert part in refused(capsys, *arguments)
    assert not Path("runs").exists()


def test_what_is_no_regular_file_is_not_waited_for(capsys) -> None:
    Path("run").mkdir()
    for name in ("pipe.yaml", "run/config.yaml", "run/result.json"):
        os.mkfifo(name)
    with at_once():
        for arguments in (
            ("train", "--config", "pipe.yaml"),
            ("train", "--resume", "run"),
            ("evaluate", "run"),
            ("report", "run"),
        ):
            refused(capsys, *arguments)
        assert "not a regular file" in refused(capsys, "train", "--config", "pipe.yaml")


def test_bad_config_files_get_a_sentence(capsys) -> None:
    Path("typo.yaml").write_text("epohcs: 3\n")
    assert "typo.yaml, line 1: cclis has no setting 'epohcs'. Did you mean epochs" in refused(
        capsys, "train", "--config", "typo.yaml"
    )
    Path("type.yaml").write_text("memory: [1]\n")
    assert "type.yaml, line 1: memory must be int" in refused(
        capsys, "train", "--config", "type.yaml"
    )
    Path("list.yaml").write_text("- 3\n")
    assert "'name: value'" in refused(capsys, "train", "--config", "list.yaml")
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot read bytes.yaml" in refused(capsys, "train", "--config=bytes.yaml")
    Path("method.yaml").write_text("method: nothing\n")
    assert "unknown method 'nothing'" in refused(capsys, "train", "--config", "method.yaml")


def test_bad_data_get_a_sentence(capsys, real_cifar: Path) -> None:
    folder = Path("datasets/cifar-10-batches-bin")
    shutil.copytree(real_cifar / "cifar-10-batches-bin", folder)
    third = folder / "data_batch_3.bin"
    content = third.read_bytes()
    third.write_bytes(content[:-100])
    error = refused(capsys, "train", "--benchmark", "seq-cifar10")
    assert "data_batch_3.bin" in error
    assert "truncated" in error
    third.write_bytes(b"\x63" + content[1:])
    assert "label" in refused(capsys, "train", "--benchmark", "seq-cifar10")
    assert main(["data", "--thorough"]) == 2
    assert "data_batch_3.bin" in capsys.readouterr().err


def arrays(**changed: np.ndarray) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 10, 10), dtype=np.uint8)
    labels = np.arange(40) % 4
    good = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez("own.npz", **{**good, **changed})


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"x_train": np.full((40, 10, 10), np.nan)}, "NaN"),
        ({"y_test": np.arange(40) % 5}, "4"),
        ({"x_test": np.zeros((40, 12, 10), dtype=np.uint8)}, "(12, 10, 1)"),
        ({"y_train": np.arange(39) % 4}, "39"),
    ],
    ids=["nan", "label out of range", "two sizes", "labels missing"],
)
def test_bad_arrays_get_a_sentence(changed, part, capsys) -> None:
    arrays(**changed)
    assert part in refused(capsys, "train", "--benchmark", "npz", "--data", "own.npz")


def test_images_of_two_sizes_get_a_sentence(capsys) -> None:
    for split in ("train", "test"):
        for index, side in enumerate((10, 10, 12)):
            folder = Path("own", split, f"class{index % 2}")
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (side, side)).save(folder / f"{index}.png")
    error = refused(capsys, "train", "--benchmark", "image-folder", "--data", "own")
    assert "--image_size" in error
    command = ["train", "--benchmark", "image-folder", "--data", "own", "--image_size", "8"]
    assert main([*command, *FLAGS, "--batch_size=2"]) == 0


def test_train_shows_matrices_averages_and_files(capsys) -> None:
    assert main(["train", *FLAGS, "--tasks", "[2,2,2]", "--memory", "30"]) == 0
    shown = capsys.readouterr()
    result = json.loads(Path("runs/split-digits-cclis-30-seed0/result.json").read_text())
    for text in (
        "Class-IL",
        "Task-IL",
        "after task 3",
        "prototype",
        "linear",
        "means",
        "report.html",
    ):
        assert text in shown.out
    times = r"learned in [\d.]+ s \([\d,]+ images/s\), evaluated in [\d.]+ s, [\d.]+ s in all"
    assert re.search(times, shown.out)
    for scenario in ("class_il", "task_il"):
        for value in result[scenario]["prototype"]["matrix"][-1]:
            assert f"{value:.1f}" in shown.out
    assert "task 3/3" in shown.err
    assert main(["train", *FLAGS, "--tasks", "[2,2,2]", "--memory", "30"]) == 0
    assert Path("runs/split-digits-cclis-30-seed0-2/result.json").exists()


def test_a_switch_alone_is_on(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--deterministic", "--print_config", "--tensorboard"])
    said = capsys.readouterr().out
    assert "deterministic: true" in said
    assert "tensorboard: true" in said
    with pytest.raises(SystemExit):
        main(["train", "--deterministic", "false", "--print_config"])
    assert "deterministic: false" in capsys.readouterr().out


def test_an_existing_output_is_not_touched(capsys) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    assert "exists already" in refused(capsys, "train", *FLAGS, "--output", "mine")
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


def test_your_arrays_are_learned(capsys) -> None:
    arrays()
    assert main(["train", "--benchmark=npz", "--data=own.npz", *FLAGS, "--output=run"]) == 0
    result = json.loads(Path("run/result.json").read_text())
    assert result["task_sizes"] == [2, 2]


def test_finetune_takes_its_own_settings(capsys) -> None:
    assert main(["train", "--method=finetune", *FINETUNE_FLAGS, "--output=run", "--tasks=2"]) == 0
    assert json.loads(Path("run/result.json").read_text())["memory"] == 0
    Path("own.yaml").write_text("temperature: 3\n")
    error = refused(capsys, "train", "--method", "finetune", "--config", "own.yaml")
    assert "own.yaml, line 1: temperature is a setting of cclis and co2l alone" in error
    error = refused(capsys, "train", "--method=finetune", "--temperature=1")
    assert "--temperature=1. It is a setting of cclis and co2l alone." in error


def print_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    import yaml

    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments, "--print_config"])
    assert not stopped.value.code
    shown: dict[str, object] = yaml.safe_load(capsys.readouterr().out)
    return shown


def test_print_config_shows_recipe_file_and_flags_in_that_order(capsys) -> None:
    assert print_config(capsys)["temperature"] == 0.1
    cifar = print_config(capsys, "--benchmark", "seq-cifar10")
    assert (cifar["memory"], cifar["first_epochs"], cifar["learning_rate"]) == (200, 500, 1.0)
    assert print_config(capsys, "--benchmark=seq-cifar10", "--memory=450")["memory"] == 450
    Path("own.yaml").write_text("epochs: 7\nseed: 5\n")
    for arguments in (
        ["--config", "own.yaml", "--seed", "6"],
        ["--seed", "6", "--config", "own.yaml"],
    ):
        own = print_config(capsys, *arguments)
        assert (own["epochs"], own["seed"], own["temperature"]) == (7, 6, 0.5)
    named = print_config(capsys, "--config", "seq-tinyimagenet/cclis-500")
    assert (named["benchmark"], named["memory"], named["blur"]) == ("seq-tinyimagenet", 500, 0.5)
    assert print_config(capsys, "--method=finetune")["crop"] == "padded"


def test_a_printed_config_can_be_given_back(capsys) -> None:
    import yaml

    shown = print_config(capsys, "--epochs", "3", "--tasks", "[4,6]")
    Path("again.yaml").write_text(yaml.safe_dump(shown))
    assert print_config(capsys, "--config", "again.yaml") == shown


def test_evaluate_repeats_the_numbers_and_takes_other_settings(capsys) -> None:
    assert main(["train", *FLAGS, "--tasks=2", "--memory=20", "--output=run"]) == 0
    result = json.loads(Path("run/result.json").read_text())
    assert main(["evaluate", "run", "--output", "same.json"]) == 0
    assert json.loads(Path("same.json").read_text())["class_il"] == result["class_il"]
    other = ["--probe_epochs", "1", "--paper_probe_learning_rate", "0.5"]
    assert main(["evaluate", "run", *other, "--output", "other.json"]) == 0
    assert "linear_paper" in json.loads(Path("other.json").read_text())["class_il"]
    assert json.loads(Path("other.json").read_text())["class_il"] != result["class_il"]
    assert "exists already" in refused(capsys, "evaluate", "run", "--output", "same.json")
    assert "probe_epochs must be at least 1" in refused(
        capsys, "evaluate", "run", "--probe_epochs", "0"
    )
    assert "there is no folder gone" in refused(
        capsys, "evaluate", "run", "--output", "gone/x.json"
    )
    Path("run/checkpoints/task-0.safetensors").write_bytes(b"damaged")
    assert "task-0.safetensors" in refused(capsys, "evaluate", "run")


def test_benchmarks_and_data_list_what_there_is(capsys, real_cifar: Path) -> None:
    assert main(["benchmarks"]) == 0
    shown = capsys.readouterr().out
    for name in ("split-digits", "seq-cifar10", "seq-cifar100", "seq-tinyimagenet", "finetune"):
        assert name in shown
    assert all(f" {method} " in shown for method in CONFIGS)
    assert main(["data", "--data", str(real_cifar)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("present") == 3
    assert shown.count("missing") == 1


def test_the_installed_command(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("cclis")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("cclis ")
    wrong = subprocess.run(
        [command, "train", "--memory", "-5"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr == "cclis: error: memory must be 0 or more, not -5\n"


def test_interrupting_says_so(capsys, monkeypatch) -> None:
    import cclis.experiment.loop

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cclis.experiment.loop, "train", interrupt)
    assert main(["train"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_resume_goes_on_shows_the_result_and_takes_no_other_settings(capsys) -> None:
    quick = [part for k, v in QUICK.items() for part in (f"--{k}", str(v))]
    assert main(["train", "--output", "run", "--tasks", "2", *quick]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) == 0
    said = capsys.readouterr()
    assert "has ended already" in said.err
    assert "Class-IL" in said.out
    page = Path("run/report.html").read_bytes()
    for name in ("run", "run/result.json"):
        Path("run/report.html").unlink(missing_ok=True)
        assert main(["report", name]) == 0
        assert Path("run/report.html").read_bytes() == page
    assert main(["train", "--resume", "run", "--seed", "4"]) == 2
    assert "cannot resume: the run used seed 0, not 4" in capsys.readouterr().err
    assert main(["train", "--resume", "nowhere"]) == 2
    assert "nowhere is not a run directory" in capsys.readouterr().err


def test_a_memory_smaller_than_the_classes_is_said_before_training(capsys) -> None:
    quick = [part for k, v in QUICK.items() for part in (f"--{k}", str(v))]
    assert main(["train", "--memory", "3", "--output", "run", *quick]) == 0
    said = capsys.readouterr().err
    assert "a memory of 3 is smaller than the 10 classes" in said
    assert said.index("smaller than") < said.index("training")
    assert "in no task" not in said


def test_classes_that_no_task_has_are_said_before_training(capsys) -> None:
    flags = ["--method=finetune", *FINETUNE_FLAGS, "--output=run", "--tasks=[2, 3]"]
    assert main(["train", *flags]) == 0
    said = capsys.readouterr().err
    assert "5 other classes of split-digits are in no task" in said
    assert said.index("in no task") < said.index("training")


def test_the_package_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "cclis", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout == f"cclis {cclis.__version__}\n"


def test_paths_are_printed_as_they_are(capsys) -> None:
    quick = [part for k, v in QUICK.items() for part in (f"--{k}", str(v))]
    folder = "a[/b] [bold]c"
    assert main(["train", "--output", folder, "--tasks", "2", *quick]) == 0
    assert f"report   {folder}/report.html" in capsys.readouterr().out


def test_names_that_would_steer_a_terminal_are_escaped(capsys) -> None:
    red, shown = "\x1b[31mred", r"\x1b[31mred"
    for split in ("train", "test"):
        for name in (red, "plain"):
            Path("own", split, name).mkdir(parents=True)
            for index in range(3):
                Image.new("L", (8, 8)).save(Path("own", split, name, f"{index}.png"))
    flags = [*FLAGS, "--batch_size=2", "--tasks=1", "--output", f"run {red}"]
    assert main(["train", "--benchmark", "image-folder", "--data", "own", *flags]) == 0
    said = capsys.readouterr()
    assert f"({shown}, plain) learned" in said.err
    assert f"report   run {shown}/report.html" in said.out
    Path("own", "test", f"no {red}").mkdir()
    Path("own", "test", f"no {red}", "0.png").touch()
    error = refused(capsys, "train", "--benchmark", "image-folder", "--data", "own")
    assert f"the class 'no {shown}'" in error
    assert "\x1b" not in said.err + said.out + error
