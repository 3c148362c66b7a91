"""Logits that stay divided over the tensor-parallel ranks along the vocabulary, for any loss."""

from meshwright.runtime.vocabulary.columns import Columns
from meshwright.runtime.vocabulary.logits import VocabularyLogits

__all__ = ["Columns", "VocabularyLogits"]
