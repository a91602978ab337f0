"""Model heads: the Auto class of transformers that builds the model, and its names in other libraries.

In: nothing. Out: frozen values. A task names one of these as its `head`, or defines its own. Imports no torch.
"""

from __future__ import annotations


class Head(str):
    """A model head. Its name is part of the cache keys of trials."""

    auto: str  # the Auto class of transformers
    families: str  # its table of families in transformers' modeling_auto
    called: str  # in messages
    adapter: str | None  # peft's task type, which decides what else is trained; None: unknown to peft
    reads_texts: bool  # whether its inputs are tokens (padding and position limits apply)

    def __new__(
        cls, name: str, auto: str, families: str, called: str, adapter: str | None = None, reads_texts: bool = True
    ) -> Head:
        head = super().__new__(cls, name)
        head.auto, head.families, head.called = auto, f"MODEL_{families}MAPPING_NAMES", called
        head.adapter, head.reads_texts = adapter, reads_texts
        return head


CLASSIFICATION = Head(
    "classification",
    "AutoModelForSequenceClassification",
    "FOR_SEQUENCE_CLASSIFICATION_",
    "sequence classifier",
    "SEQ_CLS",
)
IMAGE_CLASSIFICATION = Head(
    "image_classification",
    "AutoModelForImageClassification",
    "FOR_IMAGE_CLASSIFICATION_",
    "image classifier",
    reads_texts=False,
)
TOKEN_CLASSIFICATION = Head(
    "token_classification",
    "AutoModelForTokenClassification",
    "FOR_TOKEN_CLASSIFICATION_",
    "token classifier",
    "TOKEN_CLS",
)
CAUSAL = Head("causal", "AutoModelForCausalLM", "FOR_CAUSAL_LM_", "causal language model", "CAUSAL_LM")
# peft's type for the next two trains nothing besides the adapter.
MASKED = Head("masked", "AutoModelForMaskedLM", "FOR_MASKED_LM_", "masked language model", "FEATURE_EXTRACTION")
EMBEDDING = Head("embedding", "AutoModel", "", "model without a head", "FEATURE_EXTRACTION")
QUESTION_ANSWERING = Head(
    "question_answering",
    "AutoModelForQuestionAnswering",
    "FOR_QUESTION_ANSWERING_",
    "model that answers questions",
    "QUESTION_ANS",
)
SEQ2SEQ = Head("seq2seq", "AutoModelForSeq2SeqLM", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "encoder-decoder model", "SEQ_2_SEQ_LM")
BUILT_IN = {str(value): value for value in tuple(vars().values()) if isinstance(value, Head)}


def of(name: str) -> Head:
    """Return a head, looking names up among those of this file."""
    return name if isinstance(name, Head) else BUILT_IN[name]
