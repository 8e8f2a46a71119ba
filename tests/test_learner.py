from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from cclis import ContinualLearner, InputError, load_benchmark
from tests.conftest import METHODS, QUICK, quick

LEARNING = {**QUICK, "epochs": 12, "width": 32, "temperature": 0.1, "probe_epochs": 10}


def digits(task: int) -> tuple[Any, Any, Any, Any]:
    found = load_benchmark("split-digits")[task]
    return found.train.images, found.train.labels, found.test.images, found.test.labels


@pytest.fixture(scope="module")
def learner() -> ContinualLearner:
    made = ContinualLearner(memory=60, **LEARNING)
    for task in range(3):
        images, labels, _, _ = digits(task)
        made.learn(images, labels)
    return made


def test_it_learns_one_task_after_another(learner: ContinualLearner) -> None:
    assert learner.classes == [0, 1, 2, 3, 4, 5]
    right = [learner.predict(digits(t)[2]) == digits(t)[3].numpy() for t in range(3)]
    assert np.concatenate(right).mean() > 0.8


def test_probabilities_agree_with_predictions(learner: ContinualLearner) -> None:
    images = digits(1)[2]
    probabilities = learner.predict_proba(images)
    assert probabilities.shape == (len(images), 6)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    best = np.asarray(learner.classes)[probabilities.argmax(axis=1)]
    assert (best == learner.predict(images)).all()


@pytest.mark.parametrize("method", ["cclis", "finetune"])
def test_labels_may_be_any_integers_or_strings(method: str) -> None:
    settings = {k: v for k, v in LEARNING.items() if method == "cclis"}
    memory = 20 if method == "cclis" else 0
    words = ContinualLearner(method, memory, **{**settings, "epochs": 2})
    numbers = ContinualLearner(method, memory, **{**settings, "epochs": 2})
    images, labels, test, _ = digits(0)
    names = np.array(["zero", "one"])[labels]
    words.learn(images, names)
    numbers.learn(images, np.where(labels == 0, 1000, -7))
    assert words.classes == ["one", "zero"]
    assert numbers.classes == [-7, 1000]
    translated = np.where(numbers.predict(test) == 1000, "zero", "one")
    assert (words.predict(test) == translated).all()


def test_images_may_come_in_any_layout() -> None:
    images, labels, test, _ = digits(0)
    plain = ContinualLearner(memory=20, **{**LEARNING, "epochs": 2}).learn(images, labels)
    other = ContinualLearner(memory=20, **{**LEARNING, "epochs": 2}).learn(
        images.permute(0, 3, 1, 2).numpy() / 255.0, labels.tolist()
    )
    expected = plain.predict_proba(test)
    np.testing.assert_array_equal(other.predict_proba(test[..., 0].numpy()), expected)
    np.testing.assert_array_equal(other.predict_proba([i.numpy() for i in test]), expected)


def test_a_loaded_learner_predicts_and_goes_on_exactly(learner, tmp_path) -> None:
    path = tmp_path / "deep" / "model.safetensors"
    learner.save(path)
    loaded = ContinualLearner.load(path)
    test = digits(2)[2]
    np.testing.assert_array_equal(loaded.predict_proba(test), learner.predict_proba(test))
    assert loaded.classes == learner.classes
    again = ContinualLearner.load(path)
    images, labels, test, _ = digits(3)
    for one in (loaded, again):
        one.learn(images, labels)
    np.testing.assert_array_equal(loaded.predict_proba(test), again.predict_proba(test))


def test_saving_in_between_changes_nothing(tmp_path) -> None:
    straight = ContinualLearner(memory=20, **QUICK)
    broken = ContinualLearner(memory=20, **QUICK)
    for task in range(2):
        straight.learn(*digits(task)[:2])
        broken.learn(*digits(task)[:2])
        broken.save(tmp_path / "model")
        broken = ContinualLearner.load(tmp_path / "model")
    test = digits(1)[2]
    np.testing.assert_array_equal(straight.predict_proba(test), broken.predict_proba(test))


def test_a_new_class_beyond_the_first_room_is_learned() -> None:
    rng = np.random.default_rng(0)
    learner = ContinualLearner(memory=70, **{**QUICK, "epochs": 1})
    for task in range(2):
        images = rng.integers(0, 256, (80, 8, 8), dtype=np.uint8)
        learner.learn(images, np.arange(80) % 40 + 40 * task)
        # No more than as much again stays empty: means are taken over all of it.
        assert learner._trainer.method.network.classes <= 2 * len(learner.classes)
    assert learner.predict_proba(images).shape == (80, 80)


@pytest.mark.parametrize("head", ["linear", "discriminant", "means", "prototype"])
def test_any_head_of_the_method_can_predict(head: str) -> None:
    images, labels, test, answers = digits(0)
    learner = ContinualLearner(memory=20, head=head, **LEARNING).learn(images, labels)
    assert (learner.predict(test) == answers.numpy()).mean() > 0.9


def test_your_own_encoder_is_asked_for_again(tmp_path) -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
    images, labels, test, _ = digits(0)
    learner = ContinualLearner(memory=20, encoder=encoder, **QUICK).learn(images, labels)
    learner.save(tmp_path / "own")
    with pytest.raises(InputError, match="your own encoder"):
        ContinualLearner.load(tmp_path / "own")
    loaded = ContinualLearner.load(tmp_path / "own", encoder=encoder)
    np.testing.assert_array_equal(loaded.predict_proba(test), learner.predict_proba(test))
    with pytest.raises(InputError, match=r"another network: encoder\.1\.bias differs"):
        ContinualLearner.load(tmp_path / "own", encoder=nn.Flatten())


GOOD = np.zeros((4, 8, 8), dtype=np.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "part"),
    [
        (np.full((4, 8, 8), np.nan), [0, 0, 1, 1], "NaN"),
        (np.full((4, 8, 8), 2.0), [0, 0, 1, 1], r"within \[0, 1\]"),
        ([np.zeros((8, 8)), np.zeros((9, 8))], [0, 1], "different sizes"),
        (GOOD, [0, 1], "4 images need as many labels"),
        (GOOD, [0.5, 1, 2, 3], "integers or strings"),
        (GOOD, [None, 1, 2, 3], "integers or strings"),
        (GOOD, [0, "a", 1, "b"], "not a mixture"),
        (GOOD, [1, 2**63, 2**63 + 1, 1], "label 9223372036854775808 would become another"),
        (GOOD, [-1, 2**63, 0, -1], "label 9223372036854775808 would become another"),
        (GOOD, np.array([1, 2**63, 1, 1], np.uint64), "label 9223372036854775808 would become"),
        (GOOD, [1, 2**64, 2**64, 1], "label 18446744073709551616 would become another"),
        (GOOD, ["a", "a\0", "a", "a\0"], r"label 'a\\x00' would become another"),
        (GOOD, np.array(["a", "a\0", "a", "b"], object), r"label 'a\\x00' would become another"),
        (GOOD, [[0], [1, 2], 3, 4], "labels must be an array"),
        (GOOD, torch.zeros(4, dtype=torch.bfloat16), "labels must be an array"),
        (GOOD, torch.zeros(4, dtype=torch.int64).to_sparse(), "labels must be an array"),
        (GOOD, torch.zeros(4, dtype=torch.int64, device="meta"), "labels must be an array"),
        (GOOD[:0], [], "non-empty"),
        (np.zeros((4, 8, 8, 2), dtype=np.uint8), [0, 1, 0, 1], "channels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_learned_is_refused(images: Any, labels: Any, part: str) -> None:
    learner = ContinualLearner(**QUICK)
    with pytest.raises(InputError, match=part):
        learner.learn(images, labels)
    assert learner.classes == []


def test_a_class_comes_once_and_images_keep_their_size(learner: ContinualLearner) -> None:
    with pytest.raises(InputError, match="class 0 was learned before"):
        learner.learn(GOOD, [0, 7, 7, 0])
    with pytest.raises(InputError, match="but the first task had"):
        learner.learn(np.zeros((4, 9, 9), dtype=np.uint8), [7, 7, 8, 8])
    with pytest.raises(InputError, match="were learned"):
        learner.predict(np.zeros((4, 9, 9), dtype=np.uint8))
    with pytest.raises(InputError, match="labels were ints before"):
        learner.learn(GOOD, ["a", "a", "b", "b"])
    assert learner.classes == [0, 1, 2, 3, 4, 5]


def test_predicting_before_learning_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="nothing has been learned"):
        ContinualLearner().predict(GOOD)
    with pytest.raises(InputError, match="nothing has been learned"):
        ContinualLearner().save(tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"method": "clis"}, "Did you mean 'cclis'"),
        ({"memory": -1}, "memory must be 0 or more"),
        ({"epoch": 3}, "Did you mean epochs"),
        ({"head": "protoype"}, "Did you mean 'prototype'"),
        ({"encoder": "resnet"}, "unknown encoder"),
        ({"encoder": 3}, "must be a module or a name"),
        ({"method": None}, "method must be a name or a class, not None"),
        ({"method": []}, "method must be a name"),
        ({"head": 5}, "head must be a name, not 5"),
        ({"crop": np.array(["none", "padded"])}, "crop must be a single value"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        ContinualLearner(**arguments)


def test_files_that_are_no_learner_are_refused(tmp_path, learner: ContinualLearner) -> None:
    executed = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (executed.write_text, ("!",))

    (tmp_path / "pickle").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "empty").write_bytes(b"")
    learner.save(tmp_path / "good")
    content = (tmp_path / "good").read_bytes()
    (tmp_path / "cut").write_bytes(content[: len(content) // 2])
    for name in ("pickle", "empty", "cut", "missing"):
        with pytest.raises(InputError, match=name):
            ContinualLearner.load(tmp_path / name)
    assert not executed.exists()


@pytest.mark.parametrize("path", [None, 5, "a\0b"])
def test_what_is_no_path_is_refused(learner: ContinualLearner, path: Any) -> None:
    with pytest.raises(InputError, match="cannot write"):
        learner.save(path)
    with pytest.raises(InputError, match="is not a saved learner"):
        ContinualLearner.load(path)


def tampered(tmp_path, learner: ContinualLearner, changes: dict[str, Any]) -> Path:
    """A file of the learner with other tensors, parts of its description, or settings."""
    from cclis.files import read_tensors, write_tensors

    learner.save(tmp_path / "learner")
    tensors, description = read_tensors(tmp_path / "learner")
    for name, value in changes.items():
        whole, _, part = name.partition("/")
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif part and value is None:
            del description[whole][part]
        elif part:
            description[whole][part] = value
        else:
            description[name] = value
    write_tensors(tmp_path / "learner", tensors, description)
    return tmp_path / "learner"


@pytest.mark.parametrize(
    "changes",
    [
        {"config": 5},
        {"config": ["a"]},
        {"config/method": None},
        {"config/method": 3},
        {"config/device": None},
        {"config/encoder": None},
        {"config/memory": None},
        {"config/epochs": "three"},
        {"head": 5},
        {"head": "prototype"},
        {"head/name": None},
        {"head/name": []},
        {"head/on": None},
        {"head/on": 3},
        {"head/on": "__doc__"},
        {"labels": 5},
        {"labels": "abcdef"},
        {"labels": [0, 1]},
        {"labels": [0, 1, 2, 3, 4, "5"]},
        {"labels": [0, 1, 2, 3, 4, 4]},
        {"labels": [0, 1, 2, 3, 4, 2**63]},
        {"labels": ["a", "a\0", "b", "c", "d", "e"]},
        {"labels": [[0], [1], [2], [3], [4], [5]]},
        {"task_sizes": 6},
        {"task_sizes": [2.0, 2.0, 2.0]},
        {"task_sizes": [7, -1]},
        {"position": 5},
        {"image_shape": [8, 8]},
        {"image_shape": [9, 9, 1]},
        {"classes": "many"},
        {"classes": -1},
        {"head.weight": torch.zeros(6)},
        {"head.weight": torch.zeros(6, 127)},
        {"head.weight": torch.zeros(5, 128)},
        {"head.weight": torch.zeros(6, 128, dtype=torch.float64)},
        {"head.bias": torch.zeros(1)},
        {"head.bias": torch.zeros(6, 1)},
    ],
    ids=str,
)
def test_a_damaged_learner_is_refused_when_it_is_loaded(
    tmp_path, learner: ContinualLearner, changes: dict[str, Any]
) -> None:
    with pytest.raises(InputError):
        ContinualLearner.load(tampered(tmp_path, learner, changes))


@pytest.mark.parametrize(
    "claim",
    [
        {"classes": 2_000_000},
        {"config/width": 64},
        {"config/embedding": 1_000_000},
        {"image_shape": [20_000, 20_000, 1]},
    ],
    ids=str,
)
def test_what_a_file_claims_is_compared_before_a_network_is_made(
    tmp_path, learner: ContinualLearner, monkeypatch, claim: dict[str, Any]
) -> None:
    path = tampered(tmp_path, learner, claim)
    monkeypatch.setattr("cclis.engine.trainer.Trainer.__init__", lambda *_, **__: pytest.fail("!"))
    with pytest.raises(InputError, match=r"belong to another network|others are kept"):
        ContinualLearner.load(path)


def test_a_checkpoint_of_a_run_is_no_learner(tmp_path, learner: ContinualLearner) -> None:
    from cclis.files import write_tensors

    write_tensors(tmp_path / "run", {"x": torch.ones(1)}, {"config": {}})
    with pytest.raises(InputError, match="not a saved learner"):
        ContinualLearner.load(tmp_path / "run")


def test_every_method_has_a_memory_of_its_own_by_default() -> None:
    assert ContinualLearner().config.memory == 200
    assert ContinualLearner("finetune").config.memory == 0


def test_settings_of_a_run_are_refused() -> None:
    with pytest.raises(InputError, match="limit is a setting of `cclis train`"):
        ContinualLearner(limit=3)


def test_numbers_and_labels_may_come_from_numpy_and_pandas(tmp_path) -> None:
    images, labels, test, _ = digits(0)
    names = np.array(["zero", "one"])[labels].astype(object)
    settings = {**QUICK, "learning_rate": np.float32(0.1), "epochs": np.int64(1)}
    learner = ContinualLearner(memory=np.int64(20), **settings).learn(images, names)
    learner.save(tmp_path / "model")
    assert set(ContinualLearner.load(tmp_path / "model").predict(test)) <= {"zero", "one"}
    with pytest.raises(InputError, match="it is a folder"):
        learner.save(tmp_path)


def test_an_interrupted_fit_of_the_head_leaves_the_learner_as_it_was(monkeypatch) -> None:
    from cclis.evaluation.heads import HEADS

    straight, interrupted = (ContinualLearner(memory=20, **QUICK) for _ in range(2))
    for one in (straight, interrupted):
        one.learn(*digits(0)[:2])
    images, labels, test, _ = digits(1)

    def interrupt(view: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(HEADS, "prototype", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted.learn(images, labels)
    assert interrupted.classes == [0, 1]
    np.testing.assert_array_equal(interrupted.predict_proba(test), straight.predict_proba(test))
    for one in (straight, interrupted):
        one.learn(images, labels)
    np.testing.assert_array_equal(interrupted.predict_proba(test), straight.predict_proba(test))


def test_classes_may_come_again_only_on_request() -> None:
    digits = load_digits()
    images, labels = digits.images / 16, digits.target
    learner = ContinualLearner(memory=40, **{**QUICK, "epochs": 8})

    def some(classes: list[int], part: slice) -> tuple[Any, Any]:
        chosen = np.flatnonzero(np.isin(labels, classes))[part]
        return images[chosen], labels[chosen]

    learner.learn(*some([0, 1], slice(0, 200)))
    before = learner.predict_proba(some([0, 1], slice(200, 300))[0])
    with pytest.raises(InputError, match="class 1 was learned before"):
        learner.learn(*some([1, 2], slice(0, 200)))
    learner.learn(*some([1, 2], slice(0, 200)), again=True)
    assert learner.classes == [0, 1, 2]
    learner.learn(*some([0, 2], slice(100, 250)), again=True)
    assert learner.classes == [0, 1, 2]
    assert learner.predict_proba(some([0, 1], slice(200, 300))[0]).shape[1] == 3 > before.shape[1]
    test = some([0, 1, 2], slice(400, 540))
    assert (learner.predict(test[0]) == test[1]).mean() > 0.8


def test_a_memory_smaller_than_the_classes_is_said() -> None:
    digits = load_digits()
    chosen = digits.target < 4
    learner = ContinualLearner(memory=3, **QUICK)
    with pytest.warns(UserWarning, match="a memory of 3 is smaller than the 4 classes"):
        learner.learn(digits.images[chosen] / 16, digits.target[chosen])


def test_a_file_of_another_format_is_refused(tmp_path) -> None:
    from cclis.files import read_tensors, write_tensors

    digits = load_digits()
    chosen = digits.target < 2
    learner = ContinualLearner(memory=4, **{**QUICK, "epochs": 1})
    learner.learn(digits.images[chosen] / 16, digits.target[chosen])
    learner.save(tmp_path / "learner")
    tensors, description = read_tensors(tmp_path / "learner")
    for made in (1, 99, None):
        described = {k: v for k, v in description.items() if k != "format"}
        described |= {} if made is None else {"format": made}
        write_tensors(tmp_path / "other", tensors, described)
        with pytest.raises(InputError, match="has the format"):
            ContinualLearner.load(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make"):
        learner.save(tmp_path / "file" / "learner")


def test_a_first_task_that_is_refused_fixes_nothing() -> None:
    learner = ContinualLearner(memory=4, **{**QUICK, "epochs": 1})
    with pytest.raises(InputError, match="at least two samples"):
        learner.learn(np.zeros((1, 8, 8)), [0])
    learner.learn(np.random.default_rng(0).random((12, 10, 10)), [0, 1] * 6)
    assert learner.classes == [0, 1]


@pytest.mark.parametrize("method", ["er", "der", "derpp", "gcr", "gss", "gem", "icarl", "co2l"])
def test_every_method_learns_from_arrays_and_makes_room(method: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("cclis.learner.ROOM", 2)
    digits = load_digits()
    learner = ContinualLearner(method, 20, **{**quick(method), "padding": 1})
    for task in ([0, 1], [2, 3, 4], [5]):
        chosen = np.isin(digits.target, task)
        learner.learn(digits.images[chosen] / 16, digits.target[chosen])
    assert learner.predict_proba(digits.images[:9] / 16).shape == (9, 6)
    learner.save(tmp_path / "learner")
    again = ContinualLearner.load(tmp_path / "learner")
    chosen = np.isin(digits.target, [6, 7])
    for each in (learner, again):
        each.learn(digits.images[chosen] / 16, digits.target[chosen])
    probability = [each.predict_proba(digits.images[:9] / 16) for each in (learner, again)]
    assert np.array_equal(*probability)


class Double(nn.Linear):
    """Features of another precision."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).double()


ENCODERS = {
    "frozen": lambda: nn.Linear(64, 16).requires_grad_(False),
    "partly frozen": lambda: nn.Sequential(
        nn.Linear(64, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 8)
    ),
    "in 64 bits": lambda: Double(64, 16),
    "by chance": lambda: nn.Sequential(nn.Linear(64, 16), nn.Dropout(), nn.Linear(16, 8)),
}


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "joint"])
def test_encoders_of_any_kind_learn_and_go_on_exactly(method: str, kind: str, tmp_path) -> None:
    encoder = nn.Sequential(nn.Flatten(), ENCODERS[kind]())
    precision = "bf16" if kind == "in 64 bits" else "fp32"
    settings = {**quick(method), "epochs": 1, "padding": 1, "precision": precision}
    learner = ContinualLearner(method, encoder=encoder, **settings).learn(*digits(0)[:2])
    learner.save(tmp_path / "learner")
    again = ContinualLearner.load(tmp_path / "learner", encoder=encoder)
    torch.manual_seed(1)
    learner.learn(*digits(1)[:2])
    torch.manual_seed(2)
    drawn = torch.random.get_rng_state()
    again.learn(*digits(1)[:2])
    # Whatever else the caller draws by chance, neither minds the other.
    assert torch.equal(torch.random.get_rng_state(), drawn)
    images = digits(0)[2]
    assert np.array_equal(learner.predict_proba(images), again.predict_proba(images))
    weights = learner._trainer.method.network.encoder.state_dict()
    fixed = {
        name: torch.equal(value, encoder.state_dict()[name]) for name, value in weights.items()
    }
    assert all(fixed.values()) == (kind == "frozen")


class Noisy(nn.Flatten):
    """Draws a number whenever it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def forward(self, x: Any) -> Any:
        if self.training:
            self.drawn.append(float(torch.rand(())))
        return super().forward(x)


def test_no_task_has_the_chances_of_another() -> None:
    learner = ContinualLearner("er", encoder=Noisy(), **quick("er"), padding=1)
    for task in range(2):
        learner.learn(*digits(task)[:2])
    drawn = learner._trainer.method.network.encoder.drawn
    assert len(set(drawn)) == len(drawn) > 4


class Remembering(nn.Flatten):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


def test_an_encoder_that_cannot_be_saved_is_refused() -> None:
    learner = ContinualLearner("er", encoder=Remembering(), **quick("er"), padding=1)
    with pytest.raises(InputError, match="encoder's _extra_state is no tensor and cannot be saved"):
        learner.learn(*digits(0)[:2])


def test_joint_training_is_told_everything_at_once() -> None:
    learner = ContinualLearner("joint", **quick("joint"), padding=1).learn(*digits(0)[:2])
    before = learner.predict_proba(digits(0)[2])
    with pytest.raises(InputError, match="joint learns all tasks at once"):
        learner.learn(*digits(1)[:2])
    assert np.array_equal(learner.predict_proba(digits(0)[2]), before)


class Pooled(nn.BatchNorm1d):
    """Normalises what it makes of the whole batch."""

    def __init__(self) -> None:
        super().__init__(64)

    def forward(self, x: Any) -> Any:
        x = x.flatten(1)
        return x + super().forward(x.mean(dim=0, keepdim=True))


@pytest.mark.filterwarnings("ignore:a memory of 3 is smaller")
def test_a_part_of_one_sample_cannot_be_normalised() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
    der = ContinualLearner("der", encoder=encoder, replay_batch_size=1, **quick("der"), padding=1)
    with pytest.raises(InputError, match=r"two samples at least.* larger replay_batch_size helps"):
        der.learn(*digits(0)[:2])
    gem = ContinualLearner("gem", 3, encoder=encoder, **quick("gem"), padding=1)
    for task in range(2):
        gem.learn(*digits(task)[:2])
    with pytest.raises(InputError, match=r"two samples at least.* larger memory helps"):
        gem.learn(*digits(2)[:2])
    assert gem.classes == [0, 1, 2, 3]
    # Where no part has one sample, the encoder is to blame, and torch says where.
    finetune = ContinualLearner("finetune", encoder=Pooled(), **quick("finetune"), padding=1)
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        finetune.learn(*digits(0)[:2])
    assert not isinstance(raised.value, InputError)


@pytest.mark.filterwarnings("ignore:a memory of . is smaller")
@pytest.mark.parametrize(("memory", "too_small"), [(2, True), (7, False)])
def test_a_loaded_learner_learns_or_refuses_tiny_tasks_like_the_one_saved(
    memory: int, too_small: bool, tmp_path
) -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    settings = {**quick("gem"), "epochs": 1, "batch_size": 3, "padding": 1, "crop": "none"}
    rng, path = np.random.default_rng(memory), tmp_path / "learner"
    images = rng.integers(0, 256, (4, 6, 2, 2), dtype=np.uint8)
    straight, loaded = (ContinualLearner("gem", memory, encoder=encoder, **settings) for _ in "12")
    refused = []
    for task, part in enumerate(images):
        labels, said = rng.permutation([0, 0, 1, 1, 2, 2])[: 3 + task] + 3 * task, []
        for learner in (straight, loaded):
            try:
                learner.learn(part[: len(labels)], labels)
            except InputError as error:
                said.append(str(error))
        # Both, by the same sentence, or neither.
        assert len(said) != 1
        assert len(set(said)) <= 1
        refused += said
        loaded.save(path)
        loaded = ContinualLearner.load(path, encoder=encoder)
        np.testing.assert_array_equal(straight.predict_proba(part), loaded.predict_proba(part))
    assert bool(refused) == too_small


@pytest.mark.parametrize(
    ("method", "weights", "momentum", "represented"),
    [
        # Prototypes, projection and, while samples are scored, representations of all samples.
        ("cclis", 64 * 65 + 65 * 16 + 16 * 16, 1, 600 * (64 + 16)),
        ("co2l", 64 * 65 + 65 * 16, 1, 512 * (64 + 16)),
        ("er", 16 * 65, 0, 512 * (64 + 64)),
    ],
)
def test_a_task_that_does_not_fit_into_memory_is_refused(
    method: str, weights: int, momentum: int, represented: int, monkeypatch
) -> None:
    settings = {**quick(method), "epochs": 1, "padding": 1, "batch_size": 512}
    if method != "er":
        settings |= {"embedding": 16, "probe_epochs": 1}
    learner = ContinualLearner(method, 20, encoder=nn.Flatten(), **settings)
    images = np.random.default_rng(0).integers(0, 256, (600, 8, 8), dtype=np.uint8)
    labels = np.arange(600) % 2
    needed, free = 4 * ((1 + momentum) * weights + represented), [0]
    monkeypatch.setattr("cclis.engine.checks.free_memory", lambda: free[0])
    for task in range(2):
        free[0] = needed - 1
        with pytest.raises(InputError, match=r"takes .* GiB of memory at least.* smaller width"):
            learner.learn(images, labels + 2 * task)
        assert len(learner.classes) == 2 * task
        free[0] = needed
        learner.learn(images, labels + 2 * task)
        # Momentum is kept from task to task.
        needed -= 4 * momentum * weights


@pytest.mark.parametrize("method", ["er", "gcr", "finetune", "co2l"])
def test_what_the_last_step_breaks_is_refused(method: str) -> None:
    settings = {**quick(method), "epochs": 1, "batch_size": 512, "padding": 1, "flip": 0.0}
    learner = ContinualLearner(method, **{**settings, "learning_rate": 1e20})
    with pytest.raises(InputError, match=r"no longer finite: a lower learning_rate|has diverged"):
        learner.learn(*digits(0)[:2])
    assert learner.classes == []


def test_padding_leaves_something_to_see(tmp_path) -> None:
    images, labels = np.random.default_rng(0).random((8, 5, 4, 1)), [0, 1] * 4
    with pytest.raises(InputError, match="padding of 4 can push images of 5×4 out of sight"):
        ContinualLearner("er", epochs=1).learn(images, labels)
    learner = ContinualLearner("er", epochs=1, padding=3, width=8).learn(images, labels)
    # What was learned with such a padding still predicts.
    again = ContinualLearner.load(tampered(tmp_path, learner, {"config/padding": 4}))
    assert np.array_equal(again.predict_proba(images), learner.predict_proba(images))
    with pytest.raises(InputError, match="out of sight"):
        again.learn(images, [2, 3] * 4)
    ContinualLearner("er", epochs=1, crop="none", width=8).learn(images, labels)


@pytest.mark.parametrize("settings", [{"memory": 10**12}, {"memory": 20, "candidates": 10**12}])
def test_room_is_made_for_what_comes_rather_than_for_what_may(settings: dict[str, int]) -> None:
    learner = ContinualLearner("gcr", **{**quick("gcr"), "padding": 1, **settings})
    for task in range(2):
        learner.learn(*digits(task)[:2])
    assert 0 < len(learner._trainer.memory) <= settings["memory"]


def test_a_batch_that_does_not_fit_is_said() -> None:
    learner = ContinualLearner("er", 20, **quick("er"), padding=1, replay_batch_size=10**15)
    with pytest.raises(InputError, match="memory is too small"):
        learner.learn(*digits(0)[:2])
