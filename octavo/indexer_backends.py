"""The indexer's table of backends: what each needs for each operation, as the data of backends.py.

An operation is what is called: index_append, paged_mqa_logits, mqa_logits (ragged), topk. A file of a backend's package
holds one or two of them (`FILES`); rules look at an IndexerSpec. `choose_indexer` judges them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .backends import TRITON_VERSION, WRITTEN
from .device import ARCHITECTURES, Device
from .rules import Rule, architecture, at_most, one_of, rules_table
from .spec import IndexerSpec

# Operation -> file (without .py) of a backend's package.
FILES = {
    "index_append": "index_append",
    "paged_mqa_logits": "mqa_logits",
    "mqa_logits": "mqa_logits",
    "topk": "topk",
}
OPERATIONS = tuple(FILES)
LOGITS = ("paged_mqa_logits", "mqa_logits")
_PAGED = ("index_append", "paged_mqa_logits")


@dataclass(frozen=True)
class IndexerBackend:
    """One implementation of the indexer's operations.

    Attributes:
        name: what a user calls it.
        rules: all that have to hold; `Rule.phases` narrows one to operations.
        captured: the operations that a CUDA graph can hold, at any batch.
    """

    name: str
    rules: tuple[Rule, ...]
    captured: tuple[str, ...] = OPERATIONS

    def reasons(self, spec: IndexerSpec, device: Device, operation: str) -> tuple[str, ...]:
        """Why it cannot run `operation`: one or more sentences for every broken rule; empty if it may."""
        return tuple(reason for rule in self.rules for reason in rule.reasons(spec, device, operation))


def written(backend: str) -> tuple[Rule, ...]:
    """The rules that this repository has the kernel, one a file."""
    return tuple(
        Rule(
            needs="a kernel in this repository",
            holds=lambda spec, device, operation, file=file: file in WRITTEN[backend],
            found=lambda spec, device, operation: "none yet",
            phases=tuple(operation for operation, of in FILES.items() if of == file),
        )
        for file in dict.fromkeys(FILES.values())
    )


def of(operations: tuple[str, ...], *rules: Rule) -> tuple[Rule, ...]:
    """The rules, as rules of these operations."""
    return tuple(replace(rule, phases=operations) for rule in rules)


# Hopper's tiles: keys and queries come by TMA, and the heads of a row are columns of one tensor-core operand.
GLUON: tuple[Rule, ...] = (
    *of(OPERATIONS, architecture(("sm_90",), "Hopper (sm_90)"), TRITON_VERSION),
    *written("gluon"),
    *of(LOGITS, one_of("num_heads", (16, 32, 64, 128)), one_of("head_dim", (64, 128))),
    *of(
        ("paged_mqa_logits",),
        one_of("page_size", (32, 64, 128), 64, " (the scales of a page in 128-byte pieces)"),
        one_of("page_alignment", (16,)),
        at_most("max_query_len", 8, "max_query_len"),
    ),
)
TRITON: tuple[Rule, ...] = (
    *of(OPERATIONS, architecture(ARCHITECTURES, f"a GPU of {', '.join(ARCHITECTURES)}"), TRITON_VERSION),
    *written("triton"),
    *of(LOGITS, at_most("num_heads", 128, "num_heads"), one_of("head_dim", (64, 128))),
    *of(("index_append",), one_of("head_dim", (64, 128))),
    *of(_PAGED, one_of("page_size", (16, 32, 64, 128), 64), one_of("page_alignment", (4, 8, 16))),
    *of(("topk",), at_most("top_k", 8192, "top_k")),
)
INDEXER_BACKENDS = (
    IndexerBackend("gluon", GLUON),
    IndexerBackend("triton", TRITON),
    # Its append selects the live rows first, which reads the slots on the host.
    IndexerBackend("reference", written("reference"), captured=(*LOGITS, "topk")),
)
INDEXER_BY_NAME = {backend.name: backend for backend in INDEXER_BACKENDS}


def rules_markdown() -> str:
    """The second part of docs/rules.md: every rule of every backend of the indexer, a table a backend."""
    lines = ["", "# Rules of the indexer's backends", "", "As above, an operation at a time."]
    for backend in INDEXER_BACKENDS:
        captured = ", ".join(backend.captured)
        lines += ["", f"## {backend.name}, the indexer", "", f"CUDA graphs: {captured}.", ""]
        lines += rules_table(backend.rules, OPERATIONS)
    return "\n".join(lines) + "\n"
