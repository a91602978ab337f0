"""Update the entry `tie_word_embeddings` of a config after its tied weights were untied.

In: a transformers model. Out: its config, which says whether any weights are still tied.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from typing import Any


def write_down(model: Any) -> None:
    """Set `tie_word_embeddings` to False if no weights are tied, so that every reader of an export loads the same
    weights, not only transformers, which inspects the files. Unchanged if a forward depends on the entry (T5 scales its
    output)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
    if not pairs or any(parameters.get(t) is parameters.get(s) for t, s in pairs.items()):
        return
    module = sys.modules.get(type(model).__module__)
    with suppress(OSError, TypeError):
        if module is not None and "config.tie_word_embeddings" not in inspect.getsource(module):
            model.config.tie_word_embeddings = False
