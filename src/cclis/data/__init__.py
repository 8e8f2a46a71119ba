"""Streams of image classes: reading, splitting into tasks, batching, augmenting."""
