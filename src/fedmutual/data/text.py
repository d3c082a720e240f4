"""Text as token ids: by a hashing tokenizer that needs no vocabulary, or by a tokenizer from files on disk."""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.data.examples import TEXT
from fedmutual.errors import ConfigError, DataError, format_error

HASH, LENGTH = "hash", 128  # the default tokenizer; the tokens of a text if data.length is unset
_ASCII_TOKEN = re.compile(r"\w+|[^\w\s]")  # ten times as fast as the pattern for all scripts
# Han, kana, Thai, Lao, Burmese and Khmer have no blanks between words, so each character is a token
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
Encode = Callable[[list[str], int], list[list[int]]]
"""(texts, the most tokens of each) -> the token ids of each text."""


def encode_texts(x: Any, config: DataConfig) -> Any:
    """Return inputs in which an array of text [n] is replaced by `input_ids` and `attention_mask`, each int64 [n, length].

    x: an array, or several by name. The mask is 1 for tokens of the text and 0 where a text is filled up.

    Raises:
        ConfigError: the tokenizer of data.tokenizer cannot be read, or its package is missing.
        DataError: several inputs are text.
    """
    named = x if isinstance(x, Mapping) else {"x": x}
    texts = [name for name, one in named.items() if isinstance(one, np.ndarray) and one.dtype.kind == "U" and one.ndim == 1]
    if not texts:
        return x
    if len(texts) > 1:
        raise DataError(f"the inputs {', '.join(texts)} are text, and an example can have one text; join them")
    ids, mask = _tokenize(named[texts[0]].tolist(), config)
    return {k: one for k, one in named.items() if k not in texts} | dict(zip(TEXT, (ids, mask), strict=True))


def _tokenize(texts: list[str], config: DataConfig) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the token ids and the mask of texts, each [n, length]."""
    length = config.length or LENGTH
    encode, padding = _make_encoder(config)
    ids, mask = (np.full((len(texts), length), value, dtype=np.int64) for value in (padding, 0))
    for row, tokens in enumerate(encode(texts, length)):
        tokens = tokens[:length] or [padding]  # a text without a token has one step, so that a mean over steps exists
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    return ids, mask


def _make_encoder(config: DataConfig) -> tuple[Encode, int]:
    """Return the function that encodes texts, and the id that fills up short texts."""
    if config.tokenizer == HASH:
        return lambda texts, _: [hash_tokens(text, config.words) for text in texts], 0
    path = Path(config.tokenizer)
    try:
        if path.is_file():
            from tokenizers import Tokenizer

            by_file = Tokenizer.from_file(str(path))
            by_file.no_padding()
            by_file.no_truncation()  # the file may state another length
            if config.length != 1:  # this keeps special tokens, such as the one that ends a text
                by_file.enable_truncation(config.length or LENGTH)
            padding = next((i for name in ("[PAD]", "<pad>") if (i := by_file.token_to_id(name)) is not None), 0)
            return lambda texts, _: [encoded.ids for encoded in by_file.encode_batch(texts)], padding
        if path.is_dir():
            from transformers import AutoTokenizer

            by_folder = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            return (
                lambda texts, length: by_folder(texts, truncation=True, max_length=length)["input_ids"],
                by_folder.pad_token_id or 0,
            )
    except ImportError as problem:
        fix = "pip install 'fedmutual[text]'"
        raise ConfigError(f"key 'data.tokenizer': {path} needs the package {problem.name}: {fix}") from None
    except Exception as problem:  # the libraries raise many kinds of errors for a damaged file
        fix = "save the tokenizer again, or name another"
        raise ConfigError(f"key 'data.tokenizer': {path} cannot be read ({format_error(problem)}); {fix}") from None
    raise ConfigError(
        f"key 'data.tokenizer': there is no file {path}; name a tokenizer.json, a folder that transformers saved, or 'hash'"
    )


@cache
def _make_pattern() -> re.Pattern[str]:
    """Return the pattern of a word or a symbol. A word includes the vowel signs of Indic scripts, no letters for `re`."""
    marks = "".join(c for c in map(chr, range(0x300, 0x1E000)) if unicodedata.category(c)[0] == "M")
    marks, letter = re.sub(f"[{_UNSPACED}]", "", marks), rf"[^\W{_UNSPACED}]"
    return re.compile(rf"{letter}+(?:[{marks}]+{letter}*)*|[{_UNSPACED}]|[^\w\s]")


def hash_tokens(text: str, words: int) -> list[int]:
    """Return an id from 1 to `words` - 1 for each word and symbol of a text, in lower case: a digest of the word.

    In scripts without blanks between words, such as Chinese and Thai, each character is a word. Equal letters have equal ids
    whether an accent is part of a letter or a character of its own (Unicode's form NFC).
    """
    pattern = _ASCII_TOKEN if text.isascii() else _make_pattern()
    tokens = pattern.findall(unicodedata.normalize("NFC", text).lower())
    digests = (hashlib.blake2b(token.encode(), digest_size=8).digest() for token in tokens)
    return [1 + int.from_bytes(digest, "big") % (words - 1) for digest in digests]


def join_columns(frame: Any, columns: Sequence[str]) -> npt.NDArray[np.str_]:
    """Return the text of each row of a DataFrame [n]: its cells in these columns, joined by blanks."""
    texts: npt.NDArray[np.str_] = frame[list(columns)].fillna("").astype(str).agg(" ".join, axis=1).to_numpy(dtype=str)
    return texts
