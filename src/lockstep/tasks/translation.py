"""Translation with any model that `AutoModelForSeq2SeqLM` knows, pretrained or from scratch with its own tokenizers.

In: pairs of texts: a `translation` column as the Hub has it, or two columns. Out: loss and perplexity per target token,
BLEU and chrF of what the model writes, all from sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import BaseModel, Field

from lockstep.config.run import Run, RunError
from lockstep.data import lm_documents, tokenizer
from lockstep.data.tokens import Columns, Prepared
from lockstep.tasks import length_curves
from lockstep.tasks.abilities import Generates, GivesPredictions, Predicts, Streams
from lockstep.tasks.metric_arrays import listed
from lockstep.tasks.models import bleu, heads, seq2seq_data
from lockstep.tasks.models.seq2seq_data import WritingOptions as WritingOptions
from lockstep.tasks.per_token import TokenLosses
from lockstep.tasks.task import Forward, Generate
from lockstep.tasks.text_task import Arrays, Encoder, TextData

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor

    from lockstep.data.batch import MicroBatch, Sums
    from lockstep.tasks.models.decoding import Decoding


_WORDS = "by_words"


class TranslationOptions(WritingOptions):
    """The task's own keys in the run file."""

    bleu: bool = Field(True, description="write translations at each evaluation, and score them by BLEU and chrF")
    bleu_tokenizer: str = Field("13a", description="sacrebleu's tokenizer: 13a, intl, zh, ja-mecab, char, ...")


class Translation(TokenLosses, Streams, Predicts, Generates, GivesPredictions):
    """One text for another."""

    Options: ClassVar[type[BaseModel]] = TranslationOptions
    head = heads.SEQ2SEQ
    column_keys = ("source", "target")
    default_model = "google-t5/t5-small"
    small_model = "marian"
    cache_name = ("translation",)
    within = seq2seq_data.PAIR
    row_is_example = True
    pipeline = "translation"
    display_keys: ClassVar[tuple[str, ...]] = ("bleu", "bleu_tokenizer", "beams", "samples")
    answer: ClassVar[str] = "translation"  # what `predict` calls what is written
    metric_inputs = ("written",)
    metric_names: tuple[str, ...] = ("accuracy", "perplexity", "bleu", "chrf")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def overlap_of(cls, options: Any) -> Any:
        """What scores the texts that are written, by `sums` and `scores`; None: nothing does. Errors: `RunError`."""
        if options.bleu:
            bleu.check(options.bleu_tokenizer)
        return bleu.Overlap(options.bleu_tokenizer) if options.bleu else None

    @classmethod
    def prepare(cls, run: Run) -> Prepared:
        cls.overlap_of(cls.options_of(run))  # refuses a tokenizer of sacrebleu's before anything is read
        return super().prepare(run)

    @classmethod
    def target_columns(cls, options: WritingOptions) -> list[str]:
        return [options.target]

    @classmethod
    def usable(cls, rows: Dataset, options: WritingOptions, split: str, name: str, drop: bool) -> Dataset:
        return seq2seq_data.pairs(rows, options, split, name, drop)

    @classmethod
    def compared(cls, options: WritingOptions) -> tuple[list[str], list[str]]:
        return ["source", "target"], []

    @classmethod
    def prepare_tokenizer(cls, data: TextData, hashed: str) -> Path:
        if data.rows is None:
            return seq2seq_data.tokenizers(data.run, data.splits["train"], hashed, data.options)
        content = data.rows.content if data.run.tokenizer.train else ""
        return seq2seq_data.tokenizers(data.run, data.rows, content, data.options)

    @classmethod
    def check(cls, data: TextData, folder: Path, tok: Any) -> None:
        _check_model(data.run, data.options, folder)

    @classmethod
    def key_parts(cls, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        return [data.run.data.max_length, data.options.prefix, data.options.target_length]

    @classmethod
    def encoder(cls, run: Run, folder: str, labels: Any, split: str, name: str) -> tuple[Encoder, Features]:
        return seq2seq_data.encoder_of(run, folder, cls.options_of(run))

    # -- in every process --------------------------------------------------------------------------------------------

    def __init__(self, run: Run, prepared: Prepared) -> None:
        from lockstep.tasks.models import model_configs

        super().__init__(run, prepared)
        self.target_tokenizer = seq2seq_data.target_tokenizer(run, Path(prepared.tokenizer), self.tokenizer)
        self.entries = _entries(run, self.tokenizer, self.target_tokenizer)
        self.unpadded = self.padded_because is None
        self.starts_from_first = model_configs.load_config(run).model_type in model_configs.FROM_FIRST_TOKEN
        self.overlap = self.overlap_of(self.options)
        self.smoothing = self.options.label_smoothing

    @property
    def config_entries(self) -> dict[str, Any]:
        return self.entries

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        """Teacher forcing: the decoder reads its start token and then the targets, one behind."""
        from lockstep.data.batch import IGNORED

        wanted, real = columns.ragged("target_ids").padded(rows, int(self.target_tokenizer.pad_token_id))  # [B, T]
        read = np.roll(wanted, 1, axis=1)
        read[:, 0] = self.entries["decoder_start_token_id"]
        inputs = self.padded_texts(columns, rows) | {"decoder_input_ids": read}  # [B, S]
        if self.unpadded or self.starts_from_first:  # which would take a start for padding that has its number
            inputs["decoder_attention_mask"] = real
        return inputs, np.where(real == 1, wanted, IGNORED)

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return int(columns.ragged("target_ids").lengths[rows].sum())

    def score_texts(self, generate: Generate, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        import torch

        if self.overlap is None and not self.per_example_outputs:
            return {}
        tokens = generate(_asked(batch), self._decoding())
        gathered = {"written": tokens.int()} if self.per_example_outputs else {}  # as wide for every batch
        if self.overlap is None:
            return gathered
        found = self._overlaps(self._written(tokens)[: len(rows)], columns.texts("reference", rows))
        sums = {name: torch.from_numpy(counts).to(batch.targets.device).double() for name, counts in found.items()}
        return gathered | sums

    def _overlaps(self, written: list[str], wanted: list[str]) -> dict[str, np.ndarray]:
        """What the scores of texts are made of, in bins by the words of the references: [bins, ...] each."""
        words = [len(text.split()) for text in wanted]
        place = length_curves.bin_of(words)
        of_bins = [
            self.overlap.sums(*([texts[i] for i in np.flatnonzero(place == b)] for texts in (written, wanted)))
            for b in range(len(length_curves.BINS))
        ]
        return {_WORDS: length_curves.binned(words)} | {
            name: np.stack([of[name] for of in of_bins]) for name in of_bins[0]
        }

    def tables(self, sums: Sums) -> dict[str, Any]:
        """The scores of texts by the words of the references."""
        if self.overlap is None or _WORDS not in sums:
            return {}

        def score(name: str, b: int) -> float:
            return float(self.overlap.scores({key: sums[key][b] for key in self.overlap.names})[name])

        lines = {name: length_curves.curve(sums[_WORDS], partial(score, name)) for name in self.overlap.scored}
        return {"plots": [{"title": ", ".join(lines), "x": "words of the reference", "lines": lines}]}

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What was written, and the references: texts [N] each."""
        return listed(self._written(sums["written"])), listed(columns.texts("reference", rows))

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        return listed(["a text that is written", "another one", ""]), listed(["a text as it is wanted", "another", "x"])

    def metrics(self, sums: Sums) -> dict[str, float]:
        if self.overlap is None or _WORDS not in sums:
            return super().metrics(sums)
        return super().metrics(sums) | self.overlap.scores({name: sums[name].sum(0) for name in self.overlap.names})

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        written = self._written(generate(_asked(batch), self._decoding()))
        shown = zip(self.decoded(batch.inputs["input_ids"]), written, columns.texts("reference", rows), strict=True)
        return [{"source": source, "written": text, "reference": reference} for source, text, reference in shown]

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """Without the prefix, as the tokenizer writes it: `predict` puts it there."""
        text, prefix = super().sample_input(sample), self.options.prefix
        ids = self.tokenizer(prefix, add_special_tokens=False)["input_ids"] if prefix else []
        prefixes = (prefix.strip(), str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip())
        return next((text.removeprefix(each) for each in prefixes if text.startswith(each)), text).strip()

    @property
    def usage(self) -> str:
        """transformers has no pipeline for translation any more."""
        target = 'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_REPO")\n'
        written, most = "tokenizer", seq2seq_data.most(self.run, self.options)
        if self.target_tokenizer is not self.tokenizer:
            target += 'targets = AutoTokenizer.from_pretrained("PATH_OR_REPO", subfolder="target")\n'
            written = "targets"
        return (
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
            f'{target}model = AutoModelForSeq2SeqLM.from_pretrained("PATH_OR_REPO")\n'
            f'ids = tokenizer("{self.options.prefix}some text", return_tensors="pt")["input_ids"]\n'
            f"tokens = model.generate(ids, num_beams={self.options.beams}, max_new_tokens={most})\n"
            f"{written}.decode(tokens[0], skip_special_tokens=True)"
        )

    @classmethod
    def decodes_greedily(cls, run: Run) -> bool:
        options = cls.options_of(run)
        return options.beams == 1 or not (options.samples or cls.overlap_of(options) or run.metrics)

    def _decoding(self) -> Decoding:
        from lockstep.tasks.models.decoding import Decoding

        pad, end = int(self.target_tokenizer.pad_token_id), lm_documents.end_of(self.target_tokenizer)
        start = int(self.entries["decoder_start_token_id"])
        return Decoding(seq2seq_data.most(self.run, self.options), pad, end, start, self.options.beams)

    def _written(self, tokens: Tensor) -> list[str]:
        found = self.target_tokenizer.batch_decode(tokens.tolist(), skip_special_tokens=True)
        return [text.strip() for text in found]

    @classmethod
    def input_columns(cls, run: Run) -> tuple[str, ...]:
        options = cls.options_of(run)
        return (options.source,)

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """The `translation`, or what else is written."""
        from lockstep.tasks.models import batched_inference, models
        from lockstep.tasks.models.decoding import Decoding, by_transformers

        options = cls.options_of(run)
        model, sources = models.exported(cls.head, folder, run)
        targets = seq2seq_data.target_tokenizer(run, folder, sources)
        most, start = run.data.max_length, model.config.decoder_start_token_id
        how = Decoding(
            seq2seq_data.most(run, options), targets.pad_token_id, lm_documents.end_of(targets), start, options.beams
        )

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            read = [sources(options.prefix + row[0], truncation=True, max_length=most) for row in rows]
            tokens = by_transformers(
                model, batched_inference.padded(read, {"input_ids": int(sources.pad_token_id)}), how
            )
            written = targets.batch_decode(tokens.tolist(), skip_special_tokens=True)
            return [{cls.answer: text.strip()} for text in written]

        return batched_inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        return str(answer[cls.answer])

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        super().write(folder, weights)
        if self.target_tokenizer is not self.tokenizer:
            tokenizer.save(self.target_tokenizer, folder / tokenizer.TARGET)


def _asked(batch: MicroBatch) -> dict[str, Tensor]:
    """What is to be translated, without what the decoder would read."""
    return {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}


# -- preparing -------------------------------------------------------------------------------------------------------


def _entries(run: Run, sources: Any, targets: Any) -> dict[str, Any]:
    """Entries of the config: where a decoder starts, and the vocabularies of a model from scratch."""
    from lockstep.tasks.models import model_configs

    config = model_configs.load_config(run)
    known = config.to_dict()
    if run.model.type is None:
        start = known.get("decoder_start_token_id")
        start = start if start is not None else known.get("bos_token_id")
        return {"use_cache": False, "decoder_start_token_id": sources.pad_token_id if start is None else start}
    # BART begins with its end token, T5Gemma with the first of texts; Marian, T5 and the others with padding
    start = lm_documents.end_of(targets) if config.model_type in ("bart", "mbart") else targets.pad_token_id
    if config.model_type in model_configs.FROM_FIRST_TOKEN and targets.bos_token_id is not None:
        start = targets.bos_token_id
    entries = {"use_cache": False, "decoder_start_token_id": start, "forced_eos_token_id": None}
    if "decoder_vocab_size" in known:
        separate = targets is not sources
        entries |= {"decoder_vocab_size": len(targets), "share_encoder_decoder_embeddings": not separate}
    return entries


def _check_model(run: Run, options: WritingOptions, folder: Path) -> None:
    from lockstep.tasks.models import model_configs, models

    key = "task.target_length" if (options.target_length or 0) > run.data.max_length else "data.max_length"
    models.check(run, heads.SEQ2SEQ, max(run.data.max_length, seq2seq_data.most(run, options)), key, use_cache=False)
    known = model_configs.load_config(run).to_dict()
    known_to = tokenizer.load(str(folder), run.model.trust_remote_code)
    two = (folder / tokenizer.TARGET).is_dir() or getattr(known_to, "separate_vocabs", False)
    if run.model.source is not None and known.get("share_encoder_decoder_embeddings") is False and not two:
        raise RunError(
            f"model.source: {run.model.source} has a vocabulary of its own for targets, and no tokenizer for it was "
            f"found in {tokenizer.TARGET}/ beside its tokenizer: targets would be read with the tokenizer of sources"
        )
    if "num_layers" in known and known.get("num_decoder_layers", 0) > known["num_layers"]:
        raise RunError(
            f"model.config: transformers cannot decode with {known['num_decoder_layers']} decoder layers on "
            f"{known['num_layers']} encoder layers of a {known['model_type']}; set num_decoder_layers to that, or less"
        )
    if options.tokenizers == "separate" and "decoder_vocab_size" not in known:
        raise RunError(
            f"task.tokenizers: a {run.model.type or 'pretrained'} model has one vocabulary for both languages; use "
            "shared ones, or model.type: marian"
        )
