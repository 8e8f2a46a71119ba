"""The engine: the training loop, and the device that it runs on."""
