"""The pages: which address shows what.

Depends on addresses, templates, and the run that an address names, not on who may ask.  Invariant:
a handler only reads, and what takes long is done beside the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web
from aiohttp.hdrs import CONTENT_DISPOSITION

from rft.buffer.inspect import conversation, equation, judge_exchanges, plain_text
from rft.buffer.query import Questions
from rft.buffer.schema import VIEWS
from rft.buffer.token_texts import TokenTexts
from rft.errors import ConfigError, RftError, RunFailed
from rft.extras.view import charts, rollout_pages, sql_answers
from rft.extras.view.filters import ORDERS, STATES, STATUS, Filters
from rft.extras.view.found_runs import FoundRuns, differences
from rft.extras.view.html import HERE, environment
from rft.extras.view.live_events import live
from rft.extras.view.metric_curves import AXES, Axis, Curves
from rft.extras.view.opened_run import OpenedRun, group_of
from rft.extras.view.shown_images import image_answer
from rft.extras.view.token_colours import COLOURS, shown_tokens
from rft.monitor import curves as curve_pictures
from rft.monitor.pictures import svg
from rft.trainer.checkpoint import manifest as manifests

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RunHandler = Callable[[web.Request, OpenedRun], Awaitable[web.StreamResponse]]
_MOST_OPEN = 3  # runs whose ledger and metrics are held open while nobody asks
_TIMELINE_STEPS = 30
_TOKENS = 2000  # that are shown at first
_COMPARED = 6
_PLACE_DIGITS = 15
_PATIENCE_S = 0.3  # a page does not wait longer for metrics that were never read


class ViewPages:
    """All pages of the runs below `folder`.  Raises ConfigError where there is none."""

    def __init__(self, folder: Path) -> None:
        self.runs = FoundRuns(folder)
        self.runs.look()
        self.closing = asyncio.Event()
        self._compared_curves: dict[Path, Curves] = {}  # the runs that were compared last
        self._comparing = asyncio.Lock()
        self._opened: OrderedDict[Path, OpenedRun] = OrderedDict()
        self._html = environment()
        self._base = ""

    def routes(self, router: web.UrlDispatcher, base: str) -> None:
        """All of them below `base`."""
        self._base = base
        router.add_get(f"{base}/", self._runs)
        router.add_get(f"{base}/compare", self._compare)
        router.add_get(f"{base}/compare.json", self._compare_points)
        router.add_static(f"{base}/static", HERE / "static")
        run = f"{base}/run/{{run}}"
        for name, handler in {
            "": self._overview,
            "facts": self._facts,
            "curves.json": self._points,
            "timeline.svg": self._timeline,
            "rollouts": self._rollouts,
            "rollout/{id}": self._rollout,
            "image/{name}": self._image,
            "group/{id}": self._group,
            "task": self._task,
            "sql": self._sql,
            "sql.{kind}": self._download,
        }.items():
            router.add_get(f"{run}/{name}", self._using(handler))
        router.add_get(f"{run}/events", self._events)

    async def close(self) -> None:
        while self._opened:
            await self._opened.popitem()[1].close()

    # ------------------------------------------------------------ what all of them need

    def problem(self, text: str, status: int) -> web.Response:
        """A page that says what is wrong."""
        return self._page("problem.html", {"message": text}, status=status)

    def _page(self, template: str, values: Mapping[str, Any], *, status: int = 200) -> web.Response:
        body = self._html.get_template(template).render(
            base=self._base, run=None, **{"key": "", **values}
        )
        return web.Response(
            body=body.encode("utf-8", "backslashreplace"),
            content_type="text/html",
            charset="utf-8",
            status=status,
        )

    def _run_page(self, request: web.Request, page: str, values: Mapping[str, Any]) -> web.Response:
        key = request.match_info["run"]
        where = {
            "key": key,
            "name": key.replace("~", "/"),
            "here": f"{self._base}/run/{quote(key)}",
            "page": page,
        }
        return self._page(f"{page}.html", {**where, **values})

    def _run(self, request: web.Request) -> OpenedRun:
        """The run that the address names."""
        path = self.runs.path(request.match_info["run"])
        if path is None:
            raise web.HTTPNotFound
        if path not in self._opened:
            self._opened[path] = OpenedRun(path)
        self._opened.move_to_end(path)
        return self._opened[path]

    def _using(self, handler: RunHandler) -> Handler:
        """`handler` gets the run that the address names, which stays open until it has answered."""

        async def answered(request: web.Request) -> web.StreamResponse:
            run = self._run(request)
            run.users += 1
            try:
                return await handler(request, run)
            finally:
                run.users -= 1
                await self._close_idle()

        return answered

    async def _close_idle(self) -> None:
        idle = [path for path, run in self._opened.items() if not run.users]
        for path in idle[: max(0, len(self._opened) - _MOST_OPEN)]:
            await self._opened.pop(path).close()

    # ------------------------------------------------------------ runs

    async def _runs(self, _: web.Request) -> web.Response:
        lines = await asyncio.to_thread(self.runs.lines, _PATIENCE_S)
        return self._page(
            "runs.html",
            {
                "lines": lines,
                "unread": sum(not r.read for r in lines),
                "folder": self.runs.folder,
                "most": _COMPARED,
            },
        )

    def _compared(self, request: web.Request) -> dict[str, Path]:
        keys = list(dict.fromkeys(request.query.getall("run", [])))
        paths = {k: self.runs.path(k) for k in keys}
        if not 2 <= len(keys) <= _COMPARED or None in paths.values():
            raise ConfigError(
                f"compares 2 to {_COMPARED} of the runs in the table; {len(keys)} were chosen",
                key="compare",
            )
        return {k: p for k, p in paths.items() if p is not None}

    async def _compare(self, request: web.Request) -> web.Response:
        paths = self._compared(request)
        run_differences = await asyncio.to_thread(differences, list(paths.values()))
        query = urlencode([("run", k) for k in paths])
        return self._page(
            "compare.html",
            {
                "runs": list(paths),
                "differences": run_differences,
                "axes": AXES,
                "points": f"{self._base}/compare.json?{query}",
            },
        )

    async def _compare_points(self, request: web.Request) -> web.Response:
        paths = self._compared(request)
        axis = _axis(request)

        def read() -> dict[str, Any]:
            for curves in self._compared_curves.values():
                curves.refresh()
            return charts.several(
                {key: self._compared_curves[path] for key, path in paths.items()}, axis
            )

        async with self._comparing:
            self._compared_curves = {
                p: self._compared_curves.get(p) or Curves(p, charts.may_be_charted)
                for p in paths.values()
            }
            return _json(await asyncio.to_thread(read))

    # ------------------------------------------------------------ overview

    async def _overview(self, request: web.Request, run: OpenedRun) -> web.Response:
        run.begin_index()
        return self._run_page(
            request, "overview", {**await self._about(run, _PATIENCE_S), "axes": AXES}
        )

    async def _facts(self, request: web.Request, run: OpenedRun) -> web.Response:
        return self._run_page(request, "facts", await self._about(run))

    async def _about(self, run: OpenedRun, patience_s: float | None = None) -> dict[str, Any]:
        """After `patience_s` without the metrics: the page asks for them again."""
        reading = asyncio.ensure_future(run.metrics(charts.numbers))
        await asyncio.wait({reading}, timeout=patience_s)
        checkpoints = await asyncio.to_thread(
            lambda: [p.name for p in manifests.committed(run.run_dir / "checkpoints")]
        )
        ready = reading.done()
        numbers = reading.result() if ready else charts.numbers(Curves(run.run_dir))
        return {
            **run.state(),
            **numbers,
            "reading": not ready,
            "folder": run.run_dir,
            "checkpoints": checkpoints,
        }

    async def _points(self, request: web.Request, run: OpenedRun) -> web.Response:
        axis = _axis(request)
        name = request.query.get("name", "")
        return _json(await run.metrics(lambda curves: charts.of_run(curves, axis, name)))

    async def _timeline(self, request: web.Request, run: OpenedRun) -> web.Response:
        try:
            picture = svg(*await run.metrics(lambda curves: curves.timeline(_TIMELINE_STEPS)))
        except RunFailed as e:
            picture = curve_pictures.svg({}, title=str(e), width=700, height=60)
        return web.Response(text=picture, content_type="image/svg+xml")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request)
        return await live(request, run.run_dir, lambda: str(run.state()["phase"]), self.closing)

    # ------------------------------------------------------------ rollouts

    async def _rollouts(self, request: web.Request, run: OpenedRun) -> web.Response:
        f = Filters.read(request.query)
        after = request.query.get("after", "")
        if after and not (after.isdecimal() and len(after) <= _PLACE_DIGITS):
            raise ConfigError(f"{after!r} is no place in the table", key="after", given=after)
        run.begin_index()
        if f == Filters() and not after and not run.index.ready:
            page = await run.ask(rollout_pages.newest)
        else:
            index = None if f.few else await run.indexed()
            page = await run.ask(lambda q: rollout_pages.table(q, index, f, after))
        tasksets = sorted(t for t in run.index.texts["taskset"].numbers if t)
        values = {
            "f": f,
            "page_of": page,
            "tasksets": tasksets,
            "orders": list(ORDERS),
            "statuses": STATUS,
            "states": STATES,
        }
        return self._run_page(request, "rollouts", {**values, "read": run.progress})

    async def _rollout(self, request: web.Request, run: OpenedRun) -> web.Response:
        id = request.match_info["id"]
        by = request.query.get("colour", "logprob")
        if by not in COLOURS:
            raise ConfigError(f"{by!r} is none of {', '.join(COLOURS)}", key="colour", given=by)
        most = 1 << 30 if request.query.get("tokens") == "all" else _TOKENS
        if run.words is None:
            read_now = await asyncio.to_thread(TokenTexts, run.run_dir)
            run.words = read_now
        words = run.words

        def read(q: Questions) -> dict[str, Any]:
            rollout_page = rollout_pages.rollout(q, id)
            tokens = list(shown_tokens(rollout_page.x, words, by, rollout_page.advantage, most))
            ids = [s["id"] for s in rollout_page.siblings]
            at = ids.index(id)
            return {
                "rollout": rollout_page,
                "x": rollout_page.x,
                "row": rollout_page.x.row,
                "tokens": tokens,
                "at": at,
                "equation": equation(rollout_page.x),
                "said": conversation(rollout_page.x),
                "taught": rollout_pages.has_advantages(rollout_page.x),
                "info": {} if rollout_page.x.payload is None else dict(rollout_page.x.payload.info),
                "before": ids[at - 1] if at else "",
                "behind": ids[at + 1] if at + 1 < len(ids) else "",
            }

        values = await run.ask(read)
        values["info"].pop("reward_weights", None)
        values |= {"judged": judge_exchanges(values["info"]), "plain": plain_text}
        return self._run_page(request, "rollout", {**values, "by": by, "colours": COLOURS})

    async def _image(self, request: web.Request, run: OpenedRun) -> web.Response:
        name = request.match_info["name"]
        data, kind = await run.ask(lambda q: image_answer(q, name))
        return web.Response(body=data, content_type=kind)

    async def _group(self, request: web.Request, run: OpenedRun) -> web.Response:
        try:
            id = group_of(request.match_info["id"])
        except ValueError as e:
            raise ConfigError(str(e), key="group") from None

        def read(q: Questions) -> dict[str, Any]:
            group, rows = rollout_pages.group_page(q, id)
            ids = [r["id"] for r in rows]
            texts = rollout_pages.select(
                q,
                "SELECT id, prompt_text, response_text FROM v_experiences WHERE id IN (??)",
                many=ids,
            )
            return {"group": group, "rows": rows, "texts": {t["id"]: t for t in texts}}

        values = await run.ask(read)
        if not values["group"]:
            raise ConfigError(f"{id} is no group of this run", key="group", given=id)
        return self._run_page(request, "group", values)

    async def _task(self, request: web.Request, run: OpenedRun) -> web.Response:
        f = Filters.read(request.query)
        if not f.taskset or f.task is None:
            raise ConfigError("needs taskset and task", key="task")
        index = await run.indexed()
        versions = await run.ask(lambda q: rollout_pages.task(q, index, f.taskset, f.task or 0))
        return self._run_page(
            request, "task", {"versions": versions, "taskset": f.taskset, "number": f.task}
        )

    # ------------------------------------------------------------ SQL

    async def _sql(self, request: web.Request, run: OpenedRun) -> web.Response:
        text = request.query.get("q", "")
        values: dict[str, Any] = {
            "q": text,
            "answer": None,
            "message": "",
            "examples": sql_answers.EXAMPLES,
            "views": {},
        }
        try:
            values["views"] = run.views = run.views or await run.ask(
                lambda q: {v: q.columns(v) for v in VIEWS}
            )
            if text.strip():
                values["answer"] = await sql_answers.answer(run.run_dir, text)
        except RftError as e:
            values["message"] = str(e)
        return self._run_page(request, "sql", values)

    async def _download(self, request: web.Request, run: OpenedRun) -> web.StreamResponse:
        text = request.query.get("q", "")
        kind = request.match_info["kind"]
        if kind not in sql_answers.KINDS:
            raise web.HTTPNotFound
        headers = {
            CONTENT_DISPOSITION: f'attachment; filename="answer.{kind}"',
            "Content-Type": sql_answers.KINDS[kind],
        }
        response = web.StreamResponse(headers=headers)
        async with aclosing(sql_answers.chunks(run.run_dir, text, kind)) as chunks:
            # what is wrong with the query is told before anything is sent
            first = await anext(chunks, b"")
            await response.prepare(request)
            await response.write(first)
            try:
                async for chunk in chunks:
                    await response.write(chunk)
            except RftError as e:
                log.warning("a download broke off: %s", e)
                assert request.transport is not None, "something was just sent"
                request.transport.abort()  # the reader must not take a part for the whole
        return response


def _axis(request: web.Request) -> Axis:
    axis_name = request.query.get("x", "step")
    for axis in AXES:
        if axis == axis_name:
            return axis
    raise ConfigError(f"{axis_name!r} is none of {', '.join(AXES)}", key="x", given=axis_name)


def _json(value: Any) -> web.Response:
    """Numbers that are not finite are null."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
