"""The engine: the only training loop, and what it runs on."""
