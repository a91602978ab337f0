"""What a script's code is computed with without running it: operators and a few plain functions.

In: a node's class, or a name. Out: Python's own.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
FUNCTIONS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "len": len, "max": max, "min": min}
FUNCTIONS |= {"Path": str, "pathlib.Path": str, "os.path.join": lambda *parts: "/".join(parts), "dict": dict}
ENUMERATIONS = ("Strategy", "Type", "Names")  # IntervalStrategy.EPOCH is epoch
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}
COMPARISONS: dict[type, Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
