"""The same conversation through each dialect, with the official clients, streamed or not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import openai

from rft.engine.scripted import ScriptedEngine
from rft.types.completion import Completion
from rft.types.ports import GenerateRequest

SYSTEM = "You add numbers."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = ({"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS},)


@dataclass(frozen=True)
class Written:
    """One answer of the policy; `calls`: arguments of `add` as the model wrote them."""

    text: str = ""
    thought: str = ""
    calls: tuple[str, ...] = ()


class ParsedEngine(ScriptedEngine):
    """A scripted engine whose answers, again and again, were read by parsers of thoughts and calls."""

    def __init__(self, *answers: Written) -> None:
        texts = [f"{a.thought}|{a.text}|{''.join(a.calls)}" for a in answers]
        super().__init__(answer=lambda _: texts[(len(self.calls) - 1) % len(texts)])
        self.answers = answers

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        number = len(self.calls)
        answer = self.answers[number % len(self.answers)]
        calls = tuple(
            {
                "id": f"call{number:04}{i}",
                "type": "function",
                "function": {"name": "add", "arguments": arguments},
            }
            for i, arguments in enumerate(answer.calls)
        )
        (c,) = await super().generate(request)
        return [
            msgspec.structs.replace(c, text=answer.text, reasoning=answer.thought, tool_calls=calls)
        ]


@dataclass(frozen=True)
class Heard:
    """What a client got: `calls` are (id, arguments)."""

    text: str
    thought: str
    calls: tuple[tuple[str, Any], ...]
    finish: str


@dataclass
class Talk:
    """A client of one dialect and its history; subclasses speak."""

    base_url: str
    api_key: str
    streamed: bool = False
    tools: Sequence[Mapping[str, Any]] = TOOLS
    history: list[Any] = field(default_factory=list)

    async def say(self, text: str) -> Heard:
        self.history.append({"role": "user", "content": text})
        return await self.ask()

    async def give(self, results: Mapping[str, str]) -> Heard:
        """Give results of calls by their ids."""
        raise NotImplementedError

    async def ask(self) -> Heard:
        raise NotImplementedError

    def sent(self) -> list[Any]:
        """The history as the client sends it."""
        return self.history


class ChatTalk(Talk):
    async def give(self, results: Mapping[str, str]) -> Heard:
        self.history += [
            {"role": "tool", "tool_call_id": id, "content": text} for id, text in results.items()
        ]
        return await self.ask()

    async def ask(self) -> Heard:
        tools: Any = [{"type": "function", "function": dict(t)} for t in self.tools]
        messages: Any = [{"role": "system", "content": SYSTEM}, *self.sent()]
        args: Any = {"model": "m", "messages": messages, "tools": tools}
        async with openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key) as client:
            if self.streamed:
                async with client.chat.completions.stream(**args) as stream:
                    async for _ in stream:
                        pass
                    answer: Any = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(**args)
        (choice,) = answer.choices
        message = choice.message
        given_back = message.to_dict()
        self.history.append({k: v for k, v in given_back.items() if k != "parsed"})
        return Heard(
            text=message.content or "",
            thought=given_back.get("reasoning_content") or "",
            calls=tuple((c.id, c.function.arguments) for c in message.tool_calls or ()),
            finish=choice.finish_reason,
        )


class ResponsesTalk(Talk):
    """Gives items back whole."""

    async def give(self, results: Mapping[str, str]) -> Heard:
        self.history += [
            {"type": "function_call_output", "call_id": id, "output": text}
            for id, text in results.items()
        ]
        return await self.ask()

    async def ask(self) -> Heard:
        response = await self.respond(input=self.sent())
        self.history += [item.to_dict() for item in response.output]
        return self.heard(response)

    async def respond(self, **args: Any) -> Any:
        tools: Any = [{"type": "function", "strict": False, **t} for t in self.tools]
        args |= {"model": "m", "instructions": SYSTEM, "tools": tools}
        async with openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key) as client:
            if not self.streamed:
                return await client.responses.create(**args)
            events = [e async for e in await client.responses.create(stream=True, **args)]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        return events[-1].response

    @staticmethod
    def heard(response: Any) -> Heard:
        items = response.output
        thoughts = [part.text for i in items if i.type == "reasoning" for part in i.content]
        return Heard(
            text=response.output_text,
            thought="".join(thoughts),
            calls=tuple((i.call_id, i.arguments) for i in items if i.type == "function_call"),
            finish=response.status,
        )


class PreviousTalk(ResponsesTalk):
    """Sends the new items alone, behind `previous_response_id`."""

    previous: str | None = None

    async def ask(self) -> Heard:
        args = {} if self.previous is None else {"previous_response_id": self.previous}
        response = await self.respond(input=self.history, **args)
        self.previous = response.id
        self.history = []
        return self.heard(response)


def add(arguments: Any) -> str:
    numbers = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(numbers["a"] + numbers["b"])


class MessagesTalk(Talk):
    async def give(self, results: Mapping[str, str]) -> Heard:
        content = [
            {"type": "tool_result", "tool_use_id": id, "content": text}
            for id, text in results.items()
        ]
        self.history.append({"role": "user", "content": content})
        return await self.ask()

    async def ask(self) -> Heard:
        import anthropic

        tools: Any = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in self.tools
        ]
        args: Any = {"model": "m", "max_tokens": 4096, "system": SYSTEM, "tools": tools}
        args["messages"] = self.sent()
        address = self.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=address, api_key=self.api_key) as client:
            if self.streamed:
                async with client.messages.stream(**args) as stream:
                    message: Any = await stream.get_final_message()
            else:
                message = await client.messages.create(**args)
        self.history.append({"role": "assistant", "content": given_back(message)})
        blocks = message.content
        return Heard(
            text="".join(b.text for b in blocks if b.type == "text"),
            thought="".join(b.thinking for b in blocks if b.type == "thinking"),
            calls=tuple((b.id, b.input) for b in blocks if b.type == "tool_use"),
            finish=message.stop_reason,
        )


def given_back(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message as its client sends them again."""
    return [block.model_dump(exclude_none=True) for block in message.content]


def anew(id: str, history: list[Any]) -> str:
    """An id of the client's own, another one in each request."""
    return f"{id}n{len(history)}"


class EditingChat(ChatTalk):
    """Writes ids and the JSON of arguments anew, drops thoughts, sends results in another order."""

    def sent(self) -> list[Any]:
        sent: list[Any] = []
        for is_result, group in itertools.groupby(self.history, lambda m: m["role"] == "tool"):
            messages = [self.message(message) for message in group]
            sent += messages[::-1] if is_result else messages
        return sent

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        message = {k: v for k, v in message.items() if k != "reasoning_content"}
        if "tool_call_id" in message:
            message["tool_call_id"] = anew(message["tool_call_id"], self.history)
        if "tool_calls" in message:
            message["tool_calls"] = [self.call(call) for call in message["tool_calls"] or ()]
        return message

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
        function = {**call["function"], "arguments": arguments}
        return {**call, "id": anew(call["id"], self.history), "function": function}


class EditingResponses(ResponsesTalk):
    """Does the same, and sends the text of an answer behind its calls."""

    def sent(self) -> list[Any]:
        sent: list[Any] = []
        for side, group in itertools.groupby(self.history, self.side):
            items = [self.item(item) for item in group if item.get("type") != "reasoning"]
            if side == "answer":
                items.sort(key=lambda item: bool(item["type"] == "message"))
            sent += items[::-1] if side == "results" else items
        return sent

    @staticmethod
    def side(item: dict[str, Any]) -> str:
        if item.get("type") == "function_call_output":
            return "results"
        return "input" if item.get("role") == "user" else "answer"

    def item(self, item: dict[str, Any]) -> dict[str, Any]:
        changed = {"call_id": anew(item["call_id"], self.history)} if "call_id" in item else {}
        return {**item, **changed}


class EditingMessages(MessagesTalk):
    """Does the same, and sends an answer as several messages."""

    def sent(self) -> list[Any]:
        sent: list[Any] = []
        for message in self.history:
            if isinstance(message["content"], str):
                sent.append(message)
                continue
            blocks = [self.block(b) for b in message["content"] if b["type"] != "thinking"]
            if message["role"] == "user":
                sent.append({**message, "content": blocks[::-1]})
                continue
            blocks.sort(key=lambda block: block["type"] == "text")
            sent += [{**message, "content": [block]} for block in blocks]
        return sent

    def block(self, block: dict[str, Any]) -> dict[str, Any]:
        if block["type"] == "tool_result":
            return {**block, "tool_use_id": anew(block["tool_use_id"], self.history)}
        if block["type"] == "tool_use":
            given = dict(reversed(block["input"].items()))
            return {**block, "id": anew(block["id"], self.history), "input": given}
        return block


EDITING = {"chat": EditingChat, "responses": EditingResponses, "messages": EditingMessages}
TALKS = {
    "chat": ChatTalk,
    "responses": ResponsesTalk,
    "previous": PreviousTalk,
    "messages": MessagesTalk,
}
