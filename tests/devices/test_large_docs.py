"""The config of docs/guides/large.md is accepted, and its ranks hold what the page says."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path

import pytest

from roll.config import load_config
from roll.config.yaml_document import parse
from roll.data.sources import load_tasks
from roll.devices.inventory import Inventory
from roll.devices.plan import Plan, check_memory, make_plan
from roll.devices.run_requirements import rlvr_requirements
from roll.model.tiny import character_tokenizer
from tests.devices.test_sharded_memory import EXPERTS_235B

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "large.md").read_text(encoding="utf-8")
(CONFIG,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SHAPE = deepcopy(EXPERTS_235B)
SHAPE.max_position_embeddings, SHAPE.architectures = 40960, ["Qwen3MoeForCausalLM"]
NODE = {"id": "", "cores": 128, "gpus": 8, "memory_bytes": 2 << 40, "gpu_bytes": 141 << 30}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """On 32 nodes; of the model there are its shape and a tokenizer, of the tasks two, with prompts of 200 tokens."""
    folder = tmp_path_factory.mktemp("large")
    model, tasks = folder / "Qwen3-235B-A22B", folder / "gsm8k_train.jsonl"
    SHAPE.save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    (model / "model.safetensors").touch()
    question = "x" * 139  # and what the format adds
    tasks.write_text("\n".join(json.dumps({"question": question, "answer": f"#### {n}"}) for n in range(2)))
    settings = {**parse(CONFIG).data, "tasks": {"source": str(tasks), "options": {"format": "gsm8k", "held_out": 1}}}
    config = load_config({**settings, "model": {"path": str(model), "dtype": "bf16"}})
    return make_plan(config, rlvr_requirements(config, load_tasks(config.tasks, None)), Inventory.of([NODE] * 32))


def test_it_fits(plan: Plan) -> None:
    check_memory(plan)
    assert ("tokens per sample", "prompt up to 200, response up to 8192") in plan.sizes


def test_a_rank_holds_what_the_page_says(plan: Plan) -> None:
    pool = plan.memory.pools[0]
    planned = {p.what: round(p.bytes / 2**20) for p in plan.memory.parts[pool, "train"] if p.role == "actor_train"}
    rows = re.findall(r"│ ([a-z][^│]*?) +│ ([\d,]+) +│$", PAGE, re.MULTILINE)
    said = {what: int(mib.replace(",", "")) for what, mib in rows}
    total = sum(p.bytes for p in plan.memory.parts[pool, "train"] if p.role == "actor_train")
    assert said.pop("each of 256") == round(total / 2**20)
    assert said == planned
