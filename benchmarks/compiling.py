"""How long a training step takes to compile where nothing was compiled before, and how fast it is.

    python benchmarks/compiling.py [--out results/compiling]

The paper's step (ResNet-18, batches of 512 images of 32×32), each way in a process of its own with
an empty cache: as the package compiles, and with several candidates tried for every pointwise
kernel, as torch does by itself. Needs a GPU. Prints and writes JSON.
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

from summary import write_summary
from throughput import images_of, make_trainer

from cclis.engine.device import device_name
from cclis.nn import compiling

WAYS = {"as it comes": False, "the best of several": True}
EPOCHS, WARMED_UP, SAMPLES = 40, 10, 10240


def measure(way: str) -> dict[str, Any]:
    """Seconds until the first epoch is over, and images a second when all is compiled."""
    compiling.OPTIONS["triton.autotune_pointwise"] = WAYS[way]
    trainer, ends = make_trainer(32, 512, EPOCHS), list[float]()
    started = time.perf_counter()
    trainer.learn(images_of(32, SAMPLES, 0), 2, lambda _: ends.append(time.perf_counter()))
    return {
        "pointwise": way,
        "first_epoch_seconds": ends[0] - started,
        "compile_seconds": compiling.seconds_compiling(),
        "images_per_second": SAMPLES * (EPOCHS - WARMED_UP) / (ends[-1] - ends[WARMED_UP - 1]),
        "device": device_name(trainer.fabric.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/compiling"))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way)))
        return
    found = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as cache:
            places = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            command = [sys.executable, __file__, "--way", way]
            done = subprocess.run(
                command, env={**os.environ, **places}, stdout=subprocess.PIPE, check=True
            )
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(found[-1]))
    ways = [{k: v for k, v in way.items() if k != "device"} for way in found]
    write_summary(arguments.out, found[0]["device"], {"ways": ways})


if __name__ == "__main__":
    main()
