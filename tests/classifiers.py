"""Reward models made by hand: small, on disk as `transformers` saves them, with the tokenizer of single characters."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForSequenceClassification

from roll.model.tiny import character_tokenizer, tiny_config


def save_random(folder: Path, *, labels: int = 1, seed: int = 0) -> Path:
    """A model whose scores are noise."""
    config = tiny_config()
    config.num_labels, config.num_hidden_layers = labels, 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight, std=0.5)
    return _saved(model, folder)


def save_liking(folder: Path, liked: str) -> Path:
    """A model whose score is above 0 where a conversation ends with this character, and below 0 elsewhere."""
    config = tiny_config()
    config.num_labels, config.num_hidden_layers = 1, 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config)
    token = character_tokenizer().convert_tokens_to_ids(liked)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)  # no layer adds anything: the last state is the last token's own
        model.model.embed_tokens.weight[:, 0] = -1
        model.model.embed_tokens.weight[token, 0] = 1
        model.score.weight[0, 0] = 1 / config.hidden_size**0.5
    return _saved(model, folder)


def _saved(model: LlamaForSequenceClassification, folder: Path) -> Path:
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder
