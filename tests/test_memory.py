from __future__ import annotations

import pytest
import torch

from cclis.data.images import ImageSet
from cclis.errors import InputError
from cclis.memory import Memory


def samples(*labels: int, value: int = 7) -> ImageSet:
    images = torch.full((len(labels), 2, 2, 1), value, dtype=torch.uint8)
    return ImageSet(images, torch.tensor(labels, dtype=torch.int64))


def test_a_new_memory_is_empty():
    memory = Memory(3)
    assert (len(memory), memory.samples, len(memory.proposal)) == (0, None, 0)
    assert memory.state() == {}


def test_a_negative_capacity_is_refused():
    with pytest.raises(InputError, match="0 or more, not -1"):
        Memory(-1)


def test_replace_keeps_these_and_no_others():
    memory = Memory(3)
    memory.replace(samples(0, 1, 2), torch.tensor([0.1, 0.2, 0.3]))
    memory.replace(samples(4, 5), torch.tensor([0.4, 0.6]))
    assert len(memory) == 2
    assert memory.samples is not None
    assert memory.samples.labels.tolist() == [4, 5]
    assert torch.equal(memory.proposal, torch.tensor([0.4, 0.6]))


@pytest.mark.parametrize(
    ("given", "stored"),
    [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2],
)
def test_proposals_keep_their_precision_and_have_at_least_float32(given, stored):
    memory = Memory(2)
    proposal = torch.tensor([0.4, 0.6], dtype=given)
    memory.replace(samples(4, 5), proposal)
    assert memory.proposal.dtype == stored
    assert torch.equal(memory.proposal, proposal.to(stored))


def test_the_capacity_is_never_exceeded():
    memory = Memory(2)
    memory.replace(samples(0, 1), torch.ones(2))
    with pytest.raises(InputError, match="3 samples do not fit a memory of 2"):
        memory.replace(samples(0, 1, 2), torch.ones(3))
    assert len(memory) == 2


def test_every_sample_needs_a_proposal():
    with pytest.raises(InputError, match="2 samples need as many proposals, not 3"):
        Memory(5).replace(samples(0, 1), torch.ones(3))


def test_visible_is_the_memory_then_the_task():
    memory, task = Memory(2), samples(8, 9, value=1)
    assert memory.visible(task) is task
    memory.replace(samples(3, 4), torch.ones(2))
    visible = memory.visible(task)
    assert visible.labels.tolist() == [3, 4, 8, 9]
    assert visible.images[:, 0, 0, 0].tolist() == [7, 7, 1, 1]


def test_what_is_kept_outlives_the_data_it_came_from():
    data, proposal = samples(0, 1, 2), torch.tensor([0.5, 0.25, 0.25])
    memory = Memory(2)
    memory.replace(data[:2], proposal[:2])  # slices are views
    data.images.zero_()
    data.labels.fill_(9)
    proposal.zero_()
    assert memory.samples is not None
    assert memory.samples.images.unique().tolist() == [7]
    assert memory.samples.labels.tolist() == [0, 1]
    assert memory.proposal.tolist() == [0.5, 0.25]
    # A view into it would keep all of the data alive.
    assert memory.samples.images.untyped_storage().nbytes() == memory.samples.images.numel()


def test_replacing_with_nothing_empties():
    memory = Memory(2)
    memory.replace(samples(0, 1), torch.ones(2))
    memory.replace(samples(), torch.ones(0))
    assert (len(memory), memory.samples, memory.state()) == (0, None, {})


def test_a_memory_for_nothing_takes_nothing():
    memory = Memory(0)
    memory.replace(samples(), torch.ones(0))
    with pytest.raises(InputError, match="do not fit"):
        memory.replace(samples(1), torch.ones(1))


def test_state_and_load_are_inverse():
    memory, other = Memory(2), Memory(2)
    memory.replace(samples(3, 4), torch.tensor([0.25, 0.75]))
    other.load(memory.state())
    assert other.state().keys() == memory.state().keys() == {"images", "labels", "proposal"}
    for name, tensor in memory.state().items():
        assert torch.equal(other.state()[name], tensor)

    other.load(Memory(2).state())
    assert len(other) == len(other.proposal) == 0


def test_loading_what_does_not_fit_is_refused():
    memory = Memory(2)
    memory.replace(samples(3, 4), torch.ones(2))
    with pytest.raises(InputError, match="do not fit a memory of 1"):
        Memory(1).load(memory.state())


def test_a_stream_fills_free_rows_and_replaces_others():
    memory = Memory(3)
    first = ImageSet(torch.arange(8, dtype=torch.uint8).view(2, 2, 2, 1), torch.tensor([5, 6]))
    memory.insert(torch.tensor([0, 1]), first, {"logits": torch.tensor([[1.0], [2.0]])})
    assert (len(memory), memory.seen) == (2, 2)
    memory.insert(torch.tensor([2, -1]), samples(7, 8), {"logits": torch.tensor([[3.0], [4.0]])})
    memory.insert(torch.tensor([-1, 0]), samples(9, 10), {"logits": torch.tensor([[5.0], [6.0]])})
    memory.insert(torch.tensor([-1, -1]), samples(9, 9), {"logits": torch.zeros(2, 1)})
    assert (len(memory), memory.seen) == (3, 8)
    assert memory.samples is not None
    assert memory.samples.labels.tolist() == [10, 6, 7]
    assert memory.extras["logits"].flatten().tolist() == [6, 2, 3]
    assert memory.proposal.tolist() == [1, 1, 1]
    assert memory.samples.images[1].flatten().tolist() == [4, 5, 6, 7]


def test_beside_what_was_kept_a_stream_has_the_share_of_a_common_reservoir():
    assert Memory(4).replay_sizes(torch.tensor([0, 3, 9])).tolist() == [0, 3, 4]
    memory = Memory(6, reservoir=9)
    assert memory.replay_sizes(torch.tensor([0, 4, 8, 99])).tolist() == [0, 4, 6, 6]
    for first in range(0, 40, 4):
        slots = torch.arange(first, first + 4)
        memory.insert(torch.where(slots < 9, slots, -1), samples(1, 2, 3, 4), {})
    kept = memory.samples
    assert kept is not None
    memory.replace(kept[torch.arange(6)], torch.ones(6))
    again = Memory(6, reservoir=9)
    again.load(memory.state())
    for each in (memory, again):
        assert (each.seen, each.past, each.previous) == (0, 40, 6)
        # Beside six that stand for 40: a half when 40 more have passed by.
        assert each.replay_sizes(torch.tensor([0, 3, 7, 20, 40, 99])).tolist() == [0, 0, 1, 3, 6, 6]
    uncounted = {name: value for name, value in memory.state().items() if name != "past"}
    with pytest.raises(InputError, match="did not count the samples of the stream"):
        again.load(uncounted)


def test_samples_of_every_past_task_count():
    memory = Memory(2, reservoir=4)
    for passed in (4, 8, 12):
        for first in range(0, passed, 4):
            slots = len(memory) + torch.arange(4) if not first else torch.full((4,), -1)
            memory.insert(slots, samples(0, 1, 0, 1), {})
        kept = memory.samples
        assert kept is not None
        memory.replace(kept[:2], torch.ones(2))
    assert memory.past == 4 + 8 + 12
    # Two that stand for 24: one new sample beside them when 12 have passed by.
    assert memory.replay_sizes(torch.tensor([11, 12])).tolist() == [0, 1]


def test_no_more_is_replayed_than_a_reservoir_holds():
    assert Memory(6, reservoir=3).replay_sizes(torch.tensor([0, 2, 4, 99])).tolist() == [0, 2, 3, 3]


def test_room_for_a_stream_grows_with_it():
    memory = Memory(10**15)
    for first in range(0, 9, 3):
        memory.insert(first + torch.arange(3), samples(*range(first, first + 3)), {})
    assert memory.samples is not None
    assert memory.samples.labels.tolist() == list(range(9))
    # Twice as much each time, so that little is copied, but no more than it may hold.
    assert len(memory._rows["labels"]) == 12
    small = Memory(4)
    for slots in ([0, 1, 2], [3]):
        small.insert(torch.tensor(slots), samples(*slots), {})
    assert len(small._rows["labels"]) == len(small) == 4


def test_extras_of_every_class_are_kept_as_room_grows_and_shrinks():
    memory = Memory(2)
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    memory.replace(samples(0, 1), torch.ones(2), {"logits": logits, "weight": torch.ones(2)})
    memory.widen("logits", 4)
    assert memory.extras["logits"].tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
    memory.widen("logits", 1)
    assert memory.extras["logits"].tolist() == [[1], [3]]
    assert memory.extras["weight"].tolist() == [1, 1]
    memory.widen("nothing of that name", 3)
    assert memory.extras.keys() == {"logits", "weight"}


def test_a_stream_continues_from_a_saved_state():
    memory, again = Memory(4), Memory(4)
    memory.insert(torch.tensor([0, 1]), samples(1, 2), {"logits": torch.tensor([[1.0], [2.0]])})
    again.load({name: value.clone() for name, value in memory.state().items()})
    for each in (memory, again):
        each.insert(torch.tensor([2, 3]), samples(3, 4), {"logits": torch.tensor([[3.0], [4.0]])})
    state, other = memory.state(), again.state()
    assert state.keys() == other.keys() == {"images", "labels", "proposal", "logits", "seen"}
    assert all(torch.equal(state[name], other[name]) for name in state)
