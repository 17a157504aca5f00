"""lm-eval over the sides of a comparison: its tasks, answered through the paged caches.

lm-eval scores a continuation by one forward pass, which would never read a cache. Here the tokens go through the
model's cache in chunks, the last ones one by one, so that log-likelihoods are of the keys and values as they are
stored; generation is the model's own. The softmax is taken in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch

from ..errors import InvalidInput, first_line
from . import passes

CHUNK, TAIL = 128, 8
RESAMPLES = 1000


def evaluate(
    sides: Sequence[passes.Side],
    tokenizer: Any,
    tasks: Sequence[str],
    limit: int | None = None,
    batch_size: int = 4,
    include: str | None = None,
) -> dict[str, dict[str, dict[str, dict[str, float | None]]]]:
    """{task: {side: {metric: {"value", "stderr"}}}} of lm-eval's `tasks`, at most `limit` examples of each.

    include: a folder of further task files. Raises InvalidInput for a task that lm-eval does not know or cannot load.
    """
    from lm_eval import simple_evaluate

    manager = known_tasks(tasks, include)
    results: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for side in sides:
        try:
            found = simple_evaluate(
                model=_language_model(side, tokenizer, batch_size),
                tasks=list(tasks),
                limit=limit,
                task_manager=manager,
                bootstrap_iters=RESAMPLES,
                log_samples=False,
            )
        except (OSError, ValueError) as error:  # a data set that cannot be fetched, a task that does not fit the model
            raise InvalidInput(f"lm-eval cannot run {', '.join(tasks)}", first_line(error)) from error
        for task, metrics in (found or {})["results"].items():
            results.setdefault(task, {})[side.name] = _metrics(metrics)
    return results


def known_tasks(tasks: Sequence[str], include: str | None = None) -> Any:
    """lm-eval's manager of tasks; InvalidInput for a task that it does not know."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise InvalidInput("--tasks must be tasks that lm-eval knows", ", ".join(unknown))
    return manager


def _metrics(found: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """lm-eval's "acc,none" and "acc_stderr,none" as one entry "acc"; filters other than none stay in the name.

    What is no metric has no filter. What is not finite is left out, as a single example's error is: JSON has no NaN.
    """
    values: dict[str, dict[str, float | None]] = {}
    for key, value in found.items():
        name, comma, filter_name = key.partition(",")
        if not comma or name.endswith("_stderr") or not _is_finite(value):
            continue
        error = found.get(f"{name}_stderr,{filter_name}")
        shown = name if filter_name == "none" else f"{name} ({filter_name})"
        values[shown] = {"value": float(value), "stderr": float(error) if _is_finite(error) else None}
    return values


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _language_model(side: passes.Side, tokenizer: Any, batch_size: int) -> Any:
    """lm-eval's model of a side; the class is made here, for lm-eval is imported only when it is asked for."""
    from lm_eval.models.huggingface import HFLM

    class PagedLM(HFLM):
        def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
            return through_cache(side, inps)

    return PagedLM(pretrained=side.model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")


@torch.inference_mode()
def through_cache(side: passes.Side, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, vocabulary] of tokens [B, T] through a fresh cache: CHUNK at a time, the last TAIL one by one."""
    cache = side.new_cache({})
    keyword = passes.cache_keyword(side.model)
    parts = [
        side.model(tokens[:, start:end], use_cache=True, **{keyword: cache}).logits
        for start, end in passes.pieces(tokens.shape[1], CHUNK, TAIL)
    ]
    return torch.cat(parts, 1)
