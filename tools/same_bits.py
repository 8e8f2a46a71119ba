"""Whether the working tree still computes the same bits as another commit.

    python tools/same_bits.py BASE

Every method learns split-digits in both trees, shortened, with two seeds, on one CPU thread. Then
all metrics are compared, and the values of the last checkpoint's weights and memory, whatever their
names. New keys and new tensors are fine. It takes about two minutes.

Exit code: 0 if all is the same, 1 if anything differs, 2 if BASE cannot be checked out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METHODS = (
    *("cclis", "co2l", "er", "icarl", "der", "derpp"),
    *("gcr", "gem", "gss", "finetune", "joint"),
)
SEEDS = (0, 1)
MEMORY = {"finetune": 0, "joint": 0}
FLAGS = {
    "benchmark": "split-digits",
    "device": "cpu",
    "threads": 1,
    "precision": "fp32",
    "epochs": 2,
    "first_epochs": 3,  # always given, because recipes have some
    "width": 16,
    "map_samples": 0,
}
PROBE = {"probe_epochs": 10, "mean_passes": 2}
OWN = {
    "cclis": {**PROBE, "score_passes": 2},
    "co2l": PROBE,
    "icarl": {"mean_passes": 2},
    "finetune": PROBE,
}
"""Shorter than by default, for the methods that have them."""
TIMES = ("images_per_second", "seconds")
"""Keys of records that differ each time."""
NOT_WEIGHTS = ("momentum.", "generator.", "chance.")
"""Tensors of a checkpoint that are neither weights nor memory: if they differ it is only said."""
SHOWN = 5
"""Differences of a run that are printed."""
LONGEST = 40
"""Characters of a value that are printed."""


def main() -> int:
    """Compare the trees; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Check that the working tree computes the same bits as another commit."
    )
    parser.add_argument("base", metavar="BASE", help="the commit to compare with")
    parser.add_argument("--train-into", help=argparse.SUPPRESS)  # how it calls itself
    options = parser.parse_args()
    if options.train_into is not None:
        train_all(Path(options.base), Path(options.train_into))
        return 0
    commit = git(
        "rev-parse", "--verify", "--quiet", "--end-of-options", f"{options.base}^{{commit}}"
    )
    if commit.returncode != 0:
        print(f"same_bits: there is no commit '{options.base}' in this repository", file=sys.stderr)
        return 2
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        temporary = Path(name).resolve()
        tree = temporary / "tree"
        added = git("worktree", "add", "--detach", "--quiet", str(tree), commit.stdout.strip())
        if added.returncode != 0:
            print(f"same_bits: cannot check out {options.base}: {added.stderr}", file=sys.stderr)
            return 2
        try:
            outputs = temporary / "base", temporary / "here"
            run_both((tree, ROOT), outputs)
            differing = compare_all(*outputs)
        finally:
            git("worktree", "remove", "--force", str(tree))
    runs = len(METHODS) * len(SEEDS)
    took = f"{time.perf_counter() - began:.0f} s"
    if differing:
        print(f"{differing} of {runs} runs differ from {options.base} ({took})")
        return 1
    print(f"all {runs} runs have the same bits as {options.base} ({took})")
    return 0


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in this repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_both(trees: tuple[Path, Path], outputs: tuple[Path, Path]) -> None:
    """Train with each tree in a process of its own, side by side."""
    processes = []
    try:
        for tree, output in zip(trees, outputs, strict=True):
            output.mkdir()
            one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            command = [sys.executable, str(Path(__file__).resolve()), str(tree)]
            with (output / "log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, "--train-into", str(output)],
                        cwd=output,
                        env={**os.environ, **one, "PYTHONPATH": str(tree / "src")},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train_all(tree: Path, output: Path) -> None:
    """Train every method with every seed, with the package of a tree."""
    import cclis
    from cclis.cli import main as cclis_main

    if not Path(cclis.__file__).is_relative_to(tree / "src"):
        raise SystemExit(f"{cclis.__file__} was imported, which is not of {tree}")
    for method in METHODS:
        for seed in SEEDS:
            name = name_of(method, seed)
            settings = {
                "method": method,
                "memory": MEMORY.get(method, 100),
                "seed": seed,
                "output": name,  # relative, so that both trees are told the same
                **FLAGS,
                **OWN.get(method, {}),
            }
            print(f"--- {name}", flush=True)
            try:
                code = cclis_main(["train", *(f"--{k}={v}" for k, v in settings.items())])
                print(f"exit code {code}", flush=True)
            except (Exception, SystemExit):
                traceback.print_exc(file=sys.stdout)
            (output / name / "report.html").unlink(missing_ok=True)  # large


def name_of(method: str, seed: int) -> str:
    """What a run is called."""
    return f"{method}-seed{seed}"


def compare_all(base: Path, here: Path) -> int:
    """Print a line for every run; returns how many differ."""
    differing = 0
    for method in METHODS:
        for seed in SEEDS:
            name = name_of(method, seed)
            failed = False
            for folder, what in ((base, "BASE"), (here, "the working tree")):
                if not (folder / name / "result.json").is_file():
                    print(f"{name:16} failed in {what}: {last_words(folder / 'log', name)}")
                    failed = True
            if failed:
                differing += 1
                continue
            found = list(differences(base / name, here / name))
            remark = remark_on_others(base / name, here / name)
            if not found:
                print(f"{name:16} ok{remark}")
                continue
            differing += 1
            rest = len(found) - SHOWN
            more = f"; and {rest} more" if rest > 0 else ""
            print(f"{name:16} differs: {'; '.join(found[:SHOWN])}{more}")
    return differing


def last_words(log: Path, name: str) -> str:
    """The last lines that a failed run printed."""
    text = log.read_text(encoding="utf-8", errors="replace")
    _, _, own = text.partition(f"--- {name}\n")
    lines = (own.split("\n--- ")[0] if own else text).strip().splitlines()
    return " / ".join(lines[-3:]) or "it never began"


def differences(base: Path, here: Path) -> Iterator[str]:
    """What differs between two runs."""
    before, now = (json.loads((run / "result.json").read_text()) for run in (base, here))
    for key in ("class_il", "task_il"):
        yield from lacking(before[key], now.get(key), key)
    before, now = (records(run) for run in (base, here))
    yield from lacking(before, now, "metrics.jsonl")
    before, now = (last_checkpoint(run) for run in (base, here))
    if now is None or before is None:
        yield "there is no checkpoint"
        return
    if before.name != now.name:
        yield f"the last checkpoint is {now.name}, not {before.name}"
    left = Counter(values(now).values())
    for name, value in values(before).items():
        if name.startswith(NOT_WEIGHTS):
            continue
        if left[value] == 0:
            yield f"no tensor has the values of {name} ({value[0]}, {list(value[1])})"
        left[value] -= left[value] > 0


def remark_on_others(base: Path, here: Path) -> str:
    """Which tensors that are not weights have other values, in words."""
    before, now = (last_checkpoint(run) for run in (base, here))
    left = set(values(now).values()) if now else set()
    others = values(before).items() if before else ()
    missing = [k for k, value in others if k.startswith(NOT_WEIGHTS) and value not in left]
    return f" (beside the weights, these differ: {', '.join(missing)})" if missing else ""


def lacking(before: Any, now: Any, where: str) -> Iterator[str]:
    """What of one value another lacks or has otherwise; it may have more keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            if key in now:
                yield from lacking(value, now[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is missing"
    elif isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            yield f"{where} has {len(now)} entries, not {len(before)}"
        for index, (one, another) in enumerate(zip(before, now, strict=False)):
            yield from lacking(one, another, f"{where}[{index}]")
    elif repr(before) != repr(now):
        # As text, so that NaN is NaN, and 1 is not 1.0.
        yield f"{where} is {short(now)}, not {short(before)}"


def short(value: Any) -> str:
    """A value, to be printed."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def records(run: Path) -> list[dict[str, Any]]:
    """What a run logged, without times."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    return [{key: value for key, value in r.items() if key not in TIMES} for r in logged]


def last_checkpoint(run: Path) -> Path | None:
    """The checkpoint after the last task."""
    found = (run / "checkpoints").glob("task-*.safetensors")
    whole = [path for path in found if path.stem.removeprefix("task-").isdecimal()]
    return max(whole, key=lambda path: int(path.stem.removeprefix("task-")), default=None)


def values(checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Type, shape and digest of every tensor."""
    import torch
    from safetensors.torch import load_file

    found = {}
    for name, tensor in load_file(checkpoint).items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(content).hexdigest()
        found[name] = str(tensor.dtype), tuple(tensor.shape), digest
    return found


if __name__ == "__main__":
    sys.exit(main())
