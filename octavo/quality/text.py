"""Windows of real text: from the standard library's language reference, or from a file.

The choice is deterministic: the same Python and tokenizer give the same windows. The language reference differs between
Python versions, so figures are compared only within one; ``Windows.digest`` tells whether two runs saw the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput, first_line

# Characters a token is assumed to have at most on average; text is read a few times over if it has more.
CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True)
class Windows:
    """Text as tokens.

    Attributes:
        tokens: int64 [windows, length].
        source: where it is from, in words.
        names: a name per window: its topic, or its place in the file.
    """

    tokens: torch.Tensor
    source: str
    names: tuple[str, ...]

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the tokens' SHA-256."""
        return hashlib.sha256(self.tokens.to(torch.int64).numpy().tobytes()).hexdigest()[:16]

    def split(self, count: int) -> tuple[Windows, torch.Tensor]:
        """The first `count` windows, and the tokens of the others."""
        return Windows(self.tokens[:count], self.source, self.names[:count]), self.tokens[count:]


def windows(path: Path | None, tokenizer: Any, count: int, length: int) -> Windows:
    """`count` windows of `length` tokens from the text in `path`; None: from the language reference."""
    if path is None:
        return library_windows(tokenizer, count, length)
    return file_windows(path, tokenizer, count, length)


def check_file(option: str, path: Path | None) -> None:
    """Raise InvalidInput, naming the option, for a path that is given and is no file."""
    if path is not None and not path.is_file():
        raise InvalidInput(f"{option} must be a file; {path} is {'a folder' if path.is_dir() else 'not there'}")


def library_windows(tokenizer: Any, count: int, length: int) -> Windows:
    """`count` windows of `length` tokens from ``pydoc_data.topics``, the language reference that ``help()`` prints.

    Each is the beginning of a topic, longest topics first, so that no window runs from one text into another; a topic
    that mostly repeats lines of an earlier window is left out. Raises InvalidInput if there are not enough.
    """
    from pydoc_data.topics import topics

    prefix = _prefix(tokenizer)
    names: list[str] = []
    rows: list[list[int]] = []
    seen: set[str] = set()
    for name in sorted(topics, key=lambda topic: (-len(topics[topic]), topic)):
        if len(names) == count:
            break
        head = topics[name][: length * CHARACTERS_PER_TOKEN]
        ids = [*prefix, *_encode(tokenizer, head)][:length]
        if len(ids) < length:
            continue
        lines = _long_lines(tokenizer.decode(ids))
        if len(lines & seen) * 2 > len(lines):
            continue
        seen |= lines
        names.append(name)
        rows.append(ids)
    if len(names) < count:
        raise InvalidInput(
            f"the standard library's pydoc_data.topics has {len(names)} texts of {length} tokens, {count} were asked "
            "for; ask for fewer windows or give a text of your own"
        )
    return Windows(torch.tensor(rows), "the Python language reference (pydoc_data.topics)", tuple(names))


def file_windows(path: Path, tokenizer: Any, count: int, length: int) -> Windows:
    """`count` windows of `length` tokens, one after the other from the beginning of the UTF-8 text in `path`.

    Raises InvalidInput if the file cannot be read, is not UTF-8 text, or is too short.
    """
    prefix = _prefix(tokenizer)
    fresh = length - len(prefix)
    wanted = count * fresh
    ids: Sequence[int] = ()
    for text in _heads(path, wanted * CHARACTERS_PER_TOKEN):
        ids = _encode(tokenizer, text)
        if len(ids) >= wanted:
            break
    if len(ids) < wanted:
        raise InvalidInput(
            f"{path} is too short: {count} windows of {length} tokens need {wanted} tokens of text", f"{len(ids)}"
        )
    rows = [[*prefix, *ids[i * fresh : (i + 1) * fresh]] for i in range(count)]
    names = tuple(f"tokens {i * fresh} to {(i + 1) * fresh - 1}" for i in range(count))
    return Windows(torch.tensor(rows), path.name, names)


def _heads(path: Path, characters: int) -> Iterator[str]:
    """The first `characters` of the text in `path`, then four times as many, and so on up to all of it."""
    while True:
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(characters)
        except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError; so is a NUL byte in the path
            what = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {_why(error)}"
            raise InvalidInput(f"{path} {what}") from error
        if "\0" in text:
            raise InvalidInput(f"{path} is not UTF-8 text: it holds NUL bytes")
        yield text
        if len(text) < characters:
            return
        characters *= 4


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)


def _encode(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: a text longer than the model's context is cut into windows, so the warning would mislead.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _prefix(tokenizer: Any) -> list[int]:
    """The beginning-of-text token of tokenizers that add one (Gemma's models are lost without it); else nothing."""
    added = list(tokenizer("", verbose=False)["input_ids"])
    return added if added and added == [tokenizer.bos_token_id] else []


def _long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) > 50}
