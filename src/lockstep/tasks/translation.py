"""Translation with any model that `AutoModelForSeq2SeqLM` knows, pretrained or from scratch with its own tokenizers.

In: pairs of texts: a `translation` column as the Hub has it, or two columns. Out: loss and perplexity per target token,
BLEU and chrF (by sacrebleu) of generated translations, all from sums.

BLEU and chrF are functions of sums: sacrebleu's counts of each sentence are added up, also over ranks, and give the
scores of the whole corpus. They need the extra `lockstep-train[translation]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection, ModelSection, Section
from lockstep.data import lm_documents, source, tokenizer, usable_rows
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.batch import IGNORED, MicroBatch, Sums
from lockstep.data.stream import Stream
from lockstep.data.token_checks import Limit
from lockstep.tasks import own_metrics
from lockstep.tasks.models import heads
from lockstep.tasks.own_metrics import listed
from lockstep.tasks.per_token import LossChunk, TokenLosses
from lockstep.tasks.task import Forward, Generate, Generates, GivesPredictions, Predicts, Streams
from lockstep.tasks.text_task import Arrays, Encoder, TextData

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor

    from lockstep.tasks.models.inference import Decoding
    from lockstep.tasks.models.model_configs import ModelChoice


PAIR = "translation"  # the Hub's column of {language: text}


class WritingOptions(Section):
    """Keys of tasks that generate one text from another."""

    source: str = Field("source", description="column of the source text, or its language in a translation column")
    target: str = Field("target", description="column of the target text, or its language in a translation column")
    prefix: str = Field("", description="prefix of every source text, as T5 needs it")
    tokenizers: Literal["shared", "separate"] = Field(
        "shared", description="number of trained tokenizers: one for both languages, or one for each (marian)"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="label smoothing of the training loss")
    loss_chunk: LossChunk = None
    target_length: int | None = Field(
        None, ge=1, description="maximum number of tokens of a target and of a generated text; default: data.max_length"
    )
    beams: int = Field(1, ge=1, description="beams of the search that generates texts; 1: greedy")
    samples: int = Field(3, ge=0, description="texts shown after each evaluation, with the generated ones")

    @property
    def text_columns(self) -> dict[str, str]:
        """Key of the run file -> column name, or language in a `translation` column."""
        return {"task.source": self.source, "task.target": self.target}


def tokenizers(
    choice: tokenizer.TokenizerChoice, train: Dataset | Stream, hashed: str, options: WritingOptions
) -> Path:
    """Prepare the tokenizers of sources and targets and return their folder. The caller holds the lock. `hashed`: hash
    of the texts. Errors: `RunError`."""

    def batches(*columns: str) -> Iterator[list[str]]:
        def of(some: Dataset) -> Iterator[list[str]]:
            for start in range(0, len(some), 1000):
                rows = some[start : start + 1000]
                yield [text for column in columns for text in rows[column]]

        return train.texts(of) if isinstance(train, Stream) else of(train)

    targets = tokenizer.of_targets(choice)
    if targets is not None:  # the model was trained with two tokenizers; overrides task.tokenizers
        return tokenizer.pair(tokenizer.prepare(choice, batches("source"), hashed), targets)
    if options.tokenizers == "shared":
        return tokenizer.prepare(choice, batches("source", "target"), hashed, generative=True)
    if choice.section.train is None:
        raise RunError(
            "LS3372",
            "task.tokenizers: separate tokenizers are either trained (set tokenizer.train) or come with the "
            f"model, the second in its folder {tokenizer.TARGET}/; "
            f"{choice.source or 'a new model'} has no such folder; remove "
            "task.tokenizers",
        )
    trained = partial(tokenizer.prepare, choice, generative=True)
    sources = trained(batches("source"), f"{hashed} source")
    return tokenizer.pair(sources, trained(batches("target"), f"{hashed} target", of_target=True))


def target_tokenizer(section: ModelSection, folder: Path, shared: Any) -> Any:
    """The target tokenizer in the folder of `tokenizers`, or `shared` if there is none."""
    target_folder = folder / tokenizer.TARGET
    return tokenizer.load(str(target_folder), section.trust_remote_code) if target_folder.is_dir() else shared


def most(data: DataSection, options: WritingOptions) -> int:
    """Maximum number of tokens of a target."""
    return options.target_length or data.max_length


SIZES = {"bleu": 10, "chrf": 18}  # lengths, matches and totals of 1- to 4-grams; three counts of 1- to 6-grams


def check(tokenizer: str) -> None:
    """Check that sacrebleu and the selected tokenizer are installed. Errors: `RunError`."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise RunError(
            "LS3373",
            "task.bleu: sacrebleu is not installed: pip install 'lockstep-train[translation]', or set task.bleu=false",
        )
    from sacrebleu.metrics.bleu import BLEU

    if tokenizer not in BLEU.TOKENIZERS:
        raise RunError(
            "LS3374",
            f"task.bleu_tokenizer: unknown tokenizer {tokenizer!r}; sacrebleu has {', '.join(BLEU.TOKENIZERS)}",
        )
    try:
        BLEU(tokenize=tokenizer)
    except (ImportError, RuntimeError, OSError) as error:  # some tokenizers need extra packages or models
        raise RunError("LS3375", f"task.bleu_tokenizer: {tokenizer}: {' '.join(str(error).split())}") from error


class Overlap:
    """Statistics of BLEU and chrF2 with sacrebleu's defaults, except BLEU's tokenizer."""

    names = tuple(SIZES)  # of the sums
    scored = ("bleu", "chrf")

    def __init__(self, tokenizer: str) -> None:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        self._metrics: dict[str, Any] = {"bleu": BLEU(tokenize=tokenizer, force=True), "chrf": CHRF()}

    def sums(self, written: list[str], references: list[str]) -> dict[str, np.ndarray]:
        """Counts over these sentences: int64, sizes as in `SIZES`."""
        counts = {name: np.zeros(size, dtype=np.int64) for name, size in SIZES.items()}
        for name, metric in self._metrics.items() if written else ():
            counts[name] += np.sum(metric._extract_corpus_statistics(written, [references]), axis=0, dtype=np.int64)
        return counts

    def scores(self, sums: Sums) -> dict[str, float]:
        """BLEU and chrF2, from 0 to 100; empty if `sums` has no counts."""
        return {
            name: float(metric._compute_score_from_stats([int(count) for count in sums[name]]).score)
            for name, metric in self._metrics.items()
            if name in sums
        }


_WORDS = "by_words"


class TranslationOptions(WritingOptions):
    """The task's own keys in the run file."""

    bleu: bool = Field(True, description="generate translations at each evaluation, and score them by BLEU and chrF")
    bleu_tokenizer: str = Field("13a", description="sacrebleu's tokenizer: 13a, intl, zh, ja-mecab, char, ...")


class Translation(TokenLosses, Streams, Predicts, Generates, GivesPredictions):
    """Generate one text from another."""

    Options: ClassVar[type[BaseModel]] = TranslationOptions
    head = heads.SEQ2SEQ
    greedy_by: ClassVar[str] = "set task.beams=1, or switch generation off (task.samples=0, task.bleu=false)"
    column_keys = ("source", "target")
    default_model = "google-t5/t5-small"
    small_model = "marian"
    cache_name = ("translation",)
    within = PAIR
    row_is_example = True
    pipeline = "translation"
    t5_prefix: ClassVar[str] = "translate {source} to {target}: "
    language_keys: ClassVar[tuple[str, ...]] = ("source", "target")
    plain_columns: ClassVar[Mapping[str, str]] = {"source": "source", "target": "target"}
    display_keys: ClassVar[tuple[str, ...]] = ("bleu", "bleu_tokenizer", "beams", "samples")
    input_keys = ("source",)
    answer_name: ClassVar[str] = "translation"
    metric_inputs = ("written",)
    metric_names: tuple[str, ...] = ("accuracy", "perplexity", "bleu", "chrf")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def overlap_of(cls, options: Any) -> Any:
        """Scorer of generated texts with methods `sums` and `scores`, or None. Errors: `RunError`."""
        if options.bleu:
            check(options.bleu_tokenizer)
        return Overlap(options.bleu_tokenizer) if options.bleu else None

    def prepare(self) -> Prepared:
        self.overlap_of(self.options)  # checks sacrebleu's tokenizer before reading data
        return super().prepare()

    @classmethod
    def target_columns(cls, options: WritingOptions) -> list[str]:
        return [options.target]

    @classmethod
    def valid_rows(cls, rows: Dataset, options: WritingOptions, split: str, name: str, drop: bool) -> Dataset:
        """Both sides as columns `source` and `target`. Errors: `RunError`."""
        sides = {"source": options.source, "target": options.target}
        if PAIR in rows.column_names and not {options.source, options.target} <= set(rows.column_names):
            rows = rows.select_columns([PAIR]).flatten()
            languages = [column.removeprefix(f"{PAIR}.") for column in rows.column_names]
            for key, language in sides.items():
                if language not in languages:
                    raise RunError(
                        "LS3370",
                        f"task.{key}: the {split} split of {name} has no language {language!r}; it has "
                        f"{', '.join(languages)}",
                    )
            sides = {key: f"{PAIR}.{language}" for key, language in sides.items()}
        rows = usable_rows.texts(rows, {f"task.{key}": column for key, column in sides.items()}, split, name, drop)
        if options.source == options.target:
            raise RunError(
                "LS3371", f"task.target: {options.target!r} is also task.source; name the column of translations"
            )
        selection = rows.select_columns([*sides.values(), *(c for c in rows.column_names if c == source.SOURCE)])
        return selection.rename_columns({column: key for key, column in sides.items() if column != key})

    @classmethod
    def dedup_columns(cls, options: WritingOptions) -> tuple[list[str], list[str]]:
        return ["source", "target"], []

    def prepare_tokenizer(self, data: TextData, hashed: str) -> Path:
        choice = tokenizer.TokenizerChoice.of(self.run)
        if data.rows is None:
            return tokenizers(choice, data.splits["train"], hashed, self.options)
        content = data.rows.content if self.run.tokenizer.train else ""
        return tokenizers(choice, data.rows, content, self.options)

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        _check_model(self.model_choice, self.run.data, self.options, folder)

    def tokenizers(self, folder: Path, tok: Any) -> dict[str, Any]:
        return {"input_ids": tok, "target_ids": target_tokenizer(self.run.model, folder, tok)}

    def limits(self, read_by: Mapping[str, Any]) -> dict[str, Limit]:
        key = "data.max_length" if self.options.target_length is None else "task.target_length"
        special = read_by["target_ids"].num_special_tokens_to_add(pair=False)
        return super().limits(read_by) | {"target_ids": Limit(key, most(self.run.data, self.options), special)}

    @classmethod
    def side_columns(cls, options: Any, side: str) -> list[str]:
        return ["source" if side == "input_ids" else "target"]

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        return [self.run.data.max_length, self.options.prefix, self.options.target_length]

    def encoder(self, folder: str, labels: Any, split: str, name: str) -> tuple[Encoder, Features]:
        """Return the function that tokenizes pairs, and the features of its output."""
        import datasets

        options = self.options
        sources: Any = tokenizer.load(folder, self.run.model.trust_remote_code)
        targets = target_tokenizer(self.run.model, Path(folder), sources)
        numbers = datasets.List(datasets.Value("int32"))
        text = datasets.Value("string")
        features = datasets.Features({"input_ids": numbers, "target_ids": numbers, "reference": text})
        limit = {"truncation": True, "max_length": self.run.data.max_length, "return_attention_mask": False}

        def closed(rows: list[list[int]], known: Any) -> list[list[int]]:
            """Give an empty target its end token, so that there is something to learn."""
            return [row or [lm_documents.end_or_padding(known)] for row in rows]

        def encoder(rows: dict[str, list]) -> dict[str, list]:
            source_ids = sources([options.prefix + text for text in rows["source"]], **limit)["input_ids"]
            target_ids = targets(text_target=rows["target"], **limit | {"max_length": most(self.run.data, options)})[
                "input_ids"
            ]
            ids = {"input_ids": closed(source_ids, sources), "target_ids": closed(target_ids, targets)}
            return ids | {"reference": rows["target"]}

        return encoder, features

    def idle_keys(self, facts: Mapping[str, Any]) -> list[str]:
        unused = self.run.task.options.get("bleu") is False
        return ["task.bleu_tokenizer has no effect with task.bleu: false"] if unused else []

    # -- in every process --------------------------------------------------------------------------------------------

    def open(self, prepared: Prepared) -> None:
        from lockstep.tasks.models import model_configs

        super().open(prepared)
        self.target_tokenizer = target_tokenizer(self.run.model, Path(self.prepared.tokenizer), self.tokenizer)
        self.entries = _entries(self.run.model, self.tokenizer, self.target_tokenizer)
        family = model_configs.load_config(self.run.model).model_type
        self.masks_targets = self.padded_because is None or family in model_configs.NEEDS_DECODER_MASK
        self.overlap = self.overlap_of(self.options)
        self.smoothing = self.options.label_smoothing

    @property
    def config_entries(self) -> dict[str, Any]:
        return self.entries

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        """Teacher forcing: decoder inputs are the start token and the targets shifted by one."""
        target_ids, real = columns.ragged("target_ids").padded(rows, int(self.target_tokenizer.pad_token_id))  # [B, T]
        read = np.roll(target_ids, 1, axis=1)
        read[:, 0] = self.entries["decoder_start_token_id"]
        inputs = self.padded_texts(columns, rows) | {"decoder_input_ids": read}  # [B, S]
        if self.masks_targets:
            inputs["decoder_attention_mask"] = real
        return inputs, np.where(real == 1, target_ids, IGNORED)

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return int(columns.ragged("target_ids").lengths[rows].sum())

    def score_texts(self, generate: Generate, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        import torch

        if self.overlap is None and not self.per_example_outputs:
            return {}
        tokens = generate(_source_inputs(batch), self._decoding())
        gathered = {"written": tokens.int()} if self.per_example_outputs else {}  # same width in every batch
        if self.overlap is None:
            return gathered
        overlaps = self._overlaps(self._written(tokens)[: len(rows)], columns.texts("reference", rows))
        sums = {name: torch.from_numpy(counts).to(batch.targets.device).double() for name, counts in overlaps.items()}
        return gathered | sums

    def _overlaps(self, written: list[str], references: list[str]) -> dict[str, np.ndarray]:
        """Sums of text scores, binned by the words of the references: [bins, ...] each."""
        words = [len(text.split()) for text in references]
        place = own_metrics.bin_of(words)
        of_bins = [
            self.overlap.sums(*([texts[i] for i in np.flatnonzero(place == b)] for texts in (written, references)))
            for b in range(len(own_metrics.BINS))
        ]
        return {_WORDS: own_metrics.binned(words)} | {
            name: np.stack([of[name] for of in of_bins]) for name in of_bins[0]
        }

    def tables(self, sums: Sums) -> dict[str, Any]:
        """Text scores by the number of words of the references."""
        if self.overlap is None or _WORDS not in sums:
            return {}

        def score(name: str, b: int) -> float:
            return float(self.overlap.scores({key: sums[key][b] for key in self.overlap.names})[name])

        lines = {name: own_metrics.curve(sums[_WORDS], partial(score, name)) for name in self.overlap.scored}
        return {"plots": [{"title": ", ".join(lines), "x": "words of the reference", "lines": lines}]}

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Generated and reference texts: [N] each."""
        return listed(self._written(sums["written"])), listed(columns.texts("reference", rows))

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        return listed(["a generated text", "another one", ""]), listed(["a reference text", "another", "x"])

    def metrics(self, sums: Sums) -> dict[str, float]:
        if self.overlap is None or _WORDS not in sums:
            return super().metrics(sums)
        return super().metrics(sums) | self.overlap.scores({name: sums[name].sum(0) for name in self.overlap.names})

    def score_names(self) -> tuple[str, ...] | None:
        overlap = self.overlap_of(self.options)
        written = () if overlap is None else overlap.scored
        return ("loss", "accuracy", "perplexity", *written) if self.built_in() else None

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        written = self._written(generate(_source_inputs(batch), self._decoding()))
        samples = zip(self.decoded(batch.inputs["input_ids"]), written, columns.texts("reference", rows), strict=True)
        return [{"source": source, "written": text, "reference": reference} for source, text, reference in samples]

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """The source text without the task prefix, which `predict` adds itself."""
        text, prefix = super().sample_input(sample), self.options.prefix
        ids = self.tokenizer(prefix, add_special_tokens=False)["input_ids"] if prefix else []
        prefixes = (prefix.strip(), str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip())
        return next((text.removeprefix(each) for each in prefixes if text.startswith(each)), text).strip()

    @property
    def usage(self) -> str:
        """Python code for the model card; transformers no longer has a translation pipeline."""
        target = 'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_REPO")\n'
        written, longest = "tokenizer", most(self.run.data, self.options)
        if self.target_tokenizer is not self.tokenizer:
            target += 'targets = AutoTokenizer.from_pretrained("PATH_OR_REPO", subfolder="target")\n'
            written = "targets"
        return (
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
            f'{target}model = AutoModelForSeq2SeqLM.from_pretrained("PATH_OR_REPO")\n'
            f'ids = tokenizer("{self.options.prefix}some text", return_tensors="pt")["input_ids"]\n'
            f"tokens = model.generate(ids, num_beams={self.options.beams}, max_new_tokens={longest})\n"
            f"{written}.decode(tokens[0], skip_special_tokens=True)"
        )

    def decodes_greedily(self) -> bool:
        options = self.options
        return options.beams == 1 or not (options.samples or self.overlap_of(options) or self.run.metrics)

    def _decoding(self) -> Decoding:
        from lockstep.tasks.models.inference import Decoding

        pad, end = int(self.target_tokenizer.pad_token_id), lm_documents.end_of(self.target_tokenizer)
        start = int(self.entries["decoder_start_token_id"])
        return Decoding(most(self.run.data, self.options), pad, end, start, self.options.beams)

    def _written(self, tokens: Tensor) -> list[str]:
        texts = self.target_tokenizer.batch_decode(tokens.tolist(), skip_special_tokens=True)
        return [text.strip() for text in texts]

    def predict(self, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield the generated text as `translation`."""
        from lockstep.tasks.models import inference, models
        from lockstep.tasks.models.inference import Decoding, by_transformers

        options = self.options
        model, sources = models.exported(self.head, folder, self.run.model)
        targets = target_tokenizer(self.run.model, folder, sources)
        limit, start = self.run.data.max_length, model.config.decoder_start_token_id
        how = Decoding(
            most(self.run.data, options), targets.pad_token_id, lm_documents.end_of(targets), start, options.beams
        )

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            read = [sources(options.prefix + row[0], truncation=True, max_length=limit) for row in rows]
            tokens = by_transformers(model, inference.padded(read, {"input_ids": int(sources.pad_token_id)}), how)
            written = targets.batch_decode(tokens.tolist(), skip_special_tokens=True)
            return [{self.answer_name: text.strip()} for text in written]

        return inference.answers(rows, answer)

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        super().write(folder, weights)
        if self.target_tokenizer is not self.tokenizer:
            tokenizer.save(self.target_tokenizer, folder / tokenizer.TARGET)


def _source_inputs(batch: MicroBatch) -> dict[str, Tensor]:
    """The encoder's inputs, without the decoder's."""
    return {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}


# -- preparing -------------------------------------------------------------------------------------------------------


def _entries(section: ModelSection, sources: Any, targets: Any) -> dict[str, Any]:
    """Config entries for the decoder's start token and, from scratch, the vocabularies."""
    from lockstep.tasks.models import model_configs

    config = model_configs.load_config(section)
    values = config.to_dict()
    if section.type is None:
        start = values.get("decoder_start_token_id")
        start = start if start is not None else values.get("bos_token_id")
        return {"use_cache": False, "decoder_start_token_id": sources.pad_token_id if start is None else start}
    # BART starts from its end token, T5Gemma from the texts' first token; Marian, T5 and others from padding
    from_end = config.model_type in model_configs.FROM_END_TOKEN
    start = lm_documents.end_of(targets) if from_end else targets.pad_token_id
    if config.model_type in model_configs.FROM_FIRST_TOKEN and targets.bos_token_id is not None:
        start = targets.bos_token_id
    entries = {"use_cache": False, "decoder_start_token_id": start, "forced_eos_token_id": None}
    if "decoder_vocab_size" in values:
        separate = targets is not sources
        entries["decoder_vocab_size"] = tokenizer.highest_id(targets) + 1
        entries["share_encoder_decoder_embeddings"] = not separate
    return entries


def _check_model(choice: ModelChoice, data: DataSection, options: WritingOptions, folder: Path) -> None:
    from lockstep.tasks.models import model_configs, models, padding

    section = choice.section
    key = "task.target_length" if (options.target_length or 0) > data.max_length else "data.max_length"
    models.check(choice, heads.SEQ2SEQ, max(data.max_length, most(data, options)), key, use_cache=False)
    entries = model_configs.load_config(section).to_dict()
    known_to = tokenizer.load(str(folder), section.trust_remote_code)
    two = (folder / tokenizer.TARGET).is_dir() or getattr(known_to, "separate_vocabs", False)
    if section.source is not None and entries.get("share_encoder_decoder_embeddings") is False and not two:
        raise RunError(
            "LS3376",
            f"model.source: {section.source} has a separate vocabulary for targets, but no tokenizer for it "
            f"in {tokenizer.TARGET}/ beside its tokenizer, so targets would be encoded with the tokenizer of "
            "sources; save the second tokenizer there",
        )
    check_start(section)
    padding.check_foresight(section, "seq2seq")
    check_start_is_read(section, known_to)
    if "num_layers" in entries and entries.get("num_decoder_layers", 0) > entries["num_layers"]:
        raise RunError(
            "LS3377",
            f"model.config: transformers cannot decode a {entries['model_type']} with "
            f"{entries['num_decoder_layers']} decoder layers and only {entries['num_layers']} encoder layers; set "
            f"num_decoder_layers to {entries['num_layers']} or less",
        )
    if options.tokenizers == "separate" and "decoder_vocab_size" not in entries:
        raise RunError(
            "LS3378",
            f"task.tokenizers: a {section.type or 'pretrained'} model has one vocabulary for both "
            "languages; remove task.tokenizers, or use model.type: marian",
        )


def check_start_is_read(section: ModelSection, tokens: Any) -> None:
    """Refuse an FSMT decoder that starts from padding, which it ignores in training and does not count as a position.
    `tokens`: the target tokenizer. Errors: `RunError`."""
    from lockstep.tasks.models import model_configs

    if model_configs.load_config(section).model_type != "fsmt":
        return
    start = _entries(section, tokens, tokens)["decoder_start_token_id"]
    if start == tokens.pad_token_id:
        raise RunError(
            "LS3379",
            f"model: the decoder of this fsmt starts from its padding token ({start}) when it generates, but "
            "not when it is trained; use a tokenizer whose padding token is not its end token, or set "
            "model.config.decoder_start_token_id of a pretrained model to its end token",
        )


def check_start(section: ModelSection) -> None:
    """Refuse a pretrained T5Gemma that names two different start tokens for its decoder. Errors: `RunError`."""
    from lockstep.tasks.models import model_configs

    config = model_configs.load_config(section)
    if section.source is None or config.model_type not in model_configs.FROM_FIRST_TOKEN:
        return
    start, trained_from = getattr(config, "decoder_start_token_id", None), config.decoder.bos_token_id
    start = config.bos_token_id if start is None else start
    if start != trained_from:
        raise RunError(
            "LS3380",
            f"model.source: the decoder of this {config.model_type} starts from token {start} when it "
            f"generates, and from {trained_from} when transformers trains it (decoder.bos_token_id of its config); set "
            f"model.config.decoder_start_token_id={trained_from}, or write one token for both into its config.json",
        )
