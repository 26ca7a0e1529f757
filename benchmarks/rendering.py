"""What a turn of a conversation costs to render as it gets longer, under SmolLM2's template.

`short` renders what a turn adds, as a template allows that writes every message by itself; `whole` renders the
conversation from its beginning, as every other template needs. A turn is an answer and an observation. Microseconds a
turn, with the tokens of the new text, both in one run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.config.schema import ModelConfig
from roll.data.task import Message
from roll.model.chat import ChatRenderer, Conversation
from roll.model.find import find_model
from roll.model.loading import load_tokenizer

ROOM = "######\n#__O_#\n#_X__#\n#__P_#\n#____#\n######\n"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--turns", type=int, nargs="*", default=[5, 20, 80])
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()
    tokenizer = load_tokenizer(find_model("smollm2-135m"), ModelConfig())
    result: dict[str, float] = {}
    for turns in args.turns:
        best = {"short": float("inf"), "whole": float("inf")}
        for _ in range(args.repeats):
            for name in best:
                renderer = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
                assert renderer._renders_independently, "the template is not of the kind that this is about"
                renderer._renders_independently = name == "short"
                best[name] = min(best[name], converse(renderer, turns))
        result |= {f"{name}_{turns}_turns_us": 1e6 * seconds for name, seconds in best.items()}
        result[f"whole_of_short_{turns}_turns"] = best["whole"] / best["short"]
    report(result, args.json)


def converse(renderer: ChatRenderer, turns: int) -> float:
    """Seconds a turn of a conversation of so many."""
    answer = np.array([*renderer.tokenizer("up")["input_ids"], *renderer.stop_ids], np.int32)
    drawn = (answer, np.zeros(len(answer), np.float32), np.zeros(len(answer), np.int32))
    conversation = Conversation(renderer, [Message(role="user", content="Push the box onto the target.\n\n" + ROOM)])
    began = time.perf_counter()
    for turn in range(turns):
        conversation.respond(*drawn)
        conversation.observe([Message(role="user", content=f"turn {turn}\n{ROOM}")])
    return (time.perf_counter() - began) / turns


if __name__ == "__main__":
    main()
