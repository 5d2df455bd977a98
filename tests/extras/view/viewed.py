"""Runs for tests of `rft view`: small ledgers with metrics, and texts that mean no good."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.extras.view.view_pages import ViewPages
from rft.extras.view.view_server import ViewServer
from rft.testing.storage_contract import row
from rft.types.block import encode
from rft.types.experience import failed
from rft.types.ids import GroupId, Version
from tests.helpers.asked_ledger import play
from tests.helpers.stored_metrics import metrics as metrics

INJECTIONS = (
    "<script>window.hit=1</script>",
    "</title><script>window.hit=2</script>",
    "</textarea><script>window.hit=3</script>",
    "</div></bdi></main><script>window.hit=4</script>",
    '"><img src=x onerror="window.hit=5">',
    "'><svg onload='window.hit=6'>",
    "<svg><script href='data:text/javascript,window.hit=7'/></svg>",
    '<iframe srcdoc="<script>parent.hit=8</script>"></iframe>',
    '<a href="javascript:window.hit=9">click</a>',
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=10>",
    '<body onload="window.hit=11">',
    '<input autofocus onfocus="window.hit=12">',
    '<details open ontoggle="window.hit=13">',
    '<meta http-equiv="refresh" content="0;url=https://example.org/14">',
    '<base href="https://example.org/15/">',
    '<link rel=stylesheet href="https://example.org/16.css">',
    '<form action="https://example.org/17"><button>x</button></form>',
    '<object data="https://example.org/18"></object><embed src="https://example.org/18">',
    "<style>body{display:none}</style>",
    '<div style="position:fixed;inset:0;background:red">20</div>',
    "{{ 7*7 }}{% for x in ().__class__.__base__.__subclasses__() %}{% endfor %}",
    "<!--><script>window.hit=22</script-->",
    "<noscript><p title='</noscript><img src=x onerror=window.hit=23>'>",
    "&lt;script&gt;window.hit=24&lt;/script&gt;&#60;script&#62;window.hit=24&#60;/script&#62;",
    "\x1b[31mred\x1b]0;title\x07\x1b]8;;https://example.org/25\x1b\\link",
    "abc\u202egnp.exe\u2066\u2067\u2069 26",
    "nul\x00 bell\x07 back\x08\x08 c1\x9b2J 27",
    "high \ud83d alone, low \ude00 alone 28",
    "\u2028window.hit=29\u2029//",
    "`${window.hit=30}`\\u003cscript\\u003ewindow.hit=30\\u003c/script\\u003e",
    "' OR 1=1; DROP TABLE experiences; -- 31",
    "..%2f..%2f..%2fetc%2fpasswd/../../32",
)
TAGS = set(
    "html head meta title link script body a header nav span button main h1 h2 h3 small p div form "
    "label input select option "
    "table thead tbody tr th td bdi code b br ol ul li details summary dialog kbd article svg path "
    "pre textarea datalist img".split()
)


async def stored(run_dir: Path) -> Path:
    """A run that has ended, with rows of every state."""
    await play(run_dir)
    metrics(run_dir)
    (run_dir / "state.json").write_text(
        json.dumps({"phase": "done", "pid": 1, "time": 1.7e9, "version": "1:1"})
    )
    return run_dir


async def hostile(run_dir: Path) -> list[str]:
    """A run whose texts, names and numbers come from people who mean no good; ids of its rows, one
    for each injection.
    """
    buffer = Buffer(BufferSettings(folder=run_dir / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    writer = buffer.writer(1)
    ids = []
    for task, evil in enumerate(INJECTIONS):
        name = GroupId(1, 0, 0, task)
        members = [row(name.run(run), reward=float(run), version=Version(1, 0)) for run in range(2)]
        # payload and database hold no lone surrogates
        kept = evil.encode("utf-8", "replace").decode()
        judged = {"judge": kept, "question": [{"role": kept, "content": kept}], "reply": kept}
        said = {
            "messages": (
                {
                    "role": kept,
                    "name": kept,
                    "content": [{"type": "text", "text": kept}, {"type": kept}],
                },
                {
                    "role": "assistant",
                    "content": kept,
                    "tool_calls": [{"function": {"name": kept, "arguments": kept}}],
                },
            ),
            "tools": ({"type": "function", "function": {"name": kept}},),
            "info": {"reward_reason": kept, kept: kept, "judge": [judged]},
            "metrics": {kept: 1.0},
            "prompt_text": kept,
            "response_text": kept,
            "taskset": kept,
            "workflow": kept,
            "reward_parts": {kept: 0.5},
            "finish_reason": kept,
        }
        members[0] = msgspec.structs.replace(members[0], **said)
        members[1] = failed(
            name.run(1),
            taskset=kept,
            task_index=task,
            workflow=kept,
            reason=kept,
            info={"traceback": kept},
        )
        members.append(
            msgspec.structs.replace(row(name.run(2), reward=0.5), taskset=kept, workflow=kept)
        )
        await writer.append(encode(members), accepted=True)
        ids += [str(m.id) for m in members]
    await writer.close_batch(0, accepted=len(INJECTIONS), expected=len(INJECTIONS), reasons={})
    await buffer.close()
    metrics(run_dir, note=INJECTIONS[0])
    with (run_dir / "metrics.jsonl").open("a") as file:
        for number, evil in enumerate(INJECTIONS):
            record = {
                "role": "trainer",
                "step": 20 + number,
                "time": 1.7e9 + 500,
                "values": {f"alarm/{evil}": 1.0, evil: 2.0, f"eval/{evil}/mean@1": 0.5},
            }
            file.write(json.dumps({**record, "notes": [evil]}) + "\n")
    (run_dir / "state.json").write_text(
        json.dumps(
            {"phase": INJECTIONS[4], "pid": 1, "time": 1.7e9, "reason": "".join(INJECTIONS[:6])}
        )
    )
    (run_dir / "config.json").write_text(json.dumps({"tree": {evil: evil for evil in INJECTIONS}}))
    return ids


@asynccontextmanager
async def viewing(
    folder: Path, **more: Any
) -> AsyncIterator[tuple[ViewServer, aiohttp.ClientSession]]:
    """A server that shows `folder`, and somebody who asks."""
    server = ViewServer(ViewPages(folder), port=0, **more)
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield server, session
    finally:
        await server.close()


class Page(HTMLParser):
    """What a browser would find in a page: tags, attributes, links, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data
