"""Long-context retrieval that needs no network: a pass key said once, far back in filler, and asked for at the end.

The prompt has exactly as many tokens as the context that is tested. An answer is right if the model would give every
token of the key greedily: each is put first when the ones before it are given. Whether a model can do this at all is
told by its 16-bit side; what a cache costs is the difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import InvalidInput
from . import passes, score

# Sentences of no consequence; which come, and in what order, differs from trial to trial.
FILLER = (
    "The grass is green and the sky is wide. ",
    "A train leaves the station every morning at eight. ",
    "Bread is made of flour, water, salt and time. ",
    "The river runs slowly past the old mill. ",
    "Some books are long, and some are short. ",
    "In winter the lake behind the hill freezes over. ",
    "The baker opens the shop before the sun is up. ",
    "Birds gather on the wires when the wind turns. ",
    "A clock on the wall counts the quiet hours. ",
    "The gardener waters the beans and then the roses. ",
    "Rain fell on the roof for most of the night. ",
    "Two boats were tied to the pier with a rope. ",
)
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is"
DIGITS = 5
TAIL = 2  # decode steps before the answer: the cache is read by both phases


def prompts(tokenizer: Any, context: int, trials: int, seed: int = 0) -> tuple[torch.Tensor, list[int], list[float]]:
    """(tokens int64 [trials, context], answer lengths, depths): the end of each row is the key that answers it.

    depth: where the needle is, 0 the beginning and 1 the end, spread evenly over the trials. Raises InvalidInput for a
    context that cannot hold needle and question.
    """
    prefix = list(tokenizer("", verbose=False)["input_ids"])
    prefix = prefix if prefix == [tokenizer.bos_token_id] else []

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    rows, answers, depths = [], [], []
    for trial in range(trials):
        chosen = random.Random(f"{seed} {context} {trial}")
        key = "".join(chosen.choice("123456789") for _ in range(DIGITS))
        needle, question = ids(NEEDLE.format(key=key)), ids(QUESTION)
        answer = ids(f"{QUESTION} {key}")[len(question) :]
        room = context - len(prefix) - len(needle) - len(question) - len(answer)
        if room < 0:
            raise InvalidInput(f"a context of at least {context - room} tokens holds pass key and question", context)
        filler: list[int] = []
        while len(filler) < room:
            filler += ids(chosen.choice(FILLER))
        depth = trial / max(1, trials - 1)
        at = round(depth * room)
        rows.append([*prefix, *filler[:at], *needle, *filler[at:room], *question, *answer])
        answers.append(len(answer))
        depths.append(depth)
    return torch.tensor(rows), answers, depths


def measure(
    sides: Sequence[passes.Side],
    tokenizer: Any,
    contexts: Sequence[int],
    trials: int,
    *,
    chunk: int = 512,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """Of each context: {"context", "trials", "depths", "right": {side: [bool]}, "figures": {side: {...}}}.

    figures: "right" the share of keys given back, "change" its difference from the first side, each with an interval
    over the trials (a bootstrap; the difference is of paired trials).
    """
    results = []
    base = sides[0].name
    for context in contexts:
        tokens, answers, depths = prompts(tokenizer, context, trials)
        rows: dict[str, list[bool]] = {side.name: [False] * trials for side in sides}
        for answer in sorted(set(answers)):  # trials of as many tokens go together
            those = [i for i in range(trials) if answers[i] == answer]
            found = passes.score_windows(sides, tokens[those], chunk=chunk, tail=answer + TAIL, advance=advance)
            for name, top in found.top.items():
                for i, right in zip(those, top[:, -answer:].all(1).tolist(), strict=True):
                    rows[name][i] = right
        right = {name: torch.tensor(found, dtype=torch.float64)[:, None] for name, found in rows.items()}
        results.append(
            {
                "context": context,
                "trials": trials,
                "depths": depths,
                "right": rows,
                "figures": {
                    name: {
                        "right": score.mean(found).as_dict(),
                        **({} if name == base else {"change": score.mean(found - right[base]).as_dict()}),
                    }
                    for name, found in right.items()
                },
            }
        )
    return results
