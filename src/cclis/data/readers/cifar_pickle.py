"""The pickles of CIFAR's python layout, loaded without running anything they name."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cclis.data.readers.dataset import Uint8
from cclis.data.readers.text import first_line, read_bytes, text
from cclis.errors import InputError


def unpickle(file: Path) -> dict[str, Any]:
    """The mapping that a file of the python layout holds."""
    data = read_bytes(file)
    try:
        # The unpickler allocates as many memo slots as the highest index asks for, so one
        # damaged byte could take all memory.
        for opcode, argument, _ in pickletools.genops(data):
            if "PUT" in opcode.name and (argument or 0) > len(data):
                raise pickle.UnpicklingError(f"memo index {argument}")
        content = _CifarUnpickler(file, data).load()
        return {text(key): value for key, value in content.items()}
    except InputError:
        raise
    # Damaged pickles raise nearly every type of exception.
    except Exception as error:
        raise InputError(
            f"{file} is not a CIFAR file, or is damaged ({first_line(error)}); download it again"
        ) from error


def array_of(value: Any) -> Uint8 | None:
    """The array of bytes that `value` is the record of, if it is one."""
    try:
        shape, dtype, fortran, raw = value.state[-4:]
        if dtype.args[0] not in ("u1", b"u1"):
            return None
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        return None


class _Recorded:
    """Stands in for every numpy constructor a pickle names: it notes the call, and does nothing."""

    args: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _CifarUnpickler(pickle.Unpickler):
    """Loads plain containers and the record of an array; runs nothing that a file names."""

    admitted: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _Recorded,
        ("numpy._core.multiarray", "_reconstruct"): _Recorded,
        ("numpy", "ndarray"): _Recorded,
        ("numpy", "dtype"): _Recorded,
        # Python 3 writes bytes under protocol 2 as the encoding of a text.
        ("_codecs", "encode"): str.encode,
    }

    def __init__(self, file: Path, data: bytes):
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        """The harmless stand-in for a name the files are known to hold; all else is refused."""
        if (module, name) not in self.admitted:
            raise InputError(
                f"{self.file} is not a CIFAR file: it wants to load {module}.{name}, "
                "which is refused; delete it and download the collection again"
            )
        return self.admitted[module, name]
