"""A trial's name, which is its folder's: its keys in short, the same whenever the sweep is called.

In: keys. Out: a name of letters, digits, `.`, `_` and `-`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Mapping
from typing import Any

from lockstep.tools.sweep.grid import format_value

LONGEST = 80


def name_of(keys: Mapping[str, Any], taken: Container[str]) -> str:
    """`learning_rate-3e-05_source-gpt2`; with a few digits of its hash where another trial has that name, or where it
    would be long."""
    lasts = [key.rpartition(".")[2] for key in keys]
    parts = []
    for key, value in keys.items():
        last = key.rpartition(".")[2]
        parts.append(f"{last if lasts.count(last) == 1 else key}-{format_value(value)}")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts)).strip("-._") or "trial"
    if len(name) <= LONGEST and name not in taken:
        return name
    digest = hashlib.sha256(json.dumps(dict(keys), sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{name[: LONGEST - 9]}-{digest}"
