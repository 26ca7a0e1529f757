"""The page of every setting, made from the schema: `python -m roll.config.reference > docs/reference/config.md`."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config import schema_tree
from roll.config.error_messages import format_bare_value
from roll.config.schema import Config, Section
from roll.config.yaml_document import Path

_INTRODUCTION = """\
# Configuration

One YAML file describes a run. Every setting has a default, so a file names only what it changes, and an empty file is
a complete run. A section with a short form may be written as that one setting: `model: tiny` means `model: {path:
tiny}`.

<!-- cpu -->
```yaml
model: smollm2-135m          # short for model: {path: smollm2-135m}
tasks: addition
rollout:
  groups_per_step: 8
  group_size: 8              # 8 × 8 = 64 samples per step
train: {steps: 50, lr: 1e-5}
```

On the command line an override is written `key.sub=value`. Overrides are applied after the file, a later one wins,
and each replaces only the setting that it names:

<!-- cpu -->
```sh
roll plan examples/tiny.yaml train.lr=3e-6 rollout.group_size=32 rollout.stop='["\\n"]'
```

A value is YAML, except that a text setting takes what is typed (`run.dir=007` is the folder `007`). Numbers may be
written `1e-6` or `10_000`; `null` is nothing, `""` is empty text.

Relative names of files and code (`train.jsonl`, `near.py:near`, `my_rewards:near`) are looked up in the folder of the
YAML file, wherever `roll` is started; `root` names another folder. In an override, and in a mapping given in Python,
they are relative to the working directory. Three things are different:

- `run.dir` is relative to the working directory: the run writes there.
- A model (`model`, `roles.judge.model`), or a run that is read (`data.options.runs`), is looked up in the folder of
  the YAML file, then in the working directory; a model that is in neither is taken from the model hub.
- Options of a function of yours are passed to it as they are written. The function decides what a path among them is
  relative to.

No key is ignored. Unknown and repeated keys, values of the wrong kind and settings that contradict each other are
refused before anything starts, all of them at once, each with its line and what to write instead:

```text
examples/x.yaml:7: train.lrr is not a setting; did you mean train.lr?
```

Numbers are finite: `.nan` is refused everywhere, and `.inf` wherever the table does not give it a meaning. `1e400` is
refused, because no such number exists. A file may have at most 1 MiB and, with its aliases written out, 50,000
values. Merge keys (`<<`) and tags (`!!python/…`) are not read.
"""


def render_reference() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION, *_sections(Config, ())]
    return "\n".join(parts)


def _sections(section: type[Section], path: Path) -> Iterator[str]:
    yield _section(section, path)
    for name, info in section.model_fields.items():
        if inner := schema_tree.inner_section(name, info.annotation):
            yield from _sections(inner[0], (*path, *inner[1]))


def _section(section: type[Section], path: Path) -> str:
    title = f"`{schema_tree.dotted(path)}`" if path else "Top level"
    lines = [f"## {title}", "", _own_docstring(section)]
    if section.short:
        lines += ["", f"Short form: `{path[-1]}: …` sets `{schema_tree.dotted((*path, section.short))}`."]
    lines += ["", "| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for name, info in section.model_fields.items():
        here = (*path, name)
        key = f"`{schema_tree.dotted(here)}`"
        if schema_tree.section_in(info.annotation):
            cells = [
                f"[{key}](#{schema_tree.dotted(here).replace('.', '').lower()})",
                "a section",
                "",
                schema_tree.doc_of(info),
            ]
        elif schema_tree.named_section_in(info.annotation):
            link = schema_tree.dotted((*here, schema_tree.ANY_NAME))
            cells = [key, f"[sections by name](#{link.replace('.', '').lower()})", "`{}`", schema_tree.doc_of(info)]
        else:
            takes = schema_tree.describe_type(info.rebuild_annotation()).removeprefix("a ")
            default = (
                "required"
                if info.is_required()
                else f"`{format_bare_value(info.get_default(call_default_factory=True))}`"
            )
            cells = [key, takes, default, schema_tree.doc_of(info)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _own_docstring(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


if __name__ == "__main__":
    print(render_reference(), end="")
