"""A serving storm: a simulated engine on one device, thousands of steps of what engines do to kernels.

Requests arrive, share prefixes, are preempted and finish; drafts are verified and partly rejected; page tables keep
stale ids, padded rows have lengths and pages of anything; decode steps are graphs, captured from the largest batch to
the smallest and replayed as batches come; prompts run in mixed batches on another stream; two models with different
heads share one workspace. The tokens of a request are known, so what every row must be is known without reading the
cache: sampled rows are compared with attention in float64 over the tokens' keys and values as the format stores them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention import Attention
from ..quality.score import common
from ..spec import AttentionSpec
from .graphs import Captured
from .storm_layers import VOCABULARY, Buffers, Layer, no_synchronisation

GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(eq=False)
class Request:
    """One sequence: its tokens, how many of them the caches hold, its pages, how long it shall become."""

    tokens: list[int]
    computed: int
    pages: list[int]
    length: int
    shared: int = 0  # pages at the front that other requests own too


@dataclass
class Tally:
    """What happened, by name, and the largest error of a sampled row relative to the row."""

    counts: dict[str, int] = field(default_factory=dict)
    worst: float = 0.0

    def add(self, name: str, number: int = 1) -> None:
        """Count."""
        self.counts[name] = self.counts.get(name, 0) + number


class Storm:
    """The simulated engine.

    Args:
        specs: of the layers that one step runs, one after the other; they share pages' ids, tables and a workspace.
        device: where. pages: of each pool. max_batch, max_context: bounds. seed: of everything that is drawn.
        backend: one of octavo's, or None for what is chosen.
    """

    def __init__(
        self,
        specs: list[AttentionSpec],
        device: torch.device | str,
        *,
        pages: int = 4096,
        max_batch: int = 256,
        max_context: int = 4096,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.garbage = torch.tensor((*GARBAGE, 0, 7), dtype=torch.int32)
        self.max_batch, self.max_context, self.page = max_batch, max_context, specs[0].page_size
        self.rows = min(spec.max_query_len for spec in specs)
        self.prompt_rows = 4 * self.page
        self.width = -(-max_context // self.page) + 1
        most = max_batch * self.rows + self.prompt_rows
        self.layers: list[Layer] = []
        made = [
            Attention(
                spec,
                max_batch=max_batch + 1,
                max_query_tokens=most,
                max_context=max_context + self.page,
                device=self.device,
                backend=backend,
            )
            for spec in specs
        ]
        largest = max((attention.workspace for attention in made), key=lambda w: w.numel())
        largest.fill_(0xFF)
        for index, (spec, attention) in enumerate(zip(specs, made, strict=True)):
            attention.workspace = largest
            self.layers.append(Layer(spec, pages, attention, seed + index))
        self.free = list(range(1, pages))  # page 0 is nobody's: padding writes nowhere, and reads what is there
        self.draw.shuffle(self.free)
        self.owners: dict[int, int] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.prefixes = [self._tokens(self.draw.randrange(1, 5) * self.page) for _ in range(4)]
        self.kept: dict[int, list[int]] = {}  # pages of a prefix, once a request has computed them
        self.tally = Tally()
        self.outputs = [
            torch.empty(most, spec.num_q_heads, spec.value_dim, dtype=torch.bfloat16, device=self.device)
            for spec in specs
        ]
        self.decode_buffers = Buffers(max_batch, max_batch * self.rows, self.width, self.device)
        self.mixed_buffers = Buffers(max_batch + 1, most, self.width, self.device)
        self.graphs: dict[int, Captured] = {}
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self.device.type == "cuda" else []

    def _compute(self, buffers: Buffers, batch: int, rows: int, num_decodes: int | None, longest: int | None) -> None:
        """Plan, append and run of every layer over the front of `buffers`: what a graph holds."""
        for layer, out in zip(self.layers, self.outputs, strict=True):
            tokens = buffers.tokens[:rows]
            q, k, v = layer.q[tokens], layer.k[tokens], layer.v[tokens]
            before = self._allocations()
            layer.attention.plan(
                buffers.seq_lens[:batch],
                buffers.page_table[:batch],
                buffers.query_starts[: batch + 1],
                num_decodes=num_decodes,
                max_query_len=longest,
            )
            layer.cache.append(k, v, buffers.slots[:rows])
            layer.attention.run(q, layer.cache, out=out[:rows])
            assert self._allocations() == before, "plan, append or run allocated"

    def _allocations(self) -> int:
        """How often torch allocated on the GPU so far."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_stats_as_nested_dict(self.device)["allocation"]["all"]["allocated"]

    def capture(self, sizes: list[int]) -> None:
        """Make a graph for each batch size, the largest first, over rows that are all padding."""
        graphs = all(layer.attention.choice.graph_support != "never" for layer in self.layers)
        for size in sorted(sizes, reverse=True):
            rows = size * self.rows
            step = lambda size=size, rows=rows: self._compute(self.decode_buffers, size, rows, size, self.rows)  # noqa: E731
            self.graphs[size] = Captured(step, self.device, graphs)
            self.tally.add("graphs captured")

    def run(
        self, steps: int, check_every: int = 1, sampled: int = 4, advance: Callable[[], None] = lambda: None
    ) -> Tally:
        """So many steps, rows of every `check_every`-th compared. AssertionError tells the step, row and error."""
        for step in range(steps):
            self._arrive()
            self._admit()
            if self.running:
                self._step(step, sampled if step % check_every == 0 else 0)
            advance()
        return self.tally

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(count)]

    def _draws(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, len(self.garbage), shape, generator=self.generator)

    def _arrive(self) -> None:
        while len(self.waiting) < 4 and self.draw.random() < 0.7:
            prompt = self._tokens(self.draw.randrange(1, 3 * self.page))
            which = self.draw.randrange(2 * len(self.prefixes))
            if which < len(self.prefixes):
                prompt = self.prefixes[which] + prompt
            length = min(self.max_context - self.rows, len(prompt) + self.draw.randrange(1, 4 * self.page))
            self.waiting.append(Request(prompt[: length - 1] or prompt[:1], 0, [], length))
            self.tally.add("arrived")

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            for which, prefix in enumerate(self.prefixes):
                if which in self.kept and len(request.tokens) > len(prefix) and request.tokens[: len(prefix)] == prefix:
                    request.pages = list(self.kept[which])
                    request.shared, request.computed = len(request.pages), len(prefix)
                    self._own(request.pages)
                    self.tally.add("prefixes shared")
            if not self._room(request, len(request.tokens) + self.rows):
                self._release(request)
                return
            self.running.append(self.waiting.pop(0))

    def _own(self, pages: list[int]) -> None:
        for page in pages:
            self.owners[page] = self.owners.get(page, 0) + 1

    def _release(self, request: Request) -> None:
        for page in request.pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                del self.owners[page]
                self.free.append(page)
        request.pages, request.computed, request.shared = [], 0, 0

    def _room(self, request: Request, tokens: int) -> bool:
        """Own pages for so many tokens; False where there are none left."""
        missing = -(-tokens // self.page) - len(request.pages)
        if missing > len(self.free):
            return False
        taken = [self.free.pop() for _ in range(max(0, missing))]
        self._own(taken)
        request.pages += taken
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self.waiting.insert(0, request)
        self.tally.add("preempted")

    def _step(self, step: int, sampled: int) -> None:
        if self.draw.random() < 0.02:
            self._preempt(self.draw.choice(self.running))
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self._room(request, len(request.tokens) + self.rows):
                index += 1
            else:
                self._preempt(self.running[-1])
        decoding = [r for r in self.running if len(r.tokens) - r.computed == 1]
        prompts = [r for r in self.running if len(r.tokens) - r.computed > 1]
        if prompts and (not decoding or self.draw.random() < 0.5):
            shares = self._mixed(decoding, prompts[0])
        elif decoding:
            shares = self._decode(decoding)
        else:
            return
        self._check(step, shares, sampled)
        self._advance(shares)

    def _decode(self, decoding: list[Request]) -> list[tuple[Request, int, list[int]]]:
        """One row a sequence and its drafts, as a graph of the next larger size; the rows beyond are padding."""
        fitting = [size for size in self.graphs if size >= len(decoding)]
        if not fitting:
            decoding = decoding[: max(self.graphs)]
            fitting = [max(self.graphs)]
        size = min(fitting) if self.draw.random() < 0.8 else self.draw.choice(fitting)
        shares = [(r, r.computed, [r.tokens[-1], *self._tokens(self.rows - 1)]) for r in decoding]
        self._fill(self.decode_buffers, shares, size)
        with self._on_stream(0), no_synchronisation(self.device):
            self.graphs[size].replay()
        self.tally.add("graph steps")
        return shares

    def _mixed(self, decoding: list[Request], prompt: Request) -> list[tuple[Request, int, list[int]]]:
        """Decodes and a piece of a prompt in one call, eager, on another stream."""
        shares = [(r, r.computed, [r.tokens[-1]]) for r in decoding]
        # A piece of as few rows as a decode would be taken for one where the host does not say which is which.
        count = min(len(prompt.tokens) - prompt.computed, self.draw.randrange(self.rows + 1, self.prompt_rows))
        shares.append((prompt, prompt.computed, prompt.tokens[prompt.computed : prompt.computed + count]))
        rows = self._fill(self.mixed_buffers, shares, len(shares))
        known = self.draw.random() < 0.5
        with self._on_stream(1), no_synchronisation(self.device):
            longest = max(count, 1) if known else None
            decodes = len(decoding) if known and count > self.rows else None
            self._compute(self.mixed_buffers, len(shares), rows, decodes, longest)
        self.tally.add("mixed steps")
        return shares

    def _fill(self, buffers: Buffers, shares: list[tuple[Request, int, list[int]]], batch: int) -> int:
        """Write a step's metadata; sequences beyond the live ones are padding of any kind. Returns the rows."""
        lens, starts, slots, tokens = [], [0], [], []
        table = self.garbage[self._draws(batch, self.width)].numpy()
        for row, (request, begin, new) in enumerate(shares):
            lens.append(begin + len(new))
            starts.append(starts[-1] + len(new))
            pages = request.pages[: self.width]
            table[row, : len(pages)] = pages
            at = range(begin, begin + len(new))
            slots += [request.pages[t // self.page] * self.page + t % self.page for t in at]
            tokens += new
        rows = starts[-1]
        padded_rows = batch * self.rows if buffers is self.decode_buffers else rows
        for _ in range(batch - len(shares)):
            lens.append(self.draw.choice((0, 0, 1)))
            starts.append(starts[-1] if lens[-1] == 0 else min(starts[-1] + 1, padded_rows))
        slots += [-1] * (padded_rows - rows)
        tokens += [0] * (padded_rows - rows)
        buffers.write(
            seq_lens=lens, query_starts=starts, page_table=torch.from_numpy(table), slots=slots, tokens=tokens
        )
        return rows

    def _check(self, step: int, shares: list[tuple[Request, int, list[int]]], sampled: int) -> None:
        """Compare sampled live rows of every layer with float64."""
        for stream in self.streams:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        for _ in range(sampled):
            index = self.draw.randrange(len(shares))
            request, begin, new = shares[index]
            row = self.draw.randrange(len(new))
            at = sum(len(s[2]) for s in shares[:index]) + row
            tokens = request.tokens[:begin] + new
            for layer, out in zip(self.layers, self.outputs, strict=True):
                want = layer.expected(tokens, begin + row)
                got = out[at].double()
                error = float((got - want).norm() / want.norm().clamp_min(1e-30))
                # FP8 products of a prompt's piece are as far off as e4m3 is; decode is as exact as bf16.
                limit = 2.0**-4 if len(new) > self.rows and layer.spec.precision == "fast" else 2.0**-6
                words = f"step {step}, sequence {index} of {len(shares)}, row {row} of {len(new)} at {begin + row}"
                assert error <= limit, f"{words}, {layer.spec.num_q_heads}x{layer.spec.head_dim}: error {error:.4f}"
                self.tally.worst = max(self.tally.worst, error)
            self.tally.add("rows compared")

    def _advance(self, shares: list[tuple[Request, int, list[int]]]) -> None:
        """Accept some of the drafts, go on in prompts, finish, keep what can be shared."""
        for request, begin, new in shares:
            if len(request.tokens) - begin == 1:  # a decode: its own token and the accepted drafts
                accepted = self.draw.randrange(len(new))
                request.tokens = request.tokens[:begin] + new[: 1 + accepted] + self._tokens(1)
                request.computed = begin + 1 + accepted
                self.tally.add("drafts rejected", len(new) - 1 - accepted)
            else:
                request.computed = begin + len(new)
                if request.computed == len(request.tokens):
                    request.tokens.append(self.draw.randrange(VOCABULARY))
            for which, prefix in enumerate(self.prefixes):
                if which not in self.kept and request.computed >= len(prefix) == common(request.tokens, prefix):
                    self.kept[which] = request.pages[: len(prefix) // self.page]
                    self._own(self.kept[which])
            if len(request.tokens) >= request.length:
                self.running.remove(request)
                self._release(request)
                self.tally.add("finished")

    @contextmanager
    def _on_stream(self, index: int) -> Any:
        """Run on one of the streams, in order with the host's copies and with the other."""
        if not self.streams:
            yield
            return
        stream, current = self.streams[index], torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


def trial(steps: int, backend: str | None = None, device: str = "cuda") -> dict[str, Any]:
    """The storm as a GPU runs it: two models of other heads and head_dim, graphs of 256 to 1 sequences; what happened.

    Memory is read every 1,000 steps, after 500 that fill what is filled once.
    """
    specs = [
        AttentionSpec(8, 2, 128, max_query_len=2),
        AttentionSpec(8, 1, 64, max_query_len=2, window=700, precision="exact"),
    ]
    started = time.perf_counter()
    storm = Storm(specs, device, pages=6000, max_batch=256, max_context=3000, seed=7, backend=backend)
    storm.capture(list(range(1, 257)))
    storm.run(500, check_every=5, sampled=2)
    memory: list[int] = []
    done = 500
    while done < steps:
        memory.append(torch.cuda.memory_allocated(device))
        count = min(1000, steps - done)
        storm.run(count, check_every=5, sampled=2)
        torch.cuda.synchronize(device)
        done += count
    memory.append(torch.cuda.memory_allocated(device))
    return {
        "backends": [
            {phase: layer.attention.choice.phase(phase).backend for phase in ("prefill", "decode")}
            for layer in storm.layers
        ],
        "specs": [spec.as_dict() for spec in specs],
        "steps": done,
        "counts": storm.tally.counts,
        "worst_row_error": storm.tally.worst,
        "bytes_allocated": sorted(set(memory)),
        "seconds": round(time.perf_counter() - started, 1),
    }
