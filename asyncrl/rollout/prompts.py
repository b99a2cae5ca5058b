"""The prompt stream: a dataset's rows, shuffled, as token ids, without those that are too long.

The one place where an index of the run becomes a row. Resumable without state: what stands at an
index depends on nothing but the index, the data and the seed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.datasets import stable_hash
from asyncrl.interfaces import Dataset, Messages, Prompt, Row

_log = logging.getLogger(__name__)
_MAX_NAMED = 5


def encode(messages: Messages, tokenizer: Any) -> NDArray[np.int32]:
    """[P] token ids of chat messages, up to where the assistant's turn begins, or of plain text.

    ValueError for chat messages when the tokenizer has no chat template.
    """
    if isinstance(messages, str):
        ids = tokenizer(messages)["input_ids"]
    else:
        if tokenizer.chat_template is None:
            raise ValueError(
                "the data gives chat messages, but the tokenizer of model.path has no chat "
                "template; set model.path to an instruction-tuned model, or data.type to a dataset "
                "of plain text"
            )
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        # The template has written the special tokens already.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.asarray(ids, dtype=np.int32)


class PromptStream:
    """The prompts of one split in the order in which a run asks them: a new one every epoch."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        tokenizer: Any,
        max_prompt_tokens: int,
        seed: int,
        alphabet: str | None,
    ) -> None:
        """Measures every row once; those beyond `max_prompt_tokens` are named in a warning.

        seed: decides the order, together with the epoch.
        alphabet: characters that a random model knows; null = the tokenizer takes any text.
        ValueError when a character is not in it, or when no prompt is short enough.
        """
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._seed = seed
        rows = [dataset.row(number) for number in range(len(dataset))]
        if alphabet is not None:
            _check_alphabet(rows, alphabet)
        lengths = [len(encode(row.messages, tokenizer)) for row in rows]
        self._kept = [row for row, num in enumerate(lengths) if 0 < num <= max_prompt_tokens]
        if len(self._kept) < len(lengths):
            _report(lengths, num_kept=len(self._kept), max_prompt_tokens=max_prompt_tokens)
        self._epoch = -1
        self._order: list[int] = []
        """Positions in `_kept`, in the order of `_epoch`."""

    def __len__(self) -> int:
        """Prompts before the stream repeats."""
        return len(self._kept)

    def draw(self, index: int) -> tuple[Prompt, NDArray[np.int32]]:
        """The prompt at an index of the stream and its token ids [P]; repeats, reshuffled."""
        row = self._dataset.row(self._row_number(index))
        prompt = Prompt(index=index, messages=row.messages, answer=row.answer)
        return prompt, encode(row.messages, self._tokenizer)

    def _row_number(self, index: int) -> int:
        """A pure function of index, seed and kept rows; the order of one epoch is remembered."""
        epoch, position = divmod(index, len(self._kept))
        if epoch != self._epoch:
            generator = np.random.default_rng(stable_hash("shuffle", self._seed, epoch))
            self._order = generator.permutation(len(self._kept)).tolist()
            self._epoch = epoch
        return self._kept[self._order[position]]


def _check_alphabet(rows: Sequence[Row], alphabet: str) -> None:
    for row in rows:
        unknown = set(str(row.messages)) - set(alphabet)
        if unknown:
            raise ValueError(
                f"the prompt {row.messages!r} has characters {''.join(sorted(unknown))!r} that "
                f"model.random.alphabet={alphabet!r} lacks; add them there"
            )


def _report(lengths: Sequence[int], *, num_kept: int, max_prompt_tokens: int) -> None:
    rows = [row for row, num in enumerate(lengths) if not 0 < num <= max_prompt_tokens]
    named = ", ".join(f"row {row} ({lengths[row]} tokens)" for row in rows[:_MAX_NAMED])
    more = f" and {len(rows) - _MAX_NAMED} more" if len(rows) > _MAX_NAMED else ""
    text = (
        f"{len(rows)} of {len(lengths)} prompts are empty or longer than "
        f"rollout.max_prompt_tokens={max_prompt_tokens} (longest: {max(lengths, default=0)}): "
        f"{named}{more}"
    )
    if num_kept == 0:
        raise ValueError(f"{text}; none is left: raise rollout.max_prompt_tokens")
    _log.warning("%s; they are left out, raise rollout.max_prompt_tokens to keep them", text)
