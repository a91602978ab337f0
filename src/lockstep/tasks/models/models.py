"""Models from transformers: pretrained, or from a config; and back to a folder. The tasks share this.

In: the `model` section, a tokenizer and label names. Out: a model on the CPU, the same bits in every process.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from lockstep.config.lazy import lazy
from lockstep.config.run import Run, RunError
from lockstep.config.sections import ModelSection
from lockstep.data import tokenizer as tokenizers
from lockstep.distributed.randomness import seed_libraries
from lockstep.tasks.models import config_checks, head_padding, heads, padding, storage_dtype
from lockstep.tasks.models.model_configs import (
    ModelChoice,
    check_one_save,
    entry,
    load_config,
    local_or_id,
    rejected,
    texts,
    with_architectures,
)

if TYPE_CHECKING:
    from lockstep.data import hub
    from lockstep.tasks.models import adapters, quantized, source_files, source_ties, token_rows
else:  # for a pretrained model, and to load an export
    (hub,) = lazy("lockstep.data", "hub")
    adapters, quantized, source_files = lazy("lockstep.tasks.models", "adapters", "quantized", "source_files")
    source_ties, token_rows = lazy("lockstep.tasks.models", "source_ties", "token_rows")

# Families whose positions start after the padding id, so that fewer tokens fit than positions exist.
_OFFSET_POSITIONS = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer", "mpnet")
}


def check(
    choice: ModelChoice,
    head: str = "classification",
    tokens: int | None = None,
    key: str = "data.max_length",
    **entries: Any,
) -> None:
    """Check, before any process starts, that the model can be built and has positions for `tokens` tokens.

    `tokens` (default: `data.max_length`) is set by `key`. `entries` are set in the config first. Errors: `RunError`."""
    from transformers.models.auto import modeling_auto

    section, tokens = choice.section, tokens or choice.max_length
    adapters.check(section)
    config = load_config(section)
    model_head = heads.of(head)
    if config.model_type not in getattr(modeling_auto, model_head.families) and not section.trust_remote_code:
        raise RunError(
            "LS3140",
            f"model: transformers has no {model_head.called} for the type {config.model_type!r}; "
            "choose another model.type",
        )
    if section.config or section.adapter:
        for name, value in entries.items():
            setattr(config, name, value)
        _check_buildable(section, config, head)
    if not model_head.reads_texts:
        return
    for part in texts(config):
        if "sliding_attention" in (entry(part, "layer_types") or ()) and vars(part).get("sliding_window", 0) is None:
            switch = "use_sliding_window: true and " if entry(part, "use_sliding_window") is False else ""
            raise RunError(
                "LS3141",
                f"model.config.layer_types: sliding_attention needs a window, and this {part.model_type} has "
                f"none; set model.config.{switch}sliding_window, or use full_attention",
            )
        fits = positions_of(part)
        if fits is not None and tokens > fits:
            raise RunError(
                "LS3142",
                f"{key}: {tokens} tokens, but the model has positions for {fits} only; lower it to {fits}",
            )
    _check_summary(config, model_head)
    check_block_sparse(config, tokens, key)
    _check_loading(section, config, head)
    source_files.check(section, head)
    config_checks.check(section, head)
    padding.unsupported_reason(choice, head)  # run the trial once and cache it for all processes
    config_checks.notes(section, head)


def positions_of(config: Any) -> int | None:
    """Maximum number of tokens that a model has positions for; None if unlimited. In some families positions start
    after the padding id, which may still be unknown."""
    positions = entry(config, "max_position_embeddings")
    if positions is None or positions <= 0:
        return None
    return int(positions) - ((config.pad_token_id or 0) + 1 if config.model_type in _OFFSET_POSITIONS else 0)


def most_tokens(section: ModelSection) -> int | None:
    """Maximum number of tokens that the run's model has positions for; None if unlimited, or if it cannot be read."""
    with suppress(RunError):
        return min(
            (fits for part in texts(load_config(section)) if (fits := positions_of(part)) is not None), default=None
        )
    return None


def longer(section: ModelSection, key: str, now: int, least: int | None = None) -> str:
    """Advice for texts that do not fit into the `now` tokens of the key `key`: raise it, to at least `least`, or what
    else to do where the model has no positions for more."""
    fits = most_tokens(section)
    if fits is not None and fits < (now + 1 if least is None else least):
        return f"shorten the texts, or use a model with positions for more than {fits:,} tokens"
    return f"raise {key}" if least is None else f"raise {key} to {least} or more"


def with_length_that_fits(run: Run, key: str) -> tuple[Run, list[str]]:
    """Lower the default of the length key `key` to the model's number of positions; return the run and a note if it was
    lowered. A value that the user wrote is left to `check`, which refuses it."""
    if run.wrote(key):
        return run, []
    with suppress(RunError):  # an unreadable model: `check` reports it
        name, _, inner = key.partition(".")
        section = getattr(run, name)
        length = getattr(section, inner)
        fits = most_tokens(run.model)
        if fits is not None and 2 <= fits < length:
            note = f"{key} is {fits}, because the model has positions for {fits} tokens; its default is {length}"
            return run.model_copy(update={name: section.model_copy(update={inner: fits})}), [note]
    return run, []


# Heads and families for which `from_pretrained` of transformers 5.23 zeroes the padding token's embedding, whatever the
# file holds, although training changes that row because the output shares it.
ZEROED = {("causal", "youtu"), ("masked", "funnel")}


def _check_loading(section: ModelSection, config: Any, head: str) -> None:
    """Refuse a model whose export would load with other weights than were trained. Errors: `RunError`."""
    if (head, config.model_type) in ZEROED and entry(config, "tie_word_embeddings") and not section.adapter:
        raise RunError(
            "LS3151",
            f"model: transformers sets the padding token's row to zero when it loads a {config.model_type}, and "
            "training changes that row if input and output embeddings are tied, so the export would differ from the "
            "trained model; set model.config.tie_word_embeddings=false for a model from scratch, or use another family",
        )


# Families that transformers cannot compute under autocast with float32 weights -> why.
_NO_AUTOCAST = {
    "xmod": "its adapters need inputs in the dtype of the weights",
    "deberta": "its attention fills masked scores with the minimum of float32, which is out of range in that precision",
}


def check_arithmetic(section: ModelSection, head: str, precision: str, exact: bool | str) -> None:
    """Refuse a family of `_NO_AUTOCAST` under autocast, and a family that does not support `model.attention` or
    portable arithmetic. `exact`: `strategy.exact`. Errors: `RunError`."""
    config = load_config(section)
    family = config.model_type
    _check_attention(section, config, head)
    why = _NO_AUTOCAST.get(family)
    if why and precision != "fp32" and not section.trained_in_bfloat16:
        raise RunError(
            "LS3143",
            f"precision: transformers cannot compute a {family} model in {precision} with float32 "
            f"weights: {why}; set precision: fp32, or precision: bf16 and model.dtype: bfloat16",
        )
    if exact == "portable":
        config_checks.check_portable(section, head)


def _check_buildable(section: ModelSection, config: Any, head: str) -> None:
    """Build the model on the meta device to detect inconsistent sizes before any process starts. Errors: `RunError`."""
    import transformers

    try:
        with torch.device("meta"):
            model = getattr(transformers, heads.of(head).auto).from_config(with_architectures(config))
            if section.adapter:
                adapters.wrap(section, model, head)
    except (ValueError, RuntimeError, AssertionError, TypeError, LookupError, ArithmeticError) as error:
        if "meta" in str(error):  # a model that needs memory to be built: sizes unknown
            return
        reason = rejected(error, section.config)
        raise RunError(
            "LS3144", f"model.config: transformers cannot build this {config.model_type}: {reason}"
        ) from error


def _check_attention(section: ModelSection, config: Any, head: str) -> None:
    """Refuse a `model.attention` that the family does not support. Those of GPUs and of the Hub are not tried. Errors:
    `RunError`."""
    import transformers

    if section.attention not in ("sdpa", "flex_attention"):
        return
    auto = getattr(transformers, heads.of(head).auto)
    options = {"trust_remote_code": section.trust_remote_code, "attn_implementation": section.attention}
    try:
        with torch.device("meta"):
            auto.from_config(with_architectures(config), **options)
    except (ImportError, ValueError) as error:
        if "attention" in str(error):
            raise RunError(
                "LS3138",
                f"model.attention: transformers has no {section.attention} for a model of the type "
                f"{config.model_type!r}; leave model.attention out for the model's own choice",
            ) from error


def sequence_classifier(
    choice: ModelChoice, tokenizer: Any, labels: list[str], empty: bool = False, problem: str | None = None
) -> nn.Module:
    """Build a sequence classifier; weights missing from the source (the head) are drawn from the seed.

    `empty`: on the meta device. `problem`: transformers' `problem_type`."""
    problem_type = {} if problem is None else {"problem_type": problem}
    return build(choice, "classification", tokenizer, empty, **named(labels), **problem_type)


def named(labels: list[str]) -> dict[str, Any]:
    """Config entries that hold the label names."""
    names = dict(enumerate(labels))
    return {"num_labels": len(labels), "id2label": names, "label2id": {name: code for code, name in names.items()}}


def build(choice: ModelChoice, head: str, tokenizer: Any, empty: bool = False, **entries: Any) -> nn.Module:
    """Build a model with the Auto class of `head`; weights missing from the source are drawn from the seed.

    `tokenizer`: None for a model that reads no texts. `entries`: config entries that the task sets. `empty`: build on
    the meta device, without memory.
    """
    import transformers

    from lockstep.tasks.models import masks, unpadded  # with transformers' models

    section = choice.section
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    auto = getattr(transformers, heads.of(head).auto)
    config = with_architectures(load_config(section))
    if tokenizer is not None:
        _prepare(config, tokenizer, section.source is not None)
    laid = padding.unsupported_reason(choice, head) is None
    options: dict[str, Any] = {"attn_implementation": section.attention} if section.attention else {}
    options |= {"attn_implementation": unpadded.NAME} if laid else {}
    options |= storage_dtype.loaded_in(section)
    seed_libraries(choice.seed)
    if section.type is not None and tokenizer is not None:
        for part in texts(config):
            part.vocab_size = tokenizers.embeddings_of(section, tokenizer)
            if entry(part, "decoder_vocab_size") is not None:  # Marian, whose decoder may be a separate model
                part.decoder_vocab_size = part.vocab_size
            for name in ("bos_token_id", "eos_token_id"):
                with suppress(StrictDataclassError):  # a family that requires one keeps its own
                    setattr(part, name, getattr(tokenizer, name))
        for part in texts(config)[1:]:
            if config.is_encoder_decoder and part.bos_token_id is None:  # T5Gemma's decoder starts from it
                part.bos_token_id = tokenizer.pad_token_id
        if config.is_encoder_decoder and config.eos_token_id is None:  # BART's classifier reads at the text's end
            config.eos_token_id = tokenizer.sep_token_id
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:  # T5 from scratch
        config.decoder_start_token_id = config.pad_token_id
    for name, value in entries.items():
        setattr(config, name, value)
    if section.type is not None or empty:
        with torch.device("meta" if empty else "cpu"):
            model = auto.from_config(config, trust_remote_code=section.trust_remote_code, **options)
        if section.source is not None:
            source_ties.apply(section, model)
    else:
        model = _pretrained(section, head, auto, config, options)
    settle_block_sparse(model)
    if section.adapter:
        with torch.device("meta" if empty else "cpu"):
            model = adapters.wrap(section, model, head)
    seeds_from_torch(model)
    if laid:
        unpadded.install(model)
    masks.prepare(model)
    model = storage_dtype.cast_weights(section, model)
    head_padding.install(model)
    return model


def _pretrained(section: ModelSection, head: str, auto: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """Load the model with `from_pretrained`. Errors: `RunError`."""
    with hub.downloading(local_or_id(section), "model"), hub.reading_weights(str(section.source)):
        model, info = auto.from_pretrained(
            local_or_id(section),
            config=config,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            ignore_mismatched_sizes=True,  # a head for other labels is reinitialized
            output_loading_info=True,
            **options,
        )
    source_files.check_loaded(section, head, model, info)
    source_ties.check(section, model, auto)
    freeze_as_from_config(model, auto)
    return model


def _prepare(config: Any, tokenizer: Any, pretrained: bool) -> None:
    """Set the padding token and disable features unused in training. Errors: `RunError` if the padding token has no
    embedding."""
    for part in texts(config):
        if pretrained:
            token_rows.check_padding(entry(part, "vocab_size"), tokenizer)
        part.pad_token_id = tokenizer.pad_token_id
        if hasattr(part, "use_cache"):  # a cache costs memory and may change bits; `save` switches it on again
            part.use_cache = False
        if entry(part, config_checks.ROUTER_LOGITS):  # their loss is refused or zero, and generation fails with them
            setattr(part, config_checks.ROUTER_LOGITS, False)


def freeze_as_from_config(model: Any, auto: Any) -> None:
    """Freeze the parameters that a model built from the config has frozen. `from_pretrained` unfreezes them, so
    Marian's computed positions, which no export contains, would receive weight decay."""
    if not type(model).__module__.startswith("transformers."):  # code from the Hub may need memory to be built
        return
    with torch.device("meta"):
        fresh = auto.from_config(model.config)
    trained = {name: parameter.requires_grad for name, parameter in fresh.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        if not trained.get(name, True):
            parameter.requires_grad_(False)


def seeds_from_torch(model: nn.Module) -> None:
    """Draw Reformer's dropout seeds from torch's generator, which is seeded for every micro-batch. Reformer itself
    seeds each layer from the operating system so that backward can redraw the same dropout."""

    def draw(layer: Any, name: str) -> None:
        seed = int(torch.randint(2**62, ()))
        setattr(layer, name, seed)
        torch.manual_seed(seed)

    for layer in model.modules():
        if type(layer).__name__ == "ReformerLayer":
            for name in ("attention_seed", "feed_forward_seed"):
                setattr(layer, f"_init_{name}", partial(draw, layer, name))


def to_fill(section: ModelSection, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose weights are all loaded next. Draws none of them, for a model from a config."""
    if section.type is None:
        return build()
    with no_init_weights():
        model = build()
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
    return model


def save(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    folder: Path,
    section: ModelSection | None = None,
    template: str | None = None,
) -> None:
    """Write config, weights and tokenizer so that `from_pretrained` loads them. If `section` has an adapter, its
    `export` decides what is written.

    `template`: the chat template used in training, in place of the tokenizer's."""
    plain = {name: tensor.cpu() for name, tensor in weights.items()}
    model.load_state_dict(plain)
    for part in texts(model.config):
        if getattr(part, "use_cache", None) is False:
            part.use_cache = True  # disabled only in training
    with _no_import_of_deepspeed():
        if section is not None and section.adapter:
            adapters.save(section, model, folder, str(load_config(section).dtype).removeprefix("torch."))
        else:
            model.save_pretrained(folder)  # type: ignore[operator]
    if tokenizer is None:
        return
    if template is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    tokenizers.save(tokenizer, folder)


def stop_at(model: nn.Module, ends: Sequence[int]) -> None:
    """Let `generate` of the saved model stop at these tokens, too; a model that names them stays as it is."""
    for module in model.modules():  # peft wraps a model
        if (config := vars(module).get("generation_config")) is None:
            continue
        own = config.eos_token_id
        known = [*own] if isinstance(own, list | tuple) else [own] * (own is not None)
        if further := [token for token in ends if token not in known]:
            every = [*known, *further]
            config.eos_token_id = every if len(every) > 1 else every[0]


@contextmanager
def _no_import_of_deepspeed() -> Iterator[None]:
    """Keep Accelerate from importing DeepSpeed (1 to 2 s) while transformers saves a model, which it does to check
    whether DeepSpeed wraps the model. Does nothing if DeepSpeed is already imported."""
    other = sys.modules.get("accelerate.utils.other")
    if "deepspeed" in sys.modules or not hasattr(other, "is_deepspeed_available"):
        yield
    else:
        with mock.patch.object(other, "is_deepspeed_available", return_value=False):
            yield


def exported(head: str, folder: Path, section: ModelSection) -> tuple[Any, Any]:
    """Load an exported model, ready for inference, and its tokenizer. Errors: `RunError`."""
    model = exported_model(head, folder, section)
    with _loading(folder):
        tokenizer = tokenizers.load(str(folder), section.trust_remote_code)
    token_rows.guard(model, tokenizer)
    return model, tokenizer


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Convert any error of a library that loads an export to `RunError`."""
    try:
        yield
    except (RunError, MemoryError):
        raise
    except Exception as error:
        raise RunError(
            "LS3430",
            f"{folder}: the model cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:200]}. "
            "Restore its files, or write it again (of a run: remove the export and run lockstep train again)",
        ) from error


def exported_model(head: str, folder: Path, section: ModelSection) -> Any:
    """Load an exported model in float32 and evaluation mode. Errors: `RunError`."""
    with _loading(folder):
        return _exported_model(head, folder, section)


def _exported_model(head: str, folder: Path, section: ModelSection) -> Any:
    """Load the exported model as `exported_model` does, but raise the libraries' own errors."""
    import transformers

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    check_one_save(folder, "the export")
    options: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    adapter = adapters.is_adapter(folder)
    source = local_or_id(section) if adapter else folder
    auto = getattr(transformers, heads.of(head).auto)
    if adapter:
        options |= storage_dtype.loaded_in(section)  # same frozen weights as in training
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # both are checked below
    model, info = auto.from_pretrained(source, config=config, **options)
    if adapter:
        source_files.check_loaded(section, head, model, info)
        model = adapters.load_onto(model, folder, trainable=section.quantization is not None)
    else:
        source_files.check_whole(folder, model, info)
    model = model.float().eval()
    if adapter and section.quantization is not None:
        quantized.pack(section, model)  # packs only weights without a gradient
    return model


# -- BigBird's attention ---------------------------------------------------------------------------------------------

# transformers switches from `block_sparse` to `original_full` at the first short text, permanently, within a forward,
# and draws random weights for new, unused layers. Dropout then depends on the texts that a process has read before.
_BLOCK_SPARSE = ("big_bird", "bigbird_pegasus")


def check_block_sparse(config: Any, tokens: int, key: str) -> None:
    """Refuse a BigBird model whose attention only some texts of up to `tokens` tokens would switch. `key` sets
    `tokens`. Errors: `RunError`."""
    if config.model_type not in _BLOCK_SPARSE or config.attention_type != "block_sparse":
        return
    shortest = (5 + 2 * config.num_random_blocks) * config.block_size
    if tokens > shortest:
        raise RunError(
            "LS3080",
            f"model: this {config.model_type} permanently switches its attention from block_sparse to original_full "
            f"at the first batch of texts of at most {shortest} tokens, so results would depend on earlier batches; "
            f"set model.config.attention_type to original_full, or {key} to {shortest} or less",
        )


def settle_block_sparse(model: nn.Module) -> None:
    """Switch the attention to `original_full` now, in place; `check_block_sparse` only admits texts that switch it."""
    if getattr(getattr(model, "config", None), "model_type", None) not in _BLOCK_SPARSE:
        return
    with torch.random.fork_rng(devices=[]):
        for module in model.modules():
            if callable(switch := getattr(module, "set_attention_type", None)):
                switch("original_full")  # idempotent


# -- special tokens that mark positions in a text --------------------------------------------------------------------

# Encoder-decoder families whose classifiers read at the last end token and need the same number of them in each text.
_CLASSIFIED_AT_END = ("bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "t5", "umt5")
_SUMMARIZED = ("flaubert", "xlm", "xlnet")  # classify a summary of a text's vectors (model.config.summary_type)
_SUMMARY_AT_END = ("last", "cls_index")  # of which the second is the last place where no index is passed
_SEPARATORS = 3  # Longformer: one after the question, one before the text, one after it


def check_tokenizer(section: ModelSection, head: str, tokenizer: Any) -> None:
    """Refuse a tokenizer whose special tokens do not match what the model expects. Errors: `RunError`."""
    if head == heads.CLASSIFICATION:
        _check_end(section, tokenizer)
    if head == heads.QUESTION_ANSWERING:
        _check_separators(section, tokenizer)


def _check_end(section: ModelSection, tokenizer: Any) -> None:
    config = load_config(section)
    if config.model_type not in _CLASSIFIED_AT_END:
        return
    end = config.eos_token_id
    if section.type is not None:  # from scratch: `build` takes the tokenizer's ids
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is not None and end == tokenizer.pad_token_id:
        raise RunError(
            "LS3190",
            f"tokenizer: a {config.model_type} classifies at the end token, and this tokenizer pads with its "
            f"end token {tokenizer.pad_token!r}, so padding would be read as the end of a text; add a "
            "separate padding token, set tokenizer.train, or use an encoder such as bert",
        )


def _check_separators(section: ModelSection, tokenizer: Any) -> None:
    config = load_config(section)
    if config.model_type != "longformer":
        return
    around = tokenizer("", "")["input_ids"].count(config.sep_token_id)
    if around != _SEPARATORS:
        raise RunError(
            "LS3191",
            f"tokenizer: a longformer finds the question by {_SEPARATORS} tokens with the id "
            f"{config.sep_token_id} (model.config.sep_token_id) in each example, but this tokenizer writes "
            f"{around} around a question and its text; use a tokenizer that writes <s> question </s></s> text "
            "</s>, as allenai/longformer-base-4096 does, or another family",
        )


def check_encoded(section: ModelSection, head: str, tokenizer: Any, texts: int) -> None:
    """Refuse a tokenizer that leaves out the end token at which a family classifies, and token types that the model
    does not have. `texts`: 1, or 2 for pairs. Errors: `RunError`."""
    config, encoded = load_config(section), tokenizer(*("a",) * texts)
    ids = (tokenizer.eos_token_id, tokenizer.sep_token_id) if section.type is not None else (config.eos_token_id,)
    end = next((each for each in ids if each is not None), None)
    reads_end = head == heads.CLASSIFICATION and config.model_type in _CLASSIFIED_AT_END
    if reads_end and end is not None and end not in encoded["input_ids"]:
        raise RunError(
            "LS3192",
            f"tokenizer: a {config.model_type} classifies at the end token, and this tokenizer ends no text with the "
            f"id {end} (model.config.eos_token_id); use a tokenizer that does, as that of facebook/bart-base, or an "
            "encoder such as bert",
        )
    types = encoded.get("token_type_ids", []) if "token_type_ids" in tokenizer.model_input_names else []
    known = entry(config, "type_vocab_size")
    unknown = texts == 2 and isinstance(known, int) and max(types, default=0) >= known
    if unknown and padding.kept_trial(section, head, config, config_checks.rejected_types) is not None:
        raise RunError(
            "LS3193",
            f"tokenizer: the second text of a pair has the token type {max(types)}, and this {config.model_type} has "
            f"{known} (model.config.type_vocab_size); remove token_type_ids from model_input_names in the "
            "tokenizer's tokenizer_config.json",
        )


def distinguishes_types(section: ModelSection, tokenizer: Any) -> bool:
    """Whether a model may compute other outputs with the token types that the tokenizer writes than without any: GPT-2
    and XLNet do, which name no `type_vocab_size`. Families that name one read missing types as the first type."""
    if "token_type_ids" not in tokenizer.model_input_names:
        return False
    return entry(load_config(section), "type_vocab_size") is None or any(tokenizers.TokenTypes.of(tokenizer).written)


def gives_types(section: ModelSection, head: str, tokenizer: Any) -> bool:
    """Whether transformers' `Trainer` gives a model token types of single texts that change what it computes."""
    config = load_config(section)
    if not distinguishes_types(section, tokenizer) or not takes_types(config, head):
        return False
    known = entry(config, "type_vocab_size")
    return not isinstance(known, int) or max(tokenizers.TokenTypes.of(tokenizer).written) < known


def takes_types(config: Any, head: str, unknown: bool = False) -> bool:
    """Whether the model of a config has an argument `token_type_ids`. `unknown`: for models of other code."""
    import transformers
    from transformers.models.auto import modeling_auto

    families = getattr(modeling_auto, heads.of(head).families)
    if not type(config).__module__.startswith("transformers.") or config.model_type not in families:
        return unknown
    names = families[config.model_type]
    classes = [getattr(transformers, name) for name in ((names,) if isinstance(names, str) else names)]
    return any("token_type_ids" in inspect.signature(each.forward).parameters for each in classes)


def pads_left(config: Any, head: str) -> bool:
    """Whether a model classifies at the last place of the batch, padding or not: XLNet, whose tokenizer writes the
    token for it at the end of a text and pads on the left."""
    return head == heads.CLASSIFICATION and config.model_type == "xlnet" and config.summary_type in _SUMMARY_AT_END


def _check_summary(config: Any, head: str) -> None:
    if head != heads.CLASSIFICATION or config.model_type not in _SUMMARIZED:
        return
    kind = config.summary_type
    if kind != "first" and not pads_left(config, head):
        expected = "last or first" if config.model_type == "xlnet" else "first"
        raise RunError(
            "LS3194",
            f"model.config.summary_type: with {kind}, a {config.model_type} computes other outputs for a text beside "
            f"longer ones, because it reads their padding, or fails; expected {expected}",
        )


def pads(model: Any, head: str, tokenizer: Any) -> dict[str, int]:
    """The inputs that an exported model reads of what its tokenizer writes -> value at padding."""
    types = {"token_type_ids": 0} if takes_types(model.config, head, True) else {}
    return {"input_ids": int(tokenizer.pad_token_id)} | types
