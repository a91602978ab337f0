"""`data.padding`: whether a model's padding can be left out, found out by trying.

In: a run, and the head of its model. Out: None, or why padding is computed. The same on every machine and under every
strategy, as it depends on the model's config and the versions of libraries alone: a model of the same config, but
narrow and of few tokens, is made and run both ways before any process starts. The answer is kept in the cache.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, RunError
from lockstep.data.cache import cache_folder, kept
from lockstep.distributed.randomness import seed_libraries
from lockstep.tasks.models import adapters, models, unpadded

# Lengths of the examples that are tried together, and of what is decoded. Attention takes other ways for texts that are
# equally long, for one, and for those above `unpadded.SHORT`.
BATCHES = (
    ((11, 5, 8), (4, 13, 6)),
    ((9, 9, 9), (7, 7, 7)),
    ((10,), (6,)),
    ((1, 1), (1, 1)),
    ((1, 12, 3), (9, 1, 2)),
    ((70, 66, 81), (67, 82, 69)),
    ((72, 72), (68, 68)),
)
# Lengths of texts that share a block, for each block of a batch; a block may hold one text.
BLOCKS = (((7, 5), (5, 7)), ((12,), (12,)), ((12,), (3, 9)), ((8, 4),), ((50, 30), (80,)), ((80,), (80,)))
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")  # entries of configs, in tokens
NARROW_AND_WIDE = (4, 1000)  # windows below the length of most texts, and above that of all
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
    return kept_trial(run, head, config, tried)


def crosses(run: Run) -> str | None:
    """Why texts of one block see each other though their positions begin anew with each; None: they do not. Errors:
    `RunError` when the cache cannot be written."""
    return kept_trial(run, "causal", models.load_config(run), tried_apart)


def foresight(run: Run) -> str | None:
    """What to do about a causal language model whose logits know the tokens after them; None: they do not, or no small
    model of this config can be made. Errors: `RunError` when the cache cannot be written."""
    return kept_trial(run, "causal", models.load_config(run), tried_ahead)


def windowed(run: Run, head: str) -> bool:
    """Whether texts go end to end through attention that looks back no further than a window. Errors: `RunError`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = models.load_config(run)
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and head != "causal":  # to both sides
        return False
    inside = [models.entry(part, name) for part in models.texts(config) for name in WINDOWS]
    return any(isinstance(size, int) for size in inside) and refused(run, head) is None


def kept_trial(run: Run, head: str, config: Any, trial: Callable[[Run, str, Any], str | None]) -> str | None:
    """The answer of a trial on small models of a config, kept in the cache. Errors: `RunError` when that fails."""
    asked = [trial.__name__, run.model.attention, run.data.padding, config.to_dict(), head, run.model.adapter]
    asked += [torch.__version__, _transformers(), _code(trial), *_code_of_model(run, config)]
    key = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def make(aside: Path) -> None:
        aside.write_text(json.dumps(trial(run, head, config)))

    found: str | None = json.loads(kept(cache_folder() / "padding" / f"{key}.json", make).read_text())
    return found


def tried(run: Run, head: str, config: Any) -> str | None:
    """Compare the two ways on a small model of this config. Leaves torch's random state as it was."""
    why = ""
    with torch.random.fork_rng([]):
        for wanted in smaller(config, head):
            try:
                plain: Any = small(run, head, wanted, None)
                computed(plain, head, examples(head, *BATCHES[0]))
            except Exception as error:  # entries that do not fit each other any more
                why = _brief(error)
                continue
            if plain.get_correct_attn_implementation(None) != "sdpa":  # its own choice
                return "transformers has no attention by torch's function (sdpa) for it"
            return next((said for each in windows(wanted) if (said := differs(run, head, each)) is not None), None)
    return f"a small model of this family could not be tried ({why})"


def differs(run: Run, head: str, config: Any) -> str | None:
    """Why padding is computed, seen from a small model of this very config; None: nothing differed in any of `BATCHES`.
    A batch that the plain model does not take, such as one longer than its positions, is one that no run has."""
    plain = small(run, head, config, None)
    try:
        laid = small(run, head, config, unpadded.NAME)
    except Exception as error:
        return f"its layers do not take examples laid end to end ({_brief(error)})"
    unpadded.install(laid)
    batches = [(lengths, targets, examples(head, lengths, targets)) for lengths, targets in BATCHES]
    if "token_type_ids" in inspect.signature(type(plain).forward).parameters:  # pairs of texts
        batches += [(lengths, targets, inputs | typed(inputs)) for lengths, targets, inputs in batches[:2]]
    for lengths, targets, inputs in batches:
        try:
            wanted = computed(plain, head, inputs)
        except Exception as error:
            if inputs is batches[0][2]:
                return f"a small model with other windows could not be tried ({_brief(error)})"
            continue
        try:
            with counted(laid, (sum(lengths), sum(targets))) as blocks:
                found = computed(laid, head, inputs)
            ahead = head == "causal" and reads_ahead(laid, inputs) and not reads_ahead(plain, inputs)
        except unpadded.Cannot as error:
            return str(error)
        except Exception as error:
            return f"its layers do not take examples laid end to end ({_brief(error)})"
        if len(lengths) > 1 and not blocks:
            return "its layers do not use transformers' masks and attention functions"
        if not _near([wanted[0]], [found[0]]) or not _near(wanted[1], found[1]):
            return "laid end to end, its examples would see each other" + _of(lengths)
        if ahead:
            return "laid end to end, its tokens would see those after them" + _of(lengths)
    return None


def _of(lengths: Sequence[int]) -> str:
    """Of a batch other than the first one, its lengths: to be found in the table of families."""
    return "" if tuple(lengths) == BATCHES[0][0] else f" (texts of {', '.join(map(str, lengths))} tokens)"


def reads_ahead(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether another last token of each text changes logits before it."""
    ids, last = inputs["input_ids"], inputs["attention_mask"].sum(1, keepdim=True) - 1  # [B, T], [B, 1]
    if int(last.max()) == 0:
        return False
    before = torch.arange(ids.shape[1])[None] < last  # [B, T]
    changed = ids.scatter(1, last, 5 + (ids.gather(1, last) - 4) % (TOKENS - 5))
    with torch.no_grad():
        one, other = (model(**inputs | {"input_ids": each})[0][before] for each in (ids, changed))
    return not _near([one], [other])


def tried_ahead(run: Run, head: str, config: Any) -> str | None:
    """What to do about a config whose causal language model reads ahead; None: it does not."""
    with torch.random.fork_rng([]):
        if not _ahead(run, head, config):
            return None
        for name in ("causal", "is_decoder"):
            if models.entry(config, name) is False:
                other = copy.deepcopy(config)
                setattr(other, name, True)
                if not _ahead(run, head, other):
                    return f"set model.config.{name}: true"
    return "take a family that does not, or another task"


def _ahead(run: Run, head: str, config: Any) -> bool:
    """Whether a small model of this config, by transformers alone, reads ahead; no where none can be made."""
    for wanted in smaller(config, head):
        try:
            model = small(run, head, wanted, None)
            return any(reads_ahead(model, examples(head, *batch)) for batch in BATCHES[:2])
        except Exception:
            continue
    return False


def tried_apart(run: Run, head: str, config: Any) -> str | None:
    """Compare texts that share a block with the same texts, each in a row of its own."""
    why = ""
    attention = unpadded.NAME if refused(run, head) is None else run.model.attention
    with torch.random.fork_rng([]):
        for wanted in smaller(config, head):
            try:
                for each in windows(wanted):
                    model = small(run, head, each, attention)
                    if attention == unpadded.NAME:
                        unpadded.install(model)
                    for blocks in BLOCKS:
                        if (blocks is BLOCKS[0] or takes(model, sum(blocks[0]))) and not apart(model, blocks):
                            return "its texts see each other, or their positions"
                return None
            except Exception as error:
                why = _brief(error)
    return f"a small model of it could not be tried ({why})"


def takes(model: nn.Module, length: int) -> bool:
    """Whether a text may be that long; a model without positions for it trains on no such texts."""
    try:
        with torch.no_grad():
            model(input_ids=torch.full((1, length), TOKENS - 1))
    except Exception:
        return False
    return True


def apart(model: Any, blocks: Sequence[Sequence[int]]) -> bool:
    """Whether texts of these lengths, packed into blocks that are equally long, give the logits and gradients that each
    gives by itself."""
    width = sum(blocks[0])
    ids = torch.randint(5, TOKENS, (len(blocks), width), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(length) for length in block]) for block in blocks])
    together = model(input_ids=ids, position_ids=positions).logits
    ends = [[sum(block[: i + 1]) for i in range(len(block))] for block in blocks]
    parts = [(row, end - n, end) for row, block in enumerate(blocks) for n, end in zip(block, ends[row], strict=True)]
    alone = [model(input_ids=ids[row : row + 1, begin:end]).logits[0] for row, begin, end in parts]
    packed = [together[row, begin:end] for row, begin, end in parts]
    sides = [(torch.cat(side).detach(), gradients(model, torch.cat(side))) for side in (alone, packed)]
    return _near([sides[0][0]], [sides[1][0]]) and _near(sides[0][1], sides[1][1])


def computed(model: Any, head: str, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Logits of real tokens (or of examples), and gradients by parameter."""
    logits = model(**inputs)[0]  # or hidden states, where it has no head
    if head != "classification":
        real = inputs["decoder_attention_mask" if head == "seq2seq" else "attention_mask"].bool()
        logits = logits[real]
    return logits.detach(), gradients(model, logits)


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor | None]:
    """By parameter, of a weighted sum of logits."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel()).sin().view_as(logits)
    (logits.float() * weights).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@contextmanager
def counted(model: nn.Module, tokens: Sequence[int]) -> Iterator[list[str]]:
    """The blocks that are given examples end to end, meanwhile: [1, one of `tokens`, ...]."""
    blocks: list[str] = []

    def count(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = [value.shape[:2] for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any((1, n) in shapes for n in tokens):
            blocks.append(type(block).__name__)

    inside = [block for stack in unpadded.stacks(model) for block in stack]
    hooks = [block.register_forward_pre_hook(count, with_kwargs=True) for block in inside]
    try:
        yield blocks
    finally:
        for hook in hooks:
            hook.remove()


def small(run: Run, head: str, config: Any, attention: str | None) -> nn.Module:
    """A model of this config, its dropout off. Errors: `RunError` for one that is large."""
    import transformers

    auto = getattr(transformers, models.HEADS[head][0])
    options = {"attn_implementation": attention} if attention else {}
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(copy.deepcopy(config), **options).parameters())
    if size > LARGE:
        raise RunError(f"it has {size / 1e6:.0f}M parameters")
    transformers.logging.set_verbosity_error()
    seed_libraries(0)
    model: nn.Module = auto.from_config(copy.deepcopy(config), **options)
    if run.model.adapter:
        model = adapters.wrap(run, model, head)
    return model.float().eval()


def examples(head: str, lengths: Sequence[int], targets: Sequence[int]) -> dict[str, Tensor]:
    """Examples of these lengths, padded on the right, and what is decoded of them."""
    draw = torch.Generator().manual_seed(0)

    def batch(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()  # [B, T]
        ids = torch.randint(5, TOKENS, mask.shape, generator=draw)
        ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = END
        return ids * mask + PAD * (1 - mask), mask

    ids, mask = batch(lengths)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if head == "seq2seq":
        read, mask = batch(targets)
        inputs |= {"decoder_input_ids": read, "decoder_attention_mask": mask}
    return inputs


def typed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Examples that are pairs of texts: token types 1 from their third token on."""
    return {"token_type_ids": inputs["attention_mask"] * (torch.arange(inputs["input_ids"].shape[1]) >= 2)}


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


def windows(config: Any) -> Iterator[Any]:
    """The config, and where its attention has windows the same with narrow and with wide ones."""
    yield config
    inside = [(part, name) for part in models.texts(config) for name in WINDOWS]
    if any(isinstance(models.entry(part, name), int) for part, name in inside):
        for size in NARROW_AND_WIDE:
            other = copy.deepcopy(config)
            for part in models.texts(other):
                for name in WINDOWS:
                    if isinstance(models.entry(part, name), int):
                        setattr(part, name, size)
            yield other


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
    largest = _largest([one for one, _ in pairs])
    return _largest([one - other for one, other in pairs]) <= NEAR * largest < math.inf


def _largest(tensors: Sequence[Tensor]) -> float:
    """The largest absolute value; infinite where a number is not finite."""
    return max((float(t.abs().max().double().nan_to_num(nan=math.inf)) for t in tensors if t.numel()), default=0.0)


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


def _code(trial: Callable[..., Any]) -> list[str]:
    """Of what decides: this file, what lays end to end, and the trial's own file."""
    files = dict.fromkeys([__file__, unpadded.__file__, sys.modules[trial.__module__].__file__])
    return [hashlib.sha256(Path(str(each)).read_bytes()).hexdigest() for each in files]
