"""What an entry script trains, of any kind in the table of heads and untrained."""

import importlib
from typing import Any

from heads.kinds import forms, name_of
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.vocab import DraftVocab


def fresh_objective(form: str, target: EmbeddingsAndHead, vocab: DraftVocab) -> Any:
    """Of an untrained head.

    Args:
        form: one of `heads.kinds.forms`.
        target: the frozen target.
        vocab: of heads that may choose.
    """
    head = forms()[form].untrained(target, form, vocab)
    entry: Any = importlib.import_module(f"train.{name_of(head)}")
    return entry.default_objective(head, target)
