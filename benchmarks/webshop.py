"""WebShop's generated catalogue: what it costs to make and to search, and what simple shoppers score in it.

`at_random` clicks whatever is on the page and searches for three words of the instruction; `first` searches for the
instruction and buys the first result as it is; `expert` is the environment's own. Each plays the same goals, in the
compact view. `observed_chars` is what an episode shows, in characters.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.env.webshop.env import WebShop, open_catalogue

Shopper = Callable[[WebShop, random.Random], str]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--products", type=int, default=4000)
    options.add_argument("--seeds", type=int, default=500)
    args = options.parse_args()
    before, started = memory_mib(), time.process_time()
    catalogue = open_catalogue(args.products, 0)
    made_s, made_mib = time.process_time() - started, memory_mib() - before
    queries = [goal.instruction for goal in catalogue.goals[: args.seeds]]
    started = time.process_time()
    for query in queries:
        catalogue.search(query)
    result = {
        "products": args.products,
        "goals": len(catalogue.goals),
        "made_cpu_s": made_s,
        "made_mib": made_mib,
        "search_cpu_ms": (time.process_time() - started) / len(queries) * 1e3,
    }
    for shopper in (at_random, first, expert):
        result |= {
            f"{shopper.__name__}_{name}": value for name, value in played(shopper, args.products, args.seeds).items()
        }
    report(result, args.json)


def played(shopper: Shopper, products: int, seeds: int) -> dict[str, float]:
    started, rewards, turns, chars = time.process_time(), [], [], []
    for seed in range(seeds):
        world, rng = WebShop(products=products), random.Random(f"shopper/{seed}")
        begun = world.reset(seed)
        seen = [len(str(begun[0]))]
        while True:
            step = world.step(shopper(world, rng))
            seen.append(len(str(step.observation)))
            if step.done:
                break
        rewards.append(step.reward)
        turns.append(len(seen) - 1)
        chars.append(sum(seen))
    return {
        "score": fmean(rewards),
        "success": fmean(reward == 1.0 for reward in rewards),
        "turns": fmean(turns),
        "observed_chars": fmean(chars),
        "most_observed_chars": max(chars),
        "turn_cpu_ms": (time.process_time() - started) / sum(turns) * 1e3,
    }


def at_random(world: WebShop, rng: random.Random) -> str:
    elements = world._shop.elements(world._page)
    return (
        f"click[{rng.choice(elements)}]"
        if elements
        else f"search[{' '.join(rng.sample(world._goal.instruction.split(), 3))}]"
    )


def first(world: WebShop, rng: random.Random) -> str:
    place = world._page
    if not place.keywords:
        return f"search[{world._goal.instruction}]"
    return "click[Buy Now]" if place.product else f"click[{world._shop.results_on(place)[0].id}]"


def expert(world: WebShop, rng: random.Random) -> str:
    return world.expert() or ""


def memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
