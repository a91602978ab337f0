"""`data.padding`: whether a model's padding can be left out, found out by trying.

In: a run, and the head of its model. Out: None, or why padding is computed. The same on every machine and under every
strategy, as it depends on the model's config and the versions of libraries alone: a model of the same config, but
narrow and of few tokens, is made and run both ways before any process starts. The answer is kept in the cache.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, RunError
from lockstep.data.cache import cache_folder, kept
from lockstep.distributed.randomness import seed_libraries
from lockstep.tasks.models import adapters, models, unpadded

LENGTHS = (11, 5, 8)  # of the examples that are tried
TARGETS = (4, 13, 6)  # of what is decoded
PAD, START, END, TOKENS = 1, 3, 2, 60
LARGE = 1_000_000_000  # parameters of a model that is not tried
NEAR = 1e-4  # how far the two may be apart, relative to the largest number


def refused(run: Run, head: str) -> str | None:
    """Why padding is computed; None: it is not. Errors: `RunError` when the cache cannot be written."""
    if run.data.padding == "batch":
        return "data.padding is batch"
    if run.model.attention not in (None, "sdpa"):
        return f"model.attention: {run.model.attention} takes padded examples"
    config = models.load_config(run)
    if not type(config).__module__.startswith("transformers."):
        return "the model is code from the Hub"
    if (entry := models.leaves_out_layers(config)) is not None:
        return f"layers are left out at random (model.config.{entry})"
    return _kept(run, head, config, tried)


def crosses(run: Run) -> str | None:
    """Why texts of one block see each other though their positions begin anew with each; None: they do not. Errors:
    `RunError` when the cache cannot be written."""
    return _kept(run, "causal", models.load_config(run), tried_apart)


def _kept(run: Run, head: str, config: Any, trial: Callable[[Run, str, Any], str | None]) -> str | None:
    asked = [trial.__name__, run.model.attention, run.data.padding, config.to_dict(), head, run.model.adapter]
    asked += [torch.__version__, _transformers(), _code(), *_code_of_model(run, config)]
    key = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def make(aside: Path) -> None:
        aside.write_text(json.dumps(trial(run, head, config)))

    found: str | None = json.loads(kept(cache_folder() / "padding" / f"{key}.json", make).read_text())
    return found


def tried(run: Run, head: str, config: Any) -> str | None:
    """Compare the two ways on a small model of this config. Leaves torch's random state as it was."""
    inputs, why = examples(head), ""
    with torch.random.fork_rng([]):
        for wanted in smaller(config, head):
            try:
                outputs, gradients, blocks = computed(run, head, wanted, None, inputs)
            except Exception as error:  # entries that do not fit each other any more
                why = _brief(error)
                continue
            if blocks is None:
                return "transformers has no attention by torch's function (sdpa) for it"
            try:
                found = computed(run, head, wanted, unpadded.NAME, inputs)
            except unpadded.Cannot as error:
                return str(error)
            except Exception as error:
                return f"its layers do not take examples laid end to end ({_brief(error)})"
            if not found[2]:
                return "its layers do not use transformers' masks and attention functions"
            if not _near([outputs], [found[0]]) or not _near(gradients, found[1]):
                return "laid end to end, its examples would see each other"
            return None
    return f"a small model of this family could not be tried ({why})"


def tried_apart(run: Run, head: str, config: Any) -> str | None:
    """Compare texts that share a block with the same texts, each in a row of its own."""
    why = ""
    attention = unpadded.NAME if refused(run, head) is None else run.model.attention
    ids = torch.randint(5, TOKENS, (2, 12), generator=torch.Generator().manual_seed(0))  # two blocks of two texts each
    cuts = (7, 5)
    positions = torch.stack([torch.cat([torch.arange(cut), torch.arange(12 - cut)]) for cut in cuts])
    with torch.random.fork_rng([]):
        for wanted in smaller(config, head):
            try:
                model = small(run, head, wanted, attention)
                parts = [(row, part) for row, cut in enumerate(cuts) for part in (slice(0, cut), slice(cut, 12))]
                alone = [model(input_ids=ids[row : row + 1, part]).logits[0].detach() for row, part in parts]
                if attention == unpadded.NAME:
                    unpadded.install(model)
                found = model(input_ids=ids, position_ids=positions).logits.detach()
            except Exception as error:
                why = _brief(error)
                continue
            if not _near(alone, [found[row, part] for row, part in parts]):
                return "its texts see each other, or their positions"
            return None
    return f"a small model of it could not be tried ({why})"


def computed(
    run: Run, head: str, config: Any, attention: str | None, inputs: dict[str, Tensor]
) -> tuple[Tensor, list[Tensor | None], int | None]:
    """Logits of real tokens (or of examples), gradients by parameter, and how many blocks got examples end to end; None
    for a model that has no such attention."""
    model: Any = small(run, head, config, attention)
    blocks = 0

    def count(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal blocks
        shapes = [value.shape[:2] for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        blocks += (1, sum(LENGTHS)) in shapes or (1, sum(TARGETS)) in shapes

    if attention is not None:
        unpadded.install(model)
        for block in (block for stack in unpadded.stacks(model) for block in stack):
            block.register_forward_pre_hook(count, with_kwargs=True)
    logits = model(**inputs)[0]  # or hidden states, where it has no head
    if head != "classification":
        real = inputs["decoder_attention_mask" if head == "seq2seq" else "attention_mask"].bool()
        logits = logits[real]
    weights = torch.linspace(-1, 1, logits.numel()).sin().view_as(logits)
    (logits.float() * weights).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    sdpa = model.get_correct_attn_implementation(None) == "sdpa"  # its own choice
    return logits.detach(), gradients, blocks if sdpa else None


def small(run: Run, head: str, config: Any, attention: str | None) -> nn.Module:
    """A model of this config, its dropout off. Errors: `RunError` for one that is large."""
    import transformers

    auto = getattr(transformers, models.HEADS[head][0])
    options = {"attn_implementation": attention} if attention else {}
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(copy.deepcopy(config), **options).parameters())
    if size > LARGE:
        raise RunError(f"it has {size / 1e6:.0f}M parameters")
    seed_libraries(0)
    model: nn.Module = auto.from_config(copy.deepcopy(config), **options)
    if run.model.adapter:
        model = adapters.wrap(run, model, head)
    return model.float().eval()


def examples(head: str) -> dict[str, Tensor]:
    """Three examples of unlike length."""
    draw = torch.Generator().manual_seed(0)

    def batch(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()  # [B, T]
        ids = torch.randint(5, TOKENS, mask.shape, generator=draw)
        ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = END
        return ids * mask + PAD * (1 - mask), mask

    ids, mask = batch(LENGTHS)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if head == "seq2seq":
        read, mask = batch(TARGETS)
        inputs |= {"decoder_input_ids": read, "decoder_attention_mask": mask}
    return inputs


def smaller(config: Any, head: str) -> Iterator[Any]:
    """The config with narrow layers, and as it is; each with few tokens. All layers are kept: kinds of them may take
    turns."""
    for narrow in (True, False):
        found = copy.deepcopy(config)
        try:
            for part in models.texts(found) if narrow else ():
                _narrow(part)
            yield _prepared(found, head)
        except Exception:  # a config that does not let itself be changed
            continue


def _narrow(config: Any) -> None:
    """Four heads of 16 numbers; of keys and values as many, or two where they are shared."""
    heads, shared = (models.entry(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    narrow = {"num_attention_heads": 4, "hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    narrow |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    narrow |= {f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")}
    narrow |= {"num_key_value_heads": 4 if shared == heads else 2, "moe_intermediate_size": 32}
    for name, value in narrow.items():
        if isinstance(models.entry(config, name), int):
            setattr(config, name, value)


def _prepared(config: Any, head: str) -> Any:
    """Its vocabulary and special tokens those of `examples`, its cache off as in training."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    for part in models.texts(config):
        part.vocab_size, part.use_cache = TOKENS, False
        for name, token in (("pad", PAD), ("bos", START), ("eos", END), ("decoder_start", START)):
            setattr(part, f"{name}_token_id", token)
        for name in ("decoder_vocab_size", "vocab_size_per_layer_input"):
            if models.entry(part, name) is not None:
                setattr(part, name, TOKENS)
    if head == "causal" and config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        config.is_decoder = True  # as the task `language_modeling` has it
    return config


def _near(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    """Whether numbers are the same but for rounding, as seen from the largest of them."""
    if [one is None for one in ours] != [other is None for other in theirs]:
        return False
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one is not None and other is not None]
    largest = max((float(one.abs().max()) for one, _ in pairs if one.numel()), default=0.0)
    apart = max((float((one - other).abs().max()) for one, other in pairs if one.numel()), default=0.0)
    return apart <= NEAR * largest


def _brief(error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return said if len(said) <= 120 else f"{said[:117]}..."


def _transformers() -> str:
    import transformers

    return str(transformers.__version__)


def _code_of_model(run: Run, config: Any) -> list[str]:
    """What stands for code that comes with the model: its files, or where on the Hub they are."""
    if not run.model.trust_remote_code or not getattr(config, "auto_map", None):
        return []
    files = sorted(Path(str(run.model.source)).expanduser().glob("*.py"))
    return [hashlib.sha256(each.read_bytes()).hexdigest() for each in files] or [
        f"{run.model.source}@{run.model.revision}"
    ]


def _code() -> list[str]:
    """Of what decides: this file, and what lays end to end."""
    return [hashlib.sha256(Path(str(each)).read_bytes()).hexdigest() for each in (__file__, unpadded.__file__)]
