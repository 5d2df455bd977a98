"""A judge: a prompt, a strict parser and a scale.  It asks an auxiliary model and is a reward like
any other.

    @reward("clear_judge")
    class ClearJudge(Judge):
        scale = Scale(1, 5)

        def prompt(self, case, delimit):
            return f"How clear is this?\\n{delimit('answer',
            case.answer)}\\n{delimit.ask(score=self.scale)}"

`delimit(name, text)` shows untrusted text as data; `delimit.ask(...)` requests the verdict, which
`read` finds and `value` turns into a reward.  A reply that cannot be read is asked for again
(`max_retries`), then the answer is unscored. Invariant: no answer gets a number that the judge did
not give it, except that one that says nothing gets the lowest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel

from rft.errors import ConfigError
from rft.plugins import mark_of
from rft.reward import exchanges, judge_metrics
from rft.reward.base import Reward, RewardResult
from rft.reward.delimiters import PromptDelimiters, Scale, inert
from rft.reward.judge_args import JudgeArgs
from rft.reward.judge_cache import CachedReply
from rft.reward.judge_client import JudgeClient, check_limits, close_client, open_client
from rft.reward.judge_costs import BudgetUsedUp
from rft.reward.named import NO_TASKS, named
from rft.reward.verdict import UnreadableVerdict, read, says_nothing
from rft.types.completion import Completion, Score, Transcript, Turn
from rft.types.ports import ChatModel, GenerateRequest
from rft.types.task import SamplingArgs, Task
from rft.worker.waiting import waits

log = logging.getLogger(__name__)
Messages = list[dict[str, Any]]
# the same question, asked anew: how consistent a judge is
REPEAT: ContextVar[int] = ContextVar("repeat", default=0)
AGAIN_TEMPERATURE = 0.5  # at least, when a reply could not be read
Write = Callable[..., str | Messages]  # write(delimit, *answers): a question


@dataclass(frozen=True)
class JudgeCase:
    """What is judged: `question` is the last thing that was asked of the policy in its first call."""

    task: Task
    transcript: Transcript
    question: str
    answer: str

    @classmethod
    def of(cls, task: Task, transcript: Transcript) -> JudgeCase:
        asked = [m for m in transcript.turns[0].messages if m.get("role") == "user"]
        question = str(asked[-1].get("content", "")) if asked else task.prompt or ""
        return cls(task, transcript, question, transcript.answer)

    def saying(self, answer: str) -> JudgeCase:
        """The same with another answer."""
        if answer == self.answer:
            return self
        last: Turn = self.transcript.turns[-1]
        completion = msgspec.structs.replace(
            last.completion, text=answer, reasoning="", in_thought=False, stop_text=""
        )
        other = msgspec.structs.replace(last, completion=completion)
        transcript = msgspec.structs.replace(
            self.transcript, turns=(*self.transcript.turns[:-1], other)
        )
        return replace(self, transcript=transcript, answer=answer)


@dataclass(frozen=True)
class Reading:
    """What came of a question: the verdict's fields, or None and why; the question and the last
    reply.
    """

    verdict: dict[str, Any] | None
    why: str = ""
    question: Sequence[Mapping[str, Any]] = ()
    reply: str = ""


class Judge(Reward):
    """Subclass with `prompt`, and `value` where there is not one field on `scale`; raise `version`
    when `read` changes its meaning.

    The arguments are those of `Args`, by default `JudgeArgs`; they are `self.args`.
    """

    Args: ClassVar[type[BaseModel]] = JudgeArgs
    scale: Scale = Scale(1, 10)
    version: str = "1"
    # the model answers with one of these words and nothing else; none: it writes
    choices: tuple[str, ...] = ()

    def __init__(self, **given: Any) -> None:
        self.args: Any = self.Args(**given)
        if not isinstance(self.args, JudgeArgs):
            raise TypeError(f"{type(self).__name__}.Args must be a subclass of JudgeArgs")
        mark = mark_of(type(self))
        self.kind = mark.name if mark is not None else type(self).__name__
        self.name = self.args.name or self.kind
        self.metrics = judge_metrics.of(self.name)
        self._client: JudgeClient | None = None
        self._warned: set[str] = set()
        # ways to ask that are known to keep answers inside of the delimiters
        self._fenced: set[str] = set()

    # ------------------------------------------------------------ yours

    def prompt(self, case: JudgeCase, delimit: PromptDelimiters) -> str | Messages:
        """The question: a text, or messages.  Whatever the policy, the task or another model wrote
        goes through `delimit`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method prompt(self, case, delimit)"
        )

    def delimiters(self) -> PromptDelimiters:
        """The delimiters of one call."""
        return PromptDelimiters()

    def rules(self, delimit: PromptDelimiters) -> str:
        """What the system message says about the delimiters."""
        return delimit.rules

    def reply(self, completion: Completion) -> str:
        """What `read` is given, and what is remembered.  Raises UnreadableVerdict for a reply that
        was cut.
        """
        if completion.finish_reason != "stop":
            raise UnreadableVerdict(f"the reply was cut at max_tokens {self.args.max_tokens}")
        return completion.with_thought

    def read(self, reply: str, delimit: PromptDelimiters) -> dict[str, Any]:
        """The verdict in a reply.  Raises UnreadableVerdict.  By default: its last line, which has
        the form of `delimit.ask`.
        """
        return read(reply, delimit)

    def value(self, verdict: dict[str, Any], case: JudgeCase) -> RewardResult:
        """The reward of a verdict: number / highest number.  By default of its only field."""
        number, *more = verdict.values()
        if more or isinstance(number, str):
            raise TypeError(
                f"{self.kind} needs a method value(self, verdict, case): its verdict, {verdict}, "
                f"is not one number"
            )
        return self.scale.value(number)

    # ------------------------------------------------------------ a reward

    def check_models(
        self, models: Mapping[str, object], tasks: Mapping[str, str] = NO_TASKS
    ) -> None:
        check_limits(models[name := self._named(models, tasks)], name, self.args)

    def check_task(self, task: Task, transcript: Transcript) -> None:
        """Makes a question: one that asks for no verdict, or shows an answer outside of the
        delimiters, is refused before the run.
        """
        if type(self).prompt is Judge.prompt:  # it asks in its own way
            return
        case = JudgeCase.of(task, transcript)
        delimit = self.delimiters()

        def write(delimit: PromptDelimiters, answer: str) -> str | Messages:
            return self.prompt(case.saying(answer), delimit)

        self._messages(write, delimit, (case.answer,))
        if not delimit.fields and not self.choices and type(self).read is Judge.read:
            raise ConfigError(
                f"the prompt of judge {self.kind} asks for no verdict; end it with "
                f"delimit.ask(score=self.scale)"
            )
        self._probe(write, 1)

    def _named(self, models: Mapping[str, object], tasks: Mapping[str, str] = NO_TASKS) -> str:
        """The name of the auxiliary model.  Raises ConfigError where it is missing, or is not the
        only one and not named.
        """
        key = "reward_fn_args.judge"
        return named(models, self.args.judge, who=self.kind, key=key, task="generate", tasks=tasks)

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Raises ConfigError where the model is missing, and where judges that ask the same model
        have different limits.
        """
        name = self._named(models)
        self._client = open_client(models[name], name, self.args)

    async def close(self) -> None:
        if self._client is not None:
            client = self._client
            self._client = None
            await close_client(client)

    def gold_answer(self, task: Task) -> None:
        """`rft check` asks no models."""

    async def __call__(self, task: Task, transcript: Transcript) -> RewardResult:
        case = JudgeCase.of(task, transcript)
        if (known := self.without_asking(case)) is not None:
            return known
        found = await self.ask(
            lambda delimit, answer: self.prompt(case.saying(answer), delimit), case.answer
        )
        return (
            Score(value=None, reason=found.why)
            if found.verdict is None
            else self.value(found.verdict, case)
        )

    # ------------------------------------------------------------ asking

    def without_asking(self, case: JudgeCase) -> Score | None:
        """The score of an answer that is not shown to the model: the lowest if it says nothing,
        unscored if it is too long.
        """
        if says_nothing(inert(case.answer)):
            self.metrics.empty += 1
            return Score(value=self.scale.lowest, reason="the answer says nothing")
        if len(case.answer) > self.args.max_chars:
            self.metrics.unscored += 1
            return Score(
                value=None,
                reason=f"the answer has {len(case.answer)} characters, more than max_chars "
                f"{self.args.max_chars}",
            )
        return None

    async def ask(self, write: Write, *answers: str) -> Reading:
        """Asks until a verdict can be read, or `max_retries` are used up.

        `answers`: texts of the policy, which must not stand outside of the delimiters.
        `write(delimit, *answers)` makes the question; it is called for every try, and before the
        first one with other texts, which show where it puts them.  Raises ConfigError if that is
        outside, BudgetUsedUp, and EngineFailed when the model is gone.
        """
        if self._client is None:
            raise RuntimeError(f"{self.kind}: `await judge.prepare(models)` comes first")
        self._probe(write, len(answers))
        client = self._client

        def question(delimit: PromptDelimiters) -> Messages:
            return self._messages(write, delimit, answers)

        key = self._key(question(PromptDelimiters.keying()))
        with waits("question", f"judge {self.name}", whole=True):
            found = await client.once(
                key, lambda: self._attempts(client, key, question), self.metrics
            )
        exchanges.note(self.name, found.question, found.reply, found.why)
        return found

    def _probe(self, write: Write, answers: int) -> None:
        """Once for each `write`, with random answers: what the policy wrote cannot end a run."""
        way = getattr(write, "__qualname__", "")
        if way in self._fenced:
            return
        delimit = PromptDelimiters()
        probes = tuple(secrets.token_hex(16) for _ in range(answers))
        try:
            messages = self._messages(write, delimit, probes)
        except Exception as e:  # a prompt that takes answers of some form only
            log.debug(
                "%s: no question with a random answer: %s: %s", self.kind, type(e).__name__, e
            )
            return
        free = "\n".join(delimit.outside(str(m["content"])) for m in messages).lower()
        if any(p in free for p in probes):
            raise ConfigError(
                f"the prompt of judge {self.kind} shows an answer outside of the delimiters, where "
                f"it could speak to the judge; "
                "write delimit('answer', case.answer)"
            )
        self._fenced.add(way)

    def _messages(
        self, write: Write, delimit: PromptDelimiters, answers: tuple[str, ...]
    ) -> Messages:
        """With the rules of the delimiters first."""
        made = write(delimit, *answers)
        messages = (
            [{"role": "user", "content": made}]
            if isinstance(made, str)
            else [dict(m) for m in made]
        )
        if messages[0]["role"] == "system":
            return [
                {**messages[0], "content": f"{self.rules(delimit)}\n\n{messages[0]['content']}"},
                *messages[1:],
            ]
        return [{"role": "system", "content": self.rules(delimit)}, *messages]

    def _key(self, messages: Messages) -> bytes:
        assert self._client is not None
        a = self.args
        what: list[Any] = [
            self.kind,
            self.version,
            messages,
            a.temperature,
            a.max_tokens,
            self._client.identity,
        ]
        what += [REPEAT.get(), *self.choices]
        return hashlib.blake2b(
            json.dumps(what, sort_keys=True).encode("utf-8", "surrogatepass"), digest_size=20
        ).digest()

    async def _attempts(
        self, client: JudgeClient, key: bytes, question: Callable[[PromptDelimiters], Messages]
    ) -> Reading:
        m = self.metrics
        a = self.args
        if client.cache is not None and (known := client.cache.get(key)) is not None:
            delimit = PromptDelimiters.keying()
            asked = question(delimit)  # which sets the fields that it asks for
            delimit.key = known.verdict_key
            try:
                found = Reading(self.read(known.text, delimit), "", asked, known.text)
            except UnreadableVerdict:
                log.debug(
                    "%s: a reply in the cache cannot be read any more; asked again", self.kind
                )
            else:
                m.cache_hit += 1
                return found
        why = text = ""
        messages: Messages = []
        for attempt in range(a.max_retries + 1):
            delimit = self.delimiters()
            messages = question(delimit)
            request = GenerateRequest(
                messages=tuple(messages),
                sampling=self._sampling(attempt),
                choices=self.choices,
                request_id=f"{self.name}-{key.hex()}-{attempt}",
            )
            try:
                completion, tokens = await client.generate(request, a.timeout_s, m)
            except BudgetUsedUp as e:
                if a.over_budget == "stop":
                    raise
                self._warn("budget", str(e))
                why = "the judge's budget is used up"
                break
            except TimeoutError:
                m.timeouts += 1
                why = f"the judge did not answer within {a.timeout_s:g} s"
                continue
            except (
                ValueError
            ) as e:  # too long for it, or refused by its server: asking again would not help
                self._warn("refused", f"a question was refused: {e}")
                why = f"the judge refused the question: {str(e)[:200]}"
                break
            try:
                text = completion.text
                text = self.reply(completion)
                found = Reading(self.read(text, delimit), "", messages, text)
            except UnreadableVerdict as e:
                m.unreadable += 1
                why = f"the judge's reply cannot be read: {e}"
                continue
            if client.cache is not None:
                reply = CachedReply(text, delimit.key)
                client.cache.put(key, reply, judge=self.kind, model=client.identity, tokens=tokens)
            return found
        m.unscored += 1
        log.debug("%s: unscored: %s", self.name, why)
        return Reading(None, why, messages, text)

    def _sampling(self, attempt: int) -> SamplingArgs:
        if self.choices:  # one token, whose log-prob is asked for
            return SamplingArgs(temperature=0.0, max_tokens=1)
        warmer = (
            self.args.temperature if not attempt else max(self.args.temperature, AGAIN_TEMPERATURE)
        )
        return SamplingArgs(temperature=warmer, max_tokens=self.args.max_tokens)

    def _warn(self, what: str, message: str) -> None:
        """Once for each kind of trouble."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning("judge %s: %s", self.name, message)
