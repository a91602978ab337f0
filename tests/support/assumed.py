"""Tests of lockstep's assumptions about a library, using the library alone.

In: a test whose docstring begins with the assumption. Out: the same test; its failure names the assumption, the tested
versions, and the files of lockstep that rely on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from _pytest.outcomes import Skipped

LIBRARIES = (
    *("torch", "transformers", "tokenizers", "datasets", "accelerate", "deepspeed", "peft", "safetensors"),
    *("huggingface_hub", "bitsandbytes", "trl", "obstore", "wandb", "mlflow-skinny", "trackio", "optuna"),
)


def rests_on_it(*files: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that names the files, relative to the checkout's root, that rely on the test's assumption."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def run(*arguments: Any, **named: Any) -> None:
            try:
                test(*arguments, **named)
            except Skipped:
                raise
            except BaseException as error:
                sentence = " ".join(str(test.__doc__).split())
                error.add_note(f"no longer so: {sentence}\nrests on it: {', '.join(files)}\nwith {_versions()}")
                raise

        return run

    return decorate


def _versions() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
