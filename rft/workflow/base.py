"""The interface of a workflow: a task and a context in, a transcript out.

A workflow is a class whose method `run`, async or not, performs one run; each run gets a new
object.  Independent of buffer and trainer.

    @register.workflow("my_workflow")
    class MyWorkflow(Workflow):
        async def run(self, task, ctx):
            await ctx.chat(task.chat())
            return ctx.transcript()
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar

import msgspec
import numpy as np

from rft.engine.base import PromptTooLong
from rft.engine.settings import SELF
from rft.errors import DeadlineExceeded
from rft.images.decode import check
from rft.plugins import Provider, kind
from rft.types.completion import Completion, Layout, Score, Transcript, Turn
from rft.types.images import Image, as_parts, names_in
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow
from rft.types.readonly import read_only
from rft.types.task import Task, plain_text

workflow = kind("workflow")
NO_MODELS: Mapping[str, ChatModel] = {}


class Workflow(Provider):
    """Performs one run of a task.  `__init__` takes the checked `workflow_args` as keyword
    arguments.

    Override `run`, or `run_group` to perform all runs of a task at once.  Attributes of the class:

    - `isolated` (True or an `Isolation`): perform each run in a separate process
    - `needs`: {required library: the pip extra of `rft` that installs it}
    - `gives`: fields of the experiences that `run` sets for algorithms ("info.NAME" or a field); or
      a static method that returns them for given `workflow_args`
    - `scores_itself`: sets every score; the taskset must not name a reward
    - `needs_reward`: sets no score; the taskset must name a reward
    - `usual_reward`, `usual_reward_args`: the reward if the taskset names none
    """

    isolated: ClassVar[Any] = False
    needs: ClassVar[Mapping[str, str]] = {}
    scores_itself: ClassVar[bool] = False
    needs_reward: ClassVar[bool] = False
    usual_reward: ClassVar[str | None] = None
    usual_reward_args: ClassVar[Mapping[str, Any]] = {}

    def run(self, task: Task, ctx: RunContext) -> Any:
        """Perform one run and return its transcript."""
        raise NotImplementedError(f"{type(self).__name__} needs a method run(self, task, ctx)")

    def teacher_messages(self, task: Task) -> Sequence[dict[str, Any]]:
        """Return the teacher's prompt for `rft check`, which counts its tokens; () if it is not
        known before the run.
        """
        return ()

    def run_group(self, task: Task, contexts: list[RunContext]) -> Any:
        """Perform all runs of the task and return their transcripts, in order."""
        raise NotImplementedError(f"{type(self).__name__} plays one run at a time")


class TeacherLate(Exception):
    """A teacher did not answer within its time; it fails the run."""


class RunContext:
    """The models of one run: the policy, with the task's sampling arguments, and the auxiliary
    models by name.

    Every call by `chat` or `sample` is recorded; `transcript()` returns the calls in order.  A call
    whose messages begin with those of an earlier call and its answer reuses that call's tokens;
    nothing is tokenised twice.  `seed(number)` is the seed of the run's request of this number in a
    deterministic run; without it the engine draws one.
    """

    def __init__(
        self,
        model: ChatModel,
        task: Task,
        *,
        run: int,
        request_id: str,
        seed: Callable[[int], int] | None = None,
        models: Mapping[str, ChatModel] = NO_MODELS,
        reward: Callable[[Transcript], Awaitable[Score]] | None = None,
        teacher_top: int = 0,
    ) -> None:
        self._model = model
        self._reward = reward
        self._task = task
        self._turns: list[Turn] = []
        self._images = {image.sha256: image for image in task.images}
        self._requests = 0
        self.run = run
        self.request_id = request_id
        self.seed = seed
        self.models = models
        self.teacher_top = teacher_top  # how many of a teacher's likeliest tokens are read

    @property
    def policy(self) -> ChatModel:
        """The policy's engine, for calls that are not recorded."""
        return self._model

    def model(self, name: str) -> ChatModel:
        """Return the auxiliary model `name`.  Raises KeyError that lists all names."""
        if name not in self.models:
            raise KeyError(
                f"no auxiliary model {name!r}; explorer.auxiliary_models has "
                f"{', '.join(self.models) or 'none'}"
            )
        return self.models[name]

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        **overrides: Any,
    ) -> Completion:
        """Call the policy once.  `overrides` replace fields of the task's sampling arguments, e.g.
        max_tokens=8.
        """
        if overrides.get("n", 1) != 1:
            raise ValueError(
                "ctx.chat gives one answer; ctx.sample(messages, n=4) gives a list of several"
            )
        (completion,) = await self.sample(messages, tools=tools, **overrides)
        return completion

    async def sample(
        self, messages: Sequence[dict[str, Any]] = (), **arguments: Any
    ) -> list[Completion]:
        """Return `n` answers to the messages, or to `prompt_tokens`, each recorded as one call.
        Arguments as in `request`.
        """
        request = self.request(messages, **arguments)
        completions = await self._model.generate(request)
        for completion in completions:
            self.record(turn_of(request, completion))
        return completions

    def image(self, data: bytes) -> dict[str, str]:
        """Return the part of a message that shows the image in `data`, a PNG, JPEG, WebP, BMP or
        GIF file.  Raises ValueError for a file that cannot be used.
        """
        image = Image.of(data)
        if image.sha256 not in self._images:
            check(data)
            self.know([image])
        return image.part

    def know(self, images: Iterable[Image]) -> None:
        """Let messages show images, which the engine decodes."""
        self._images |= {image.sha256: image for image in images}

    def request(
        self,
        messages: Sequence[dict[str, Any]] = (),
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        prompt_tokens: Sequence[int] = (),
        images: Sequence[Image] = (),
        chat_template: str | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        strict_template_args: Sequence[str] = (),
        numbered: bool = True,
        **overrides: Any,
    ) -> GenerateRequest:
        """Build the run's next request; the number of the request decides its seed.

        `images`: which the messages show, beside those that the run knows.  `numbered` False: the
        request is not one of the run's, so it takes no number.
        """
        if images:
            self.know(images)
        sampling = self._task.sampling
        if "max_tokens" in overrides:  # less than the task's min_tokens is allowed
            overrides["min_tokens"] = min(
                overrides.get("min_tokens", sampling.min_tokens), overrides["max_tokens"]
            )
        sampling = msgspec.structs.replace(sampling, **overrides) if overrides else sampling
        number = self._requests
        self._requests += numbered
        if self.seed is not None and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self.seed(number))
        # copies: the caller may change its messages afterwards
        conversation: tuple[dict[str, Any], ...] = read_only(
            tuple(map(_as_text, map(self._with_files, messages)))
        )
        schemas: tuple[dict[str, Any], ...] = read_only(
            tuple(tools if tools is not None else self._task.tools)
        )
        parent = None
        if chat_template is None:
            parent = self._parent_turn(conversation, prompt_tokens, schemas)
        if parent is not None and conversation:
            conversation = _as_recorded(parent, conversation)
        return GenerateRequest(
            messages=conversation,
            tools=schemas,
            prompt_tokens=tuple(prompt_tokens),
            images=self.shown(conversation),
            prefix_places=() if parent is None else parent.completion.images,
            prefix_tokens=None if parent is None else _tokens(parent.completion),
            prefix_messages=0 if parent is None or not conversation else len(parent.messages) + 1,
            chat_template=chat_template if chat_template is not None else self._task.chat_template,
            chat_template_args={**self._task.chat_template_args, **(chat_template_args or {})},
            strict_template_args=tuple(strict_template_args),
            # only the first prompt may be truncated: later ones repeat recorded tokens
            prompt_truncation=self._task.prompt_truncation if not self._turns else "error",
            sampling=sampling,
            n=n,
            request_id=f"{self.request_id}-{number}",
        )

    def _with_files(self, message: Any) -> Any:
        """Return a message with parts {"type": "image", "image": FILE} as `image` makes them."""
        if not isinstance(message, dict) or not isinstance(content := message.get("content"), list):
            return message
        files = [isinstance(p, Mapping) and isinstance(p.get("image"), bytes) for p in content]
        parts = zip(content, files, strict=True)
        return {**message, "content": [self.image(p["image"]) if f else p for p, f in parts]}

    def shown(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Image, ...]:
        """Return the images of messages, each once.  Raises ValueError for an unknown one."""
        names = list(dict.fromkeys(names_in(messages)))
        if unknown := [name for name in names if name not in self._images]:
            raise ValueError(
                f"a message shows image {unknown[0]!r:.80}, which this run does not have; make the "
                f"part with ctx.image(data), or take it from task.messages"
            )
        return tuple(self._images[name] for name in names)

    def record(self, turn: Turn) -> None:
        """Add a call of the policy that was made elsewhere."""
        self._turns.append(turn)

    def _parent_turn(
        self,
        messages: Sequence[dict[str, Any]],
        prompt_tokens: Sequence[int],
        tools: tuple[Any, ...],
    ) -> Turn | None:
        """Return the latest recorded turn that a request extends, by messages or by tokens."""
        prompt = np.asarray(prompt_tokens)
        for turn in reversed(self._turns):
            if (not tools or turn.tools == tools) and _extends(turn, messages, prompt):
                return turn
        return None

    def score_step(
        self, value: float | None, *, parts: dict[str, float] | None = None, **info: Any
    ) -> None:
        """Set the reward of the last call, and fields of its experience's `info` (e.g. a state
        hash).
        """
        if not self._turns:
            raise ValueError("score_step: there is no model call to score yet")
        score = None if value is None else Score(value=float(value), parts=parts or {})
        last = self._turns[-1]
        self._turns[-1] = msgspec.structs.replace(last, score=score, info={**last.info, **info})

    async def reward(self) -> Score:
        """Return the taskset's reward of the calls so far; give it back with `transcript(score=...)`,
        or it is computed once more.  Raises RuntimeError in an isolated workflow, ValueError without
        a reward for a single run.
        """
        if self._reward is None:
            raise RuntimeError("ctx.reward: an isolated workflow cannot ask for its reward")
        return await self._reward(self.transcript())

    async def teach(
        self,
        name: str,
        *,
        messages: Sequence[dict[str, Any]] = (),
        completion: Completion | None = None,
        **arguments: Any,
    ) -> None:
        """Record what a teacher says of tokens that the policy wrote, at the temperature of their
        call.

        `name`: an auxiliary model, with the policy's tokenizer or `alignment: text`, or "self": the
        policy, with the weights that it serves.  The teacher scores every call that has no teacher
        yet, or that of `completion`, after the call's own prompt.  With `messages` it scores
        `completion` (None: the last call's) after this other prompt, which its template renders and
        which is never trained; `arguments` as in `request`.  Raises KeyError for an unknown name,
        ValueError for what cannot be taught, PromptTooLong, and TeacherLate.
        """
        teacher = self._model if name == SELF else self.model(name)
        if completion is None and not messages:
            turns = [i for i, turn in enumerate(self._turns) if turn.teacher is None]
        else:
            turns = [self._index_of(completion)]
        for i in turns:
            turn = self._turns[i]
            c = turn.completion
            prompt = None
            if messages:
                prompt = self._teacher_request(name, turn, messages, arguments)
            row = ScoreRow(
                tokens=_tokens(c) if prompt is None else c.tokens,
                prompt_length=len(c.prompt_tokens) if prompt is None else 0,
                prompt=prompt,
                chat=self._chat_request(turn) if prompt is None and name != SELF else None,
                logprobs=None if name == SELF else c.logprobs,
                top=self.teacher_top,
                temperature=c.sampling.temperature or 1.0,  # 1 for greedy tokens
            )
            try:
                scores = await teacher.score(row)
            except PromptTooLong as e:
                what = f"the prompt for teacher {name!r} with an answer of {len(c.tokens)} tokens"
                raise PromptTooLong(e.tokens, e.limit, what) from e
            except DeadlineExceeded as e:
                raise TeacherLate(f"teacher {name!r}: {e}") from e
            self._turns[i] = msgspec.structs.replace(turn, teacher=scores)

    def _index_of(self, completion: Completion | None) -> int:
        """Return the number of the call with this completion, or of the last call."""
        if not self._turns:
            raise ValueError("teach: there is no model call to teach yet")
        if completion is None:
            return len(self._turns) - 1
        numbers = [i for i, turn in enumerate(self._turns) if turn.completion is completion]
        if not numbers:
            raise ValueError("teach: the completion is of no call of this run")
        return numbers[0]

    def _chat_request(self, turn: Turn) -> GenerateRequest | None:
        """Return a call's prompt for another template; None if it has no messages, or images."""
        if not turn.messages or turn.images:
            return None
        return GenerateRequest(
            messages=turn.messages,
            tools=turn.tools,
            chat_template_args=self._task.chat_template_args,
        )

    def _teacher_request(
        self, name: str, turn: Turn, messages: Sequence[dict[str, Any]], arguments: dict[str, Any]
    ) -> GenerateRequest:
        """Build the teacher's prompt.  Raises ValueError if the call's own prompt says all of it:
        the policy was shown what only its teacher may read.
        """
        request = self.request(messages, numbered=False, **arguments)
        if all(message in turn.messages for message in request.messages):
            raise ValueError(
                f"teach: the prompt for teacher {name!r} says nothing that the call's own prompt "
                f"does not say; put what only the teacher may read into `messages`, and never into "
                f"those of ctx.chat"
            )
        return msgspec.structs.replace(
            request, prefix_tokens=None, prefix_messages=0, prompt_truncation="error"
        )

    @property
    def completions(self) -> list[Completion]:
        return [t.completion for t in self._turns]

    def transcript(
        self,
        *,
        score: Score | None = None,
        metrics: dict[str, float] | None = None,
        info: dict[str, Any] | None = None,
        layout: Layout = "joined",
        limited: bool = False,
        expert: bool = False,
    ) -> Transcript:
        """Return the calls so far.  Without `score`, the taskset's reward scores them after the run.

        `layout` "chains": one row for each chain of calls, "joined": one row.  `limited`: a limit
        of the workflow ended the run, so its rows are truncated.  `expert`: another model than the
        policy wrote the answers; only losses that take an expert's rows train them.
        """
        return Transcript(
            turns=tuple(self._turns),
            score=score,
            metrics=metrics or {},
            info=info or {},
            layout=layout,
            limited=limited,
            expert=expert,
        )


def turn_of(request: GenerateRequest, completion: Completion) -> Turn:
    """Return the record of one answer to `request`."""
    return Turn(
        messages=request.messages,
        tools=request.tools,
        images=request.images,
        completion=completion,
    )


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message with its text parts joined, or with its text and image parts.  Raises
    ValueError for other parts, which templates leave out or write as code.
    """
    if not isinstance(message, Mapping):
        raise TypeError(
            f"a message must be a dict with role and content, not {type(message).__name__}; for an "
            f"answer: answer.message"
        )
    content = message.get("content")
    if (text := plain_text(content)) is not None:
        return {**message, "content": text} if isinstance(content, list) else dict(message)
    if (parts := as_parts(content)) is None:
        raise ValueError(
            "content of a message must be a text or a list of parts: of text, and of images as "
            "ctx.image(data) gives them; sound and videos are not offered"
        )
    return {**message, "content": parts}


def _tokens(c: Completion) -> np.ndarray:
    joined: np.ndarray = np.concatenate([c.prompt_tokens, c.tokens])
    return joined.astype(np.int32, copy=False)


def _extends(turn: Turn, messages: Sequence[dict[str, Any]], prompt: np.ndarray) -> bool:
    """Return whether a request begins with the messages, or tokens, of a turn and its answer."""
    if not messages:
        tokens = _tokens(turn.completion)
        return len(tokens) > 0 and np.array_equal(prompt[: len(tokens)], tokens)
    n = len(turn.messages)
    return (
        len(messages) > n
        and _is_answer(messages[n], turn.completion)
        and all(map(_same, messages, turn.messages))
    )


def _is_answer(message: Mapping[str, Any], c: Completion) -> bool:
    """Return whether `message` has the text and the tool calls of this answer."""
    if message.get("role") != "assistant" or (message.get("content") or "") != c.text:
        return False
    return _pairs(message.get("tool_calls") or (), c.tool_calls) is not None


def _same(message: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Whether two messages are equal but for what clients write differently: ids, the order of calls
    and the JSON of their arguments.
    """
    if message == recorded:
        return True
    differing = {"tool_calls", "tool_call_id"}
    names = message.keys() | recorded.keys()
    return all(message.get(name) == recorded.get(name) for name in names - differing) and (
        _pairs(message.get("tool_calls") or (), recorded.get("tool_calls") or ()) is not None
    )


def _pairs(
    calls: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]] | None:
    """Pair each call with the recorded one that it equals; None where the calls differ."""
    unpaired = [(_called(call), call) for call in recorded]
    pairs = []
    for call in calls:
        called = _called(call)
        match = next((i for i, (other, _) in enumerate(unpaired) if other == called), None)
        if match is None:
            return None
        pairs.append((call, unpaired.pop(match)[1]))
    return None if unpaired else pairs


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return name and arguments of a call; clients may write the JSON of the arguments differently."""
    function = dict(call.get("function") or {})
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        # a NaN is not equal to itself
        function["arguments"] = json.loads(function.get("arguments") or "{}", parse_constant=str)
    return function


def _as_recorded(turn: Turn, messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return `messages`, which continue `turn`, with calls and ids as the engine wrote them."""
    n = len(turn.messages)
    calls = [*turn.completion.tool_calls]
    answer = messages[n]
    if messages[:n] == turn.messages and answer.get("tool_calls", calls) == calls:
        return messages
    if answer.get("tool_calls"):
        answer = {**answer, "tool_calls": calls}
    recorded = (*turn.messages, answer)
    ids: dict[Any, Any] = {}
    for message, original in zip(messages, recorded, strict=False):
        pairs = _pairs(message.get("tool_calls") or (), original.get("tool_calls") or ()) or ()
        ids |= {call["id"]: match.get("id") for call, match in pairs if call.get("id")}
    later = (
        {**m, "tool_call_id": ids[m["tool_call_id"]]} if m.get("tool_call_id") in ids else m
        for m in messages[n + 1 :]
    )
    restored: tuple[dict[str, Any], ...] = read_only((*recorded, *later))
    return restored


def seed_for(seed: int, *place: int | str) -> Callable[[int], int]:
    """Return the function from a turn of the run at `place` (batch, task, run) to its seed in
    [0, 2**31).

    Seeds do not depend on the attempt: a repeated run samples the same tokens.
    """

    def turn_seed(turn: int) -> int:
        digest = blake2b(repr((seed, *place, turn)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % 2**31

    return turn_seed
