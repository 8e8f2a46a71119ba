"""That the pretended card computes as the host does, and refuses what a GPU would."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cclis.engine import devices as device
from cclis.settings import RunOptions
from tests.pretended_card import CARD, CardError, CardGraph, pretended_card

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
on_a_card = pytest.mark.usefixtures("card")


def captured(work: Callable[[], object]) -> CardGraph:
    graph = CardGraph()
    with graph.capture():
        work()
    return graph


def step(place: str) -> list[Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2))
    network = network.to(torch.device(place, 0) if place == "cuda" else place)
    images = torch.arange(150.0).reshape(2, 3, 5, 5).to(place).sin()
    loss = nn.functional.cross_entropy(network(images), torch.tensor([0, 1]).to(place))
    loss.backward()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    return [loss.detach(), *network.state_dict().values()]


@on_a_card
def test_it_computes_what_the_host_does() -> None:
    for there, here in zip(step("cuda"), step("cpu"), strict=True):
        assert there.device == CARD
        assert torch.equal(there.cpu(), here)


@on_a_card
def test_a_tensor_made_like_one_on_the_card_lies_there() -> None:
    card = torch.ones(3, device=CARD)
    assert card.new_tensor([1.0]).device == card.new_zeros(2).device == CARD
    assert card.new_tensor(1.0, dtype=torch.float64).dtype == torch.float64


@on_a_card
@pytest.mark.parametrize(
    "work",
    [
        lambda card, host: card + host,
        lambda card, host: torch.cat([card, host]),
        lambda card, host: host[card.long()],
        lambda card, host: torch.where(card > 0, card, host),
        lambda card, host: card @ host,
        lambda card, host: card.add_(host),
        lambda card, host: host[0].add_(card[0]),
        lambda card, host: torch.stack([card[0], host[0]]),
        lambda card, host: card.index_put_((card.long(),), host),
        lambda card, host: card.numpy(),
        lambda card, host: torch.rand(2, generator=torch.Generator(), device=CARD),
        lambda card, host: torch.rand(2, generator=torch.Generator(CARD)),
        lambda card, host: host.normal_(generator=torch.Generator(CARD)),
    ],
)
def test_what_mixes_card_and_host_is_refused(work: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(CardError):
        work(torch.ones(3, device=CARD), torch.ones(3))


@on_a_card
@pytest.mark.parametrize(
    "work",
    [
        lambda card, host: float(card.sum()),
        lambda card, host: bool(card.any()),
        lambda card, host: card.cpu(),
        lambda card, host: card.to("cpu"),
        lambda card, host: card.tolist(),
        lambda card, host: card.nonzero(),
        lambda card, host: card[card > 0],
        lambda card, host: card.long().bincount(),
        lambda card, host: nn.functional.one_hot(card.long()),
        lambda card, host: card.unique(),
        lambda card, host: card.unique_consecutive(),
        lambda card, host: torch.linalg.inv(card.diag()),
        lambda card, host: torch.allclose(card, card),
        lambda card, host: torch.equal(card, card),
        lambda card, host: card[host.long()],
        lambda card, host: card.copy_(host),
        lambda card, host: host.copy_(card),
        lambda card, host: host.to("cuda"),
        lambda card, host: host.to(card),
        lambda card, host: torch.tensor([1.0], device=CARD),
        lambda card, host: card.new_tensor([1.0]),
    ],
)
def test_a_recording_refuses_what_waits_for_the_host(
    work: Callable[[Tensor, Tensor], object],
) -> None:
    card, host = torch.ones(3, device=CARD), torch.ones(3)
    work(card, host)
    with pytest.raises(CardError, match="in a recording"):
        captured(lambda: work(card, host))
    work(card, host)


@on_a_card
def test_a_capture_computes_nothing_and_a_replay_everything_in_its_place() -> None:
    norm = nn.BatchNorm1d(2, momentum=1.0).to(CARD)
    x, total, found = torch.zeros(4, 2, device=CARD), torch.zeros(2, device=CARD), []

    def work() -> None:
        norm(x)
        total.add_(x[1:].sum(dim=0))
        found.append(total * 2)

    graph = captured(work)
    assert total.tolist() == [0, 0]
    assert norm.running_mean.tolist() == [0, 0]
    x.copy_(torch.arange(8.0).reshape(4, 2))
    for times in (1, 2):
        graph.replay()
        assert total.tolist() == [12 * times, 15 * times]
        assert found[0].tolist() == [24 * times, 30 * times]
        assert norm.running_mean.tolist() == [3, 4]
        assert int(norm.num_batches_tracked) == times


@on_a_card
def test_a_replay_knows_what_the_host_had_when_it_was_captured() -> None:
    x, factor, found = torch.ones(2, device=CARD), torch.tensor(2.0), []
    graph = captured(lambda: found.append(x * factor))
    factor.fill_(3)
    graph.replay()
    assert found[0].tolist() == [2, 2]


def settings() -> list[object]:
    return [
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        *(getattr(torch.backends.cudnn, n) for n in ("benchmark", "deterministic", "allow_tf32")),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]


def originals() -> list[object]:
    return [
        *(getattr(torch, name) for name in ("Generator", "compile", "autocast")),
        *(getattr(torch.cuda, name) for name in OF_CUDA),
        Tensor.pin_memory,
        device.Fabric,
        torch.__future__.get_overwrite_module_params_on_conversion(),
        torch._C._only_lift_cpu_tensors(),
        torch.optim.Optimizer._group_tensors_by_device_and_dtype,
    ]


OF_CUDA = [name for name in dir(torch.cuda) if not name.startswith("__")]
ORIGINALS = originals()
"""As they were before the first test on a card, which may have left something behind."""


def test_afterwards_the_machine_is_as_it_was() -> None:
    before = settings()
    with pretended_card():
        device.make_fabric(RunOptions(device="cuda", deterministic=True))
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        assert settings() != before
    assert settings() == before
    assert originals() == ORIGINALS
