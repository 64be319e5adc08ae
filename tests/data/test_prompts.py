"""Prompt files: what is accepted, what is refused and how; the order and its resumption."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2po_megatron.data.prompts import Cursor, PromptQueue, read_prompts
from m2po_megatron.data.trajectory import Prompt


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_with_and_without_ids(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "1+1=", "answer": "2"}', "", '{"prompt": "2+2=", "answer": "4", "id": 7}')
    assert read_prompts(path) == [Prompt("prompts.jsonl:1", "1+1=", "2"), Prompt("7", "2+2=", "4")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "answer": "b"', "is not valid JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"prompt": "a\\ud800", "answer": "b"}', '"prompt" holds a lone surrogate'),
        ('{"prompt": "a", "answer": "\\udfff"}', '"answer" holds a lone surrogate'),
        ('{"prompt": "a", "answer": "b", "id": "\\ud800"}', '"id" holds a lone surrogate'),
        ("[1, 2]", "is not a JSON object but list"),
        ('{"question": "a", "answer": "b"}', 'has no "prompt" .it has question.'),
        ('{"prompt": "", "answer": "b"}', '"prompt" must be a text that is not empty'),
        ('{"prompt": 3, "answer": "b"}', '"prompt" must be a text'),
        ('{"prompt": "a"}', 'has no "answer"'),
        ('{"prompt": "a", "answer": 4}', '"answer" must be a text'),
        ('{"prompt": "a", "answer": "b", "id": null}', '"id" must be a text or an integer'),
        ('{"prompt": "a", "answer": "b", "id": "one"}', "id 'one' is already used by line 1"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, '{"prompt": "x", "answer": "y", "id": "one"}', "", line)
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 3: {reason}"):
        read_prompts(path)


def test_a_row_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "b"}\n')
    with pytest.raises(ValueError, match="line 1: is not UTF-8"):
        read_prompts(path)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path, "", ""))
    with pytest.raises(FileNotFoundError, match="absent.jsonl does not exist"):
        read_prompts(tmp_path / "absent.jsonl")


PROMPTS = [Prompt(str(i), f"{i}=") for i in range(20)]


def take(queue: PromptQueue, count: int) -> list[str]:
    return [queue.take()[0].id for _ in range(count)]


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    ids = take(PromptQueue(PROMPTS, seed=1), 60)
    epochs = [ids[0:20], ids[20:40], ids[40:60]]
    assert all(sorted(epoch) == sorted(p.id for p in PROMPTS) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ids == take(PromptQueue(PROMPTS, seed=1), 60)
    assert ids != take(PromptQueue(PROMPTS, seed=2), 60)


@pytest.mark.parametrize("taken", [0, 7, 19, 20, 33, 40])
def test_resuming_from_the_cursor_continues_the_order(taken: int) -> None:
    whole = take(PromptQueue(PROMPTS, seed=5), 60)
    first = PromptQueue(PROMPTS, seed=5)
    take(first, taken)
    assert first.cursor == Cursor(taken // 20, taken % 20)
    assert take(PromptQueue(PROMPTS, seed=5, cursor=first.cursor), 60 - taken) == whole[taken:]


def test_a_cursor_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="was the file changed"):
        PromptQueue(PROMPTS, seed=0, cursor=Cursor(0, 21))
