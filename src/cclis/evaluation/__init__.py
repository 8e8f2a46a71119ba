"""Evaluation: classifiers on the frozen network, and how well they do."""
