"""A LangGraph agent answers questions through `rft serve` and posts whether each answer was right:
what it runs is what is trained.

    python langgraph_agent.py ADDRESS      reads lines {"tasks", "runs", "train"}, plays each task so often, prints {"plays"}

With "train" false its sessions are withdrawn: an evaluation, which trains nothing.  It outlives
restarts of the service: calls are sent again, and the reward of a session that a restart gave up is
null.  See frameworks.txt for what it needs.
"""

import asyncio
import json
import os
import re
import sys
import uuid

from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from openai import APIStatusError

from rft.extras.serve.client import AsyncClient, ServeError

ADDRESS = sys.argv[1].removesuffix("/v1")
MODEL = ChatOpenAI(
    model="policy",
    base_url=f"{ADDRESS}/v1",
    api_key="each session has its own",
    timeout=300,
    max_retries=40,
)


async def answer(state: MessagesState, config: RunnableConfig) -> dict:
    key = {
        "Authorization": f"Bearer {config['configurable']['key']}",
        "Idempotency-Key": uuid.uuid4().hex,
    }
    return {"messages": [await MODEL.ainvoke(state["messages"], extra_headers=key)]}


GRAPH = (
    StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
)  # where there is no number, it asks once more
GRAPH.add_node("remind", lambda s: {"messages": [("user", "Give the number.")]}).add_edge(
    "remind", "answer"
)


def done(state):
    last = state["messages"][-1].text
    return END if len(state["messages"]) > 2 or re.search(r"\d", last) else "remind"


AGENT = GRAPH.add_conditional_edges("answer", done, ["remind", END]).compile()


async def play(rft: AsyncClient, number: int, task: dict[str, str], train: bool) -> dict:
    session = await rft.session(task_id=f"{number}: {task['prompt']}")
    try:
        state = await AGENT.ainvoke(
            {"messages": [("user", task["prompt"])]}, {"configurable": {"key": session.api_key}}
        )
        reward = float(re.findall(r"-?\d+", state["messages"][-1].text)[-1:] == [task["response"]])
        await (rft.reward(session, reward) if train else rft.withdraw(session))
    except (APIStatusError, ServeError):
        if (await rft.state(session))["state"] != "explained":
            raise
        return {"reward": None, "session": session.id, "answers": []}
    answers = [m.response_metadata["id"] for m in state["messages"] if m.type == "ai"]
    return {"reward": reward, "session": session.id, "answers": answers}


async def main() -> None:
    async with AsyncClient(
        ADDRESS, os.environ["RFT_SERVE_KEY"], timeout_s=300, patience_s=300
    ) as rft:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            plays = [
                play(rft, n, t, asked["train"])
                for n, t in enumerate(asked["tasks"])
                for _ in range(asked["runs"])
            ]
            print(json.dumps({"plays": await asyncio.gather(*plays)}), flush=True)


asyncio.run(main())
