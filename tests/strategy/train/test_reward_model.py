"""A reward model's scores against those of the class that `transformers` itself reads them with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import save_liking, save_random
from transformers import AutoModelForSequenceClassification

from roll.config import UserError
from roll.config.schema import TrainConfig
from roll.data.tokenlog import IntArray
from roll.model.classifier import load_classifier
from roll.model.find import find_model
from roll.model.tiny import character_tokenizer
from roll.strategy.train.reward_model import RewardModelStrategy

TOKENIZER = character_tokenizer()


def tokens(text: str) -> IntArray:
    ids = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}], return_dict=False
    )
    return np.array(ids, np.int32)


def made(folder: Path, rows: int = 0, *, exact: bool = False) -> RewardModelStrategy:
    model = load_classifier(find_model(str(folder)), torch.float32)
    return RewardModelStrategy(model, TrainConfig(micro_batch_tokens=rows), exact=exact)


@pytest.mark.parametrize("rows", [0, 32])
def test_scores_are_those_of_the_class_itself(tmp_path: Path, rows: int) -> None:
    folder = save_random(tmp_path)
    conversations = [tokens(text) for text in ("a", "abc", "abd", "", "the same", "the same", "x" * 15)]
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = [float(plain(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits) for ids in conversations]
    assert np.ptp(wanted) > 0.1
    np.testing.assert_allclose(made(folder, rows).scores(conversations), wanted, atol=2e-5)


def test_where_bits_must_repeat_a_score_does_not_depend_on_what_else_waits(tmp_path: Path) -> None:
    scorer = made(save_random(tmp_path), exact=True)
    some = [tokens(text) for text in ("one", "another one", "a third, longer than both")]
    alone = np.concatenate([scorer.scores([ids]) for ids in some])
    assert scorer.scores(some[::-1])[::-1].tobytes() == alone.tobytes()


def test_the_token_that_is_read_is_the_last_that_is_no_padding(tmp_path: Path) -> None:
    scorer = made(save_liking(tmp_path, "7"))
    assert (scorer.scores([tokens("17"), tokens("71"), tokens("")]) > 0).tolist() == [True, False, False]


def test_laid_aside_and_back_it_scores_the_same(tmp_path: Path) -> None:
    scorer = made(save_random(tmp_path))
    before = scorer.scores([tokens("x")])
    scorer.set_residency("none")
    scorer.set_residency("all")
    assert scorer.scores([tokens("x")]) == before


def test_a_model_without_such_a_head_is_refused(tmp_path: Path) -> None:
    from roll.model.tiny import tiny_model

    with pytest.raises(UserError, match="'tiny' has no head that scores: write a folder or hub id"):
        load_classifier(find_model("tiny"), torch.float32)
    with pytest.raises(UserError, match="has a head of 3 outputs"):
        load_classifier(find_model(str(save_random(tmp_path / "three", labels=3))), torch.float32)
    words = tiny_model(0)
    words.save_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match="has no head that scores"):
        load_classifier(find_model(str(tmp_path / "words")), torch.float32)
    words.config.architectures, words.config.num_labels = ["LlamaForSequenceClassification"], 1
    words.config.save_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match=r"has no weights of 'score.weight'"):
        load_classifier(find_model(str(tmp_path / "words")), torch.float32)
