"""Losses: pure functions of similarities, embeddings or logits, of labels and of proposals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.functional.precision import at_least_float32

NEVER = -1e9
"""A logit so low that its softmax is exactly zero; infinity times zero would not be."""


def sample_nce(
    similarity: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    proposal: Tensor | None = None,
    old_classes: int | Tensor = 0,
) -> Tensor:
    """Prototype InfoNCE with importance-weighted replay: Sample-NCE (Eqs. 9-10).

    A sample j of class i costs -s_ij + log Σ_k w_ik exp(s_ik), with s = similarity / temperature
    and k over the batch. The weight w_ik is 1 / (g_k |J_m|) where both the prototype i and the
    sample k (of class m ≠ i) belong to old classes, and 1 everywhere else. The mean over the batch
    is returned.

    Args:
        similarity: Cosines of the seen classes' prototypes with the batch, (C, B).
        labels: Class of every sample, int64 in 0..C-1, (B,).
        temperature: τ.
        proposal: g_k of the replayed samples, (B,); what it holds for samples of new classes is
            ignored, and a negative one marks a sample of an old class that was not replayed.
            None weighs every sample alike.
        old_classes: Classes 0..old_classes-1 are old: their samples are replayed. A tensor, ()
            and int64, lets a compiled step serve for every task.
    """
    logits = at_least_float32(similarity) / temperature
    classes = torch.arange(len(logits), device=labels.device)[:, None]
    own = classes == labels
    weighted = logits
    if proposal is not None:
        replayed = (labels < old_classes) & (proposal >= 0)
        old = (classes < old_classes) & replayed & ~own
        in_batch = (own & replayed).sum(dim=1)
        # A proposal that underflowed to zero stays finite.
        drawn = proposal.to(logits.dtype) * in_batch[labels]
        drawn = drawn.clamp_min(torch.finfo(logits.dtype).tiny)
        weighted = logits - torch.where(old, drawn.log(), 0.0)
    # A sum over a mask rather than a gather: its gradient adds in a fixed order on a GPU too.
    cost = weighted.logsumexp(dim=1, keepdim=True) - logits
    return torch.where(own, cost, 0.0).sum() / len(labels)


def prd(
    student: Tensor, teacher: Tensor, *, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Prototype-instance relation distillation (Eq. 14), mean over the batch.

    Args:
        student: Cosines of the old classes' prototypes with the batch now, (C, B).
        teacher: The same under the frozen previous model, (C, B).
        student_temperature: κ_cur.
        teacher_temperature: κ_past.
    """
    target = (at_least_float32(teacher) / teacher_temperature).softmax(dim=0)
    log_probability = (at_least_float32(student) / student_temperature).log_softmax(dim=0)
    return -(target * log_probability).sum(dim=0).mean()


def supcon(
    embeddings: Tensor, labels: Tensor, *, temperature: float, anchors: Tensor | None = None
) -> Tensor:
    """Asymmetric supervised contrastive loss (Co2L, Section 4.1; Khosla et al. 2020, L_out).

    An anchor i costs -1/|P(i)| Σ_{j ∈ P(i)} log(exp(s_ij) / Σ_{k ≠ i} exp(s_ik)), with
    s_ij = z_i·z_j / temperature and P(i) the other rows of its class. The mean over the anchors
    that have such a row is returned, and 0 where none has.

    Args:
        embeddings: z, unit-norm, (B, D); views of an image are rows of their own.
        labels: Class of every row, int64, (B,).
        temperature: τ.
        anchors: Which rows are anchors, bool, (B,): those of the current task. The others are
            only contrasted with. None makes every row an anchor.
    """
    log_share = _log_share_of_others(embeddings, temperature)
    positive = (labels[:, None] == labels) & ~_itself(embeddings)
    positives = positive.sum(dim=1)
    # Masks rather than indices: shapes do not depend on what is in the batch.
    cost = -torch.where(positive, log_share, 0.0).sum(dim=1) / positives.clamp_min(1)
    counted = positives > 0
    if anchors is not None:
        counted = counted & anchors
    return torch.where(counted, cost, 0.0).sum() / counted.sum().clamp_min(1)


def ird(
    student: Tensor, teacher: Tensor, *, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Instance-wise relation distillation (Co2L, Section 4.2), mean over the batch.

    A row i costs -Σ_{j ≠ i} p*_ij log p_ij, with p_i the softmax over j ≠ i of
    z_i·z_j / temperature and p* the teacher's. A row alone costs nothing.

    Args:
        student: Unit-norm embeddings of the batch now, (B, D).
        teacher: The same under the frozen previous model, (B, D).
        student_temperature: κ.
        teacher_temperature: κ*.
    """
    target = _log_share_of_others(teacher, teacher_temperature).exp()
    log_probability = _log_share_of_others(student, student_temperature)
    return -(target * log_probability).sum(dim=1).mean()


def icarl_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    old_classes: int | Tensor,
    seen_classes: int | Tensor,
    old_probabilities: Tensor | None,
) -> Tensor:
    """Classification and distillation of iCaRL (Rebuffi et al. 2017, Algorithm 3).

    A sample costs the mean of -[q_y log g_y + (1 - q_y) log(1 - g_y)] over the seen classes y,
    with g = sigmoid(logits). The target q_y is the previous network's g_y where y is old, and
    otherwise 1 for the sample's own class and 0 for the rest. The mean over the batch is returned.
    The paper writes a sum over the classes; published learning rates are for the mean.

    Args:
        logits: Logits of all classes, seen or not, (B, C).
        labels: Class of every sample, int64 in 0..seen_classes-1, (B,).
        old_classes: Classes 0..old_classes-1 are old. A tensor, () and int64, lets a compiled
            step serve for every task.
        seen_classes: Classes 0..seen_classes-1 count; int or tensor likewise.
        old_probabilities: The previous network's sigmoid(logits), (B, C); what it holds for
            classes that are not old is ignored. None, where there is no previous network, takes
            the labels for every class.
    """
    logits = at_least_float32(logits)
    classes = torch.arange(logits.shape[1], device=logits.device)
    target = (classes == labels[:, None]).to(logits.dtype)
    if old_probabilities is not None:
        target = torch.where(classes < old_classes, old_probabilities.to(logits.dtype), target)
    cost = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return torch.where(classes < seen_classes, cost, 0.0).sum(dim=1).mean() / seen_classes


def _log_share_of_others(embeddings: Tensor, temperature: float) -> Tensor:
    """log softmax over j ≠ i of z_i·z_j / temperature, (B, B); on the diagonal about `NEVER`."""
    z = at_least_float32(embeddings)
    # Cosines of 16 bits are too coarse for a temperature of 0.01.
    with torch.autocast(z.device.type, enabled=False):
        logits = z @ z.T / temperature
    return logits.masked_fill(_itself(z), NEVER).log_softmax(dim=1)


def _itself(rows: Tensor) -> Tensor:
    return torch.eye(len(rows), dtype=torch.bool, device=rows.device)
