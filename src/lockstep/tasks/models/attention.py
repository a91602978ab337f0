"""`model.attention`: whether it can run, before any rank has started.

In: a run. Out: nothing, or a `RunError` of one line. Nothing here imports torch at the top.
"""

from __future__ import annotations

import difflib
import importlib.util

from lockstep.config.run import Run, RunError

_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def check(run: Run, here: bool) -> None:
    """`here`: the ranks will run on machines like this one. Errors: `RunError`."""
    name = run.model.attention
    if name is None or "/" in name:  # a kernel of the Hub's
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    if name.removeprefix("paged|") not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RunError(f"model.attention: transformers has no {name!r}; {hint}it has {', '.join(known)}")
    if not name.startswith("flash_attention"):
        return
    instead = "; leave model.attention out for the model's own choice (sdpa)"
    if run.launch.device == "cpu" or (here and not _cuda()):
        raise RunError(f"model.attention: {name} runs on GPUs only, and this job has none{instead}")
    if run.precision == "fp32":
        raise RunError(f"model.attention: {name} does not compute in fp32; set precision=bf16{instead}")
    package = _PACKAGES.get(name)
    if here and package is not None and importlib.util.find_spec(package) is None:
        raise RunError(f"model.attention: {name} needs {package}, which is not installed{instead}")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
