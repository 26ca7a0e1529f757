"""Tools of environments: from the environment to the chat template, when it is played and when it is imitated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from roll.config.schema import DataConfig
from roll.data.chat_sources import load_chats
from roll.data.task import EnvSpec, Message
from roll.env import EnvFailure, ResetResult
from roll.env.base import parse_reset
from roll.env.pool import EnvPool
from roll.model.chat import ChatRenderer
from roll.model.tiny import character_tokenizer

CALLER = f"{Path(__file__).with_name('callers.py')}:Caller"
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move one cell: up, down, left or right.",
        "parameters": {"type": "object", "properties": {"direction": {"type": "string"}}, "required": ["direction"]},
    },
}


def begun(name: str, **options: Any) -> ResetResult:
    async def main() -> ResetResult:
        async with EnvPool() as pool:
            return await pool.reset("episode", EnvSpec(name, 3, options))

    return asyncio.run(main())


def test_the_format_json_tells_its_tool_and_others_none() -> None:
    assert begun("sokoban", format="json").tools == (MOVE,)
    assert begun("sokoban").tools == ()
    assert begun("python", form="json").tools[0]["function"]["name"] == "python"
    assert begun("python").tools == ()


def test_a_method_is_called_once_the_episode_has_begun() -> None:
    assert begun(CALLER).tools == ({"name": "act3"},)


@pytest.mark.parametrize("tools", ["move", 7, [1], [{"name": {1, 2}}]])
def test_what_is_no_tool_is_refused_by_name(tools: Any) -> None:
    with pytest.raises(ValueError, match="the environment's tools are"):
        parse_reset("begin", tools)
    with pytest.raises(EnvFailure, match="invalid: the environment's tools are"):
        begun(CALLER, tools=tools)


def test_demonstrations_are_rendered_with_their_tools() -> None:
    tokenizer = character_tokenizer()
    shows = "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    tokenizer.chat_template = shows + str(tokenizer.chat_template)
    renderer = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    options = {"name": "sokoban", "count": 2, "held_out": 0, "format": "json"}
    for window in (0, 1):
        chat = load_chats(DataConfig(source="demonstrations", options={**options, "window": window})).train[0]
        assert chat.tools == (MOVE,)
        (log,) = renderer.demonstrations([Message(role="user", content="q"), chat.messages[-1]], chat.tools)
        assert tokenizer.decode(log.ids).startswith("[move]")
