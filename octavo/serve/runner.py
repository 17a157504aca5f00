"""One step of the model: the new tokens of all sequences of a batch in one row, through octavo's attention.

The tokens of several sequences lie one after the other, [1, T]; their positions, slots and page tables say whose they
are, so pieces of prompts and decodes run in one call of the model's forward, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from ..integrations.pages import Step
from ..integrations.transformers import Handle
from .graphs import DecodeGraphs
from .scheduler import Share

FIELDS = 5  # of a batch's header


@dataclass(frozen=True)
class Batch:
    """A step's shares as host tensors: what every rank must know to run it.

    Attributes:
        tokens, positions, slots: int64 [T].
        lengths: int64 [B], tokens of each sequence after this step. counts: int64 [B], its new tokens.
        table: int64 [B, W], page ids; 0 beyond a sequence's pages.
        sampled: int64 [R], rows of T whose logits are wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    counts: torch.Tensor
    table: torch.Tensor
    sampled: torch.Tensor

    @classmethod
    def of(cls, shares: list[Share], page_size: int) -> Batch:
        """The step that runs `shares`, decodes first."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        width = max(-(-(share.start + share.count) // page_size) for share in shares)
        table = torch.zeros(len(shares), width, dtype=torch.int64)
        for row, share in enumerate(shares):
            end, pages = share.start + share.count, share.sequence.pages
            tokens += share.sequence.tokens[share.start : end]
            positions += range(share.start, end)
            slots += [pages[at // page_size] * page_size + at % page_size for at in range(share.start, end)]
            used = -(-end // page_size)
            table[row, :used] = torch.tensor(pages[:used])
            if share.samples:
                sampled.append(len(tokens) - 1)
        lengths = [share.start + share.count for share in shares]
        counts = [share.count for share in shares]
        return cls(_ids(tokens), _ids(positions), _ids(slots), _ids(lengths), _ids(counts), table, _ids(sampled))

    @property
    def num_decodes(self) -> int:
        """The first so many sequences have one new token."""
        return int((self.counts == 1).sum())

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(header [FIELDS], everything in one int64 tensor), for a broadcast; `unpacked` reads them."""
        header = torch.tensor([1, len(self.tokens), len(self.lengths), self.table.shape[1], len(self.sampled)])
        parts = (self.tokens, self.positions, self.slots, self.lengths, self.counts, self.table, self.sampled)
        return header, torch.cat([part.flatten() for part in parts])

    @staticmethod
    def packed_size(header: list[int]) -> int:
        """Length of the second tensor of `packed`."""
        _, tokens, rows, width, sampled = header
        return 3 * tokens + 2 * rows + rows * width + sampled

    @classmethod
    def unpacked(cls, header: list[int], packed: torch.Tensor) -> Batch:
        """What `packed` was made of."""
        _, tokens, rows, width, sampled = header
        ids, positions, slots, lengths, counts, table, last = packed.split(
            [tokens, tokens, tokens, rows, rows, rows * width, sampled]
        )
        return cls(ids, positions, slots, lengths, counts, table.view(rows, width), last)


class Runner:
    """Runs batches on an enabled model.

    Args:
        model: a transformers model that `octavo.integrations.transformers.enable` was called on.
        handle: what that returned.

    Attributes:
        graphs: run the steps that fit them; None: every step is launched anew.
    """

    alone = True  # no other rank waits for its next step, so a failed one may be tried again

    def __init__(self, model: Any, handle: Handle) -> None:
        check_positions(model.config.get_text_config(decoder=True))
        self.model, self.handle = model, handle
        self.page_size = handle.specs[0].page_size
        self.device = handle.caches[0].device
        self.graphs: DecodeGraphs | None = None
        self._cache = handle.new_cache()

    def run(self, batch: Batch) -> torch.Tensor:
        """Append and attend the batch's tokens in every layer; logits [R, vocabulary] of its sampled rows."""
        if self.graphs is not None and self.graphs.fits(batch):
            return self.graphs.run(batch)
        int32 = {"dtype": torch.int32, "device": self.device}
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), batch.counts.cumsum(0)])
        step = Step(
            columns=len(batch.tokens),
            slots=batch.slots.to(self.device),
            rows=None,
            seq_lens=batch.lengths.to(**int32),
            page_table=batch.table.to(**int32),
            query_starts=starts.to(**int32),
            counts=batch.counts.tolist(),
            lengths=batch.lengths.tolist(),
        )
        tokens, positions = batch.tokens[None].to(self.device), batch.positions[None].to(self.device)
        return self.forward(tokens, positions, step, batch.num_decodes, batch.sampled.to(self.device))

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: Step, num_decodes: int, rows: torch.Tensor | int
    ) -> torch.Tensor:
        """The model over [1, T] tokens of `step`; logits [R, vocabulary] of `rows`, or of all T where it is 0."""
        self.handle.begin(self._cache, step, num_decodes)
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=rows,
            **{self.handle.keyword: self._cache},
        )
        return output.logits[0]

    def warm_up(self) -> None:
        """Compile what a step needs, prefill and decode, on padding: nothing is written to the cache."""
        one = {"dtype": torch.int32, "device": self.device}
        for count in (1, 2 * self.page_size):
            tokens = torch.zeros(1, count, dtype=torch.int64, device=self.device)
            step = Step(
                columns=count,
                slots=torch.full((count,), -1, device=self.device),
                rows=None,
                seq_lens=torch.zeros(1, **one),
                page_table=torch.zeros(1, 1, **one),
                query_starts=torch.tensor([0, count], **one),
                counts=[count],
                lengths=[0],
            )
            self.forward(tokens, tokens, step, int(count == 1), 0)

    def stop(self) -> None:
        """Nothing waits for this runner."""


def _ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def check_positions(config: Any) -> None:
    """Raise Unsupported where a position's rotation would depend on what else is in the batch."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    found = {str(kind.get("rope_type", kind.get("type", "default"))) for kind in kinds}
    unfit = sorted(found & {"dynamic", "longrope"})
    if unfit:
        raise Unsupported(
            f"serving a model with {unfit[0]} rotary embeddings",
            [f"rotations must depend on the position alone, not on the longest sequence of a step; {unfit[0]} ones do"],
            "--engine vllm or --engine sglang",
        )
