from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cclis import load_benchmark
from cclis.data.images import ImageSet
from cclis.engine.devices import out_of_memory
from cclis.engine.events import EpochEnded
from cclis.engine.position import Position
from cclis.engine.records import Epoch
from cclis.engine.replay import Replay
from cclis.engine.step import Step
from cclis.engine.trainer import Trainer
from cclis.errors import InputError
from cclis.files import read_tensors, write_tensors
from cclis.methods import make_config
from tests.conftest import QUICK, learn, quick
from tests.experiment.process import SERVER

SHAPE = (8, 8, 1)


def make(classes: int = 10, **settings: Any) -> Trainer:
    return Trainer(make_config("cclis", {**QUICK, "memory": 20, **settings}), SHAPE, classes)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.method.network.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def learn_digits(trainer: Trainer, tasks: range, **settings: Any) -> list[Epoch]:
    digits = load_benchmark("split-digits", **settings)
    return [record for index in tasks for record in epochs(trainer, digits[index].train)]


def epochs(trainer: Trainer, task: ImageSet) -> list[Epoch]:
    """Learn a task of two classes; returns the records of its epochs."""
    return [event.record for event in trainer.learn(task, 2) if isinstance(event, EpochEnded)]


def test_learning_continues_after_the_data_of_earlier_tasks_are_deleted() -> None:
    trainer = make(epochs=1)
    gone = []
    for index in range(5):
        task = load_benchmark("split-digits", limit=40)[index]
        learn(trainer, task.train, len(task.classes))
        gone.append(weakref.ref(task.train.images))
        task.train.images.zero_()
        del task
        if gone[-1]() is not None:
            gc.collect()
        assert gone[-1]() is None, "something still holds the task's images"
        assert trainer.memory.samples is not None
        assert bool((trainer.memory.samples.images.flatten(1).amax(dim=1) > 0).all())
    assert trainer.method.seen == 10


def test_the_memory_is_balanced_full_and_shrinks_old_classes() -> None:
    trainer = make(epochs=1, memory=23)
    sizes = []
    for index in range(5):
        learn_digits(trainer, range(index, index + 1))
        assert trainer.memory.samples is not None
        counts = trainer.memory.samples.labels.bincount()
        assert len(trainer.memory) == 23
        assert len(counts) == 2 * (index + 1)
        assert int(counts.max() - counts.min()) <= 1
        sizes.append(int(counts[0]))
    assert sizes[0] > sizes[-1]
    assert bool((trainer.memory.proposal > 0).all())


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    first, second, other = make(seed=3), make(seed=3), make(seed=4)
    for trainer in (first, second, other):
        learn_digits(trainer, range(2))
    assert same(weights(first), weights(second))
    assert same(first.memory.state(), second.memory.state())
    assert not same(weights(first), weights(other))


def test_global_generators_change_nothing() -> None:
    first, second = make(), make()
    learn_digits(first, range(1))
    torch.manual_seed(99)
    np.random.seed(99)
    torch.rand(7)
    before = torch.get_rng_state()
    learn_digits(second, range(1))
    assert same(weights(first), weights(second))
    assert torch.equal(before, torch.get_rng_state())


def test_a_saved_state_resumes_exactly(tmp_path) -> None:
    whole, half = make(), make()
    learn_digits(whole, range(3))
    learn_digits(half, range(2))
    write_tensors(tmp_path / "state.safetensors", *half.state())
    resumed = Trainer.from_state(*read_tensors(tmp_path / "state.safetensors"))
    learn_digits(resumed, range(2, 3))
    assert same(weights(whole), weights(resumed))
    assert same(whole.memory.state(), resumed.memory.state())


def test_a_restored_trainer_counts_the_classes_as_before() -> None:
    def counts(trainer: Trainer) -> dict[str, Any]:
        method = trainer.method
        tensors = int(method.old_classes), int(method.seen_classes)
        counted = method.old, method.seen, method.network.classes
        return {"tasks": trainer.task_sizes, "classes": counted, "tensors": tensors}

    trainer = make(5, epochs=1)
    task = load_benchmark("split-digits", tasks=[3, 2], limit=4)
    learn(trainer, task[0].train, 3)
    learn(trainer, task[1].train, 2)
    between = copy.deepcopy(trainer.state())
    expected = {"tasks": (3, 2), "classes": (3, 5, 5), "tensors": (3, 5)}
    assert counts(trainer) == counts(Trainer.from_state(*between)) == expected
    # So does one that has been in the middle of another task meanwhile.
    others = load_benchmark("split-digits", tasks=[5, 1], limit=4)[1].train
    next(iter(trainer.learn(others, 1)))
    within = trainer.state()
    expected_within = {"tasks": (3, 2), "classes": (5, 6, 10), "tensors": (5, 6)}
    assert counts(trainer) == counts(Trainer.from_state(*within)) == expected_within
    trainer.restore(*between)
    assert counts(trainer) == expected


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_numbers_that_are_not_finite_update_nothing(monkeypatch, bad: str) -> None:
    trainer, seen = make(), []

    def losses(batch: Any) -> dict[str, Tensor]:
        seen.append(weights(trainer))
        loss = trainer.method.network.similarity(batch.images).square().mean()
        if len(seen) < 4:
            return {"loss": loss}
        # The root has no slope at zero: its gradient is infinite while the loss is finite.
        return {"loss": loss + torch.inf if bad == "loss" else (loss - loss.detach()).abs().sqrt()}

    monkeypatch.setattr(trainer._step, "_losses", losses)
    update, updates = trainer._optimizer._sgd.step, []
    monkeypatch.setattr(trainer._optimizer._sgd, "step", lambda: updates.append(update()))
    with pytest.raises(InputError, match="task 1, epoch 1, step 4 of 10"):
        learn_digits(trainer, range(1))
    assert len(updates) == 3
    trained = [f"encoder.{name}" for name, _ in trainer.method.network.encoder.named_parameters()]
    assert all(torch.equal(seen[3][name], seen[-1][name]) for name in trained)


def test_one_thread_draws_an_epoch_and_all_take_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing, stepping = set(), set()
    draw, step = Replay._plan, Step.__call__

    def noted(where: set[int], what: Any) -> Any:
        def noting(*given: Any) -> Any:
            where.add(torch.get_num_threads())
            return what(*given)

        return noting

    monkeypatch.setattr(Replay, "_plan", noted(drawing, draw))
    monkeypatch.setattr(Step, "__call__", noted(stepping, step))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        learn_digits(make(epochs=1), range(1), limit=10)
        assert (drawing, stepping, torch.get_num_threads()) == ({1}, {2}, 2)
        monkeypatch.setattr(Replay, "_plan", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            learn_digits(make(epochs=1), range(1), limit=10)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_images_that_stay_on_the_host_teach_the_same() -> None:
    near, far = make(images="device"), make(images="host")
    for trainer in (near, far):
        learn_digits(trainer, range(2))
    assert same(near.state()[0], far.state()[0])


def test_room_for_more_classes_changes_nothing_for_those_there() -> None:
    roomy, tight = make(classes=4), make(classes=2)
    with torch.no_grad():
        roomy.method.network.prototypes[:2] = tight.method.network.prototypes
        for name, value in roomy.method.network.state_dict().items():
            if name != "prototypes":
                tight.method.network.state_dict()[name].copy_(value)
    for trainer in (roomy, tight):
        learn_digits(trainer, range(1))
    torch.testing.assert_close(
        roomy.method.network.prototypes[:2], tight.method.network.prototypes, rtol=0, atol=1e-6
    )
    learn_digits(tight, range(1, 2))
    assert tight.method.network.classes == 4
    momentum = tight.state()[0]
    assert any(value.shape == (4, 128) for name, value in momentum.items() if "momentum" in name)


def test_records_tell_the_losses_and_the_schedule() -> None:
    records = learn_digits(make(epochs=10, warmup_epochs=2, learning_rate=0.2), range(2))
    assert [(r.task, r.epoch) for r in records] == [(t, e) for t in (0, 1) for e in range(10)]
    assert records[0].losses.keys() == {"contrast"}
    assert records[-1].losses.keys() == {"contrast", "distill"}
    assert all(r.loss == pytest.approx(sum(r.losses.values())) for r in records)
    rates = [r.learning_rate for r in records[:10]]
    assert max(rates) <= 0.2
    assert rates[0] < rates[1]
    assert rates[-1] < 0.02
    assert records[0].loss > records[9].loss


@pytest.mark.parametrize(
    "changed",
    [
        {"epochs": 3},
        {"first_epochs": 1},
        {"batch_size": 16},
        {"replay_share": 0.5},
        {"learning_rate": 0.2},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"warmup_epochs": 0},
        {"schedule": "constant"},
        {"temperature": 0.1},
        {"distill_weight": 0.1},
        {"teacher_temperature": 0.5},
        {"student_temperature": 0.5},
        {"prototype_learning_rate": 0.1},
        {"score_passes": 1},
        {"importance_sampling": False},
        {"selection": "random"},
        {"distillation": False},
        {"encoder": "resnet18"},
        {"width": 4},
        {"embedding": 16},
        {"crop": "none"},
        {"crop": "padded"},
        {"crop": "padded", "padding": 1},
        {"crop_scale": 0.9},
        {"flip": 0.5},
        {"jitter": 0.8},
        {"jitter": 0.8, "jitter_strength": 0.5},
        {"memory": 10},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_every_setting_changes_what_is_learned(changed: dict[str, Any]) -> None:
    assert not same(after_two_tasks(**changed), after_two_tasks())


@pytest.mark.parametrize("changed", [{"grayscale": 0.5}, {"blur": 0.5}], ids=str)
def test_settings_for_larger_colour_images_change_them(changed: dict[str, Any]) -> None:
    assert not same(after_colour(**changed), after_colour())


_cache: dict[str, dict[str, Tensor]] = {}


def after_two_tasks(**changed: Any) -> dict[str, Tensor]:
    key = str(changed)
    if key not in _cache:
        trainer = make(**changed)
        learn_digits(trainer, range(2), limit=30)
        _cache[key] = weights(trainer) | trainer.memory.state()
    return _cache[key]


def after_colour(**changed: Any) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (12, 24, 24, 3), dtype=torch.uint8, generator=rng)
    config = make_config("cclis", {**QUICK, "width": 4, "epochs": 1, **changed})
    trainer = Trainer(config, (24, 24, 3), 2)
    learn(trainer, ImageSet(images, torch.arange(12) % 2), 2)
    return weights(trainer)


def test_images_are_normalised_by_the_first_task() -> None:
    trainer = make()
    task = load_benchmark("split-digits")[0].train
    learn(trainer, task, 2)
    values = task.images.double() / 255
    network = trainer.method.network
    assert float(network.mean) == pytest.approx(float(values.mean()), rel=1e-6)
    assert float(network.std) == pytest.approx(float(values.std(correction=0)), rel=1e-6)


def test_your_own_encoder_is_copied_and_trained() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU())
    before = encoder[1].weight.clone()
    trainer = Trainer(make_config("cclis", QUICK), SHAPE, 2, encoder=encoder)
    learn_digits(trainer, range(1))
    assert torch.equal(encoder[1].weight, before)
    assert not torch.equal(trainer.method.network.encoder[1].weight, before)


@pytest.mark.parametrize(
    ("images", "labels", "new", "part"),
    [
        (torch.zeros(4, 9, 8, 1), [0, 1, 0, 1], 2, "but the first task had"),
        (torch.zeros(4, 8, 8, 1), [0, 1, 2, 1], 2, "labels out of range"),
        (torch.zeros(4, 8, 8, 1), [-1, 1, 0, 1], 2, "labels out of range"),
        (torch.zeros(1, 8, 8, 1), [0], 1, "at least two samples"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(
    images: Tensor, labels: list[int], new: int, part: str
) -> None:
    trainer = make()
    before = weights(trainer)
    with pytest.raises(InputError, match=part):
        learn(trainer, ImageSet(images.to(torch.uint8), torch.tensor(labels)), new)
    assert same(before, weights(trainer))
    assert trainer.method.seen == 0


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    trainer = make(learning_rate=1e30, momentum=0.0, warmup_epochs=0)
    with pytest.raises(
        InputError,
        match=r"no longer finite in task 1, epoch 1, step [12] of \d+ "
        r"\(.*learning_rate 1e\+30.*distill_weight 0\.6.*precision auto\)",
    ):
        learn_digits(trainer, range(1))


def test_weights_of_another_network_are_refused() -> None:
    tensors, description = make().state()
    del tensors["network.prototypes"]
    with pytest.raises(InputError, match="another network"):
        Trainer.from_state(tensors, description)


def test_memory_zero_still_learns() -> None:
    trainer = make(memory=0)
    learn_digits(trainer, range(2))
    assert len(trainer.memory) == 0
    assert trainer.method.seen == 4


def test_what_has_been_seen_is_known_in_one_place() -> None:
    trainer = make(epochs=1)
    stream, method = trainer.method.stream, trainer.method
    tensors = method.old_classes, method.seen_classes

    def known() -> list[int]:
        return [method.old, method.seen, *map(int, tensors)]

    assert (stream.task_sizes, trainer.task_sizes, known()) == ((), (), [0, 0, 0, 0])
    digits = load_benchmark("split-digits", limit=20, tasks=[3, 2, 5])
    learn(trainer, digits[0].train, 3)
    assert (stream.task_sizes, trainer.task_sizes, known()) == ((3,), (3,), [0, 3, 0, 3])
    between = trainer.state()
    next(trainer.learn(digits[1].train, 2))
    # The task that is being learned is the stream's last, but has not been learned.
    assert (stream.task_sizes, trainer.task_sizes, known()) == ((3, 2), (3,), [3, 5, 3, 5])
    assert trainer.state()[1]["task_sizes"] == [3]
    within = trainer.state()
    trainer.restore(*between)
    assert (stream.task_sizes, trainer.task_sizes, known()) == ((3,), (3,), [0, 3, 0, 3])
    trainer.restore(*within)
    assert (stream.task_sizes, trainer.task_sizes, known()) == ((3, 2), (3,), [3, 5, 3, 5])
    trainer.restore(*between)
    # Nothing else remembers it.
    stream.set((1, 4, 2))
    assert (trainer.task_sizes, known()) == ((1, 4, 2), [5, 7, 5, 7])
    assert trainer.state()[1]["task_sizes"] == [1, 4, 2]
    # In place, where a recorded step reads them.
    assert method.old_classes is tensors[0]
    assert method.seen_classes is tensors[1]


def test_the_first_task_can_be_tried_again_after_it_diverged() -> None:
    trainer = make(learning_rate=1e30, momentum=0.0, warmup_epochs=0)
    tensors, description = trainer.state()
    before = {name: value.clone() for name, value in tensors.items()}, description
    for _ in range(2):
        with pytest.raises(InputError, match="no longer finite"):
            learn_digits(trainer, range(1))
        trainer.restore(*before)


def test_few_channels_on_many_pixels_do_not_crash_the_cpus_convolutions() -> None:
    # In a process of its own, which a crash ends.
    child = SERVER.Process(target=learn_few_channels_on_many_pixels)
    child.start()
    child.join()
    assert child.exitcode == 0


def learn_few_channels_on_many_pixels() -> None:
    config = make_config("cclis", {**QUICK, "epochs": 1, "batch_size": 8, "memory": 4, "width": 8})
    images = torch.randint(0, 256, (16, 64, 64, 3), dtype=torch.uint8)
    learn(Trainer(config, (64, 64, 3), 2), ImageSet(images, torch.arange(16) % 2), 2)


@pytest.mark.parametrize("gone", ["generator.order", "memory.labels", "network.mean"])
def test_a_state_that_lacks_a_tensor_is_refused(gone: str) -> None:
    trainer = make()
    learn_digits(trainer, range(1))
    tensors, description = trainer.state()
    del tensors[gone]
    with pytest.raises(InputError):
        Trainer.from_state(tensors, description)


@pytest.mark.parametrize(
    ("room", "said"),
    # A quarter more must fit than is advised.
    [(10, "batch_size 8 would fit"), (9, "batch_size 4 would fit"), (1, "smaller images")],
)
def test_a_full_gpu_says_what_would_fit(monkeypatch, room: int, said: str) -> None:
    trainer = make()
    losses = trainer.method.losses

    def with_little_memory(batch: Any) -> dict[str, Tensor]:
        if len(batch.labels) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(batch)

    monkeypatch.setattr(trainer.method, "losses", with_little_memory)
    monkeypatch.setattr(trainer._step, "_losses", with_little_memory)
    encoder = [parameter.clone() for parameter in trainer.method.network.encoder.parameters()]
    with pytest.raises(InputError, match=f"too small for batches of 32 images of 8×8.*{said}"):
        learn_digits(trainer, range(1))
    after = trainer.method.network.encoder.parameters()
    assert all(torch.equal(a, b) for a, b in zip(encoder, after, strict=True))


def test_a_task_begun_is_not_another_one() -> None:
    trainer = make()
    trainer._position = Position(2, trainer._replay.drawn())
    with pytest.raises(InputError, match="a task of 2 classes was begun, not one of 3"):
        learn(trainer, load_benchmark("split-digits", tasks=[3, 2])[0].train, 3)


@pytest.mark.parametrize("method", ["er", "der", "derpp", "gcr", "gem", "gss", "icarl", "co2l"])
def test_a_full_gpu_says_what_would_fit_with_every_method(monkeypatch, method: str) -> None:
    trainer = Trainer(make_config(method, {**quick(method), "memory": 20, "padding": 1}), SHAPE, 4)
    learn_digits(trainer, range(1))

    def full(batch: Any) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer._step, "_losses", full)
    with pytest.raises(InputError, match="batch_size 16 would fit"):
        learn_digits(trainer, range(1, 2))


def test_a_gpu_that_is_full_when_samples_are_scored_says_so(monkeypatch) -> None:
    trainer = make(epochs=1)

    def full(*_: Any) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(trainer.method, "select_exemplars", full)
    with pytest.raises(InputError, match="too small to score images of 8×8: use smaller images"):
        learn_digits(trainer, range(1))


def test_other_errors_are_not_taken_for_a_full_gpu(monkeypatch) -> None:
    trainer = make(epochs=1)

    def wrong(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(trainer.method, "select_exemplars", wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        learn_digits(trainer, range(1))


def test_a_failure_that_hides_behind_another_is_found() -> None:
    def fail() -> None:
        try:
            raise RuntimeError("FIND was unable to find an engine to execute this computation")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert out_of_memory(caught.value)
    assert not out_of_memory(RuntimeError("another"))
