"""Data sets that have a name, one file each, found by their names."""

from importlib import import_module
from pkgutil import iter_modules

from lipcert.data.sources.source import SOURCES, FileSource, Source, register_source

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["SOURCES", "FileSource", "Source", "register_source"]
