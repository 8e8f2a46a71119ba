"""Reading the pickles of CIFAR's python format without running code from them."""

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

MAX_TUPLES = 1000
"""Maximum number of tuples in a file. CIFAR's files have six, plus one for each string that Python
3 wrote as bytes."""


def unpickle(file: Path) -> dict[str, Any]:
    """Read the dictionary in a file of the python format."""
    data = read_bytes(file)
    try:
        _refuse_bomb(data)
        content = _CifarUnpickler(file, data).load()
        return {text(key): value for key, value in content.items()}
    except InputError:
        raise
    # Damaged pickles can raise almost any exception.
    except Exception as error:
        raise InputError(
            f"{file} is not a CIFAR file, or is damaged ({first_line(error)}); download it again"
        ) from error


def array_of(value: Any) -> Uint8 | None:
    """The uint8 array that a recorded constructor call describes; None if it is none."""
    try:
        shape, dtype, fortran, raw = value.state[-4:]
        if dtype.args[0] not in ("u1", b"u1"):
            return None
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        return None


def _refuse_bomb(data: bytes) -> None:
    """Refuse a pickle that could take much time or memory although it is small.

    - Only strings and names may be reused from the memo, as in CIFAR's files: hashing a tuple that
      contains itself many times over would never end.
    - Few tuples are allowed, because hashing deeply nested ones overflows the stack.
    - Only small numbers are allowed, because many large ones can have the same hash.
    """
    memo: dict[int, bool] = {}
    tuples, plain = 0, False
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if "PUT" in name or name == "MEMOIZE":
            index = len(memo) if argument is None else argument
            # The unpickler allocates memo slots up to the highest index.
            if index > len(data):
                raise pickle.UnpicklingError(f"memo index {index}")
            memo[index] = plain
            continue
        if name == "DUP" or ("GET" in name and not memo.get(argument or 0)):
            raise pickle.UnpicklingError("an object other than a string is reused")
        if isinstance(argument, int) and abs(argument) >= 1 << 31:
            raise pickle.UnpicklingError("a number is too large")
        tuples += "TUPLE" in name
        if tuples > MAX_TUPLES:
            raise pickle.UnpicklingError("too many tuples")
        plain = any(kind in name for kind in ("STRING", "UNICODE", "BYTES", "GLOBAL"))


class _Recorded:
    """Stand-in for numpy's constructors: it records the arguments and does nothing else."""

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
    """Unpickler for plain containers and recorded arrays; it calls nothing that a file names."""

    def __init__(self, file: Path, data: bytes):
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.file = file
        self.admitted: Mapping[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): _Recorded,
            ("numpy._core.multiarray", "_reconstruct"): _Recorded,
            ("numpy", "ndarray"): _Recorded,
            ("numpy", "dtype"): _Recorded,
            # Python 3 writes bytes under protocol 2 as an encoded string. Cached, so that a string
            # that is encoded a thousand times takes memory only once.
            ("_codecs", "encode"): cache(_encode),
        }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name that CIFAR's files contain; all other names are refused."""
        if (module, name) not in self.admitted:
            raise InputError(
                f"{self.file} is not a CIFAR file: it would load {module}.{name}, "
                "which is refused; delete it and download the dataset again"
            )
        return self.admitted[module, name]
