"""Losses of similarities, embeddings or logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.functional.precision import at_least_float32

NEVER = -1e9
"""A logit whose softmax is exactly zero. Minus infinity would give NaN where it is multiplied by
zero."""


def sample_nce(
    similarity: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    proposal: Tensor | None = None,
    replayed: Tensor | None = None,
    old_classes: int | Tensor = 0,
) -> Tensor:
    """Prototype InfoNCE with importance-weighted replay: Sample-NCE (Eqs. 9-10).

    The loss of a sample j of class i is -s_ij + log Σ_k w_ik exp(s_ik), with s = similarity /
    temperature and k over the batch. The weight w_ik is 1 / (g_k |J_m|) if the prototype i and the
    sample k, of class m ≠ i, both belong to old classes, with |J_m| the number of samples of class
    m in the batch. Otherwise it is 1. Returns the mean over the batch.

    Args:
        similarity: Cosines of the seen classes' prototypes with the batch, (C, B).
        labels: Class of every sample, int64 in 0..C-1, (B,).
        temperature: τ.
        proposal: g_k of the replayed samples, (B,). Values for other samples are ignored. None
            weights all samples equally.
        replayed: Whether a sample of an old class comes from the memory, bool (B,). None takes
            every one whose proposal is not negative.
        old_classes: Classes 0..old_classes-1 are old: their samples are replayed. Pass a tensor,
            () and int64, so that one compiled step serves all tasks.

    >>> sample_nce(torch.eye(2), torch.tensor([0, 1]), temperature=0.5)
    tensor(0.1269)
    """
    logits = at_least_float32(similarity) / temperature
    classes = torch.arange(len(logits), device=labels.device)[:, None]
    own = classes == labels
    weighted = logits
    if proposal is not None:
        replayed = (labels < old_classes) & (proposal >= 0 if replayed is None else replayed)
        old = (classes < old_classes) & replayed & ~own
        in_batch = (own & replayed).sum(dim=1)
        expected = proposal.to(logits.dtype) * in_batch[labels]
        # Finite even if a proposal underflowed to zero.
        expected = expected.clamp_min(torch.finfo(logits.dtype).tiny)
        weighted = logits - torch.where(old, expected.log(), 0.0)
    # A masked sum rather than a gather: its gradient is deterministic on a GPU too.
    cost = weighted.logsumexp(dim=1, keepdim=True) - logits
    return torch.where(own, cost, 0.0).sum() / len(labels)


def prd(
    student: Tensor, teacher: Tensor, *, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Prototype-instance relation distillation (Eq. 14), mean over the batch.

    The loss of a sample j is -Σ_i p*_ij log p_ij, with p_j the softmax over the prototypes i of
    student / temperature, and p* the teacher's.

    Args:
        student: Cosines of the old classes' prototypes with the batch now, (C, B).
        teacher: The same under the frozen previous model, (C, B).
        student_temperature: κ_cur.
        teacher_temperature: κ_past.

    >>> student, teacher = torch.zeros(2, 3), torch.ones(2, 3)
    >>> prd(student, teacher, student_temperature=0.2, teacher_temperature=0.1)
    tensor(0.6931)
    """
    target = (at_least_float32(teacher) / teacher_temperature).softmax(dim=0)
    log_probability = (at_least_float32(student) / student_temperature).log_softmax(dim=0)
    return -(target * log_probability).sum(dim=0).mean()


def supcon(
    embeddings: Tensor, labels: Tensor, *, temperature: float, anchors: Tensor | None = None
) -> Tensor:
    """Asymmetric supervised contrastive loss (Co2L, Section 4.1; Khosla et al. 2020, L_out).

    The loss of an anchor i is -1/|P(i)| Σ_{j ∈ P(i)} log(exp(s_ij) / Σ_{k ≠ i} exp(s_ik)), with
    s_ij = z_i·z_j / temperature and P(i) the other rows of its class. Returns the mean over the
    anchors with at least one such row, or 0 if there are none.

    Args:
        embeddings: z, unit-norm, (B, D). Each view of an image is a row.
        labels: Class of every row, int64, (B,).
        temperature: τ.
        anchors: Mask of the rows that are anchors, bool, (B,): those of the current task. The other
            rows only serve as positives and negatives. None makes every row an anchor.

    >>> supcon(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]), temperature=0.5)
    tensor(0.1269)
    """
    log_probability = _log_softmax_over_others(embeddings, temperature)
    positive = (labels[:, None] == labels) & ~_diagonal(embeddings)
    positives = positive.sum(dim=1)
    # Masks rather than indices: shapes do not depend on the labels.
    cost = -torch.where(positive, log_probability, 0.0).sum(dim=1) / positives.clamp_min(1)
    counted = positives > 0
    if anchors is not None:
        counted = counted & anchors
    return torch.where(counted, cost, 0.0).sum() / counted.sum().clamp_min(1)


def ird(
    student: Tensor, teacher: Tensor, *, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Instance-wise relation distillation (Co2L, Section 4.2), mean over the batch.

    The loss of a row i is -Σ_{j ≠ i} p*_ij log p_ij, with p_i the softmax over j ≠ i of
    z_i·z_j / temperature, and p* the teacher's. It is 0 for a batch of one row.

    Args:
        student: Unit-norm embeddings of the batch now, (B, D).
        teacher: The same under the frozen previous model, (B, D).
        student_temperature: κ.
        teacher_temperature: κ*.

    >>> z = torch.eye(3)
    >>> ird(z, z, student_temperature=0.2, teacher_temperature=0.1)
    tensor(0.6931)
    """
    target = _log_softmax_over_others(teacher, teacher_temperature).exp()
    log_probability = _log_softmax_over_others(student, student_temperature)
    return -(target * log_probability).sum(dim=1).mean()


def icarl_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    old_classes: int | Tensor,
    seen_classes: int | Tensor,
    old_probabilities: Tensor | None,
) -> Tensor:
    """Classification and distillation loss of iCaRL (Rebuffi et al. 2017, Algorithm 3).

    The loss of a sample is the mean of -[q_y log g_y + (1 - q_y) log(1 - g_y)] over the seen
    classes y, with g = sigmoid(logits). For an old class y, the target q_y is the previous
    network's g_y. For a new class it is 1 if y is the sample's class, and otherwise 0. Returns the
    mean over the batch. The paper sums over the classes, but published learning rates are for the
    mean.

    Args:
        logits: Logits of all classes, seen or not, (B, C).
        labels: Class of every sample, int64 in 0..seen_classes-1, (B,).
        old_classes: Classes 0..old_classes-1 are old. Pass a tensor, () and int64, so that one
            compiled step serves all tasks.
        seen_classes: Classes 0..seen_classes-1 count. An int or a tensor, as above.
        old_probabilities: The previous network's sigmoid(logits), (B, C). Columns of classes that
            are not old are ignored. None, if there is no previous network, takes all targets from
            the labels.

    >>> logits, labels = torch.zeros(2, 3), torch.tensor([0, 1])
    >>> icarl_loss(logits, labels, old_classes=0, seen_classes=2, old_probabilities=None)
    tensor(0.6931)
    """
    logits = at_least_float32(logits)
    classes = torch.arange(logits.shape[1], device=logits.device)
    target = (classes == labels[:, None]).to(logits.dtype)
    if old_probabilities is not None:
        target = torch.where(classes < old_classes, old_probabilities.to(logits.dtype), target)
    cost = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return torch.where(classes < seen_classes, cost, 0.0).sum(dim=1).mean() / seen_classes


def _log_softmax_over_others(embeddings: Tensor, temperature: float) -> Tensor:
    """log softmax over j ≠ i of z_i·z_j / temperature, (B, B); about `NEVER` on the diagonal."""
    z = at_least_float32(embeddings)
    # 16-bit cosines are too coarse for a temperature of 0.01.
    with torch.autocast(z.device.type, enabled=False):
        logits = z @ z.T / temperature
    return logits.masked_fill(_diagonal(z), NEVER).log_softmax(dim=1)


def _diagonal(rows: Tensor) -> Tensor:
    return torch.eye(len(rows), dtype=torch.bool, device=rows.device)
