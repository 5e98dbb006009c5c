"""Tokenizers, with the four names that Megatron's datasets read: vocab_size, eod, pad and
unique_identifiers."""

from __future__ import annotations

from typing import ClassVar

import numpy

_NO_PADDING = -1  # never in a dataset, so that no trained token is masked as padding


class ByteTokenizer:
    """The 256 bytes, and 256 for the end of a document."""

    vocab_size = 257
    eod = 256
    pad = _NO_PADDING
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "ByteTokenizer"}

    def encode(self, text: bytes) -> numpy.ndarray:
        """``text`` as int64 token ids [len(text)], without an end-of-document token."""
        return numpy.frombuffer(text, dtype=numpy.uint8).astype(numpy.int64)


class HuggingFaceTokenizer:
    """``transformers.AutoTokenizer`` by name or folder; the end of a document is its eos token."""

    pad = _NO_PADDING

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(name)
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"data.tokenizer={name}: it has no eos token to end a document with")
        self.vocab_size = len(self._tokenizer)
        self.eod = self._tokenizer.eos_token_id
        self.unique_identifiers = {"class": type(self).__name__, "name": name}

    def encode(self, text: bytes) -> numpy.ndarray:
        """``text`` (UTF-8) as int64 token ids, without special tokens."""
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        return numpy.asarray(ids, dtype=numpy.int64)


def build_tokenizer(name: str) -> ByteTokenizer | HuggingFaceTokenizer:
    return ByteTokenizer() if name == "byte" else HuggingFaceTokenizer(name)
