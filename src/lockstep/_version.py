"""The version, in a module without imports, so that any package can record it."""

__version__ = "0.1.0"
