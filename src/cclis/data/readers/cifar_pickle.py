"""The pickles of CIFAR's python layout, loaded without running anything they name."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cclis.data.readers.dataset import Uint8
from cclis.data.readers.text import first_line, read_bytes, text
from cclis.errors import InputError

MOST_TUPLES = 1000
"""In one file; CIFAR's own have six, and one more for every text that Python 3 wrote as bytes."""


def unpickle(file: Path) -> dict[str, Any]:
    """The mapping that a file of the python layout holds."""
    data = read_bytes(file)
    try:
        _refuse_bomb(data)
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


def _refuse_bomb(data: bytes) -> None:
    """Refuse a pickle that could take time or memory out of proportion to its length.

    What is memoised and used again may be a text or a name, as in CIFAR's files, and nothing else:
    the hash of a tuple of itself, many times over, never ends. Tuples are few, for the hash of
    deeply nested ones fills the stack; numbers are small, for large ones can share one hash.
    """
    memo: dict[int, bool] = {}
    tuples, plain = 0, False
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if "PUT" in name or name == "MEMOIZE":
            index = len(memo) if argument is None else argument
            # The unpickler allocates as many memo slots as the highest index asks for.
            if index > len(data):
                raise pickle.UnpicklingError(f"memo index {index}")
            memo[index] = plain
            continue
        if name == "DUP" or ("GET" in name and not memo.get(argument or 0)):
            raise pickle.UnpicklingError("something else than a text is used again")
        if isinstance(argument, int) and abs(argument) >= 1 << 31:
            raise pickle.UnpicklingError("a number is too large")
        tuples += "TUPLE" in name
        if tuples > MOST_TUPLES:
            raise pickle.UnpicklingError("too many tuples")
        plain = any(kind in name for kind in ("STRING", "UNICODE", "BYTES", "GLOBAL"))


class _Recorded:
    """Stands in for every numpy constructor a pickle names: it notes the call, and does nothing."""

    args: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


def _encode(value: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the encoding {encoding}")
    return value.encode("latin1")


class _CifarUnpickler(pickle.Unpickler):
    """Loads plain containers and the record of an array; runs nothing that a file names."""

    def __init__(self, file: Path, data: bytes):
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.file = file
        self.admitted: Mapping[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): _Recorded,
            ("numpy._core.multiarray", "_reconstruct"): _Recorded,
            ("numpy", "ndarray"): _Recorded,
            ("numpy", "dtype"): _Recorded,
            # Python 3 writes bytes under protocol 2 as the encoding of a text. Remembered, for a
            # text encoded a thousand times to take no more memory than once.
            ("_codecs", "encode"): cache(_encode),
        }

    def find_class(self, module: str, name: str) -> Any:
        """The harmless stand-in for a name the files are known to hold; all else is refused."""
        if (module, name) not in self.admitted:
            raise InputError(
                f"{self.file} is not a CIFAR file: it wants to load {module}.{name}, "
                "which is refused; delete it and download the collection again"
            )
        return self.admitted[module, name]
