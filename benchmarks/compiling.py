"""How long a training step takes to compile where nothing was compiled before, and how fast it is.

    python benchmarks/compiling.py [--quick] [--methods cclis er] [--out results/speed/compiling]

The first task of Seq-CIFAR-10 (random images) by a method's recipe, compiled as the package does
and in other ways, each in a process of its own with an empty cache. They compile all at once, and
are timed one after another when all have. Needs a GPU. Prints and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from methods import images_of, recipe_config
from summary import write_summary

from cclis.engine.devices import device_name
from cclis.engine.events import EpochEnded
from cclis.engine.trainer import Trainer
from cclis.methods.registry import OURS
from cclis.nn import compiling

WAYS: dict[str, dict[str, Any]] = {
    "shared launches": {},
    "a launch for each": {"combo_kernels": False},
    "shared launches, the best of several": {"triton.autotune_pointwise": True},
}
STEPS, SAMPLES, WIDTH = 1000, 10_240, 64
QUICK = 1, 64, 8
COMPILED = "compiled\n"


def measure(method: str, way: str, steps: int, samples: int, width: int) -> dict[str, Any]:
    """Seconds until the first epoch is over, and images of the task a second after the second."""
    compiling.OPTIONS.update(WAYS[way])
    epochs = 2 + -(-steps * recipe_config(method).batch_size // samples)
    config = recipe_config(method, width=width, epochs=epochs, first_epochs=None)
    trainer = Trainer(config, (32, 32, 3), 10)
    ends: list[float] = []

    started = time.perf_counter()
    for event in trainer.learn(images_of(samples, 0), 2):
        if not isinstance(event, EpochEnded):
            continue
        ends.append(time.perf_counter())
        if len(ends) == 1:
            print(COMPILED, end="", flush=True)
            sys.stdin.readline()
    return {
        "method": method,
        "pointwise": way,
        "first_epoch_seconds": ends[0] - started,
        "compile_seconds": compiling.seconds_compiling(),
        "images_per_second": samples * (len(ends) - 2) / (ends[-1] - ends[1]),
        "device": device_name(trainer.fabric.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps alone")
    parser.add_argument("--methods", nargs="+", choices=OURS, default=["cclis", "er"])
    parser.add_argument("--out", type=Path, default=Path("results/speed/compiling"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        size = QUICK if arguments.quick else (STEPS, SAMPLES, WIDTH)
        print(json.dumps(measure(*arguments.one, *size)))
        return
    running = []
    with tempfile.TemporaryDirectory() as caches:
        for method in arguments.methods:
            for way in WAYS:
                cache = Path(caches, str(len(running)))
                places = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}", "TRITON_CACHE_DIR": f"{cache}/t"}
                command = [sys.executable, __file__, "--one", method, way]
                running.append(
                    subprocess.Popen(
                        command + ["--quick"] * arguments.quick,
                        env={**os.environ, **places},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
        for process in running:
            assert process.stdout is not None
            if COMPILED not in iter(process.stdout.readline, ""):
                for other in running:
                    other.kill()
                sys.exit("one of the ways failed")
        found = [json.loads(process.communicate("\n")[0].splitlines()[-1]) for process in running]
    for way in found:
        print(json.dumps(way))
    ways = [{k: v for k, v in way.items() if k != "device"} for way in found]
    write_summary(arguments.out, found[0]["device"], {"ways": ways})


if __name__ == "__main__":
    main()
