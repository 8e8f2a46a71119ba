"""`python -m cclis` is `cclis`."""

from cclis.cli import entry

entry()
