"""Losses: pure functions of similarities, labels and proposals."""

from __future__ import annotations

import torch
from torch import Tensor


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
    logits = _at_least_float32(similarity) / temperature
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
    target = (_at_least_float32(teacher) / teacher_temperature).softmax(dim=0)
    log_probability = (_at_least_float32(student) / student_temperature).log_softmax(dim=0)
    return -(target * log_probability).sum(dim=0).mean()


def _at_least_float32(x: Tensor) -> Tensor:
    # Counts and proposals do not survive 16 bits: 257 samples of a class are 256 in bfloat16.
    return x.to(torch.promote_types(x.dtype, torch.float32))
