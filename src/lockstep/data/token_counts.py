"""How many tokens texts have, which `min_tokens` and `max_tokens` of `data.filter` ask before anything is encoded.

In: a run, and a column of a data set. Out: a number for each row, as the run's tokenizer makes them of the whole text,
special tokens among them; from the cache where it has counted the same texts before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import Run, RunError
from lockstep.data import nested_columns, tokenizer
from lockstep.data.tokens import VERSION, Columns, content, digest, encode

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class TokenCounts:
    """Counts by the run's tokenizer. The caller holds the lock of its preparation."""

    run: Run
    targets: frozenset[str] = frozenset()  # columns that the tokenizer of targets is for, where that is another one

    @classmethod
    def of(cls, run: Run, targets: Iterable[str] = ()) -> TokenCounts:
        """`targets`: columns of what a model is to write, also within the Hub's column of translations."""
        return cls(run, frozenset(name for target in targets for name in (target, f"translation.{target}")))

    def renamed(self, rename: Mapping[str, str]) -> TokenCounts:
        """For a source that calls the task's columns otherwise."""
        return replace(self, targets=frozenset(rename.get(target, target) for target in self.targets))

    def __call__(self, dataset: Dataset, path: str, split: str, name: str) -> np.ndarray:
        """Of each row: int32, -1 where it has no text. Errors: `RunError`."""
        import datasets

        if self.run.tokenizer.train is not None:
            raise RunError(
                f"data.filter: {path}: the tokenizer (tokenizer.train) is trained on the texts that the filter leaves, "
                "so it cannot count their tokens before; give tokenizer.source, or min_words, max_words instead"
            )
        column = nested_columns.added(dataset, {"data.filter": path}, split, name).select_columns([path])
        dtype = getattr(column.features[path], "dtype", None)
        if dtype not in ("string", "large_string"):
            told = f"{dtype} values" if dtype else "lists or mappings"
            raise RunError(
                f"data.filter: {path}: the {split} split of {name} holds {told} there; tokens are counted in texts"
            )
        wanted = path in self.targets
        apart = tokenizer.of_targets(self.run) if wanted else None
        folder = apart or tokenizer.prepare(self.run, iter(()), "")
        tok: Any = tokenizer.load(str(folder), self.run.model.trust_remote_code)

        def encoder(rows: dict[str, list]) -> dict[str, list]:
            texts = [text or "" for text in rows[path]]
            given = {"text_target" if wanted else "text": texts}
            found = tok(**given, return_attention_mask=False, verbose=False)["input_ids"]
            return {"tokens": [-1 if text is None else len(n) for text, n in zip(rows[path], found, strict=True)]}

        key = digest("tokens of texts", VERSION, content(column, [path]), folder.name, wanted)
        features = datasets.Features({"tokens": datasets.Value("int32")})
        return np.asarray(Columns(encode(column, encoder, features, key)).flat("tokens"))
