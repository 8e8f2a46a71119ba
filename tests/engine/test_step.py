"""A step against a plain loop; on a card, the recorded step against the one that is not.

Where there is no GPU, what can be seen without one is seen on a pretended card.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm2d

from cclis import load_benchmark
from cclis.data.augment import augment, draw_uniforms
from cclis.data.images import ImageSet
from cclis.engine.events import EpochEnded, StepDone
from cclis.engine.recording import WARMUP
from cclis.engine.trainer import Trainer
from cclis.methods import keeps_samples, make_config
from cclis.nn.network import _encode
from cclis.nn.parts import PartBatchNorm2d
from tests.conftest import METHODS, QUICK, learn, state_after
from tests.pretended_card import WAITS

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
on_a_card = pytest.mark.usefixtures("card")
ENCODER, SIDE, WIDTH, EPOCHS, COUNT = (
    ("resnet18", 32, 16, 4, 256) if GPU else ("conv", 8, 4, 2, 192)
)


def test_a_step_is_what_plain_torch_does() -> None:
    settings = {
        **QUICK,
        "device": "cpu",
        "epochs": 1,
        "batch_size": 24,
        "momentum": 0.8,
        "weight_decay": 0.01,
    }
    config = make_config("cclis", {**settings, "learning_rate": 0.3, "temperature": 0.2})
    task = load_benchmark("split-digits", limit=12)[0].train
    trainer = Trainer(config, task.shape, 2)
    twin = Trainer(config, task.shape, 2)
    network = twin.method.network
    network.fit_normalisation(task.images)
    learn(trainer, task, 2)

    order = torch.randperm(24, generator=twin._replay.generators["order"])
    images = augment(
        task.images[order], config, draw_uniforms(24, twin._replay.generators["augment"])
    )
    network.train()
    features = network.encoder((images - network.mean) / network.std)
    z = F.normalize(network.projection(features), dim=1)
    s = F.normalize(network.prototypes, dim=1) @ z.T / 0.2
    y = task.labels[order]
    loss = torch.stack([s[c].exp().sum().log() - s[c, j] for j, c in enumerate(y)]).mean()
    names = [name for name, _ in network.named_parameters()]
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    learned = dict(trainer.method.network.named_parameters())
    for name, parameter, gradient in zip(names, network.parameters(), gradients, strict=True):
        # The one step there is starts the warm-up, prototypes from another share of their rate.
        rate = 0.01 * 0.1 if name == "prototypes" else 0.3 * 0.01
        expected = parameter - rate * (gradient + 0.01 * parameter)
        torch.testing.assert_close(learned[name], expected, atol=2e-6, rtol=1e-4)


def colours(count: int, first: int) -> ImageSet:
    rng = torch.Generator().manual_seed(first)
    images = torch.randint(0, 256, (count, SIDE, SIDE, 3), dtype=torch.uint8, generator=rng)
    return ImageSet(images, torch.arange(count) % 2 + first)


def after_tasks(
    tasks: int = 2, method: str = "cclis", **settings: Any
) -> tuple[dict[str, Tensor], list[float]]:
    trainer = make(method, **settings)
    losses: list[float] = []
    for first in range(0, 2 * tasks, 2):
        losses += [
            event.record.loss
            for event in trainer.learn(colours(COUNT, first), 2)
            if isinstance(event, EpochEnded)
        ]
    return trainer.state()[0], losses


def make(method: str = "cclis", **settings: Any) -> Trainer:
    config = make_config(
        method,
        {
            "device": "cuda",
            "precision": "fp32",
            "encoder": ENCODER,
            "width": WIDTH,
            "epochs": EPOCHS,
            "batch_size": 64,
            "memory": 20,
            "learning_rate": 0.05,
            **({"score_passes": 2} if method == "cclis" else {}),
            **settings,
        },
    )
    return Trainer(config, (SIDE, SIDE, 3), 8)


@on_a_card
@pytest.mark.parametrize(
    ("method", "precision"),
    [
        *((m, "fp32") for m in ("cclis", "co2l", "er", "derpp", "gem", "gss", "gcr", "icarl")),
        *((m, "bf16") for m in ("cclis", "gss", "gem")),
    ],
)
def test_the_recorded_step_learns_what_the_unrecorded_one_does(
    method: str, precision: str, monkeypatch: Any
) -> None:
    how = {"method": method, "precision": precision, "compile": True, "deterministic": True}
    # 6 steps a task or more, the first 3 of them not replayed. In the third task a teacher has been
    # renewed, and GEM has two past tasks.
    tasks = 3 if method in ("cclis", "gem") else 2
    fast, fast_losses = after_tasks(tasks, **how)
    monkeypatch.setattr("cclis.engine.recording.WARMUP", 10**9)
    slow, slow_losses = after_tasks(tasks, **how)
    # The same kernels, recorded or not: weights, momentum, batch statistics, generators, memory.
    assert fast_losses == slow_losses
    assert fast.keys() == slow.keys()
    assert [name for name in fast if not torch.equal(fast[name], slow[name])] == []


@pytest.mark.skipif(GPU, reason="counted on a pretended card alone")
@on_a_card
@pytest.mark.parametrize("method", METHODS)
def test_a_step_waits_for_the_card_only_where_the_host_decides(method: str) -> None:
    memory = 20 if keeps_samples(method) else 0
    trainer = make(method, compile=True, epochs=1, batch_size=32, memory=memory)
    for first in (0, 2):
        events = trainer.learn(colours(COUNT, first), 2)
        waits = [len(WAITS) for event in events if isinstance(event, StepDone)]
    # The last comes after the epoch, whose losses are read.
    each = [after - before for before, after in pairwise(waits[:-1])]
    assert len(each) > WARMUP
    # GEM's products of gradients; GSS's scores, the memory's and the batch's.
    assert each == [{"gem": 1, "gss": 2}.get(method, 0)] * len(each)


@on_a_card
def test_turning_the_gradient_is_recorded_too() -> None:
    trainer = make("gem", compile=True, batch_size=COUNT // 8, epochs=1)
    for first in (0, 2):
        events = trainer.learn(colours(COUNT, first), 2)
        steps = (event for event in events if isinstance(event, StepDone))
        seen = [trainer._step._apply_recorded.recorded for _ in steps]
        # Once the step is replayed, from its fourth call on, turning warms up and is recorded.
        assert seen.index(True) == 2 * WARMUP if first else not any(seen)


@on_a_card
def test_the_recorded_step_learns_what_the_plain_one_does() -> None:
    how = {"encoder": "resnet18", "epochs": 4 if GPU else 2}
    fast, fast_losses = after_tasks(compile=True, deterministic=True, **how)
    plain, plain_losses = after_tasks(compile=False, **how)
    # Other kernels round otherwise, and training amplifies it.
    assert fast_losses == pytest.approx(plain_losses, rel=2e-3)
    counted = [name for name in plain if "num_batches_tracked" in name]
    assert counted
    assert all(torch.equal(fast[name], plain[name]) for name in counted)
    # What these bounds can tell apart: a learning rate that stays what it was when recorded.
    _, other = after_tasks(compile=False, warmup_epochs=0, **how)
    assert other != pytest.approx(plain_losses, rel=2e-3)


@on_a_card
@pytest.mark.parametrize("method", ["der", "derpp", "gcr"])
def test_replays_in_one_pass_are_learned_as_in_several(method: str, monkeypatch: Any) -> None:
    # Batches as large as those replayed beside them go through the encoder together. One task: what
    # GCR keeps of images that are noise hangs on the last bits.
    how = {"method": method, "batch_size": 32, "epochs": 1, "learning_rate": 0.01}
    how |= {"tasks": 1, "compile": True, "deterministic": True}
    together, losses = after_tasks(**how)
    with monkeypatch.context() as patch:
        patch.setattr("cclis.engine.recording.WARMUP", 10**9)
        unrecorded, same = after_tasks(**how)
    assert losses == same
    assert [name for name in unrecorded if not torch.equal(together[name], unrecorded[name])] == []
    with monkeypatch.context() as patch:
        patch.setattr("cclis.nn.network.JOINT_PASS_DEVICES", ())
        apart, expected = after_tasks(**how)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert statistics_apart(together, apart) < 0.05
    # What these bounds can tell apart: statistics that all parts have in common. Compiled code does
    # not notice that a class has another method.
    with monkeypatch.context() as patch:
        torch._dynamo.reset()
        patch.setattr(PartBatchNorm2d, "forward", lambda norm, x, _=1: BatchNorm2d.forward(norm, x))
        try:
            common, _ = after_tasks(**how)
        finally:
            torch._dynamo.reset()
    assert statistics_apart(common, apart) > 0.1


def statistics_apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """How far running means are apart, relative to their size."""
    names = [name for name in others if name.endswith("running_mean")]
    one, other = (torch.cat([state[name] for name in names]) for state in (some, others))
    return float((one - other).norm() / other.norm())


@needs_gpu
def test_a_run_compiles_the_encoder_twice_and_the_losses_twice(monkeypatch: Any) -> None:
    monkeypatch.setattr("cclis.engine.inference.BATCH", 64)
    torch._dynamo.reset()
    trainer = make(compile=True)
    found = []
    for first in range(0, 8, 2):
        learn(trainer, colours(COUNT, first), 2)
        # To train, and to score; from the second task on the latter serves the teacher too.
        encoder = torch._dynamo.eval_frame._debug_get_cache_entry_list(_encode.__code__)
        found.append((len(encoder), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert [count for count, _ in found] == [2, 2, 2, 2]
    assert found[1] == found[2] == found[3]


@on_a_card
def test_deterministic_runs_agree_bit_by_bit_wherever_the_images_lie() -> None:
    first, _ = after_tasks(compile=True, deterministic=True, images="device")
    second, _ = after_tasks(compile=True, deterministic=True, images="host")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_a_card
@pytest.mark.parametrize("method", ["cclis", "gem"])
@pytest.mark.parametrize("steps", [2, 5])
def test_a_state_from_the_middle_of_a_task_resumes_exactly(steps: int, method: str) -> None:
    straight, stopped = (make(method, compile=True, deterministic=True) for _ in range(2))
    for trainer in (straight, stopped):
        learn(trainer, colours(COUNT, 0), 2)
    resumed = Trainer.from_state(*state_after(steps, stopped, colours(COUNT, 2)))
    for trainer in (straight, resumed):
        learn(trainer, colours(COUNT, 2), 2)
    first, second = straight.state()[0], resumed.state()[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_a_card
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_after_a_step_that_is_not_finite_nothing_is_updated_in_that_task(device: str) -> None:
    trainer = make(device=device, compile=device == "cuda")
    learn(trainer, colours(COUNT, 0), 2)
    step = trainer._step
    step.begin_task(done=3)
    uniforms = draw_uniforms(64, trainer._replay.generators["augment"])
    batch = colours(64, 0).to(device)
    proposal = torch.ones(64, device=device)
    mask = torch.zeros(64, dtype=torch.bool, device=device)
    good = {**vars(batch), "proposal": proposal, "replayed": mask, "padding": mask}
    good["uniforms"] = uniforms
    # Images that are augmented by random numbers of NaN are NaN.
    bad = {**good, "uniforms": torch.full_like(uniforms, torch.nan)}
    for _ in range(5):
        step(good)
    assert step.failed is None
    encoder = [p.clone() for p in trainer.method.network.encoder.parameters()]
    step(bad)
    step(good)
    assert step.failed == 3 + 5
    after = trainer.method.network.encoder.parameters()
    assert all(torch.equal(a, b) for a, b in zip(encoder, after, strict=True))
    step.begin_task()
    assert step.failed is None


@on_a_card
def test_bf16_learns_what_fp32_does() -> None:
    _, exact = after_tasks()
    _, mixed = after_tasks(precision="bf16")
    assert mixed == pytest.approx(exact, rel=0.05)
    # Yet it is another computation, from the first epoch on.
    assert mixed[0] != exact[0]


@needs_gpu
def test_digits_are_learned_as_well_on_a_gpu_in_either_precision(tmp_path: Any) -> None:
    from cclis.experiment.loop import train
    from cclis.settings import recipe_settings

    best = {}
    for precision in ("fp32", "bf16"):
        settings = recipe_settings("split-digits/cclis-100")
        settings |= {"output": str(tmp_path / precision), "device": "cuda", "precision": precision}
        result = train(make_config(settings.pop("method"), settings)).result
        best[precision] = max(head.accuracy for head in result.class_il.values())
    assert min(best.values()) >= 88
    # Seeds differ by more than a point.
    assert best["bf16"] == pytest.approx(best["fp32"], abs=3)
