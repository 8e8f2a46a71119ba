"""A run on disk: its folder, checkpoints, records and loggers."""

from cclis.runs.directory import Run

__all__ = ["Run"]
