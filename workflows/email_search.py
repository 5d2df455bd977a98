"""Questions about a mailbox, answered with tools: search_emails, read_email and generate_response
(ART-E's task).

explorer_input:
  taskset:
    path: questions.jsonl
    format: {prompt_key: question, response_key: answer}
    default_workflow_type: email_search_workflow
    workflow_args: {database: enron_emails.db}

A row has `question`, `answer`, `inbox_address`, `query_date` (YYYY-MM-DD) and `message_ids`, the
mails that tell the answer.

The mailbox is a SQLite file with the tables emails (id, message_id, subject, from_address, date,
body) and recipients (recipient_address, email_id), and the FTS5 index emails_fts, as Trinity-RFT's
prepare_data.py makes it.  It is opened for reading only.
"""

import os
import sqlite3
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from rft import Reply, Score, Task, ToolArgs, ToolWorkflow, Transcript, register
from rft.reward.base import RewardResult
from rft.reward.judge_base import JudgeCase
from rft.reward.judges import ReferenceArgs, ReferenceJudge
from rft.reward.search_qa import same_answer
from rft.types.completion import Completion
from rft.types.ports import ChatModel

VARIABLE = "DEFAULT_EMAIL_DB_PATH"
NO_ANSWER = "I don't know"
_MOST = 10  # results of one search
_STEPS = 50_000_000  # of SQLite's machine, for one query
_SEARCH = """SELECT e.message_id, snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15)
FROM emails_fts f JOIN emails e ON e.id = f.rowid
WHERE emails_fts MATCH :words AND e.date < :until AND (e.from_address = :inbox OR EXISTS (
    SELECT 1 FROM recipients r WHERE r.email_id = e.id AND r.recipient_address = :inbox))
ORDER BY e.date DESC LIMIT :most"""


class EmailArgs(ToolArgs):
    """As ToolArgs; where the mailbox is."""

    database: str | None = Field(
        None, description=f"SQLite file of the mailbox; null: what the variable {VARIABLE} names"
    )
    max_tool_response_length: int = Field(
        2000, ge=1, description="characters of a result that the model is told"
    )
    tool_obs_char_limit: int | None = Field(
        None, ge=1, description="Trinity-RFT's name of max_tool_response_length"
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("tool_obs_char_limit") is not None:
            return {"max_tool_response_length": values["tool_obs_char_limit"], **values}
        return values


@register.workflow("email_search_workflow", args=EmailArgs)
class EmailSearch(ToolWorkflow):
    """Ends with a call of generate_response.  Its argument, and which mails were found and read,
    stand in the info of the row.
    """

    Args: type[BaseModel] = EmailArgs
    usual_reward = "email_search_reward"

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.found: dict[str, Any] = {
            "answer": None,
            "sources": [],
            "seen": [],
            "read": [],
            "turns": 0,
        }
        self.mails: Mailbox | None = None

    async def begin(self, task: Task) -> list[dict[str, Any]]:
        self.mails = Mailbox(
            _database(self.args.database), str(task.row.get("inbox_address", "")), _day(task)
        )
        messages: list[dict[str, Any]] = await super().begin(task)
        if messages[0]["role"] == "system":
            return messages
        told = (
            f"You answer a question about the mails of {self.mails.inbox}. Today is "
            f"{self.mails.today}. Search with other words where "
            f"nothing is found, and read a mail before you rely on it. You have "
            f"{self.args.max_turns} turns. In the end call "
            f"generate_response once, with the answer and the ids of the mails that tell it; if "
            f"there is none, answer {NO_ANSWER}."
        )
        return [{"role": "system", "content": told}, *messages]

    def make_tools(self, task: Task) -> Any:
        mails = self.mails
        found = self.found
        assert mails is not None, "begin opens it"

        def search_emails(keywords: list[str]) -> list[dict[str, str]]:
            """Searches subject and text of the mails of this inbox; the newest come first, at most
            ten.

            keywords: words that must all be there
            """
            hits = mails.search(keywords)
            found["seen"] += [hit["message_id"] for hit in hits]
            return hits

        def read_email(message_id: str) -> dict[str, Any]:
            """One mail as a whole.

            message_id: its id, as search_emails tells it
            """
            mail = mails.read(message_id)
            found["read"].append(message_id)
            return mail

        def generate_response(answer: str, sources: list[str] = []) -> str:  # noqa: B006  (a model's schema is made from it)
            """Ends the search.

            answer: the answer to the question
            sources: ids of the mails that tell it
            """
            if found["answer"] is None:
                found["answer"], found["sources"] = answer, list(sources)
            return "Done."

        return [search_emails, read_email, generate_response]

    async def react(self, answer: Completion) -> Reply:
        self.found["turns"] += 1
        reply = await super().react(answer)
        done = reply.done or self.found["answer"] is not None
        return Reply(reply.messages, done=done, info={**reply.info, "email": dict(self.found)})

    async def close(self) -> None:
        if self.mails is not None:
            self.mails.close()
        await super().close()


class EmailRewardArgs(ReferenceArgs):
    """As reference_judge; without a judge an answer is right that is the gold answer, articles,
    case and punctuation aside.
    """

    llm_as_a_judge: bool = True
    max_turns: int = Field(
        10, ge=1, description="the workflow's, for what is earned by being quick"
    )


@register.reward("email_search_reward")
class EmailSearchReward(ReferenceJudge):
    """Right 1 and up to 0.5 more, wrong -1, no answer 0, never answered -1; looking in the right
    place earns up to 0.3.

    Of the gold mail: found 0.1, read 0.1, named 0.1, which a wrong answer and an honest I don't
    know keep.  A right answer earns 0.3 for naming it, 0.1 / (number of sources) and 0.1 (1 - turns
    / max_turns).
    """

    Args: ClassVar[type[BaseModel]] = EmailRewardArgs

    def check_models(
        self, models: Mapping[str, object], tasks: Mapping[str, str] | None = None
    ) -> None:
        if self.args.llm_as_a_judge:
            super().check_models(models, tasks or {})

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        if self.args.llm_as_a_judge:
            await super().prepare(models)

    async def __call__(self, task: Task, transcript: Transcript) -> RewardResult:
        info: dict[str, Any] = next(
            (t.info["email"] for t in reversed(transcript.turns) if "email" in t.info), {}
        )
        answer = info.get("answer")
        if answer is None:
            return Score(
                value=-1.0,
                parts={"accuracy": 0.0, "format": -1.0},
                reason="generate_response was never called",
            )
        if not self.args.llm_as_a_judge:
            return {"accuracy": float(same_answer(answer, str(task.truth))), "format": 0.0}
        gold = next(iter(task.row.get("message_ids") or ()), None)
        partial = 0.1 * (
            (gold in info["seen"]) + (gold in info["read"]) + (gold in info["sources"])
        )
        if answer.strip().rstrip(".") in ("", NO_ANSWER):
            return {"accuracy": 0.0, "format": partial}
        verdict = await super().__call__(
            task, JudgeCase.from_transcript(task, transcript).saying(answer).transcript
        )
        if isinstance(verdict, Score) and verdict.value is None:
            return verdict
        if not (verdict.value if isinstance(verdict, Score) else verdict):
            return {"accuracy": -1.0, "format": partial}
        named = 0.3 * (gold in info["sources"]) + 0.1 / max(1, len(info["sources"])) * bool(
            info["sources"]
        )
        return {
            "accuracy": 1.0,
            "format": named + 0.1 * max(0.0, 1 - info["turns"] / self.args.max_turns),
        }


class Mailbox:
    """The mails of one address before the end of one day.  Raises ValueError for what a model asks
    wrongly.
    """

    def __init__(self, path: Path, inbox: str, today: date) -> None:
        self.inbox = inbox
        self.today = today
        self._db = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False
        )
        self._left = 0
        self._db.set_progress_handler(self._tick, 10_000)

    def _tick(self) -> bool:
        self._left -= 10_000
        return self._left < 0

    def _rows(self, sql: str, given: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        self._left = _STEPS
        return self._db.execute(sql, given).fetchall()

    def search(self, keywords: list[str]) -> list[dict[str, str]]:
        words = " ".join(
            '"' + k.replace('"', '""') + '"' for k in keywords if any(c.isalnum() for c in k)
        )
        if not words:
            raise ValueError("no keywords")
        until = f"{self.today + timedelta(days=1)} 00:00:00"
        rows = self._rows(
            _SEARCH, {"words": words, "until": until, "inbox": self.inbox, "most": _MOST}
        )
        return [{"message_id": id, "snippet": snippet} for id, snippet in rows]

    def read(self, message_id: str) -> dict[str, Any]:
        sql = (
            "SELECT id, message_id, date, subject, from_address, body FROM emails WHERE "
            "message_id = :id"
        )
        if not (rows := self._rows(sql, {"id": message_id})):
            raise ValueError(f"there is no mail {message_id!r:.80}")
        number, *mail = rows[0]
        to = self._rows(
            "SELECT recipient_address FROM recipients WHERE email_id = :id", {"id": number}
        )
        return {
            **dict(zip(("message_id", "date", "subject", "from", "body"), mail, strict=True)),
            "to": [one for (one,) in to],
        }

    def close(self) -> None:
        self._db.close()


def _database(named: str | None) -> Path:
    given = named or os.environ.get(VARIABLE)
    if not given:
        raise ValueError(
            f"there is no mailbox: name it in workflow_args.database, or in the variable {VARIABLE}"
        )
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no mailbox {path} (workflow_args.database)")
    return path


def _day(task: Task) -> date:
    given = str(task.row.get("query_date", ""))[:10]
    try:
        return date.fromisoformat(given)
    except ValueError:
        raise ValueError(
            f"task {task.taskset}[{task.index}]: query_date is {given!r}, not YYYY-MM-DD"
        ) from None
