"""Mathematics: pure functions of tensors, without settings, devices or files."""

from cclis.functional.coreset import matching_pursuit, weighted_coreset
from cclis.functional.diagnostics import diagnose
from cclis.functional.exemplars import herding, reservoir_slots
from cclis.functional.gradients import gem_coefficients, gss_slots, inner_products
from cclis.functional.losses import icarl_loss, ird, prd, sample_nce, supcon
from cclis.functional.metrics import (
    average_accuracy,
    average_forgetting,
    backward_transfer,
    forgetting,
)
from cclis.functional.sampling import log_scores, normalise, proposal, quotas, select

__all__ = [
    "average_accuracy",
    "average_forgetting",
    "backward_transfer",
    "diagnose",
    "forgetting",
    "gem_coefficients",
    "gss_slots",
    "herding",
    "icarl_loss",
    "inner_products",
    "ird",
    "log_scores",
    "matching_pursuit",
    "normalise",
    "prd",
    "proposal",
    "quotas",
    "reservoir_slots",
    "sample_nce",
    "select",
    "supcon",
    "weighted_coreset",
]
