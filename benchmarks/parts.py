"""Several small batches in one pass through the network, against one pass after another.

    python benchmarks/parts.py [--width 64] [--batch 32] [--parts 3] [--out results/speed/parts]

Logits and gradients of a ResNet-18 on 32×32 images, every batch by its own statistics, as DER++ and
GCR replay; on a GPU compiled, in bf16 and replayed as CUDA graphs. Prints and writes the seconds of
both ways and their ratio.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from summary import write_summary
from throughput import median_seconds
from torch import Tensor

from cclis.engine.devices import device_name
from cclis.engine.recording import Recording, Tensors
from cclis.nn.network import ClassifierNetwork
from cclis.nn.resnet import resnet18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/speed/parts"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    network = ClassifierNetwork(resnet18(3, arguments.width), 3, 8 * arguments.width, 10)
    network.to(device, memory_format=torch.channels_last if on_gpu else torch.contiguous_format)
    if on_gpu:
        network.compile_encoder()
    sizes = (arguments.batch,) * arguments.parts
    images = torch.rand(sum(sizes), 3, 32, 32, device=device)

    def together(images: Tensor) -> tuple[Tensor, ...]:
        return network.logits(images, arguments.parts).split(sizes)

    def one_by_one(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(network.logits(part) for part in images.split(sizes))

    def seconds(way: Callable[[Tensor], tuple[Tensor, ...]]) -> float:
        def work(inputs: Tensors) -> None:
            network.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                logits = way(inputs["images"])
            torch.cat(logits).square().mean().backward()

        run = Recording(work) if on_gpu else work
        return median_seconds(lambda: run({"images": images}))

    once, often = seconds(together), seconds(one_by_one)
    found = {
        **{name: getattr(arguments, name) for name in ("width", "batch", "parts")},
        "one_pass_seconds": once,
        "several_seconds": often,
        "ratio": often / once,
    }
    print(json.dumps(found))
    write_summary(arguments.out, device_name(device), found)


if __name__ == "__main__":
    main()
