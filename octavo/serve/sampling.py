"""Choosing the next tokens of a step's sequences from their logits.

A row's choice depends on its own logits, sampling and random state alone: the same seed gives the same tokens whatever
else is in the batch, as far as the logits do.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .requests import Sequence, TokenChoice

GREEDY = 1e-5  # temperatures below this
IMPOSSIBLE = -9999.0  # the log probability that is told of a token with none: JSON has no infinity


@torch.inference_mode()
def choose_tokens(logits: torch.Tensor, sequences: list[Sequence]) -> list[TokenChoice | None]:
    """The next token of each sequence from logits [R, vocabulary]; None for a row whose logits are not numbers.

    Log probabilities are those of the model, before temperature, penalties and cuts.
    """
    logits = logits.float()
    adjusted = _adjusted(logits, sequences)
    tokens = adjusted.argmax(-1)
    broken = adjusted.gather(1, tokens[:, None])[:, 0].isfinite().logical_not()  # argmax finds NaN and infinity first
    drawn = [row for row, s in enumerate(sequences) if s.sampling.temperature >= GREEDY]
    for rows in _alike(drawn, sequences):
        tokens[rows] = _draw(adjusted[rows], [sequences[row] for row in rows])
    found: list[TokenChoice | None] = [
        None if bad else TokenChoice(token) for token, bad in zip(tokens.tolist(), broken.tolist(), strict=True)
    ]
    return _with_logprobs(found, logits, tokens, sequences)


def _with_logprobs(
    choices: list[TokenChoice | None], logits: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]
) -> list[TokenChoice | None]:
    """The choices, those of sequences that asked for logprobs with theirs."""
    asked = [row for row, s in enumerate(sequences) if s.sampling.logprobs is not None and choices[row] is not None]
    if not asked:
        return choices
    counts = [sequences[row].sampling.logprobs or 0 for row in asked]
    logprobs = logits[asked].log_softmax(-1).clamp_min(IMPOSSIBLE)
    own = logprobs.gather(1, tokens[asked][:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(max(counts), logits.shape[1]))
    ranked = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    for row, logprob, count, top in zip(asked, own, counts, ranked, strict=True):
        choice = choices[row]
        if choice is not None:
            choices[row] = replace(choice, logprob=logprob, top=tuple(top[:count]))
    return choices


def _adjusted(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """With biases and penalties; the rows without are left as they are."""
    changed = logits
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        penalties = (sampling.presence_penalty or sampling.frequency_penalty) and sequence.counts
        if not penalties and not sampling.logit_bias:
            continue
        if changed is logits:
            changed = logits.clone()
        if penalties:
            ids = torch.tensor(list(sequence.counts), device=logits.device)
            times = torch.tensor(list(sequence.counts.values()), device=logits.device, dtype=torch.float32)
            changed[row, ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
        if sampling.logit_bias:
            ids, bias = zip(*sampling.logit_bias, strict=True)
            changed[row, list(ids)] += torch.tensor(bias, device=logits.device)
    return changed


def _alike(rows: list[int], sequences: list[Sequence]) -> list[list[int]]:
    """Rows that are drawn from the whole vocabulary, and rows that are drawn from its most probable part."""
    whole, cut = [], []
    for row in rows:
        s = sequences[row].sampling
        (cut if s.top_p < 1 or s.top_k or s.min_p else whole).append(row)
    return [rows for rows in (whole, cut) if rows]


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """One token a row by inverting the cumulative distribution at a uniform number of the sequence's own."""
    device = logits.device

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([[getattr(s.sampling, name)] for s in sequences], dtype=dtype, device=device)

    p = (logits / column("temperature")).softmax(-1)
    order = None
    if any(s.sampling.top_p < 1 or s.sampling.top_k or s.sampling.min_p for s in sequences):
        p, order = p.sort(dim=-1, descending=True, stable=True)
        top_k = column("top_k", torch.int64)
        rank = torch.arange(p.shape[1], device=device)
        dropped = (p.cumsum(-1) - p >= column("top_p")) | ((top_k > 0) & (rank >= top_k))
        dropped |= p < column("min_p") * p[:, :1]
        dropped[:, 0] = False  # the most probable one always stays
        p = p.masked_fill(dropped, 0.0)
    reached = p.double().cumsum(-1)
    at = torch.tensor([[s.random.random()] for s in sequences], dtype=torch.float64, device=device)
    found = torch.searchsorted(reached, at * reached[:, -1:], right=True).clamp_max(p.shape[1] - 1)
    return (found if order is None else order.gather(1, found))[:, 0]
