"""onnxruntime for browsers, as npm distributes it."""

from __future__ import annotations

import tarfile
from pathlib import Path

from lipcert.data import cache_dir
from lipcert.data.download import Remote, fetch
from lipcert.errors import DataError
from lipcert.files import replace_file

_VERSION = "1.30.0"
_PACKAGE = Remote(
    f"onnxruntime-web-{_VERSION}.tgz",
    "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71",
    (f"https://registry.npmjs.org/onnxruntime-web/-/onnxruntime-web-{_VERSION}.tgz",),
)
FILES = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def copy_runtime(folder: Path) -> None:
    """Put the files of onnxruntime-web into a folder; the package is kept in the cache."""
    try:
        package = fetch(_PACKAGE, cache_dir() / "npm")
    except DataError as error:
        remedy = f"put {_PACKAGE.file} from npm into {cache_dir() / 'npm'}"
        raise DataError(f"the page needs onnxruntime-web: {error}; {remedy}") from None
    with tarfile.open(package) as archive:
        for name in FILES:
            member = archive.extractfile(f"package/dist/{name}")
            assert member is not None
            with replace_file(folder / name) as temporary:
                temporary.write_bytes(member.read())
