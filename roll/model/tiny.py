"""A character tokenizer and a small Llama made from scratch: the model of the tests and of `examples/tiny.yaml`.

Every printable ASCII character and the newline is a token; three special tokens frame the turns of a conversation.
Nothing is downloaded.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

END, USER, ASSISTANT, UNKNOWN = "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"
CHARACTERS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
CONTEXT = 1024
"""Longest sequence the small model supports, in tokens."""

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|' + ('assistant' if m['role'] == 'assistant' else 'user') + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [END, USER, ASSISTANT, UNKNOWN, *CHARACTERS]
    core = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config() -> LlamaConfig:
    """About a million parameters."""
    from transformers import LlamaConfig

    tokenizer = character_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_model(seed: int) -> LlamaForCausalLM:
    """New weights, the same for the same seed; the caller's random state does not change."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_config())
