from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cclis.functional.losses import icarl_loss, ird, prd, sample_nce, supcon

SETTINGS = settings(max_examples=80, deadline=None)


def denominator_weight(
    i: int, k: int, labels: list[int], proposal: list[float] | None, old_classes: int
) -> float:
    """What sample k counts in the denominator of prototype i, read off Eqs. 9 and 10."""
    m = labels[k]
    replayed_negative = i < old_classes and m < old_classes and m != i
    if proposal is None or not replayed_negative:
        return 1.0
    return 1.0 / (proposal[k] * labels.count(m))


def naive_sample_nce(
    similarity: Tensor,
    labels: Tensor,
    temperature: float,
    proposal: Tensor | None = None,
    old_classes: int = 0,
) -> float:
    s = (similarity.double() / temperature).tolist()
    y = labels.tolist()
    g = None if proposal is None else proposal.double().tolist()
    total = 0.0
    for j, i in enumerate(y):
        denominator = 0.0
        for k in range(len(y)):
            denominator += denominator_weight(i, k, y, g, old_classes) * math.exp(s[i][k])
        total += -math.log(math.exp(s[i][j]) / denominator)
    return total / len(y)


def naive_sample_nce_gradient(
    similarity: Tensor,
    labels: Tensor,
    temperature: float,
    proposal: Tensor | None = None,
    old_classes: int = 0,
) -> Tensor:
    """Eq. 8 with ∇θ s_ik taken as a unit vector, summed over the batch's samples."""
    s = (similarity.double() / temperature).tolist()
    y = labels.tolist()
    g = None if proposal is None else proposal.double().tolist()
    gradient = torch.zeros(similarity.shape, dtype=torch.float64)
    for j, i in enumerate(y):
        terms = [
            denominator_weight(i, k, y, g, old_classes) * math.exp(s[i][k]) for k in range(len(y))
        ]
        gradient[i, j] -= 1.0
        for k, term in enumerate(terms):
            gradient[i, k] += term / sum(terms)
    return gradient / (temperature * len(y))


def naive_prd(student: Tensor, teacher: Tensor, current: float, past: float) -> float:
    classes, batch = student.shape
    total = 0.0
    for j in range(batch):
        now = [math.exp(student[i, j].item() / current) for i in range(classes)]
        before = [math.exp(teacher[i, j].item() / past) for i in range(classes)]
        for i in range(classes):
            total -= before[i] / sum(before) * math.log(now[i] / sum(now))
    return total / batch


def cosines(classes: int, batch: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(classes, batch, generator=generator, dtype=torch.float64) * 2 - 1


def example(
    classes: int, batch: int, seed: int, smallest: float = 1e-12
) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, labels, and proposals log-uniform in [smallest, 1]."""
    generator = torch.Generator().manual_seed(seed + 10_000)
    labels = torch.randint(classes, (batch,), generator=generator)
    exponent = torch.rand(batch, generator=generator, dtype=torch.float64)
    return cosines(classes, batch, seed), labels, smallest**exponent


@st.composite
def nce_cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, float, Tensor, int]:
    classes = draw(st.integers(1, 6))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=12))
    exponents = draw(
        st.lists(st.floats(-12, 0), min_size=len(labels), max_size=len(labels)), label="log10 g"
    )
    return (
        cosines(classes, len(labels), draw(st.integers(0, 2**31))),
        torch.tensor(labels),
        draw(st.floats(0.02, 2.0)),
        10 ** torch.tensor(exponents, dtype=torch.float64),
        draw(st.integers(0, classes)),
    )


class TestSampleNceAgainstTheEquations:
    @SETTINGS
    @given(nce_cases())
    def test_weighted(self, case: tuple[Tensor, Tensor, float, Tensor, int]) -> None:
        similarity, labels, temperature, proposal, old = case
        loss = sample_nce(
            similarity, labels, temperature=temperature, proposal=proposal, old_classes=old
        )
        assert loss.shape == ()
        assert loss.dtype == torch.float64
        expected = naive_sample_nce(similarity, labels, temperature, proposal, old)
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)

    @SETTINGS
    @given(nce_cases())
    def test_without_a_proposal(self, case: tuple[Tensor, Tensor, float, Tensor, int]) -> None:
        similarity, labels, temperature, _, old = case
        loss = sample_nce(similarity, labels, temperature=temperature, old_classes=old)
        expected = naive_sample_nce(similarity, labels, temperature)
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)

    @SETTINGS
    @given(nce_cases())
    def test_gradient(self, case: tuple[Tensor, Tensor, float, Tensor, int]) -> None:
        similarity, labels, temperature, proposal, old = case
        leaf = similarity.clone().requires_grad_()
        sample_nce(
            leaf, labels, temperature=temperature, proposal=proposal, old_classes=old
        ).backward()
        expected = naive_sample_nce_gradient(similarity, labels, temperature, proposal, old)
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-8)

    @pytest.mark.parametrize("old", range(5))
    def test_every_number_of_old_classes(self, old: int) -> None:
        similarity, labels, proposal = example(4, 16, seed=old, smallest=1e-3)
        loss = sample_nce(similarity, labels, temperature=0.5, proposal=proposal, old_classes=old)
        expected = naive_sample_nce(similarity, labels, 0.5, proposal, old)
        assert loss.item() == pytest.approx(expected, abs=1e-6)
        plain = sample_nce(similarity, labels, temperature=0.5)
        # One old class has no old negatives, so at least two are needed for a weight to matter.
        assert (abs(loss.item() - plain.item()) > 1e-3) == (old >= 2)

    def test_by_hand(self) -> None:
        # Classes 0 and 1 are old, 2 is current; every exp(s) is 1.
        similarity = torch.zeros(3, 4, dtype=torch.float64)
        labels = torch.tensor([0, 1, 1, 2])
        proposal = torch.tensor([0.5, 0.25, 0.1, torch.nan], dtype=torch.float64)
        loss = sample_nce(similarity, labels, temperature=1.0, proposal=proposal, old_classes=2)
        of_0 = math.log(1 + 1 / (0.25 * 2) + 1 / (0.1 * 2) + 1)
        of_1 = math.log(1 / (0.5 * 1) + 1 + 1 + 1)
        of_2 = math.log(4)
        assert loss.item() == pytest.approx((of_0 + 2 * of_1 + of_2) / 4, abs=1e-12)


@pytest.mark.parametrize("old", [0, 2, 4])
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_sample_nce_gradcheck(old: int, temperature: float) -> None:
    similarity, labels, proposal = example(4, 9, seed=3, smallest=1e-4)
    assert torch.autograd.gradcheck(
        lambda s: sample_nce(
            s, labels, temperature=temperature, proposal=proposal, old_classes=old
        ),
        similarity.requires_grad_(),
    )


@SETTINGS
@given(nce_cases())
def test_uniform_proposal_is_the_unweighted_loss(
    case: tuple[Tensor, Tensor, float, Tensor, int],
) -> None:
    similarity, labels, temperature, _, old = case
    uniform = 1 / labels.bincount()[labels].double()
    weighted = sample_nce(
        similarity, labels, temperature=temperature, proposal=uniform, old_classes=old
    )
    plain = sample_nce(similarity, labels, temperature=temperature)
    assert abs(weighted.item() - plain.item()) <= 1e-12


class TestSampleNceInFloat32:
    @pytest.mark.parametrize("smallest", [1e-12, 1.0])
    @pytest.mark.parametrize("old", [0, 3, 5])
    def test_cold_temperature_and_tiny_proposals(self, smallest: float, old: int) -> None:
        similarity, labels, proposal = example(5, 40, seed=11, smallest=smallest)
        proposal[::3] = smallest
        similarity, proposal = similarity.float(), proposal.float()
        leaf = similarity.clone().requires_grad_()
        loss = sample_nce(leaf, labels, temperature=0.01, proposal=proposal, old_classes=old)
        loss.backward()
        assert loss.dtype == torch.float32
        expected = naive_sample_nce(similarity, labels, 0.01, proposal, old)
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        gradient = naive_sample_nce_gradient(similarity, labels, 0.01, proposal, old).float()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-3, atol=1e-4)

    def test_saturated_cosines(self) -> None:
        # exp(1 / 0.01) is beyond float32: a sum of plain exponentials would overflow.
        labels = torch.tensor([0, 0, 1, 1])
        similarity = torch.tensor([[1.0, 1, 1, 1], [-1, -1, -1, -1]], requires_grad=True)
        proposal = torch.full((4,), 1e-12)
        loss = sample_nce(similarity, labels, temperature=0.01, proposal=proposal, old_classes=2)
        loss.backward()
        expected = naive_sample_nce(similarity.detach(), labels, 0.01, proposal, 2)
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        assert similarity.grad is not None
        assert similarity.grad.isfinite().all()

    def test_a_proposal_that_underflowed_stays_finite(self) -> None:
        similarity, labels, _ = example(3, 12, seed=5)
        leaf = similarity.float().requires_grad_()
        for proposal in (torch.zeros(12), torch.full((12,), 1e-200, dtype=torch.float64)):
            loss = sample_nce(leaf, labels, temperature=0.01, proposal=proposal, old_classes=3)
            (gradient,) = torch.autograd.grad(loss, leaf)
            assert loss.isfinite()
            assert gradient.isfinite().all()
            # It stays a replayed sample, whose weight is as large as can be.
            smallest = torch.full((12,), torch.finfo(torch.float32).tiny / 12)
            assert loss == sample_nce(
                leaf, labels, temperature=0.01, proposal=smallest, old_classes=3
            )

    def test_sixteen_bits_are_computed_in_thirty_two(self) -> None:
        # 257 samples of a class are 256 in bfloat16, and its logarithms have two digits.
        similarity = cosines(3, 600, seed=12).bfloat16()
        labels = torch.cat([torch.zeros(257), torch.ones(43), torch.full((300,), 2.0)]).long()
        proposal = torch.rand(600, generator=torch.Generator().manual_seed(1)).double()
        loss = sample_nce(similarity, labels, temperature=0.5, proposal=proposal, old_classes=2)
        assert loss.dtype == torch.float32
        expected = naive_sample_nce(similarity.double(), labels, 0.5, proposal, 2)
        assert loss.item() == pytest.approx(expected, rel=1e-5)

    def test_proposal_may_have_another_precision(self) -> None:
        similarity, labels, proposal = example(4, 10, seed=6)
        expected = naive_sample_nce(similarity, labels, 0.5, proposal.float(), 3)
        loss = sample_nce(
            similarity, labels, temperature=0.5, proposal=proposal.float(), old_classes=3
        )
        assert loss.dtype == torch.float64
        assert loss.item() == pytest.approx(expected, abs=1e-6)


class TestSampleNceLimits:
    @pytest.mark.parametrize("junk", [torch.nan, 0.0, -1.0, torch.inf])
    def test_proposals_of_current_samples_are_ignored(self, junk: float) -> None:
        similarity, labels, proposal = example(5, 30, seed=1, smallest=1e-3)
        carried = torch.where(labels < 3, proposal, junk)
        assert (labels >= 3).any()
        losses, gradients = [], []
        for values in (proposal, carried):
            leaf = similarity.clone().requires_grad_()
            loss = sample_nce(leaf, labels, temperature=0.5, proposal=values, old_classes=3)
            loss.backward()
            losses.append(loss.item())
            gradients.append(leaf.grad)
        assert losses[0] == losses[1]
        assert torch.equal(gradients[0], gradients[1])

    def test_no_replayed_sample_in_the_batch(self) -> None:
        similarity = cosines(5, 8, seed=2)
        labels = torch.tensor([3, 4, 3, 3, 4, 4, 4, 3])
        nothing = torch.full((8,), torch.nan, dtype=torch.float64)
        loss = sample_nce(similarity, labels, temperature=0.5, proposal=nothing, old_classes=3)
        expected = naive_sample_nce(similarity, labels, 0.5)
        assert loss.item() == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("absent", [1, 4])
    def test_prototype_of_a_class_missing_from_the_batch_has_no_gradient(self, absent: int) -> None:
        similarity, labels, proposal = example(5, 30, seed=4)
        kept = labels != absent
        leaf = similarity[:, kept].requires_grad_()
        sample_nce(
            leaf, labels[kept], temperature=0.1, proposal=proposal[kept], old_classes=3
        ).backward()
        assert leaf.grad is not None
        assert (leaf.grad[absent] == 0).all()
        present = [i for i in range(5) if i != absent]
        assert (leaf.grad[present].abs().sum(dim=1) > 0).all()

    @pytest.mark.parametrize("old", [0, 1, 2])
    def test_one_sample_costs_nothing(self, old: int) -> None:
        similarity = cosines(2, 1, seed=5)
        loss = sample_nce(
            similarity,
            torch.tensor([0]),
            temperature=0.1,
            proposal=torch.tensor([0.3], dtype=torch.float64),
            old_classes=old,
        )
        assert loss.item() == pytest.approx(0, abs=1e-12)

    @pytest.mark.parametrize("old", [0, 1])
    def test_one_class_is_never_weighted(self, old: int) -> None:
        similarity = cosines(1, 7, seed=6)
        loss = sample_nce(
            similarity,
            torch.zeros(7, dtype=torch.int64),
            temperature=0.5,
            proposal=torch.full((7,), 1e-6, dtype=torch.float64),
            old_classes=old,
        )
        logits = similarity[0] / 0.5
        expected = math.log(logits.exp().sum().item()) - logits.mean().item()
        assert loss.item() == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("batch", [1, 2, 17, 256])
    def test_equal_similarities_cost_the_logarithm_of_the_batch(self, batch: int) -> None:
        similarity = torch.full((3, batch), 0.7, dtype=torch.float64)
        labels = torch.arange(batch) % 3
        loss = sample_nce(similarity, labels, temperature=0.1)
        assert loss.item() == pytest.approx(math.log(batch), abs=1e-12)

    def test_rows_of_unseen_classes_change_nothing(self) -> None:
        similarity, labels, proposal = example(4, 20, seed=7)
        more = torch.cat([similarity, cosines(6, 20, seed=8)])
        arguments = {"temperature": 0.5, "proposal": proposal, "old_classes": 2}
        few = sample_nce(similarity, labels, **arguments)
        many = sample_nce(more, labels, **arguments)
        assert many.item() == pytest.approx(few.item(), abs=1e-12)

    @SETTINGS
    @given(nce_cases(), st.randoms(use_true_random=False))
    def test_order_of_the_batch_does_not_matter(self, case, random) -> None:
        similarity, labels, temperature, proposal, old = case
        order = list(range(len(labels)))
        random.shuffle(order)
        arguments = {"temperature": temperature, "old_classes": old}
        loss = sample_nce(similarity, labels, proposal=proposal, **arguments)
        shuffled = sample_nce(
            similarity[:, order], labels[order], proposal=proposal[order], **arguments
        )
        assert shuffled.item() == pytest.approx(loss.item(), rel=1e-10, abs=1e-10)

    def test_rarer_samples_count_more(self) -> None:
        similarity, labels, _ = example(4, 20, seed=9)
        losses = [
            sample_nce(
                similarity,
                labels,
                temperature=0.5,
                proposal=torch.full((20,), g, dtype=torch.float64),
                old_classes=4,
            ).item()
            for g in (1.0, 0.1, 0.01)
        ]
        assert losses[0] < losses[1] < losses[2]


class TestPrd:
    @SETTINGS
    @given(
        st.integers(1, 6),
        st.integers(1, 8),
        st.integers(0, 2**31),
        st.floats(0.02, 2.0),
        st.floats(0.02, 2.0),
    )
    def test_against_the_equation(
        self, classes: int, batch: int, seed: int, current: float, past: float
    ) -> None:
        student, teacher = cosines(classes, batch, seed), cosines(classes, batch, seed + 1)
        loss = prd(student, teacher, student_temperature=current, teacher_temperature=past)
        assert loss.shape == ()
        assert loss.item() == pytest.approx(
            naive_prd(student, teacher, current, past), rel=1e-6, abs=1e-6
        )

    def test_by_hand(self) -> None:
        # The teacher says 3/4 and 1/4, the student 1/2 and 1/2, and then the other way round.
        even = torch.zeros(2, dtype=torch.float64)
        skewed = torch.tensor([math.log(3), 0.0], dtype=torch.float64)
        student = torch.stack([even, skewed], dim=1) * 0.2
        teacher = torch.stack([skewed, even], dim=1) * 0.1
        loss = prd(student, teacher, student_temperature=0.2, teacher_temperature=0.1)
        second = -(math.log(0.75) + math.log(0.25)) / 2
        assert loss.item() == pytest.approx((math.log(2) + second) / 2, abs=1e-12)

    def test_gradcheck(self) -> None:
        teacher = cosines(4, 6, seed=1)
        assert torch.autograd.gradcheck(
            lambda s: prd(s, teacher, student_temperature=0.2, teacher_temperature=0.1),
            cosines(4, 6, seed=2).requires_grad_(),
        )

    @SETTINGS
    @given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 2**31), st.floats(0.1, 2.0))
    def test_least_where_the_student_is_the_teacher(
        self, classes: int, batch: int, seed: int, temperature: float
    ) -> None:
        teacher = cosines(classes, batch, seed)
        both = {"student_temperature": temperature, "teacher_temperature": temperature}
        student = teacher.clone().requires_grad_()
        least = prd(student, teacher, **both)
        least.backward()
        entropy = 0.0
        for j in range(batch):
            terms = [math.exp(teacher[i, j].item() / temperature) for i in range(classes)]
            entropy -= sum(t / sum(terms) * math.log(t / sum(terms)) for t in terms) / batch
        assert least.item() == pytest.approx(entropy, abs=1e-9)
        assert student.grad is not None
        assert student.grad.abs().max().item() <= 1e-12
        assert prd(cosines(classes, batch, seed + 1), teacher, **both) > least

    @SETTINGS
    @given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**31))
    def test_a_constant_added_to_a_sample_changes_nothing(
        self, classes: int, batch: int, seed: int
    ) -> None:
        student, teacher = cosines(classes, batch, seed), cosines(classes, batch, seed + 1)
        constant = cosines(2, batch, seed + 2) * 10
        loss = prd(student, teacher, student_temperature=0.2, teacher_temperature=0.1)
        shifted = prd(
            student + constant[:1] * 0.2,
            teacher + constant[1:] * 0.1,
            student_temperature=0.2,
            teacher_temperature=0.1,
        )
        assert shifted.item() == pytest.approx(loss.item(), abs=1e-10)

    def test_the_temperatures_are_not_swapped(self) -> None:
        student, teacher = cosines(4, 5, seed=3), cosines(4, 5, seed=4)
        loss = prd(student, teacher, student_temperature=0.2, teacher_temperature=0.1)
        scaled = prd(student / 2, teacher, student_temperature=0.1, teacher_temperature=0.1)
        assert loss.item() == pytest.approx(scaled.item(), abs=1e-12)
        swapped = prd(student, teacher, student_temperature=0.1, teacher_temperature=0.2)
        assert abs(loss.item() - swapped.item()) > 1e-2

    def test_one_class_costs_nothing(self) -> None:
        loss = prd(
            cosines(1, 5, seed=5),
            cosines(1, 5, seed=6),
            student_temperature=0.2,
            teacher_temperature=0.1,
        )
        assert loss.item() == 0.0

    def test_float32_at_a_cold_temperature(self) -> None:
        student = cosines(6, 20, seed=7).float().requires_grad_()
        teacher = cosines(6, 20, seed=8).float()
        loss = prd(student, teacher, student_temperature=0.01, teacher_temperature=0.01)
        loss.backward()
        expected = naive_prd(student.detach(), teacher, 0.01, 0.01)
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        assert student.grad is not None
        assert student.grad.isfinite().all()

    def test_sixteen_bits_are_computed_in_thirty_two(self) -> None:
        student, teacher = (cosines(6, 20, seed=seed).bfloat16() for seed in (9, 10))
        loss = prd(student, teacher, student_temperature=0.2, teacher_temperature=0.1)
        assert loss.dtype == torch.float32
        expected = naive_prd(student.double(), teacher.double(), 0.2, 0.1)
        assert loss.item() == pytest.approx(expected, rel=1e-5)


def naive_with_some_replayed(
    similarity: Tensor, labels: Tensor, proposal: Tensor, replayed: Tensor, old: int
) -> float:
    """Eqs. 9 and 10 at a temperature of 0.5, where J_m are the replayed samples of class m."""
    total, y = 0.0, labels.tolist()
    for j, i in enumerate(y):
        denominator = 0.0
        for k, m in enumerate(y):
            weight = 1.0
            if i < old and m < old and m != i and replayed[k]:
                drawn = sum(1 for n in range(len(y)) if y[n] == m and replayed[n])
                weight = 1 / (float(proposal[k]) * drawn)
            denominator += weight * math.exp(float(similarity[i, k]) / 0.5)
        total += -float(similarity[i, j]) / 0.5 + math.log(denominator)
    return total / len(y)


class TestSampleNceOfClassesThatComeAgain:
    """Samples of old classes may be the task's: these are not weighted."""

    labels = torch.tensor([0, 1, 2, 3, 0, 1, 1])
    replayed = torch.tensor([True, True, False, False, False, True, False])
    proposal = torch.tensor([0.2, 0.3, 1.0, 1.0, 0.4, 0.1, 0.5], dtype=torch.float64)

    def test_a_mask_says_which_are_replayed(self) -> None:
        similarity = cosines(4, 7, seed=0)
        given = {"temperature": 0.5, "proposal": self.proposal, "old_classes": 2}
        found = sample_nce(similarity, self.labels, replayed=self.replayed, **given)
        all_replayed = sample_nce(similarity, self.labels, **given)
        for loss, replayed in ((found, self.replayed), (all_replayed, self.labels < 2)):
            naive = naive_with_some_replayed(similarity, self.labels, self.proposal, replayed, 2)
            assert float(loss) == pytest.approx(naive, abs=1e-12)
        assert float(found) != pytest.approx(float(all_replayed), abs=1e-3)

    def test_without_a_mask_a_negative_proposal_says_it(self) -> None:
        similarity = cosines(4, 7, seed=0)
        given = {"temperature": 0.5, "old_classes": 2}
        negative = torch.where(self.replayed, self.proposal, -1.0)
        found = sample_nce(similarity, self.labels, proposal=negative, **given)
        masked = {"proposal": self.proposal, "replayed": self.replayed}
        assert torch.equal(found, sample_nce(similarity, self.labels, **masked, **given))

    @pytest.mark.parametrize("old", [0, 2, 4])
    def test_samples_of_new_classes_are_never_replayed(self, old: int) -> None:
        similarity = cosines(4, 7, seed=1)
        given = {"temperature": 0.5, "proposal": self.proposal, "old_classes": old}
        everywhere = sample_nce(similarity, self.labels, replayed=torch.ones(7).bool(), **given)
        assert torch.equal(everywhere, sample_nce(similarity, self.labels, **given))

    def test_gradcheck(self) -> None:
        given = {"temperature": 0.5, "proposal": self.proposal, "replayed": self.replayed}
        leaf = cosines(4, 7, seed=2).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda s: sample_nce(s, self.labels, old_classes=2, **given), (leaf,)
        )


def rows(batch: int, seed: int, dimension: int = 5) -> Tensor:
    """Embeddings of unit norm."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(
        torch.randn(batch, dimension, generator=generator, dtype=torch.float64), dim=1
    )


def naive_shares(embeddings: Tensor, temperature: float) -> list[dict[int, float]]:
    """For every row i, the softmax over j ≠ i of z_i·z_j / temperature."""
    z = embeddings.double().tolist()
    shares = []
    for i, a in enumerate(z):
        terms = {
            j: math.exp(sum(x * y for x, y in zip(a, b, strict=True)) / temperature)
            for j, b in enumerate(z)
            if j != i
        }
        total = sum(terms.values())
        shares.append({j: term / total for j, term in terms.items()})
    return shares


def naive_supcon(
    embeddings: Tensor, labels: Tensor, temperature: float, anchors: Tensor | None = None
) -> float:
    shares, y = naive_shares(embeddings, temperature), labels.tolist()
    costs = []
    for i in range(len(y)):
        if anchors is not None and not anchors[i]:
            continue
        logs = [math.log(share) for j, share in shares[i].items() if y[j] == y[i]]
        if logs:
            costs.append(-sum(logs) / len(logs))
    return sum(costs) / len(costs) if costs else 0.0


def naive_ird(student: Tensor, teacher: Tensor, current: float, past: float) -> float:
    now, before = naive_shares(student, current), naive_shares(teacher, past)
    total = 0.0
    for p, target in zip(now, before, strict=True):
        total -= sum(target[j] * math.log(p[j]) for j in p)
    return total / len(now)


def naive_icarl(
    logits: Tensor, labels: Tensor, old: int, seen: int, old_probabilities: Tensor | None
) -> float:
    total = 0.0
    for i, label in enumerate(labels.tolist()):
        for y in range(seen):
            q = float(y == label)
            if y < old and old_probabilities is not None:
                q = old_probabilities[i, y].item()
            g = 1 / (1 + math.exp(-logits[i, y].item()))
            total -= q * math.log(g) + (1 - q) * math.log(1 - g)
    return total / (len(labels) * seen)


@st.composite
def supcon_cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, float, Tensor]:
    labels = draw(st.lists(st.integers(0, 4), min_size=1, max_size=10))
    anchors = draw(st.lists(st.booleans(), min_size=len(labels), max_size=len(labels)))
    return (
        rows(len(labels), draw(st.integers(0, 2**31))),
        torch.tensor(labels),
        draw(st.floats(0.02, 2.0)),
        torch.tensor(anchors),
    )


class TestSupcon:
    @SETTINGS
    @given(supcon_cases())
    def test_against_the_equation(self, case: tuple[Tensor, Tensor, float, Tensor]) -> None:
        embeddings, labels, temperature, anchors = case
        for chosen in (None, anchors):
            loss = supcon(embeddings, labels, temperature=temperature, anchors=chosen)
            assert loss.shape == ()
            assert loss.dtype == torch.float64
            expected = naive_supcon(embeddings, labels, temperature, chosen)
            assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)

    def test_by_hand(self) -> None:
        # Three views of one class and one of another: 1 lies on 0, 2 is orthogonal, 3 opposite.
        embeddings = torch.tensor([[1.0, 0], [1, 0], [0, 1], [-1, 0]], dtype=torch.float64)
        labels = torch.tensor([0, 0, 0, 1])
        e = math.e
        first = -(math.log(e / (e + 1 + 1 / e)) + math.log(1 / (e + 1 + 1 / e))) / 2
        third = math.log(3)
        loss = supcon(embeddings, labels, temperature=1.0)
        assert loss.item() == pytest.approx((2 * first + third) / 3, abs=1e-12)
        only = torch.tensor([False, False, True, True])
        loss = supcon(embeddings, labels, temperature=1.0, anchors=only)
        assert loss.item() == pytest.approx(third, abs=1e-12)

    def test_two_views_of_distinct_images_are_the_nt_xent_loss(self) -> None:
        embeddings = rows(12, seed=1)
        other = torch.arange(12).roll(6)
        logits = (embeddings @ embeddings.T / 0.5).fill_diagonal_(-torch.inf)
        loss = supcon(embeddings, torch.arange(6).repeat(2), temperature=0.5)
        assert loss.item() == pytest.approx(F.cross_entropy(logits, other).item(), abs=1e-12)

    @pytest.mark.parametrize("batch", [2, 3, 17, 256])
    def test_equal_embeddings_cost_the_logarithm_of_the_others(self, batch: int) -> None:
        embeddings = rows(1, seed=2).expand(batch, -1)
        loss = supcon(embeddings, torch.zeros(batch, dtype=torch.int64), temperature=0.1)
        assert loss.item() == pytest.approx(math.log(batch - 1), abs=1e-12)

    def test_all_rows_are_anchors_unless_told(self) -> None:
        embeddings, labels = rows(9, seed=3), torch.arange(9) % 4
        everyone = torch.ones(9, dtype=torch.bool)
        loss = supcon(embeddings, labels, temperature=0.5)
        assert torch.equal(loss, supcon(embeddings, labels, temperature=0.5, anchors=everyone))

    def test_rows_that_are_no_anchors_are_contrasted_with(self) -> None:
        embeddings = rows(8, seed=4).requires_grad_()
        labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        loss = supcon(embeddings, labels, temperature=0.5, anchors=labels >= 2)
        (gradient,) = torch.autograd.grad(loss, embeddings)
        assert (gradient.abs().sum(dim=1) > 0).all()
        without = supcon(embeddings[4:], labels[4:], temperature=0.5)
        assert loss.item() > without.item()

    @pytest.mark.parametrize(
        ("labels", "anchors"),
        [
            ([0, 1, 2, 3], None),
            ([0, 0, 1, 2], [False, False, True, True]),
            ([0, 0, 1, 1], [False] * 4),
            ([0], None),
        ],
    )
    def test_no_anchor_with_a_positive_costs_nothing(
        self, labels: list[int], anchors: list[bool] | None
    ) -> None:
        embeddings = rows(len(labels), seed=5).requires_grad_()
        mask = None if anchors is None else torch.tensor(anchors)
        loss = supcon(embeddings, torch.tensor(labels), temperature=0.1, anchors=mask)
        (gradient,) = torch.autograd.grad(loss, embeddings)
        assert loss.item() == 0.0
        assert (gradient == 0).all()

    def test_an_anchor_without_a_positive_is_only_contrasted_with(self) -> None:
        embeddings, labels = rows(5, seed=6), torch.tensor([0, 0, 1, 1, 2])
        anchors = torch.tensor([True, True, True, True, False])
        losses, gradients = [], []
        for chosen in (None, anchors):
            leaf = embeddings.clone().requires_grad_()
            loss = supcon(leaf, labels, temperature=0.1, anchors=chosen)
            loss.backward()
            losses.append(loss.item())
            gradients.append(leaf.grad)
        assert losses[0] == losses[1]
        assert torch.equal(gradients[0], gradients[1])
        assert gradients[0].isfinite().all()

    @pytest.mark.parametrize("temperature", [0.1, 0.5])
    @pytest.mark.parametrize("old", [0, 1, 3])
    def test_gradcheck(self, temperature: float, old: int) -> None:
        labels = torch.tensor([0, 0, 1, 2, 2, 2, 3])
        assert torch.autograd.gradcheck(
            lambda z: supcon(z, labels, temperature=temperature, anchors=labels >= old),
            rows(7, seed=7).requires_grad_(),
        )

    @SETTINGS
    @given(supcon_cases(), st.randoms(use_true_random=False))
    def test_order_of_the_batch_does_not_matter(self, case, random) -> None:
        embeddings, labels, temperature, anchors = case
        order = list(range(len(labels)))
        random.shuffle(order)
        loss = supcon(embeddings, labels, temperature=temperature, anchors=anchors)
        shuffled = supcon(
            embeddings[order], labels[order], temperature=temperature, anchors=anchors[order]
        )
        assert shuffled.item() == pytest.approx(loss.item(), rel=1e-10, abs=1e-10)

    def test_float32_at_a_cold_temperature(self) -> None:
        # exp(1 / 0.01) is beyond float32: a sum of plain exponentials would overflow.
        embeddings = rows(20, seed=8).float()
        embeddings[10:] = embeddings[:10]
        labels = torch.arange(20) % 6
        leaf = embeddings.clone().requires_grad_()
        loss = supcon(leaf, labels, temperature=0.01)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(naive_supcon(embeddings, labels, 0.01), rel=1e-4)
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()

    def test_against_pytorch_metric_learning(self) -> None:
        from pytorch_metric_learning.losses import SupConLoss

        embeddings, labels = rows(24, seed=9), torch.arange(24) % 5
        expected = SupConLoss(temperature=0.1)(embeddings, labels)
        loss = supcon(embeddings, labels, temperature=0.1)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-9)


class TestIrd:
    @SETTINGS
    @given(st.integers(1, 9), st.integers(0, 2**31), st.floats(0.02, 2.0), st.floats(0.02, 2.0))
    def test_against_the_equation(self, batch: int, seed: int, current: float, past: float) -> None:
        student, teacher = rows(batch, seed), rows(batch, seed + 1)
        loss = ird(student, teacher, student_temperature=current, teacher_temperature=past)
        assert loss.shape == ()
        assert loss.dtype == torch.float64
        expected = naive_ird(student, teacher, current, past)
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)

    def test_by_hand(self) -> None:
        # The student sees three rows equally far apart, the teacher two alike and one opposite.
        student = torch.eye(3, dtype=torch.float64)
        teacher = torch.tensor([[1.0, 0], [1, 0], [-1, 0]], dtype=torch.float64)
        loss = ird(student, teacher, student_temperature=0.2, teacher_temperature=0.1)
        assert loss.item() == pytest.approx(math.log(2), abs=1e-12)
        loss = ird(teacher, student, student_temperature=2.0, teacher_temperature=0.1)
        near = -(math.log(1 / (1 + math.exp(-1))) + math.log(1 / (1 + math.e))) / 2
        assert loss.item() == pytest.approx((2 * near + math.log(2)) / 3, abs=1e-12)

    @SETTINGS
    @given(st.integers(3, 9), st.integers(0, 2**31), st.floats(0.1, 2.0))
    def test_least_where_the_student_is_the_teacher(
        self, batch: int, seed: int, temperature: float
    ) -> None:
        teacher = rows(batch, seed)
        both = {"student_temperature": temperature, "teacher_temperature": temperature}
        student = teacher.clone().requires_grad_()
        least = ird(student, teacher, **both)
        least.backward()
        shares = naive_shares(teacher, temperature)
        entropy = -sum(p * math.log(p) for row in shares for p in row.values()) / batch
        assert least.item() == pytest.approx(entropy, abs=1e-9)
        assert student.grad is not None
        assert student.grad.abs().max().item() <= 1e-12
        assert ird(rows(batch, seed + 1), teacher, **both) > least

    @SETTINGS
    @given(st.integers(2, 9), st.integers(0, 2**31))
    def test_a_rotation_changes_nothing(self, batch: int, seed: int) -> None:
        student, teacher = rows(batch, seed), rows(batch, seed + 1)
        turn, _ = torch.linalg.qr(rows(5, seed + 2))
        temperatures = {"student_temperature": 0.2, "teacher_temperature": 0.1}
        loss = ird(student, teacher, **temperatures)
        turned = ird(student @ turn, teacher @ turn.T, **temperatures)
        assert turned.item() == pytest.approx(loss.item(), abs=1e-9)

    def test_the_temperatures_are_not_swapped(self) -> None:
        student, teacher = rows(6, seed=1), rows(6, seed=2)
        loss = ird(student, teacher, student_temperature=0.2, teacher_temperature=0.1)
        scaled = ird(
            student / math.sqrt(2), teacher, student_temperature=0.1, teacher_temperature=0.1
        )
        assert loss.item() == pytest.approx(scaled.item(), abs=1e-12)
        swapped = ird(student, teacher, student_temperature=0.1, teacher_temperature=0.2)
        assert abs(loss.item() - swapped.item()) > 1e-2

    def test_gradcheck(self) -> None:
        teacher = rows(6, seed=3)
        assert torch.autograd.gradcheck(
            lambda z: ird(z, teacher, student_temperature=0.2, teacher_temperature=0.1),
            rows(6, seed=4).requires_grad_(),
        )

    @pytest.mark.parametrize("batch", [1, 2])
    def test_with_at_most_one_other_row_there_is_nothing_to_distil(self, batch: int) -> None:
        student = rows(batch, seed=5).requires_grad_()
        loss = ird(student, rows(batch, seed=6), student_temperature=0.2, teacher_temperature=0.1)
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.item() == 0.0
        assert (gradient == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_cold_temperatures_stay_finite(self, dtype: torch.dtype) -> None:
        student = rows(20, seed=7).to(dtype).requires_grad_()
        teacher = rows(20, seed=8).to(dtype).requires_grad_()
        loss = ird(student, teacher, student_temperature=0.01, teacher_temperature=0.01)
        loss.backward()
        expected = naive_ird(student.detach(), teacher.detach(), 0.01, 0.01)
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        for leaf in (student, teacher):
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()


@st.composite
def icarl_cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int, Tensor]:
    classes = draw(st.integers(1, 7))
    seen = draw(st.integers(1, classes))
    labels = draw(st.lists(st.integers(0, seen - 1), min_size=1, max_size=9))
    seed = draw(st.integers(0, 2**31))
    return (
        cosines(len(labels), classes, seed) * draw(st.floats(0.1, 10.0)),
        torch.tensor(labels),
        draw(st.integers(0, seen)),
        seen,
        (cosines(len(labels), classes, seed + 1) * 5).sigmoid(),
    )


class TestIcarlLoss:
    @SETTINGS
    @given(icarl_cases())
    def test_against_the_equation(self, case: tuple[Tensor, Tensor, int, int, Tensor]) -> None:
        logits, labels, old, seen, before = case
        loss = icarl_loss(
            logits, labels, old_classes=old, seen_classes=seen, old_probabilities=before
        )
        assert loss.shape == ()
        assert loss.dtype == torch.float64
        expected = naive_icarl(logits, labels, old, seen, before)
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)

    @SETTINGS
    @given(icarl_cases())
    def test_counts_may_be_tensors(self, case: tuple[Tensor, Tensor, int, int, Tensor]) -> None:
        logits, labels, old, seen, before = case
        loss = icarl_loss(
            logits, labels, old_classes=old, seen_classes=seen, old_probabilities=before
        )
        same = icarl_loss(
            logits,
            labels,
            old_classes=torch.tensor(old),
            seen_classes=torch.tensor(seen),
            old_probabilities=before,
        )
        assert torch.equal(loss, same)

    @SETTINGS
    @given(icarl_cases())
    def test_the_first_task_needs_no_previous_network(
        self, case: tuple[Tensor, Tensor, int, int, Tensor]
    ) -> None:
        logits, labels, _, seen, before = case
        none, some = (
            icarl_loss(logits, labels, old_classes=0, seen_classes=seen, old_probabilities=p)
            for p in (None, before)
        )
        assert torch.equal(none, some)
        expected = naive_icarl(logits, labels, 0, seen, None)
        assert none.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)

    def test_by_hand(self) -> None:
        # Class 0 is old, 1 and 2 are new, 3 is unseen; the sample is a replayed one of class 0.
        logits = torch.tensor([[math.log(3), 0.0, math.log(4), 7.0]], dtype=torch.float64)
        before = torch.tensor([[0.6, 0.9, 0.9, 0.9]], dtype=torch.float64)
        loss = icarl_loss(
            logits, torch.tensor([0]), old_classes=1, seen_classes=3, old_probabilities=before
        )
        old = -(0.6 * math.log(3 / 4) + 0.4 * math.log(1 / 4))
        assert loss.item() == pytest.approx((old + math.log(2) + math.log(5)) / 3, abs=1e-12)

    def test_labels_of_old_classes_do_not_matter(self) -> None:
        logits, before = cosines(6, 5, seed=1), cosines(6, 5, seed=2).sigmoid()
        losses = [
            icarl_loss(logits, labels, old_classes=3, seen_classes=5, old_probabilities=before)
            for labels in (torch.zeros(6, dtype=torch.int64), torch.arange(6) % 3)
        ]
        assert torch.equal(losses[0], losses[1])

    @pytest.mark.parametrize("junk", [torch.nan, torch.inf, -3.0])
    def test_probabilities_of_other_classes_are_ignored(self, junk: float) -> None:
        logits, before = cosines(6, 5, seed=3), cosines(6, 5, seed=4).sigmoid()
        carried = before.clone()
        carried[:, 2:] = junk
        labels = torch.tensor([0, 1, 2, 3, 3, 2])
        losses, gradients = [], []
        for values in (before, carried):
            leaf = logits.clone().requires_grad_()
            loss = icarl_loss(leaf, labels, old_classes=2, seen_classes=4, old_probabilities=values)
            loss.backward()
            losses.append(loss.item())
            gradients.append(leaf.grad)
        assert losses[0] == losses[1]
        assert torch.equal(gradients[0], gradients[1])

    def test_unseen_classes_have_no_gradient(self) -> None:
        logits = cosines(6, 7, seed=5).requires_grad_()
        before = cosines(6, 7, seed=6).sigmoid()
        loss = icarl_loss(
            logits, torch.arange(6) % 4, old_classes=2, seen_classes=4, old_probabilities=before
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        assert (gradient[:, 4:] == 0).all()
        assert (gradient[:, :4] != 0).all()

    def test_least_where_the_network_is_the_previous_one(self) -> None:
        logits = cosines(6, 4, seed=7).requires_grad_()
        loss = icarl_loss(
            logits,
            torch.arange(6) % 4,
            old_classes=4,
            seen_classes=4,
            old_probabilities=logits.detach().sigmoid(),
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.abs().max().item() <= 1e-12

    @pytest.mark.parametrize(("old", "seen"), [(0, 2), (2, 4), (3, 5)])
    def test_gradcheck(self, old: int, seen: int) -> None:
        labels, before = torch.arange(6) % seen, cosines(6, 5, seed=8).sigmoid()
        assert torch.autograd.gradcheck(
            lambda x: icarl_loss(
                x, labels, old_classes=old, seen_classes=seen, old_probabilities=before
            ),
            (cosines(6, 5, seed=9) * 3).requires_grad_(),
        )

    def test_saturated_logits_stay_finite(self) -> None:
        logits = torch.tensor([[500.0, -500, 500], [-500, 500, -500]], requires_grad=True)
        loss = icarl_loss(
            logits,
            torch.tensor([2, 0]),
            old_classes=1,
            seen_classes=3,
            old_probabilities=torch.tensor([[0.0, 0, 0], [1, 0, 0]]),
        )
        loss.backward()
        assert loss.item() == pytest.approx((500 + 500 + 500) / 6)
        assert logits.grad is not None
        assert logits.grad.isfinite().all()

    def test_sixteen_bits_are_computed_in_thirty_two(self) -> None:
        logits, before = cosines(6, 4, seed=10).bfloat16(), cosines(6, 4, seed=11).sigmoid()
        labels = torch.arange(6) % 4
        loss = icarl_loss(logits, labels, old_classes=2, seen_classes=4, old_probabilities=before)
        assert loss.dtype == torch.float32
        expected = naive_icarl(logits.double(), labels, 2, 4, before)
        assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_autocast_outside_changes_nothing() -> None:
    student, teacher = rows(16, seed=1).float(), rows(16, seed=2).float()
    labels = torch.arange(16) % 5

    def losses() -> Tensor:
        return torch.stack(
            [
                supcon(student, labels, temperature=0.1),
                ird(student, teacher, student_temperature=0.2, teacher_temperature=0.01),
                icarl_loss(
                    student,
                    labels,
                    old_classes=2,
                    seen_classes=5,
                    old_probabilities=teacher.sigmoid(),
                ),
            ]
        )

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = losses()
    assert torch.equal(inside, losses())


def test_one_graph_serves_every_task() -> None:
    student, teacher = rows(16, seed=3), rows(16, seed=4)

    def step(z: Tensor, labels: Tensor, old: Tensor, seen: Tensor) -> Tensor:
        contrast = supcon(z, labels, temperature=0.1, anchors=labels >= old)
        distill = ird(z, teacher, student_temperature=0.2, teacher_temperature=0.1)
        classify = icarl_loss(
            z, labels, old_classes=old, seen_classes=seen, old_probabilities=teacher.sigmoid()
        )
        return torch.stack([contrast, distill, classify])

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=False)
    stance = "default"
    for old, seen in ((0, 2), (2, 3), (3, 5), (5, 5)):
        labels = torch.arange(16) % seen
        results = []
        for function in (step, compiled):
            leaf = student.clone().requires_grad_()
            with torch.compiler.set_stance(stance):
                terms = function(leaf, labels, torch.tensor(old), torch.tensor(seen))
            terms.sum().backward()
            results.append((terms, leaf.grad))
        torch.testing.assert_close(results[1], results[0])
        stance = "fail_on_recompile"
