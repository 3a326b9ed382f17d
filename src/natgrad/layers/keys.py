"""Keys of mappings that choose modules: patterns of qualified names, and classes."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn


def matches(key: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    """Return whether a key stands for a module: an fnmatch pattern of its qualified name, or a class of it."""
    return fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)


def is_key(key: object) -> bool:
    """Return whether a key is a pattern or a class of modules."""
    return isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module))


def show_key(key: str | type[nn.Module]) -> str:
    """Return a key as text: a pattern in quotes, or the name of the class."""
    return repr(key) if isinstance(key, str) else key.__name__
