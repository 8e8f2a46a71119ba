"""Evaluation: classifiers on the frozen network, and their accuracy."""
