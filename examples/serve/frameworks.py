"""Agent frameworks as they are, against `rft serve`: python examples/serve/frameworks.py ADDRESS
(see frameworks.txt).
"""

import asyncio
import os
import sys

import agents
from agentscope.agent import Agent as ScopeAgent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel as ScopeModel
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel

from rft.extras.serve.client import Client


def langgraph(base_url: str, key: str) -> str:
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=key)
    graph = StateGraph(MessagesState).add_node(
        "answer", lambda state: {"messages": [model.invoke(state["messages"])]}
    )
    return (
        graph.add_edge(START, "answer")
        .add_edge("answer", END)
        .compile()
        .invoke({"messages": [("user", "hi")]})["messages"][-1]
        .text
    )


def openai_agents(base_url: str, key: str) -> str:
    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=base_url, api_key=key))
    return agents.Runner.run_sync(agents.Agent(name="short", model=model), "hi").final_output


def pydantic_ai(base_url: str, key: str) -> str:
    return (
        Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=key)))
        .run_sync("hi")
        .output
    )


def smolagents(base_url: str, key: str) -> str:
    return OpenAIServerModel("policy", api_base=base_url, api_key=key)(
        [{"role": "user", "content": "hi"}]
    ).content


def agentscope(base_url: str, key: str) -> str:
    model = ScopeModel(OpenAICredential(api_key=key, base_url=base_url), "policy")  # it streams
    return asyncio.run(
        ScopeAgent("short", "Answer shortly.", model).reply(UserMsg("user", "hi"))
    ).get_text_content()


with Client(sys.argv[1], os.environ["RFT_SERVE_KEY"]) as rft:
    for play in (langgraph, openai_agents, pydantic_ai, smolagents, agentscope):
        session = rft.session(task_id="greeting")
        print(
            f"{play.__name__}: {play(session.base_url, session.api_key)!r}, reward "
            f"{rft.reward(session, 1.0)}",
            flush=True,
        )
