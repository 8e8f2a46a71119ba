"""The command line."""

from cclis.cli.app import entry, main

__all__ = ["entry", "main"]
