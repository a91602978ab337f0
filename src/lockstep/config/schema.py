"""The JSON Schema of a run file, from which editors complete.

In: the sections' types. Out: a schema that takes what `load` takes: also a text that stands for a section.
"""

from __future__ import annotations

from typing import Any

from lockstep.config.run import Run
from lockstep.config.sections import PRECISIONS, SHORT


def schema() -> dict[str, Any]:
    """The JSON Schema of a run file."""
    found = Run.model_json_schema()
    properties, sections = found["properties"], found["$defs"]
    to = sections["TrackSection"]["properties"]["to"]
    to |= {"anyOf": [{"type": "string"}, {"type": to.pop("type"), "items": to.pop("items")}]}
    for name in SHORT:
        texts = to["anyOf"] if name == "track" else [{"type": "string"}]
        properties[name] = {"anyOf": [{"$ref": properties[name]["$ref"]}, *texts]}
    precision = properties["precision"]
    precision["enum"] += [*PRECISIONS, 32, 16]
    del precision["type"]
    return found
