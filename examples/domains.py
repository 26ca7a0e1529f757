"""A reward for `examples/domains.yaml`."""

from roll import Response, Task


def letter(task: Task, response: Response) -> dict[str, float]:
    """1 where the text begins with the letter that was asked for; whether it says more is a metric beside it."""
    return {"reward": float(response.text[:1] == task.answer), "says_more": float(len(response.text) > 1)}
