"""How fast training is on this machine, against a plain loop and the machine's own ceiling.

    python benchmarks/throughput.py [--quick] [--out results/speed/throughput]

Measures the package's own training loop (augmentation included) on random images: the first task
and one with the teacher, at several batch and image sizes, and with the images on the host; the
forward passes used for scoring and evaluation; the parts of a step; on a GPU, the kernels that take
its time; and a plain baseline written as most people would write it: a DataLoader with one worker a
core, torchvision's transforms, eager 32-bit training. Prints and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from summary import write_summary
from torch import Tensor

from cclis.data.augment import augment, draw_uniforms
from cclis.data.images import ImageSet
from cclis.engine.devices import device_name, peak_memory
from cclis.engine.events import EpochEnded
from cclis.engine.trainer import Trainer
from cclis.methods import Batch, make_config
from cclis.nn.compiling import compiled, seconds_compiling
from cclis.nn.network import PrototypeNetwork
from cclis.nn.resnet import resnet18

FLOPS_PER_IMAGE = {32: 0.5567e9, 64: 4 * 0.5567e9}
"""Multiply-adds of one forward pass of ResNet-18, by image side."""


def images_of(side: int, count: int, first_class: int) -> ImageSet:
    rng = torch.Generator().manual_seed(side + first_class)
    images = torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=rng)
    return ImageSet(images, torch.arange(count) % 2 + first_class)


def make_trainer(side: int, batch: int, epochs: int, **settings: Any) -> Trainer:
    paper = {"learning_rate": 0.1, "memory": 200, "encoder": "resnet18", "batch_size": batch}
    blur = {"blur": 0.5, "crop_scale": 0.1} if side > 32 else {}
    config = make_config("cclis", {**paper, **blur, "epochs": epochs, **settings})
    return Trainer(config, (side, side, 3), 10)


def training_speed(
    side: int, batch: int, count: int, epochs: int, **settings: Any
) -> dict[str, Any]:
    """Images a second of the training loop in the first task and with the teacher."""
    compiling = seconds_compiling()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(side, batch, epochs, **settings)
    found: dict[str, Any] = {"side": side, "batch": batch, **settings}
    for name, first in (("first_task", 0), ("with_teacher", 2)):
        started = time.perf_counter()
        ends = [
            time.perf_counter()
            for event in trainer.learn(images_of(side, count, first), 2)
            if isinstance(event, EpochEnded)
        ]
        steps = -(-(count + len(trainer.memory) * (first > 0)) // batch)
        # The first third of the epochs compiles, warms up and records.
        skip = epochs // 3
        found[name] = steps * batch * (epochs - 1 - skip) / (ends[-1] - ends[skip])
        found[f"{name}_start_seconds"] = ends[0] - started
    found["compile_seconds"] = seconds_compiling() - compiling
    found["peak_memory_gib"] = peak_memory(trainer.fabric.device) / 2**30
    return found


def median_seconds(work: Callable[[], Any], repeats: int = 30) -> float:
    for _ in range(5):
        work()
    times = []
    for _ in range(repeats):
        synchronise()
        started = time.perf_counter()
        work()
        synchronise()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parts_of_a_step(side: int, batch: int) -> dict[str, float]:
    """Seconds of each part alone, compiled as in a step; together they exceed the step itself."""
    trainer = make_trainer(side, batch, 1)
    method, config, fabric = trainer.method, trainer.config, trainer.fabric
    on_gpu = fabric.device.type == "cuda"
    data = images_of(side, batch, 0).to(fabric.device)
    uniforms = draw_uniforms(batch, torch.Generator(device=fabric.device))
    augmented = compiled(lambda i, c: augment(i, config, c), on_gpu)
    batch_now = Batch.of_task(augmented(data.images, uniforms), data.labels)
    method.begin_task(2)
    losses = compiled(method.losses, on_gpu)
    teacher = compiled(method.frozen_copy().similarity, on_gpu)

    def forward_backward() -> None:
        method.network.zero_grad(set_to_none=True)
        with fabric.autocast():
            terms = losses(batch_now)
        sum(terms.values()).backward()

    def teach() -> Tensor:
        with torch.no_grad(), fabric.autocast():
            return teacher(batch_now.images)

    def replayed(work: Callable[[], Any]) -> float:
        if not on_gpu:
            return median_seconds(work)
        side_stream = torch.cuda.Stream()
        with torch.cuda.stream(side_stream):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return median_seconds(graph.replay)

    found = {
        "augment": replayed(lambda: augmented(data.images, uniforms)),
        "forward_backward": replayed(forward_backward),
        "teacher": replayed(teach),
    }
    for parameter in method.network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    go_on = torch.zeros((), device=fabric.device)
    found["optimizer"] = replayed(lambda: trainer._optimizer.step(unless=go_on))
    return found


KINDS = {
    "convolutions and matrix products": ("gemm", "conv", "cutlass", "xmma", "cudnn", "nvjet"),
    "batch norm, activations and other compiled kernels": ("triton",),
    "copies": ("memcpy", "memset"),
}
"""Kinds of kernels by what their names contain."""


def kernels_of_a_step(side: int, batch: int) -> dict[str, Any]:
    """Where the milliseconds of a replayed step with the teacher go, by kind and by kernel."""
    trainer = make_trainer(side, batch, 1)
    device, steps = trainer.fabric.device, 20
    data = images_of(side, batch, 0).to(device)
    trainer.method.begin_task(2)
    trainer.method.begin_task(2)
    trainer.method.network.train()
    uniforms = draw_uniforms(batch, torch.Generator(device=device))
    inputs = {
        "images": data.images,
        "labels": data.labels,
        "proposal": torch.ones_like(uniforms[0]),
        **dict.fromkeys(("replayed", "padding"), torch.zeros_like(data.labels, dtype=torch.bool)),
        "uniforms": uniforms,
    }
    for _ in range(10):
        trainer._step(inputs)
    synchronise()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            trainer._step(inputs)
        synchronise()
    kernels = {
        event.key: event.self_device_time_total / 1e3 / steps
        for event in profiler.key_averages()
        if event.self_device_time_total
    }
    kinds: dict[str, float] = {}
    for name, spent in kernels.items():
        kind = next(
            (k for k, marks in KINDS.items() if any(m in name.lower() for m in marks)), "rest"
        )
        kinds[kind] = kinds.get(kind, 0.0) + spent
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:15]
    return {
        "milliseconds_by_kind": kinds,
        "longest_kernels": [{"name": n[:120], "milliseconds": ms} for n, ms in longest],
    }


def inference_speed(side: int, count: int) -> dict[str, float]:
    """Images a second of the passes that score and evaluate."""
    trainer = make_trainer(side, 512, 1)
    images = images_of(side, count, 0).images.to(trainer.fabric.device)
    rng = torch.Generator(device=trainer.fabric.device).manual_seed(0)
    return {
        "plain": count / median_seconds(lambda: trainer.inference(images), 5),
        "augmented": count / median_seconds(lambda: trainer.inference(images, rng), 5),
    }


def matmul_rate() -> float:
    """Floating-point operations a second of a large bf16 matrix product."""
    side = 8192 if torch.cuda.is_available() else 1024
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return 2 * side**3 / median_seconds(lambda: matrix @ matrix)


class PlainDataset(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images augmented one by one with torchvision, as the paper's authors do."""

    def __init__(self, data: ImageSet):
        from torchvision import transforms as T

        self.images, self.labels = data.images.numpy(), data.labels.tolist()
        self.transform = T.Compose(
            [
                T.RandomResizedCrop(data.shape[0], scale=(0.2, 1.0)),
                T.RandomHorizontalFlip(),
                T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                T.RandomGrayscale(p=0.2),
                T.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def plain_speed(side: int, batch: int, count: int, epochs: int) -> dict[str, float]:
    """The baseline: images a second without and with a teacher."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = torch.utils.data.DataLoader(
        PlainDataset(images_of(side, count, 0)),
        batch_size=batch,
        shuffle=True,
        num_workers=os.cpu_count() or 1,
        drop_last=True,
        persistent_workers=True,
        pin_memory=device == "cuda",
    )

    def network() -> PrototypeNetwork:
        return PrototypeNetwork(resnet18(3, 64), 3, 512, 128, 10).to(device)

    student, teacher = network(), network().eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    found = {}
    for name, use_teacher in (("first_task", False), ("with_teacher", True)):
        done, started = 0, 0.0
        for number in range(epochs):
            if number == 1:
                synchronise()
                started, done = time.perf_counter(), 0
            for pixels, classes in loader:
                images, labels = pixels.to(device), classes.to(device)
                student.prototypes.data = F.normalize(student.prototypes.data, dim=1)
                similarity = student.similarity(images)
                loss = F.cross_entropy((similarity / 0.5).T, labels)
                if use_teacher:
                    with torch.no_grad():
                        target = (teacher.similarity(images) / 0.1).softmax(dim=0)
                    loss = loss - (target * (similarity / 0.2).log_softmax(dim=0)).sum(0).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += len(labels)
        synchronise()
        found[name] = done / (time.perf_counter() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="batch 512 at 32×32 alone")
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/speed/throughput"))
    arguments = parser.parse_args()
    if not arguments.no_baseline:
        try:
            import_module("torchvision")
        except (ImportError, RuntimeError) as error:  # the latter beside a torch not its own
            parser.error(f"the baseline needs torchvision ({error}); --no-baseline does without it")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    count, epochs = (10_240, 30) if on_gpu else (256, 3)
    batches = (512, 2048) if on_gpu else (64,)
    result: dict[str, Any] = {
        "matmul_tflops": matmul_rate() / 1e12,
        "training": [],
    }
    settings = [(32, batch) for batch in batches] + ([(64, b) for b in batches] if on_gpu else [])
    for side, batch in settings[:1] if arguments.quick else settings:
        found = training_speed(side, batch, count, epochs)
        for name, passes in (("first_task", 3), ("with_teacher", 4)):
            flops = 2 * FLOPS_PER_IMAGE[side] * passes * found[name]
            found[f"{name}_share_of_matmul"] = flops / 1e12 / result["matmul_tflops"]
        result["training"].append(found)
        print(json.dumps(found), flush=True)
    if on_gpu:
        found = training_speed(32, batches[0], count, epochs, images="host")
        result["images_on_host"] = found
        print(json.dumps(found), flush=True)
    result["inference"] = inference_speed(32, 20 * count if on_gpu else count)
    result["parts_seconds"] = parts_of_a_step(32, batches[0])
    if on_gpu:
        result["kernels"] = kernels_of_a_step(32, batches[0])
        print(json.dumps(result["kernels"]), flush=True)
    print(json.dumps({k: result[k] for k in ("matmul_tflops", "inference", "parts_seconds")}))
    if not arguments.no_baseline:
        plain = plain_speed(32, batches[0], count, 3)
        ours = result["training"][0]
        result["baseline"] = plain
        result["ratio_to_baseline"] = {name: ours[name] / plain[name] for name in plain}
        print(json.dumps({k: result[k] for k in ("baseline", "ratio_to_baseline")}))
    write_summary(arguments.out, device_name(device), result)


if __name__ == "__main__":
    main()
