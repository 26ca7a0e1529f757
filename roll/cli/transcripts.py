"""The output of `roll rollout`: conversations coloured by speaker, with the parts that would be trained on marked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from roll.rollout.transcript import Passage, Transcript

_STYLES = {"prompt": "cyan", "observation": "yellow", "response": "bold green"}
_MARKS = {True: "▌ ", False: "  "}


def print_transcripts(console: Console, transcripts: Sequence[Transcript]) -> None:
    for transcript in transcripts:
        console.print(Rule(Text(f"{transcript.task}  {_verdict(transcript)}"), align="left"))
        for passage in transcript.passages:
            for line in _lines(passage):
                console.print(line, soft_wrap=True)
        console.print(_outcome(transcript), soft_wrap=True)
    scored = [transcript for transcript in transcripts if transcript.state == "scored"]
    trained = sum(p.tokens for t in transcripts for p in t.passages if p.is_trained)
    tokens = sum(p.tokens for t in transcripts for p in t.passages)
    mean = f"mean reward {fmean(t.reward for t in scored):.3f}, " if scored else ""
    judged = f"{len(scored)} of {len(transcripts)} episodes judged"
    counted = f"{trained} of {tokens} tokens would be trained on (▌)"
    console.print(f"{judged}, {mean}{counted}", highlight=False, soft_wrap=True)


def print_json(transcripts: Sequence[Transcript]) -> None:
    print(json.dumps([asdict(transcript) for transcript in transcripts]))


def _lines(passage: Passage) -> Iterator[Text]:
    if passage.forks:
        yield Text("  ── from here on the model sees only what follows ──", style="dim")
    style = _STYLES[passage.kind]
    for line in passage.text.splitlines() or [""]:
        yield Text(_MARKS[passage.is_trained], style=style).append(line)
    if passage.reward is not None:
        yield Text(f"  reward {passage.reward:g}", style="magenta")


def _verdict(transcript: Transcript) -> str:
    return f"reward {transcript.reward:g}" if transcript.state == "scored" else transcript.state


def _outcome(transcript: Transcript) -> Text:
    facts = [_verdict(transcript)]
    facts += [f"{name} {value:g}" for name, value in transcript.parts.items()]
    if transcript.finish is not None:
        facts.append(f"{'last answer ' if 'turns' in transcript.parts else ''}ended by {transcript.finish}")
    if transcript.reason:
        facts.append(transcript.reason)
    return Text("  " + ", ".join(facts), style="magenta" if transcript.state == "scored" else "red")
