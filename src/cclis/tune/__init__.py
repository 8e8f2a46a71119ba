"""Tuning: which settings are best on a validation split."""
