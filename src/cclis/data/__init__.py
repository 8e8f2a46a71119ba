"""Data: reading images, splitting them into tasks, batching, augmentation."""
