"""Which engine serves a model."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.engine.paged.engine import PagedEngine
from roll.engine.slot_engine import SlotEngine


def make_engine(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    *,
    max_running: int,
    exact: bool = False,
    kv_tokens: int = 0,
    version: int = 0,
    records_routes: bool = False,
) -> SlotEngine | PagedEngine:
    """On a GPU a paged cache and captured steps; on a CPU, and where bits must not depend on neighbours, slots.
    `kv_tokens`: what its cache holds at most; 0 for what requests need, as far as memory goes. `records_routes`:
    completions say which experts tokens were sent to, if the model has any."""
    if next(model.parameters()).is_cuda and not exact:
        return PagedEngine(
            model,
            tokenizer,
            max_running=max_running,
            kv_tokens=kv_tokens,
            version=version,
            records_routes=records_routes,
        )
    return SlotEngine(
        model,
        tokenizer,
        max_running=max_running,
        exact=exact,
        kv_tokens=kv_tokens,
        version=version,
        records_routes=records_routes,
    )
