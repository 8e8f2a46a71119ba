"""Cosines of single samples' gradients, against torch.func's vmap of grad, on this machine.

    python benchmarks/per_sample.py [--width 64] [--samples 64]

Half of the samples are compared with the other half, as GSS does in every step, with a ResNet-18 on
32×32 images. Prints the seconds of both, their ratio, and how far their cosines are apart; then
ours where pairs of places must be so many times fewer than weights to be taken.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
import torch.nn.functional as F
from throughput import median_seconds
from torch import Tensor
from torch.func import functional_call, grad, vmap

from cclis.nn import per_sample
from cclis.nn.network import ClassifierNetwork
from cclis.nn.per_sample import gradient_cosines
from cclis.nn.resnet import resnet18


def by_vmap(network: ClassifierNetwork, images: Tensor, labels: Tensor, first: int) -> Tensor:
    weights = {name: p.detach() for name, p in network.named_parameters() if p.dim() > 1}
    others = {**dict(network.named_buffers())}
    others |= {n: p.detach() for n, p in network.named_parameters() if n not in weights}

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(Logits(network), _under(weights | others), (image[None],))
        return F.cross_entropy(logits, label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, images, labels)
    rows = torch.cat([part.flatten(1) for part in found.values()], dim=1)
    rows = F.normalize(rows, dim=1)
    return rows[:first] @ rows[first:].T


class Logits(torch.nn.Module):
    """What `functional_call` calls."""

    def __init__(self, network: ClassifierNetwork):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.logits(images)


def _under(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"network.{name}": value for name, value in parameters.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--samples", type=int, default=64)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    network = ClassifierNetwork(resnet18(3, arguments.width), 3, 8 * arguments.width, 10).eval()
    # In memory as the package lays them out.
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    network.to(device, memory_format=layout)
    images = torch.rand(arguments.samples, 3, 32, 32, device=device).to(memory_format=layout)
    labels = torch.arange(arguments.samples, device=device) % 10
    first = arguments.samples // 2

    def ours() -> Tensor:
        def loss() -> Tensor:
            return F.cross_entropy(network.logits(images), labels, reduction="sum")

        return gradient_cosines(network, loss, first, arguments.samples - first)

    def theirs() -> Tensor:
        return by_vmap(network, images, labels, first)

    apart = float((ours() - theirs()).abs().max())
    mine, other = median_seconds(ours, 3), median_seconds(theirs, 3)
    found = {"seconds": mine, "vmap_seconds": other, "ratio": other / mine, "apart": apart}
    print(json.dumps(found))
    for fewer in (1, 4, 16, math.inf):
        per_sample.PAIRS_FACTOR = fewer
        print(json.dumps({"fewer": fewer, "seconds": median_seconds(ours, 3)}))


if __name__ == "__main__":
    main()
