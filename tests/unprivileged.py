"""Root's right to read and write everything, taken away for a while."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CAPABILITIES_3 = 0x20080522
"""The version of the kernel's interface."""
OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


@contextmanager
def unprivileged() -> Iterator[None]:
    """While the block runs, permissions bind this thread and those it starts, even as root."""
    if os.geteuid() != 0:
        yield
        return
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.capget, libc.capset  # noqa: B018
    except (AttributeError, OSError):
        pytest.skip("root cannot give up its capabilities here")
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0)
    # Effective, permitted, inheritable; then the same of the higher 32 capabilities.
    capabilities = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, capabilities) == 0
    effective = capabilities[0]
    capabilities[0] = effective & ~OVERRIDES
    assert libc.capset(header, capabilities) == 0
    try:
        yield
    finally:
        capabilities[0] = effective
        assert libc.capset(header, capabilities) == 0


@contextmanager
def of_somebody_else(folder: Path) -> Iterator[None]:
    """While the block runs, nobody may look into a folder."""
    before = folder.stat().st_mode
    folder.chmod(0)
    try:
        with unprivileged():
            yield
    finally:
        folder.chmod(before)
