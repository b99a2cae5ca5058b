from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.datasets import jsonl, reasoning_gym, reverse

GSM8K_ROWS = [
    {"question": f"What is {n} + {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>.\n#### {2 * n}"}
    for n in range(200)
]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(**settings: Any) -> reasoning_gym.Config:
    return reasoning_gym.Config(
        task="chain_sum",
        settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        **settings,
    )


def test_reverse_asks_for_the_letters_backwards() -> None:
    row = reverse.Dataset(reverse.Config(), seed=0, split="train").row(1)
    assert (row.messages, row.answer) == ("aaab>", "baaa")


def test_reverse_splits_all_words_without_overlap() -> None:
    train, validation = (
        reverse.Dataset(reverse.Config(alphabet="abcdef"), seed=0, split=split)
        for split in ("train", "validation")
    )
    words = Counter(d.row(i).messages for d in (train, validation) for i in range(len(d)))
    assert len(words) == 6**4
    assert set(words.values()) == {1}
    assert 0.05 < len(validation) / 6**4 < 0.15


def test_held_out_question_is_never_trained_under_another_seed() -> None:
    questions = [
        {
            d.row(i).answer["question"]
            for d in [reasoning_gym.Dataset(sums(num_rows=600), seed=seed, split=split)]
            for i in range(len(d))
        }
        for seed, split in ((0, "train"), (1, "validation"), (0, "validation"))
    ]
    trained, held_out, held_out_before = questions
    assert not trained & held_out
    assert held_out & held_out_before


def test_reverse_with_too_many_words_to_list_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"data\.length=8 make 16777216 rows.*shorten data\.length"
    ):
        reverse.check(reverse.Config(length=8))


def test_reasoning_gym_asks_no_question_in_both_splits() -> None:
    train, validation = (
        reasoning_gym.Dataset(sums(num_rows=600), seed=0, split=split)
        for split in ("train", "validation")
    )
    asked = Counter(d.row(i).answer["question"] for d in (train, validation) for i in range(len(d)))
    # Two one-digit numbers, plus or minus: 200 questions, of which 600 draws find nearly all.
    assert 150 < len(asked) <= 200
    assert set(asked.values()) == {1}
    assert len(validation) > 0


def test_reasoning_gym_question_ends_with_the_instruction() -> None:
    dataset = reasoning_gym.Dataset(sums(instruction="Be brief."), seed=0, split="train")
    row = dataset.row(0)
    assert row.messages == [{"role": "user", "content": row.answer["question"] + "\n\nBe brief."}]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (reasoning_gym.Config(task="chain_summ"), r"data\.task='chain_summ'"),
        (reasoning_gym.Config(settings={"digits": 2}), r"data\.settings=\{'digits': 2\}"),
        (reasoning_gym.Config(settings={"min_terms": 9, "max_terms": 2}), r"'min_terms': 9"),
    ],
)
def test_reasoning_gym_refuses_what_the_task_does_not_know(
    config: reasoning_gym.Config, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reasoning_gym.check(config)


def test_answer_pattern_finds_the_last_match(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"q": "Why?", "a": "#### 1\n#### 1,234"}])
    config = jsonl.Config(
        path=path,
        validation_share=0.001,
        question_field="q",
        answer_field="a",
        answer_pattern=r"####\s*(\S+)",
        instruction="Say it.",
    )
    row = jsonl.Dataset(config, seed=0, split="train").row(0)
    assert row.answer == "1,234"
    assert row.messages == [{"role": "user", "content": "Why?\n\nSay it."}]


def test_share_of_a_file_is_held_out_without_overlap(tmp_path: Path) -> None:
    config = jsonl.Config(
        path=write_rows(tmp_path / "rows.jsonl", GSM8K_ROWS), validation_share=0.2
    )
    train, validation = (
        jsonl.Dataset(config, seed=0, split=split) for split in ("train", "validation")
    )
    questions = Counter(
        d.row(i).messages[0]["content"] for d in (train, validation) for i in range(len(d))
    )
    assert questions == {row["question"]: 1 for row in GSM8K_ROWS}
    assert 20 < len(validation) < 60


def test_row_of_the_validation_file_is_not_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = jsonl.Config(
        path=write_rows(tmp_path / "train.jsonl", GSM8K_ROWS[:10]),
        validation_path=write_rows(tmp_path / "test.jsonl", GSM8K_ROWS[8:12]),
    )
    assert len(jsonl.Dataset(config, seed=0, split="train")) == 8
    assert len(jsonl.Dataset(config, seed=0, split="validation")) == 4
    assert "2 of 10 rows left out" in caplog.text


def test_bad_rows_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"question": "1?", "answer": "#### 1"})
    no_match = json.dumps({"question": "1?", "answer": "one"})
    path.write_text(f'{good}\n\nnot json\n["a"]\n{{"question": "2?"}}\n{no_match}\n')
    config = jsonl.Config(path=path, validation_share=0.001, answer_pattern="#### (.+)")
    with caplog.at_level(logging.WARNING):
        assert len(jsonl.Dataset(config, seed=0, split="train")) == 1
    assert "4 of 5 rows left out: line 3: " in caplog.text
    assert "line 5: no text in field 'answer' (has ['question']) and 1 more" in caplog.text


def test_file_without_a_good_row_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "1?", "answer": "one"}])
    with pytest.raises(ValueError, match=r"no train row.*data\.question_field"):
        jsonl.Dataset(jsonl.Config(path=path, answer_pattern="#(.+)"), seed=0, split="train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b"\xff\xfe{}\n", r"line 1: not UTF-8 \("),
        (b"\nPAR1\n", r"line 2: not JSON \("),
        (b"[1]\n", "line 1: a JSON object is needed, not list"),
        (
            b'{"text": "hello", "answer": "1"}\n',
            r"no text in field 'question' \(has \['answer', 'text'\]\).*data\.question_field='qu",
        ),
    ],
)
def test_file_that_does_not_begin_with_rows_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.path=.*rows\.jsonl: .*{message}"):
        jsonl.check(jsonl.Config(path=path))
    path.write_bytes(content + b'{"question": "1?", "answer": "1"}\n')
    jsonl.check(jsonl.Config(path=path))


def test_folder_is_no_file_of_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path=.*: a folder; set data\.path"):
        jsonl.check(jsonl.Config(path=tmp_path))


def test_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GSM8K_ROWS)
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(ValueError, match=r"data\.path=.*missing\.jsonl: no such file"):
        jsonl.check(jsonl.Config(path=missing))
    with pytest.raises(ValueError, match=r"data\.validation_path=.*missing\.jsonl"):
        jsonl.check(jsonl.Config(path=path, validation_path=missing))


def test_answer_pattern_without_its_one_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 2 groups; give exactly one"):
        jsonl.Config(path=tmp_path, answer_pattern="(a)(b)")
