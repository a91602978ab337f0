"""`data.stream`: the keys of it, and which other keys do not go with it, each with the reason.

In: the `data` section, and the run. Out: nothing, or what is wrong, by key.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from lockstep.config.row_filters import Condition

WINDOW = 8192
CACHE_GB = 20.0
_ALL_ROWS = "needs all rows of train at once"
# Keys of `data` that a stream cannot have -> why; those at their defaults are not looked at.
_REFUSED = {
    "layout": "a stream reads rows in .jsonl, .txt, .tar and .parquet files",
    "columns": "a stream reads no .csv or .tsv files, whose rows may reach over lines; write .jsonl or .parquet",
    "separator": "a stream reads no .csv or .tsv files; write .jsonl or .parquet",
    "quote": "a stream reads no .csv or .tsv files; write .jsonl or .parquet",
    "encoding": "a stream reads UTF-8 only",
    "split_column": f"it {_ALL_ROWS}; write validation and test to files of their own",
    "test_fraction": f"to cut it off {_ALL_ROWS}; name files in data.test",
    "validation_fraction": f"to cut it off {_ALL_ROWS}; name files in data.validation",
    "deduplicate": f"it {_ALL_ROWS}; leave duplicates out when the shards are written",
    "limit": "name fewer shards in data.train",
    "group_by_length": "it sorts examples of many steps, and a stream reads the next ones only",
}


class Streaming(BaseModel):
    """The keys of `data` about streaming."""

    stream: bool = Field(
        False,
        description="read and encode the shards of train while training, instead of keeping its tokens in the cache",
    )
    stream_window: Annotated[int, Field(ge=1)] = Field(
        WINDOW,
        description="of a stream: examples that are shuffled together, from one shard after another; of each source",
    )

    stream_cache_gb: Annotated[float, Field(gt=0)] = Field(
        CACHE_GB,
        description="gigabytes of the cache that copies of shards from elsewhere may take, of all runs; changes no bit",
    )

    @model_validator(mode="after")
    def _goes_with_a_stream(self) -> Any:
        if not self.stream:
            for key, default in (("stream_window", WINDOW), ("stream_cache_gb", CACHE_GB)):
                if getattr(self, key) != default:
                    raise ValueError(f"{key} is about a stream: set data.stream=true, or leave it out")
            return self
        for key, why in _REFUSED.items():
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} does not go with data.stream: {why}")
        _check_filter(self, "")
        for entry in getattr(self, "sources", None) or []:
            for key in [key for key in _REFUSED if key in type(entry).model_fields]:
                if getattr(entry, key) != type(entry).model_fields[key].get_default(call_default_factory=True):
                    raise ValueError(f"sources: {entry.name}: {key} does not go with data.stream: {_REFUSED[key]}")
            _check_filter(entry, f"sources: {entry.name}: ")
        return self


def _check_filter(given: Any, where: str) -> None:
    """Errors: `ValueError`."""
    for column, wanted in getattr(given, "filter", {}).items():
        if isinstance(wanted, Condition) and wanted.counts_tokens:
            raise ValueError(
                f"{where}filter: {column}: tokens are not counted in a stream before it is encoded; give min_words, "
                "max_words"
            )
