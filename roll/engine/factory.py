"""Chooses the engine for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.engine.slot_engine import SlotEngine

if TYPE_CHECKING:
    from roll.engine.paged.engine import PagedEngine


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
    """The paged engine with CUDA graphs on a GPU; the slot engine on a CPU, and with `exact`, where a request's bits must
    not depend on the other requests. `kv_tokens` limits the tokens in the KV cache; 0 means what requests need, as far as
    memory allows. With `records_routes`, completions contain the experts that each token was routed to, if the model has
    experts."""
    if next(model.parameters()).is_cuda and not exact:
        from roll.engine.paged.engine import PagedEngine  # a CPU does not need it

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
