"""Starts the tracer when torch is imported. Python imports this file at startup if its folder is on PYTHONPATH.

It does not import torch itself, and runs the `sitecustomize` that it shadows.
"""

import contextlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))


class Tracing:
    """Import finder that starts the tracer after torch is imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # find_spec may only check for torch, without importing it
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            load(module)
            start()

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def start():  # type: ignore[no-untyped-def]
    """Start the tracer. An error is only a warning; the script runs anyway."""
    try:
        spec = importlib.util.spec_from_file_location(
            "lockstep_tracer",
            os.path.join(HERE, "tracer", "__init__.py"),
            submodule_search_locations=[os.path.join(HERE, "tracer")],
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{HERE} holds no tracer")
        tracer = importlib.util.module_from_spec(spec)
        sys.modules["lockstep_tracer"] = tracer
        spec.loader.exec_module(tracer)
        from pathlib import Path

        settings = tracer.Settings.load(Path(HERE, "settings.json"))
        tracer.begin(settings)
    except Exception as error:
        text = f"lockstep trace: this process is not traced: {type(error).__name__}: {error}\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed or missing
            sys.stderr.write(text)


def chain():  # type: ignore[no-untyped-def]
    """Run the next `sitecustomize` on the path."""
    path = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Tracing())
chain()
