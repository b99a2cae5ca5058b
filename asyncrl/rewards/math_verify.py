"""Mathematical equality by the `math-verify` package: 1 for a right answer, otherwise 0.

Its time limit is a signal, which works on a main thread only, and some answers (9**9**9**9) keep
Python's lock for ever. So it runs in a small process of its own, which is killed when it hangs;
the kernel ends that process when its parent ends, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Literal

from pydantic import BaseModel, Field

from asyncrl.interfaces import Prompt

requires = (("math_verify", "pip install 'asyncrl[data]'"),)
_log = logging.getLogger(__name__)


class Config(BaseModel, frozen=True, extra="forbid"):
    """How long a check may take and how much of a completion it reads."""

    type: Literal["math_verify"] = "math_verify"
    timeout_s: int = Field(default=5, ge=1)
    """For one answer; one that takes longer is wrong, and a warning says so."""
    max_characters: int = Field(default=2000, ge=1)
    """Only the end of a longer completion is read."""


def is_correct(completion: str, answer: str, *, timeout_s: int) -> bool:
    """Whether the completion's final expression equals the answer. Main thread only.

    ValueError when the answer itself cannot be read as mathematics.
    """
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=timeout_s)
    if not gold:
        raise ValueError(f"the data's answer {answer!r} is not a mathematical expression")
    found = parse(completion, parsing_timeout=timeout_s)
    return bool(verify(gold, found, timeout_seconds=timeout_s))


_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal this process gets when its parent ends."""


class Reward:
    """Implements `asyncrl.interfaces.Reward`; one answer at a time goes to the process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    async def score(self, completion: str, prompt: Prompt) -> float:
        """1.0 when the completion's final expression equals the prompt's answer, otherwise 0.0.

        Raises ValueError for an answer in the data that is not mathematics, RuntimeError when the
        process died.
        """
        text = completion[-self._config.max_characters :]
        async with self._lock:
            process = await self._started()
            try:
                # Reading both sides and comparing may each take the whole time.
                async with asyncio.timeout(3 * self._config.timeout_s + 1):
                    verdict = await self._ask(process, [text, str(prompt.answer)])
            except TimeoutError:
                _log.warning("math-verify hung on a completion, which scores 0: %r", text[-80:])
                await self._kill()
                return 0.0
            except BaseException:
                # A question without its answer would put all later ones out of step.
                await self._kill()
                raise
        if "error" in verdict:
            raise ValueError(verdict["error"])
        return float(verdict["is_correct"])

    async def close(self) -> None:
        """Ends the process; the next `score` would start another."""
        async with self._lock:
            await self._kill()

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "asyncrl.rewards.math_verify", str(self._config.timeout_s),
                stdin=PIPE, stdout=PIPE, start_new_session=True,
            )  # fmt: skip
            try:
                await self._read(self._process)
            except BaseException:
                await self._kill()
                raise
        return self._process

    async def _ask(self, process: Process, question: list[str]) -> dict[str, str | bool]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        return await self._read(process)

    async def _read(self, process: Process) -> dict[str, str | bool]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            code = await process.wait()
            raise RuntimeError(f"the math-verify process ended with exit code {code}")
        answer: dict[str, str | bool] = json.loads(line)
        return answer

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _serve(timeout_s: int) -> None:
    """consumes: lines of standard input; produces: one line each; unblocked by: its end."""
    # Some expressions keep Python busy for hours, so that it would not see its input close.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    import math_verify  # noqa: F401  (the slow import belongs before the first question)

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        completion, answer = json.loads(line)
        try:
            verdict: dict[str, str | bool] = {
                "is_correct": is_correct(completion, answer, timeout_s=timeout_s)
            }
        except ValueError as error:
            verdict = {"error": str(error)}
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
