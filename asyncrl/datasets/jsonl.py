"""Questions and answers from a JSON Lines file (GSM8K's format, among others), as chat prompts."""

from __future__ import annotations

import json
import logging
import re
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, field_validator

from asyncrl.datasets import Split, is_in_split
from asyncrl.interfaces import Row

_log = logging.getLogger(__name__)
_MAX_NAMED = 3
_NUM_PROBED = 10
Pair = tuple[str, str]


class Config(BaseModel, frozen=True, extra="forbid"):
    """Where the rows are and which fields hold what. Relative paths start at the current folder."""

    type: Literal["jsonl"] = "jsonl"
    path: Path
    validation_path: Path | None = None
    """File of held-out rows; null = a share of `path`."""
    validation_share: float = Field(default=0.05, gt=0, lt=1)
    """Share of `path` that is held out without a `validation_path`, by the hash of the question."""
    question_field: str = "question"
    answer_field: str = "answer"
    answer_pattern: str | None = None
    """Regular expression with one group that finds the answer in the answer field; its last match
    counts, and a row without one is left out. null = the whole field."""
    instruction: str = ""
    """Follows each question, after an empty line; empty adds nothing."""

    @field_validator("answer_pattern")
    @classmethod
    def _has_one_group(cls, value: str | None) -> str | None:
        try:
            num_groups = 1 if value is None else re.compile(value).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if num_groups != 1:
            raise ValueError(f"has {num_groups} groups; give exactly one, around the answer")
        return value


def check(config: Config) -> None:
    """ValueError that names the setting whose file is missing or does not begin with such rows."""
    for key in ("path", "validation_path"):
        path = getattr(config, key)
        if path is not None:
            _check_file(config, path, key=f"data.{key}")


def _check_file(config: Config, path: Path, *, key: str) -> None:
    if not path.is_file():
        what = "a folder" if path.is_dir() else f"no such file (current folder {Path.cwd()})"
        raise ValueError(f"{key}={path}: {what}; set {key} to a JSON Lines file")
    try:
        with path.open("rb") as lines:
            numbered = ((n, line) for n, line in enumerate(lines, start=1) if line.strip())
            first = list(islice(numbered, _NUM_PROBED))
    except OSError as error:
        raise ValueError(f"{key}={path}: cannot be read ({error}); set {key}") from error
    if not first:
        raise ValueError(f"{key}={path}: the file is empty; set {key} to a file with rows")
    problems = [(number, _problem(config, line)) for number, line in first]
    if all(problem for _, problem in problems):  # a bad row among good ones is left out
        number, problem = problems[0]
        raise ValueError(
            f"{key}={path}: line {number}: {problem}; rows are JSON objects, one a line, with text "
            f"in the fields that data.question_field={config.question_field!r} and "
            f"data.answer_field={config.answer_field!r} name"
        )


def _problem(config: Config, line: bytes) -> str:
    """Why a line is no row; empty when it is one."""
    try:
        _fields(config, line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error})"
    except json.JSONDecodeError as error:
        return f"not JSON ({error})"
    except ValueError as error:
        return str(error)
    return ""


def _read(config: Config, path: Path) -> list[Pair]:
    """The good rows of a file; bad ones are counted and named in one warning."""
    rows, bad = [], []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(_parse(config, line))
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    if bad:
        more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
        _log.warning(
            "%s: %d of %d rows left out: %s%s",
            path, len(bad), len(bad) + len(rows), "; ".join(bad[:_MAX_NAMED]), more,
        )  # fmt: skip
    return rows


def _parse(config: Config, line: str) -> Pair:
    """Question and answer; ValueError for a line without them."""
    question, answer = _fields(config, line)
    if config.answer_pattern is not None:
        found = re.findall(config.answer_pattern, answer)
        if not found:
            raise ValueError(f"data.answer_pattern={config.answer_pattern!r} is not in the answer")
        answer = found[-1]
    return question, answer.strip()


def _fields(config: Config, line: str) -> Pair:
    """The texts of the question field and the answer field."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, not {type(row).__name__}")
    for field in (config.question_field, config.answer_field):
        if not isinstance(row.get(field), str | int | float) or not str(row[field]).strip():
            raise ValueError(f"no text in field {field!r} (has {sorted(row)})")
    return str(row[config.question_field]), str(row[config.answer_field])


def _split(config: Config, *, split: Split) -> list[Pair]:
    if config.validation_path is None:
        share = config.validation_share
        rows = _read(config, config.path)
        return [row for row in rows if is_in_split(row[0], split=split, validation_share=share)]
    held_out = _read(config, config.validation_path)
    if split == "validation":
        return held_out
    questions = {question for question, _ in held_out}
    rows = _read(config, config.path)
    kept = [row for row in rows if row[0] not in questions]
    if len(kept) < len(rows):
        _log.warning(
            "%s: %d of %d rows left out: also in data.validation_path=%s",
            config.path, len(rows) - len(kept), len(rows), config.validation_path,
        )  # fmt: skip
    return kept


class Dataset:
    """Implements `asyncrl.interfaces.Dataset`; an answer is a string."""

    def __init__(self, config: Config, *, seed: int, split: Split) -> None:
        del seed  # a file has the same rows for every run
        check(config)
        self._config = config
        self._rows = _split(config, split=split)
        if not self._rows:
            raise ValueError(
                f"data.path={config.path}, data.validation_path={config.validation_path}: no "
                f"{split} row with text in fields {config.question_field!r} and "
                f"{config.answer_field!r}; check data.question_field, data.answer_field and "
                "data.answer_pattern"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        """The question as one user message, and its answer."""
        question, answer = self._rows[number]
        parts = [question, self._config.instruction]
        content = "\n\n".join(part for part in parts if part)
        return Row(messages=[{"role": "user", "content": content}], answer=answer)
