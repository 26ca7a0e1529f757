"""A reward for `examples/domains.yaml`."""

from roll import Response, Task


def letter(task: Task, response: Response) -> dict[str, float]:
    """1 where the text begins with the letter that was asked for, and a little for any letter. Each is a metric."""
    first = response.text[:1]
    return {"right": float(first == task.answer), "any": 0.1 * first.isalpha()}
