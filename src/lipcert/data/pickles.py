"""Pickled dictionaries of arrays and plain values, read without running the code that a pickle can name."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from lipcert.errors import DataError


def read_pickle(content: bytes, path: str) -> dict[Any, Any]:
    """The dictionary of a pickle that holds only arrays, numbers, strings, lists and dictionaries.

    Names are refused unless they rebuild an array. Strings of Python 2 come as bytes.
    `path` is for messages.
    """
    try:
        value = _ArrayUnpickler(io.BytesIO(content), path).load()
    # What `find_class` refuses has a message of its own.
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can fail anywhere in numpy or pickle
        raise DataError(
            f"{path} is truncated or not a pickle "
            f"({type(error).__name__}); fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, expected a dictionary")
    return value


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    """What numpy's _reconstruct does in every pickled array: an empty one, filled by the state that follows."""
    if kind is not np.ndarray or shape != (0,) or code not in (b"b", "b"):
        raise pickle.UnpicklingError("an array that is rebuilt in an unusual way")
    return np.ndarray((0,), np.int8)


def _latin1(text: Any, encoding: Any = "latin1") -> Any:
    """Python 3 writes bytes so in the protocols of Python 2."""
    if not isinstance(text, str) or encoding not in (b"latin1", "latin1"):
        raise pickle.UnpicklingError("bytes in an unusual encoding")
    return text.encode("latin1")


# Both paths of _reconstruct: numpy 2 has renamed the module, old files name the old
# one.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


class _ArrayUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, path: str) -> None:
        super().__init__(file, encoding="bytes")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(
                f"{self._path} names {module}.{name}, which no data file needs; it "
                "was not opened further"
            )
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise DataError(
            f"{self._path} refers to an object outside of the file; it was "
            "not opened further"
        )
