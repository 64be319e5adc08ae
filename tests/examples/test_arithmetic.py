"""The bundled task is what its scripts say: reproducible rows, held-out sums kept out, a model half-way there."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from m2po_megatron.data.prompts import read_prompts

TASK = Path(__file__).parent.parent.parent / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def make_model() -> ModuleType:
    """examples/arithmetic/make_model.py, imported as it is when it is run: with its own folder on the path."""
    spec = importlib.util.spec_from_file_location("make_model", TASK / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(TASK))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TASK))
    return module


def operands(name: str) -> list[tuple[int, int]]:
    """The pairs of a file, read from the prompts themselves."""
    prompts = [json.loads(line)["prompt"] for line in (TASK / name).read_text().splitlines()]
    matches = [re.fullmatch(r"(\d+)\+(\d+)=", prompt) for prompt in prompts]
    return [(int(match[1]), int(match[2])) for match in matches if match]


def test_the_files_split_all_pairs() -> None:
    train, heldout = operands("train.jsonl"), operands("heldout.jsonl")
    assert (len(train), len(heldout)) == (9744, 256)
    assert not set(train) & set(heldout)
    assert set(train) | set(heldout) == {(a, b) for a in range(100) for b in range(100)}


def test_prompts_and_answers_are_sums() -> None:
    for name in ("train.jsonl", "heldout.jsonl"):
        prompts = read_prompts(TASK / name)
        assert len({prompt.id for prompt in prompts}) == len(prompts)
        for prompt, (a, b) in zip(prompts, operands(name), strict=True):
            assert (prompt.id, prompt.text, prompt.answer) == (f"{a}+{b}", f"{a}+{b}=", str(a + b))


def test_the_script_writes_these_files(make_model: ModuleType) -> None:
    for name, rows in zip(("train.jsonl", "heldout.jsonl"), make_model.arithmetic_rows(), strict=True):
        assert "".join(json.dumps(row) + "\n" for row in rows) == (TASK / name).read_text()


def test_supervised_training_never_sees_a_held_out_sum(make_model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row whose gradient is taken is recorded: the rows given to the network while gradients are on."""
    tokenizer, network = make_model.make_tokenizer(), make_model.make_network()
    seen: set[str] = set()
    forward = network.forward

    def recording(input_ids: torch.Tensor) -> object:
        if torch.is_grad_enabled():
            seen.update(tokenizer.decode(row, skip_special_tokens=True).split("=")[0] + "=" for row in input_ids)
        return forward(input_ids=input_ids)

    monkeypatch.setattr(network, "forward", recording)
    settings = make_model.argparse.Namespace(lr=1e-4, batch_size=128, max_steps=8, seed=0, accuracy=2.0)
    with pytest.raises(RuntimeError, match="raise --max-steps"):
        make_model.train(network, tokenizer, settings)
    heldout = {f"{a}+{b}=" for a, b in operands("heldout.jsonl")}
    assert len(seen) > 900
    assert seen <= {f"{a}+{b}=" for a, b in operands("train.jsonl")}
    assert not seen & heldout


def test_the_bundled_model_is_half_way_there(make_model: ModuleType) -> None:
    network = AutoModelForCausalLM.from_pretrained(TASK / "model")
    tokenizer = AutoTokenizer.from_pretrained(TASK / "model")
    assert network.num_parameters() == 332_416
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    rows = [json.loads(line) for line in (TASK / "heldout.jsonl").read_text().splitlines()]
    # The exact mean probability of the right answer at temperature 1: no sampling error.
    accuracy = make_model.expected_accuracy(network, *make_model.tensors(rows, tokenizer))
    assert 0.3 < accuracy < 0.5


def test_the_tokenizer_has_a_token_a_character() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TASK / "model")
    assert tokenizer.encode("12+7=", add_special_tokens=False) == [4, 5, 13, 10, 16]
    assert tokenizer.decode([4, 5, 13, 10, 16]) == "12+7="
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
