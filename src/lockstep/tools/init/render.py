"""The text of a run file: a header, then each key on a line of its own with a comment that says what it is.

In: the keys as nested mappings. Out: YAML.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from lockstep.config import plugins
from lockstep.config.run import Run

# Where the key's own description leans on a key that is not in the file.
_ABOUT = {
    "task.name": "what is trained; the other keys of this section are the task's",
    "model.config": "entries of the model's config: a small model, to begin with",
    "optim.warmup_fraction": "share of all steps in which the rate rises from 0",
    "strategy.name": "how processes share a step; `lockstep list` says what there is",
    "data.layout": "what the files are: docs/run-file.md",
}
_WIDTH = 44  # of keys, where comments begin


def write(filled: Mapping[str, Any], header: list[str], told: Mapping[str, str]) -> str:
    """`told`: dotted key -> what its comment says instead of, or (with a `+`) after, the key's description."""
    rows: list[tuple[str, str]] = []
    for key, value in filled.items():
        if not isinstance(value, dict):
            about = (
                Run.model_fields[key].description if key in Run.model_fields else ""
            )  # then it is refused as a whole
            rows.append((f"{key}: {scalar(value)}", _comment(key, told, about)))
            continue
        rows.append((f"{key}:", told.get(key, "")))
        known = _known(key, value) if key in Run.model_fields else {}
        for inner, each in value.items():
            about = known[inner].description if inner in known else ""
            rows.append((f"  {inner}: {scalar(each)}", _comment(f"{key}.{inner}", told, about)))
    width = min(_WIDTH, max(len(left) for left, _ in rows))
    lines = [f"# {line}".rstrip() for text in header for line in _wrapped(text)]
    return "\n".join([*lines, *(f"{left:<{width}}  # {about}" if about else left for left, about in rows)]) + "\n"


def _known(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a section, those of its plug-in among them."""
    base: Any = Run.model_fields[section].annotation
    known = dict(base.model_fields)
    if (kind := {"task": "tasks", "launch": "launchers"}.get(section)) is not None:
        name = str(values.get("name", known["name"].default))
        if "." not in name:
            known |= plugins.find(kind, name).Options.model_fields  # type: ignore[attr-defined]
    return known


def _comment(key: str, told: Mapping[str, str], about: str | None) -> str:
    text = told.get(key, "")
    about = _ABOUT.get(key, about or "")
    return f"{about}; {text[1:]}" if text.startswith("+") else text or about


def _wrapped(text: str) -> list[str]:
    """A line of the header on lines that fit; what is indented goes on below its text."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, 108, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def scalar(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.15g}".partition("e")
        return f"{digits if '.' in digits else f'{digits}.0'}e{power}" if power else digits
    dumped = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return str(dumped).removesuffix("...\n").strip()
