"""From token ids to text that is certain: whole characters, and no beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer shows for the first bytes of a character
CONTEXT = 6  # tokens before the first new one: some tokenizers write a token otherwise at the beginning
LONGEST_WINDOW = 24  # tokens that are decoded again for each new one
MOST_HELD = 16  # tokens that may be the beginning of one character; beyond that they are no text


class TextStream:
    """The text of one sequence as its tokens come.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: token ids before the new ones.
        stop: strings that end the text and are no part of it.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], stop: Items[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._window = prompt[-CONTEXT:]  # decoded with each token
        self._shown: str | None = None  # the window's text that is known; None: not decoded yet
        self._unclear = 0  # tokens that have shown no text so far
        self._held = ""  # may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that is certain now. Once `stopped`, the rest is none."""
        if self._shown is None:
            self._shown = self._decode(self._window)
        self._window.append(token)
        return self._cut(self._decoded(self._shown, final=False), final=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        known = self._shown if self._unclear else None
        return self._cut("" if known is None else self._decoded(known, final=True), final=True)

    def _decoded(self, known: str, final: bool) -> str:
        """What the window's text has beyond `known`, if it is whole characters (or no more will come)."""
        now = self._decode(self._window)
        if (now.endswith(UNFINISHED) or len(now) <= len(known)) and self._unclear < MOST_HELD and not final:
            self._unclear += 1
            return ""
        self._unclear, self._shown = 0, now
        if len(self._window) > LONGEST_WINDOW:
            self._window = self._window[-CONTEXT:]
            self._shown = self._decode(self._window)
        return now[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _cut(self, text: str, final: bool) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        if not final:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, the whole of it left out."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class TokenNames:
    """How a single token is shown in logprobs: its text and its bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The token alone, special ones included; a part of a character is U+FFFD."""
        found = self._texts.get(token)
        if found is None:
            found = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._texts[token] = found
        return found

    def bytes(self, token: int) -> list[int] | None:
        """Its UTF-8 bytes; None for a part of a character in an alphabet that is not known here."""
        text = self.text(token)
        if UNFINISHED not in text:
            return list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if len(piece) == 6 and piece.startswith("<0x"):  # SentencePiece's byte tokens
            return [int(piece[3:5], 16)]
        if all(char in BYTE_OF for char in piece):
            return [BYTE_OF[char] for char in piece]
        return None


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE (GPT-2's, and most since) writes for each byte, as byte by character.

    Printable Latin-1 stands for itself; the others are numbered from U+0100 on.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
