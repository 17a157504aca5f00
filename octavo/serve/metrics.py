"""What /metrics tells, in Prometheus' text format."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from .engine import Engine
    from .requests import Sequence
    from .scheduler import Share

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
WAIT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("octavo_requests", "HTTP requests answered.", ("endpoint", "status"), registry=registry)
        self._ended = Counter("octavo_sequences", "Replies ended, by why.", ("finish",), registry=registry)
        self._prompt = Counter("octavo_prompt_tokens", "Tokens of prompts computed or found.", registry=registry)
        self._cached = Counter("octavo_prefix_cache_hit_tokens", "Of those, found in the cache.", registry=registry)
        self._new = Counter("octavo_generated_tokens", "Tokens generated.", registry=registry)
        self._step = Histogram(
            "octavo_step_seconds", "Time of a step.", ("kind",), buckets=STEP_SECONDS, registry=registry
        )
        self._preemptions = Counter("octavo_preemptions", "Times that a sequence made way.", registry=registry)
        self._preempted = 0
        self._step_tokens = Counter("octavo_step_tokens", "Tokens run through the model.", registry=registry)
        self._first = Histogram(
            "octavo_time_to_first_token_seconds", "From arrival.", buckets=WAIT_SECONDS, registry=registry
        )
        self._between = Histogram(
            "octavo_time_between_tokens_seconds", "Within a reply.", buckets=STEP_SECONDS, registry=registry
        )

    def watch(self, engine: Engine) -> None:
        """Show the state of `engine` as it is when asked."""

        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(f"octavo_{name}", documentation, registry=self.registry)

        scheduler, pages = engine.scheduler, engine.pages
        gauge("running", "Sequences that run.").set_function(lambda: len(scheduler.running))
        gauge("waiting", "Sequences that queue.").set_function(lambda: engine.waiting)
        gauge("cache_pages", "Pages of the KV cache.").set_function(lambda: pages.pool.num_pages)
        gauge("cache_pages_used", "Pages that running sequences own.").set_function(lambda: pages.in_use)
        gauge("cache_pages_kept", "Pages of finished ones.").set_function(lambda: pages.pool.used_pages - pages.in_use)

    def stepped(self, seconds: float, shares: list[Share], preemptions: int) -> None:
        """A step of `shares` took so long; so many sequences made way since the server started."""
        self._preemptions.inc(preemptions - self._preempted)
        self._preempted = preemptions
        tokens = sum(share.count for share in shares)
        self._step.labels("decode" if tokens == len(shares) else "mixed").observe(seconds)
        self._step_tokens.inc(tokens)

    def token(self, sequence: Sequence) -> None:
        """`sequence` has a new token."""
        now = time.monotonic()
        if sequence.told is None:
            self._first.observe(now - sequence.arrived)
            self._prompt.inc(len(sequence.prompt))
            self._cached.inc(sequence.cached or 0)
        else:
            self._between.observe(now - sequence.told)
        sequence.told = now
        self._new.inc()

    def ended(self, sequence: Sequence, why: str) -> None:
        """`sequence` has ended: stop, length, cancelled or error."""
        self._ended.labels(why).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
