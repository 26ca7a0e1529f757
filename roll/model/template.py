"""Analyses a chat template without rendering it.

Most templates are a loop over the messages that writes each one independently. With such a template, a conversation that
continues need not be rendered from its start: it grows by the text that the new messages would add after its first
message alone. This is decided from the template's syntax tree; in case of doubt the answer is no.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from jinja2 import Environment, TemplateSyntaxError, nodes

_CONSTANT_NAMES = frozenset({"bos_token", "eos_token", "pad_token", "unk_token", "tools", "raise_exception"})
"""Names whose meaning is constant throughout a conversation."""
_MESSAGES, _LOOP, _GENERATE = "messages", "loop", "add_generation_prompt"
_RESERVED_NAMES = frozenset({_MESSAGES, _LOOP, _GENERATE})
"""Names that such a template must not reassign."""
_PLAIN = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(nodes.Keyword, nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr, nodes.Concat, nodes.CondExpr),
    *(nodes.Test, nodes.Filter, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Continue),
)
"""Nodes that depend only on their children."""


def renders_messages_independently(template: str) -> bool:
    """Whether the text of a conversation is a beginning, followed by the text of every message and the generation prompt,
    where a message's text depends only on itself, on the first message, and on whether it is the first."""
    try:
        tree = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:
        return False
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_name(node.iter, _MESSAGES)]
    if len(loops) != 1:
        return False
    (loop,) = loops
    where = tree.body.index(loop)
    known = _after(tree.body[:where], _CONSTANT_NAMES)
    if known is None or not _is_generation_prompt(tree.body[where + 1 :], known):
        return False
    named = _names(loop.target)
    if named is None or loop.test or loop.else_ or loop.recursive:
        return False
    return _after(loop.body, known | named) is not None


def _is_generation_prompt(rest: list[nodes.Node], known: Set[str]) -> bool:
    """Whether the nodes after the messages are a generation prompt, if requested, and nothing else."""
    if len(rest) != 1 or not isinstance(rest[0], nodes.If) or not _is_name(rest[0].test, _GENERATE):
        return False
    return not (rest[0].elif_ or rest[0].else_) and _after(rest[0].body, known) is not None


def _after(body: Iterable[nodes.Node], known: Set[str]) -> Set[str] | None:
    """The known names after these nodes; None if one of the nodes depends on other names."""
    for node in body:
        if isinstance(node, nodes.Assign):
            named = _names(node.target)
            if named is None or not _is_local(node.node, known):
                return None
            known = known | named
        elif isinstance(node, nodes.If):
            if not _is_local(node.test, known):
                return None
            for branch in (node.body, *(other.body for other in node.elif_), node.else_):
                after = _after(branch, known)
                if after is None:
                    return None
                known = known | after
            if not all(_is_local(other.test, known) for other in node.elif_):
                return None
        elif not _is_local(node, known):
            return None
    return known


def _is_local(node: nodes.Node, known: Set[str]) -> bool:
    """Whether a node's text or value depends only on known names."""
    if isinstance(node, nodes.Name):
        return node.name in known
    if isinstance(node, nodes.Getitem) and _is_name(node.node, _MESSAGES):
        return isinstance(node.arg, nodes.Const) and node.arg.value == 0
    if isinstance(node, nodes.Getattr) and _is_name(node.node, _LOOP):
        return node.attr == "first" or _LOOP in known
    if isinstance(node, nodes.For):  # over a part of one message; its own loop variable may be used freely
        named = _names(node.target)
        if named is None or node.test or node.else_ or node.recursive or not _is_local(node.iter, known):
            return False
        return _after(node.body, known | named | {_LOOP}) is not None
    if isinstance(node, nodes.Filter) and node.name == "random":
        return False
    return isinstance(node, _PLAIN) and all(_is_local(child, known) for child in node.iter_child_nodes())


def _names(target: nodes.Node) -> frozenset[str] | None:
    """The names that a loop or an assignment binds; None if the target is not a plain name or several."""
    parts = target.items if isinstance(target, nodes.Tuple) else [target]
    names = frozenset(part.name for part in parts if isinstance(part, nodes.Name)) - _RESERVED_NAMES
    return names if len(names) == len(parts) else None


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name
