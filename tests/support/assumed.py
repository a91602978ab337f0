"""Tests of what lockstep takes for granted of a library, by the library alone.

In: a test whose docstring begins with the sentence that is taken for granted. Out: the same test; where it fails, the
error says the sentence, the versions that were tried, and the files of lockstep that rest on it.
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
    """Name the files, from the checkout's root, that are wrong if the test's sentence is."""

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
