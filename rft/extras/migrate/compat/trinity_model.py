"""Trinity-RFT's ModelWrapper: the policy, or an auxiliary model, as its workflows ask them.

Depends on a run's home.  Invariant: an experience has the tokens that the engine saw and wrote;
nothing is tokenised a second time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

from rft.engine.base import PromptTooLong
from rft.extras.migrate.compat import trinity_experience as experience
from rft.extras.migrate.compat.trinity_experience import TrinityExperience
from rft.extras.migrate.compat.trinity_home import Home
from rft.types.completion import Completion, Turn
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs
from rft.workflow.base import turn_of

_FIELDS = frozenset(f.name for f in msgspec.structs.fields(SamplingArgs))
_REST = {"logprobs", "n", "tools", "lora_request"}  # log-probs are always there
_PLAIN = "{{ messages[0]['content'] }}"
_NOT_KEPT = {
    **dict.fromkeys(
        (
            "sync_model_weights",
            "init_process_group",
            "teardown_process_group",
            "set_state_dict_meta",
        ),
        "weights are brought by the synchronizer",
    ),
    **dict.fromkeys(("prepare", "shutdown"), "engines are started and closed with the run"),
    **dict.fromkeys(
        ("get_lora_request", "get_lora_request_async"),
        "an adapter (model.lora_configs) is a part of the policy",
    ),
    **dict.fromkeys(("get_available_address_async",), "engines open no port"),
    "clone_with_isolated_history": "every run has a wrapper of its own already",
    "get_current_load": "requests are routed by the engine pool",
}


class ModelWrapper:
    """`name` None is the policy, whose calls are recorded; else the auxiliary model of that name."""

    enable_history = True

    def __init__(self, home: Home, name: str | None = None) -> None:
        self._home = home
        self._name = name
        self._history: list[Turn] = []
        self._state: dict[str, Any] = {}
        self._clients: dict[str, Any] = {}
        self._address: tuple[str, str] | None = None

    def __getattr__(self, name: str) -> Any:
        reason = _NOT_KEPT.get(name)
        raise AttributeError(
            f"ModelWrapper.{name} is not kept: {reason}"
            if reason
            else f"ModelWrapper has no {name!r}"
        )

    # ------------------------------------------------------------ answers

    def chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[TrinityExperience]:
        """`n` answers (1 unless given) to one conversation; what is given of the sampling arguments
        replaces the taskset's.
        """
        return self._home.wait(self._chat(messages, kwargs))

    async def chat_async(
        self, messages: list[dict[str, Any]], **kwargs: Any
    ) -> list[TrinityExperience]:
        return await self._home.awaited(self._chat(messages, kwargs))

    def generate(self, prompts: Sequence[str], **kwargs: Any) -> list[TrinityExperience]:
        """Answers to texts that no chat template is put around, `n` for each in turn."""
        return self._home.wait(self._generate(prompts, kwargs))

    async def generate_async(
        self, prompts: Sequence[str], **kwargs: Any
    ) -> list[TrinityExperience]:
        return await self._home.awaited(self._generate(prompts, kwargs))

    def logprobs(self, tokens: Sequence[int], temperature: float | None = None) -> torch.Tensor:
        """float32 [len(tokens) - 1]: log-prob of each token but the first."""
        return self._home.wait(self._logprobs(tokens, temperature))

    async def logprobs_async(
        self, tokens: Sequence[int], temperature: float | None = None
    ) -> torch.Tensor:
        return await self._home.awaited(self._logprobs(tokens, temperature))

    async def get_message_token_len(self, messages: list[dict[str, Any]]) -> int:
        """Tokens of the rendered conversation; asked by having one token generated, which is not
        recorded.
        """
        return await self._home.awaited(self._count(messages))

    # ------------------------------------------------------------ what was recorded

    def convert_messages_to_experience(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> TrinityExperience:
        """One sequence of a whole conversation, joined from the calls in which the policy wrote its
        answers.

        Raises ValueError for a conversation with an answer that the policy did not write in this
        run, or not as it stands there.
        """
        self._policy_only("convert_messages_to_experience")
        self._home.collect()
        return experience.of(_chain(messages, self._home.turns))

    async def convert_messages_to_experience_async(
        self, *args: Any, **kwargs: Any
    ) -> TrinityExperience:
        return self.convert_messages_to_experience(*args, **kwargs)

    def extract_experience_from_history(
        self, clear_history: bool = True
    ) -> list[TrinityExperience]:
        """The calls since the history was cleared, one experience each; also those of the OpenAI
        clients.
        """
        self._policy_only("extract_experience_from_history")
        self._history += self._home.collect()
        experiences = [experience.of([t]) for t in self._history]
        if clear_history:
            self._history = []
        return experiences

    @property
    def history(self) -> list[TrinityExperience]:
        return self.extract_experience_from_history(clear_history=False)

    # ------------------------------------------------------------ OpenAI clients

    def get_openai_client(self) -> Any:
        """An `openai.OpenAI` for this model; calls to the policy are recorded, with the taskset's
        sampling.
        """
        return self._client("OpenAI")

    def get_openai_async_client(self) -> Any:
        return self._client("AsyncOpenAI")

    def _client(self, kind: str) -> Any:
        if kind not in self._clients:
            openai, (base_url, key) = _openai(), self._door()
            self._clients[kind] = client = getattr(openai, kind)(base_url=base_url, api_key=key)
            client.model_path = self.model_path  # Trinity-RFT's workflows name the model by it
        return self._clients[kind]

    @property
    def api_address(self) -> str:
        return self._door()[0].removesuffix("/v1")

    @property
    def api_key(self) -> str:
        return self._door()[1]

    async def close(self) -> None:
        """Closes the clients; called when the run is over."""
        for client in self._clients.values():
            # its connections belong to an event loop of the workflow, which has ended
            with suppress(RuntimeError):
                if inspect.isawaitable(waiting := client.close()):
                    await waiting

    # ------------------------------------------------------------ what it is

    @property
    def model_name(self) -> str:
        return self._name or "policy"

    @property
    def model_path(self) -> str:
        return self.model_name

    @property
    def model_version(self) -> int:
        """Train step of the weights that answer now."""
        return self._home.wait(self._version())

    @property
    async def model_version_async(self) -> int:
        return await self._home.awaited(self._version())

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        s = self._home.task.sampling
        return {"temperature": s.temperature, "top_p": s.top_p, "max_tokens": s.max_tokens}

    def set_workflow_state(self, state: dict[str, Any]) -> None:
        self._state.update(state)

    def get_workflow_state(self) -> dict[str, Any]:
        return dict(self._state)

    def clean_workflow_state(self) -> None:
        self._state = {}

    # ------------------------------------------------------------ inside: in the explorer's loop

    @property
    def _model(self) -> ChatModel:
        ctx = self._home.contexts[0]
        return ctx.policy if self._name is None else ctx.model(self._name)

    async def _chat(
        self, messages: list[dict[str, Any]], kwargs: dict[str, Any]
    ) -> list[TrinityExperience]:
        n, overrides = _split(kwargs)
        return await self._ask(tuple(messages), n, overrides, tools=kwargs.get("tools"))

    async def _generate(
        self, prompts: Sequence[str], kwargs: dict[str, Any]
    ) -> list[TrinityExperience]:
        n, overrides = _split(kwargs)
        requests = [
            ({"role": "user", "content": p},)
            for p in ([prompts] if isinstance(prompts, str) else prompts)
        ]
        completions = await asyncio.gather(
            *(self._ask(m, n, overrides, tools=(), chat_template=_PLAIN) for m in requests)
        )
        return [x for some in completions for x in some]

    async def _ask(
        self, messages: tuple[dict[str, Any], ...], n: int, overrides: dict[str, Any], **how: Any
    ) -> list[TrinityExperience]:
        """Answers of the policy go to the runs in order: the i-th of several is a call of the i-th
        run.
        """
        contexts = self._home.contexts
        asker = next(
            (
                c
                for c in contexts
                if any(t.messages == messages[: len(t.messages)] for t in c.transcript().turns)
            ),
            contexts[0],
        )
        request = asker.request(messages, n=n, **how, **overrides)
        if self._name is not None:
            request = msgspec.structs.replace(request, prefix_tokens=None, prefix_messages=0)
        completions = await self._model.generate(request)
        turns = [turn_of(request, c) for c in completions]
        if self._name is None:
            for i, turn in enumerate(turns):
                (contexts[i % len(contexts)] if n > 1 else asker).record(turn)
        return [experience.of([t]) for t in turns]

    async def _logprobs(self, tokens: Sequence[int], temperature: float | None) -> torch.Tensor:
        scale = self._home.task.sampling.temperature if temperature is None else temperature
        row = ScoreRow(tokens=np.asarray(tokens, np.int32), prompt_length=1, temperature=scale)
        return torch.from_numpy((await self._model.score(row)).logprobs.copy())

    async def _count(self, messages: list[dict[str, Any]]) -> int:
        try:
            return len((await self._one_token(messages)).prompt_tokens)
        except PromptTooLong as e:
            return e.tokens

    async def _version(self) -> int:
        return (await self._one_token([{"role": "user", "content": "."}])).version.step

    async def _one_token(self, messages: list[dict[str, Any]]) -> Completion:
        request: GenerateRequest = self._home.contexts[0].request(
            messages, max_tokens=1, min_tokens=0
        )
        (completion,) = await self._model.generate(request)
        return completion

    def _door(self) -> tuple[str, str]:
        if self._address is None:
            self._address = self._home.wait(self._home.session(self._name))
        return self._address

    def _policy_only(self, method: str) -> None:
        if self._name is not None:
            raise ValueError(f"{method}: calls of auxiliary model {self._name!r} are not recorded")


def _split(kwargs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    if unknown := sorted(kwargs.keys() - _FIELDS - _REST):
        raise TypeError(
            f"unknown sampling argument {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}, n, "
            f"tools"
        )
    overrides = {k: v for k, v in kwargs.items() if k in _FIELDS and v is not None}
    if isinstance(stop := overrides.get("stop"), str | list):
        overrides["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return int(kwargs.get("n") or 1), overrides


def _chain(messages: Sequence[dict[str, Any]], turns: Sequence[Turn]) -> list[Turn]:
    """The calls that wrote the answers in `messages`, which must go on from each other."""
    chain: list[Turn] = []
    first = next(
        (n for n in range(len(messages)) if any(_wrote(t, messages, n) for t in turns)), None
    )
    if first is None:
        raise ValueError(
            "no message of this conversation is an answer of this run's model; chat with it first"
        )
    for n in range(first, len(messages)):
        if messages[n].get("role") != "assistant":
            continue
        turn_match = next(
            (
                t
                for t in reversed(turns)
                if _wrote(t, messages, n) and (not chain or _goes_on(t, chain[-1]))
            ),
            None,
        )
        if turn_match is None:
            raise ValueError(
                f"message {n} is not what the policy wrote in this run after the messages before "
                f"it; training would be on tokens that "
                "were never sampled.  Pass answers on as they are, and keep earlier messages "
                "unchanged"
            )
        chain.append(turn_match)
    return chain


def _wrote(turn: Turn, messages: Sequence[dict[str, Any]], n: int) -> bool:
    message = messages[n]
    same = message.get("role") == "assistant" and message.get("content") == turn.completion.text
    return same and len(turn.messages) == n and turn.messages == tuple(messages[:n])


def _goes_on(turn: Turn, before: Turn) -> bool:
    c = turn.completion.prompt_tokens
    old = before.completion
    sequence = np.concatenate([old.prompt_tokens, old.tokens])
    return len(c) >= len(sequence) and np.array_equal(c[: len(sequence)], sequence)


def _openai() -> Any:
    try:
        import openai
    except ImportError:
        raise ImportError(
            "OpenAI clients need the package openai: pip install 'rft-platform[agent]'"
        ) from None
    return openai
