"""`data.padding`: find out by a trial whether a model can run without padding.

In: the section `model`, and the head. Out: None, or the reason why padding is computed. The answer depends only on the
model's config and library versions, so it is the same on every machine and with every strategy: a narrow model of the
same config with few tokens is run both ways before any process starts. The answer is cached.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data.cache import cache_folder, cached
from lockstep.tasks.models import heads, model_configs
from lockstep.tasks.models.model_configs import ModelChoice

if TYPE_CHECKING:
    from lockstep.tasks.models import small_models
else:  # for trials that are not in the cache
    (small_models,) = lazy("lockstep.tasks.models", "small_models")

_OF_TRIALS = [str(Path(__file__).with_name(name)) for name in ("small_models.py", "unpadded.py")]
_WHEN_IMPORTED = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (__file__, *_OF_TRIALS)]
# Lengths of the texts of each block of a batch; a block may hold one text.
BLOCKS = (((7, 5), (5, 7)), ((12,), (12,)), ((12,), (3, 9)), ((8, 4),), ((50, 30), (80,)), ((80,), (80,)))


def unsupported_reason(choice: ModelChoice, head: str) -> str | None:
    """The reason why padding is computed; None if it is left out. Errors: `RunError` if the cache cannot be written."""
    if not heads.of(head).reads_texts:
        return "images of one size need none"
    section = choice.section
    if choice.padding == "batch":
        return "data.padding is batch"
    if section.attention not in (None, "sdpa"):
        return f"model.attention: {section.attention} needs padded examples"
    config = model_configs.load_config(section)
    if not type(config).__module__.startswith("transformers."):
        return "the model is code from the Hub"
    if (entry := model_configs.leaves_out_layers(config)) is not None:
        return f"layers are skipped at random (model.config.{entry})"
    return kept_trial(section, head, config, trial)


def crosses(choice: ModelChoice) -> str | None:
    """The reason why texts packed into one block attend to each other although positions restart with each; None if
    they do not. Errors: `RunError` if the cache cannot be written."""
    laid = unsupported_reason(choice, "causal") is None
    return kept_trial(choice.section, "causal", model_configs.load_config(choice.section), tried_apart, laid)


def foresight(section: ModelSection, head: str) -> str | None:
    """How to fix a model whose logits depend on later tokens; None if they do not, or if no small model of this config
    can be built. `head`: causal or seq2seq. Errors: `RunError` if the cache cannot be written."""
    return kept_trial(section, head, model_configs.load_config(section), tried_ahead)


def check_foresight(section: ModelSection, head: str) -> None:
    """Refuse a model that attends to the tokens that it has to predict. Errors: `RunError`."""
    if (instead := foresight(section, head)) is not None:
        raise RunError(
            "LS3150",
            f"model: {model_configs.load_config(section).model_type} sees the tokens that it has to predict; {instead}",
        )


def kept_trial(
    section: ModelSection, head: str, config: Any, trial: Callable[..., str | None], *more: Any
) -> str | None:
    """Run a trial on small models of a config, or return its cached answer.

    `trial` is called with the section, head, config and `more`. Errors: `RunError` if the cache cannot be written."""
    code = _code(trial)
    if code[: len(_WHEN_IMPORTED)] != _WHEN_IMPORTED:  # lockstep was replaced after this process began
        return trial(section, head, config, *more)
    key_parts = [
        trial.__name__,
        section.attention,
        config.to_dict(),
        head,
        section.adapter,
        *more,
    ]
    key_parts += [torch.__version__, _transformers(), code, *_code_of_model(section, config)]
    key = hashlib.sha256(json.dumps(key_parts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def make(aside: Path) -> None:
        aside.write_text(json.dumps(trial(section, head, config, *more)))

    verdict: str | None = json.loads(cached(cache_folder() / "padding" / f"{key}.json", make).read_text())
    return verdict


def trial(section: ModelSection, head: str, config: Any) -> str | None:
    """Compare padded and unpadded computation on a small model of this config. Leaves torch's random state
    unchanged."""

    def attempt(variant: Any) -> tuple[Any, Any]:
        plain = small_models.small(section, head, variant, None)
        small_models.computed(plain, head, small_models.examples(head, *small_models.BATCHES[0]))
        return variant, plain

    try:
        variant, plain = small_models.tried(config, head, attempt)
    except Exception as error:
        return f"a small model of this family could not be tried ({small_models.brief(error)})"
    if plain.get_correct_attn_implementation(None) != "sdpa":  # its own choice
        return "transformers does not support torch's attention (sdpa) for it"
    with torch.random.fork_rng([]):
        reasons = (differs(section, head, each) for each in small_models.windows(variant))
        return next((reason for reason in reasons if reason is not None), None)


def differs(section: ModelSection, head: str, config: Any) -> str | None:
    """The reason why padding is computed, from a small model of exactly this config; None if no batch of `BATCHES`
    differs.

    Batches that the plain model rejects, such as ones longer than its positions, are skipped: no run has them."""
    from lockstep.tasks.models import unpadded  # with transformers' models

    plain = small_models.small(section, head, config, None)
    try:
        laid = small_models.small(section, head, config, unpadded.NAME)
    except Exception as error:
        return f"its layers do not support concatenated examples ({small_models.brief(error)})"
    unpadded.install(laid)
    batches = [
        (lengths, targets, small_models.examples(head, lengths, targets)) for lengths, targets in small_models.BATCHES
    ]
    if "token_type_ids" in inspect.signature(type(plain).forward).parameters:  # pairs of texts
        batches += [(lengths, targets, inputs | small_models.typed(inputs)) for lengths, targets, inputs in batches[:2]]
    for lengths, targets, inputs in batches:
        try:
            reference = small_models.computed(plain, head, inputs)
        except Exception as error:
            if inputs is batches[0][2]:
                return f"a small model with other windows could not be tried ({small_models.brief(error)})"
            continue
        try:
            with small_models.counted(laid, (sum(lengths), sum(targets))) as blocks:
                outputs = small_models.computed(laid, head, inputs)
            ahead = head == "causal" and reads_ahead(laid, inputs) and not reads_ahead(plain, inputs)
        except unpadded.Cannot as error:
            return str(error)
        except Exception as error:
            return f"its layers do not support concatenated examples ({small_models.brief(error)})"
        if len(lengths) > 1 and not blocks:
            return "its layers do not use transformers' masks and attention functions"
        if not small_models.near([reference[0]], [outputs[0]]) or not small_models.near(reference[1], outputs[1]):
            return "concatenated examples would attend to each other" + _of(lengths)
        if ahead:
            return "tokens of concatenated examples would attend to later ones" + _of(lengths)
    return None


def _of(lengths: Sequence[int]) -> str:
    """Text that names the lengths of a batch; empty for the first batch."""
    return "" if tuple(lengths) == small_models.BATCHES[0][0] else f" (texts of {', '.join(map(str, lengths))} tokens)"


def reads_ahead(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether changing the last token of each text (or decoder input) changes earlier logits, of those that are finite:
    DoRA divides by the norm of each row of a head, and a new row of a padding token is 0."""
    of = "decoder_" if "decoder_input_ids" in inputs else ""
    ids, mask = f"{of}input_ids", f"{of}attention_mask"
    last = inputs[mask].sum(1, keepdim=True) - 1  # [B, 1]
    if int(last.max()) == 0:
        return False
    before = torch.arange(inputs[ids].shape[1])[None] < last  # [B, T]
    changed = inputs[ids].scatter(1, last, 5 + (inputs[ids].gather(1, last) - 4) % (small_models.TOKENS - 5))
    with torch.no_grad():
        one, other = (model(**inputs | {ids: each})[0][before] for each in (inputs[ids], changed))
    finite = one.isfinite() | other.isfinite()
    return not small_models.near([one[finite]], [other[finite]])


def tried_ahead(section: ModelSection, head: str, config: Any) -> str | None:
    """How to fix a config whose models read ahead; None if they do not."""
    if not _ahead(section, head, config):
        return None
    for name in ("causal", "is_decoder"):
        if model_configs.entry(config, name) is False:
            other = copy.deepcopy(config)
            setattr(other, name, True)
            if not _ahead(section, head, other):
                return f"set model.config.{name}: true"
    if head == "seq2seq" and getattr(model_configs.entry(config, "decoder"), "is_decoder", None) is False:
        return "set model.config.decoder: {is_decoder: true, add_cross_attention: true}"
    return "use a family that does not, or another task"


def _ahead(section: ModelSection, head: str, config: Any) -> bool:
    """Whether a small model of this config, in plain transformers, reads ahead; False if none can be built."""

    def attempt(variant: Any) -> bool:
        model = small_models.small(section, head, variant, None)
        return any(reads_ahead(model, small_models.examples(head, *batch)) for batch in small_models.BATCHES[:2])

    with suppress(Exception):
        return small_models.tried(config, head, attempt)
    return False


def tried_apart(section: ModelSection, head: str, config: Any, laid: bool) -> str | None:
    """Compare texts that share a block with the same texts in separate rows. `laid`: whether padding is left out."""
    from lockstep.tasks.models import unpadded  # with transformers' models

    attention = unpadded.NAME if laid else section.attention

    def attempt(variant: Any) -> str | None:
        for each in small_models.windows(variant):
            model = small_models.small(section, head, each, attention)
            if attention == unpadded.NAME:
                unpadded.install(model)
            for blocks in BLOCKS:
                if (blocks is BLOCKS[0] or takes(model, sum(blocks[0]))) and not packs_exactly(model, blocks):
                    return "its texts attend to each other, or depend on each other's positions"
        return None

    try:
        return small_models.tried(config, head, attempt)
    except Exception as error:
        return f"a small model of it could not be tried ({small_models.brief(error)})"


def takes(model: nn.Module, length: int) -> bool:
    """Whether the model accepts a text of this length; if it has no positions for it, no run has such texts."""
    try:
        with torch.no_grad():
            model(input_ids=torch.full((1, length), small_models.TOKENS - 1))
    except Exception:
        return False
    return True


def packs_exactly(model: Any, blocks: Sequence[Sequence[int]]) -> bool:
    """Whether texts of these lengths, packed into blocks of equal length, give the same logits and gradients as
    separate texts."""
    width = sum(blocks[0])
    ids = torch.randint(5, small_models.TOKENS, (len(blocks), width), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(length) for length in block]) for block in blocks])
    together = model(input_ids=ids, position_ids=positions).logits
    ends = [[sum(block[: i + 1]) for i in range(len(block))] for block in blocks]
    parts = [(row, end - n, end) for row, block in enumerate(blocks) for n, end in zip(block, ends[row], strict=True)]
    alone = [model(input_ids=ids[row : row + 1, begin:end]).logits[0] for row, begin, end in parts]
    packed = [together[row, begin:end] for row, begin, end in parts]
    sides = [(torch.cat(side).detach(), small_models.gradients(model, torch.cat(side))) for side in (alone, packed)]
    return small_models.near([sides[0][0]], [sides[1][0]]) and small_models.near(sides[0][1], sides[1][1])


def _transformers() -> str:
    import transformers

    return str(transformers.__version__)


def _code_of_model(section: ModelSection, config: Any) -> list[str]:
    """Identify code that comes with the model: hashes of its files, or its Hub repository and revision."""
    if not section.trust_remote_code or not getattr(config, "auto_map", None):
        return []
    files = sorted(Path(str(section.source)).expanduser().glob("*.py"))
    return [hashlib.sha256(each.read_bytes()).hexdigest() for each in files] or [f"{section.source}@{section.revision}"]


def _code(trial: Callable[..., Any]) -> list[str]:
    """Hashes of the code that decides the answer: this file, the small models, `unpadded.py` and the trial's own
    file."""
    files = dict.fromkeys([__file__, *_OF_TRIALS, sys.modules[trial.__module__].__file__])
    return [hashlib.sha256(Path(str(each)).read_bytes()).hexdigest() for each in files]
