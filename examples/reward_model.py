"""A reward model from ratings: conversations in which a digit is repeated are rated good, others bad. Half a minute on
a CPU; the folder is one that `roles.reward_model.model` takes."""

import random
import string
import sys

import torch
from transformers import LlamaForSequenceClassification

from roll.model.tiny import CHARACTERS, character_tokenizer, tiny_config

STEPS, BATCH = 250, 64


def rated(chance: random.Random) -> tuple[list[dict[str, str]], float]:
    """A question, an answer, and whether it is the answer."""
    digit = chance.choice(string.digits)
    answer = chance.choice([digit, digit, chance.choice(string.digits), chance.choice(CHARACTERS), ""])
    return [{"role": "user", "content": digit}, {"role": "assistant", "content": answer}], float(answer == digit)


def main(folder: str) -> None:
    chance, tokenizer, config = random.Random(0), character_tokenizer(), tiny_config()
    config.num_labels, config.num_hidden_layers = 1, 2
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for step in range(1, STEPS + 1):
        chats, ratings = zip(*(rated(chance) for _ in range(BATCH)), strict=True)
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor(ratings))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            right = ((scores > 0) == torch.tensor(ratings).bool()).float().mean()
            print(f"step {step}: loss {loss:.3f}, {right:.0%} of the ratings right")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/liking")
