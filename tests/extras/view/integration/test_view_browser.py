"""`rft view` in a real browser: every page of a run that goes on and of a stored one, at two
widths, in both colour schemes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.cli import main as cli
from rft.testing import tiny
from tests.extras.view.viewed import hostile
from tests.helpers.browser import SIZES, browser, console, until
from tests.helpers.runs import TINY, Run

pytestmark = [pytest.mark.e2e, pytest.mark.browser]
STEPS = 10
QUICK = (
    "buffer.batch_size=8",
    "algorithm.repeat_times=4",
    "explorer.eval_interval=4",
    "project=p",
    "group=g",
    "monitor.keep_trainer_logprobs=true",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a stored run, and the tiny model."""
    made = tmp_path_factory.mktemp("viewed")
    tiny.make(made / "model")
    with pytest.raises(SystemExit) as ended:
        cli.main([*_command(made), "name=stored", f"trainer.total_steps={STEPS}"])
    assert ended.value.code in (None, 0)
    return made


def _command(folder: Path) -> list[str]:
    return [
        "run",
        "--in-process",
        "--config",
        str(TINY),
        f"checkpoint_root_dir={folder}",
        f"model.model_path={folder / 'model'}",
        *QUICK,
    ]


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Run]:
    """A run that goes on until the tests have ended."""
    run = Run(
        *_command(folder),
        "name=live",
        "trainer.total_steps=100000",
        "buffer.total_epochs=100000",
        "trainer.save_interval=100000",
    )
    run.wait_for("step 2/")
    yield run
    run.interrupt()
    run.end(60)


@pytest.fixture(scope="module")
def address(folder: Path, live: Run) -> Iterator[str]:
    viewer = Run("view", str(folder), "--port", "0")
    viewer.wait_for("view  http", 60)
    yield next(line.split()[1] for line in viewer.lines if line.startswith("view"))
    viewer.interrupt()
    assert viewer.end(60) == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", ["stored", "live"])
def test_every_page_can_be_walked_through(
    address: str, live: Run, run: str, size: str, dark: bool
) -> None:
    with browser(size=size, dark=dark) as window:
        walk = Walk(window)
        walk.open(address)
        walk.click(f"a[href$='p~g~{run}/']")
        walk.curves(dark)
        if run == "live":
            before = until(window, "document.querySelectorAll('.card b')[1].textContent")
            until(
                window,
                f"!document.querySelector('#live').hidden && "
                f"Number(document.querySelectorAll('.card b')[1].textContent) > {before}",
                180,
            )
        walk.rollouts()
        walk.one_rollout()
        walk.sql()
        walk.compare(address)
        walk.keys(address, run)


_HAIR = """
  const ask = window.fetch, curve = (x) => ({ title: String(x), curves: [{ label: "a", x: x, y: x.map(() => 1) }] });
  const charts = [[1, 2, 3], [1], [], [1, 1 + 2 ** -52], [9, 9 + 2 ** -49], [50000, 50000 + 2 ** -37], [0, 1e-300]].map(curve);
  window.fetch = (at, ...more) => String(at).includes("x=") ? Promise.resolve(Response.json({ x: "step", charts })) : ask(at, ...more);
"""


def test_a_chart_that_is_a_hair_wide_is_drawn(address: str) -> None:
    """Two points that floating point can hardly tell apart; uPlot's own axis never ends there."""
    with browser() as window:
        window.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _HAIR})
        walk = Walk(window)
        walk.open(address)
        walk.click("a[href$='p~g~stored/']")
        until(window, "document.querySelector('#charts').dataset.drawn === '7'")
        walk.fits()


def test_a_newcomers_minute(address: str) -> None:
    """The clicks that docs/howto/see-a-run.md writes down: the worst answer of step 10, why it got its
    reward, which weights wrote it.
    """
    with browser() as window:
        walk = Walk(window)
        walk.open(address)
        walk.click("a[href$='p~g~stored/']")
        walk.click("[data-key=r]")
        walk.write("[name=step]", "10")
        walk.choose("[name=order]", "worst")
        walk.click("#filters button")
        walk.click("#rows a.go")
        assert walk.clicks == 4, "and a number, and a choice"
        assert "Trained in step 1:10" in walk.text("#why")
        for station in (
            "weights 1:9",
            "engine",
            "row batch 9",
            "lease step 10",
            "step 1:10",
            "checkpoint global_step_10",
        ):
            assert station in walk.text("#path")
        assert [line.split()[0] for line in walk.text("#reward").splitlines()][-3:] == [
            "reward",
            "mean",
            "reward",
        ]
        assert walk.text("#conversation .role-user") and walk.text("#conversation .role-assistant")


class Walk:
    """What a person does; after every click the page fits its window and the console is silent."""

    def __init__(self, window: Any) -> None:
        self.window = window
        self.clicks = 0

    def one(self, css: str) -> Any:
        from selenium.webdriver.common.by import By

        return self.window.find_element(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """In one step: a live page replaces its elements."""
        return str(
            self.window.execute_script(
                "return document.querySelector(arguments[0]).innerText.trim()", css
            )
        )

    def open(self, url: str) -> None:
        self.window.get(url)
        self.fits()

    def click(self, css: str) -> None:
        """A click that leads to another page."""
        self.window.execute_script("window.left = true")
        found = self.one(css)
        self.window.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()
        self.clicks += 1
        until(self.window, "!window.left && document.readyState === 'complete'")
        self.fits()

    def fits(self) -> None:
        assert self.window.execute_script(
            "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )
        assert console(self.window) == []

    def write(self, css: str, text: str) -> None:
        field = self.one(css)
        field.clear()
        field.send_keys(text)

    def choose(self, css: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.one(css)).select_by_value(value)

    def curves(self, dark: bool) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        w = self.window
        until(w, "Number(document.querySelector('#charts').dataset.drawn) >= 8")
        ground = w.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is not dark
        for axis in ("time", "tokens", "step"):
            self.choose("[name=x]", axis)
            named = {"time": "hours", "tokens": "tokens", "step": "step"}[axis]
            until(
                w,
                f"[...document.querySelectorAll('.u-legend .u-series th')].some(t => "
                f"t.textContent.includes('{named}'))",
            )
        w.execute_script(
            "const s = document.querySelector('[name=smooth]'); s.value = 0.8; s.dispatchEvent(new "
            "Event('input'))"
        )
        self.write("[name=name]", "actor/loss\n")
        until(w, "document.querySelector('.chart h3').textContent === 'actor/loss'")
        plot = self.one(".chart .u-over")
        w.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
        ActionChains(w).move_to_element_with_offset(plot, -60, 0).click_and_hold().move_by_offset(
            90, 0
        ).release().perform()
        until(w, "document.querySelector('#timeline').naturalWidth > 100")
        assert "done" in self.text(".cards") or "running" in self.text(".cards")
        self.fits()

    def rollouts(self) -> None:
        self.click("[data-key=r]")
        self.write("[name=step]", "2")
        self.choose("[name=order]", "worst")
        self.click("#filters button")
        assert self.text("#count") == "32 rollouts"
        rewards = [
            float(r)
            for r in self.window.execute_script(
                "return [...document.querySelectorAll('#rows a.go')].map(a => a.textContent)"
            )
        ]
        assert len(rewards) == 32
        assert rewards == sorted(rewards)
        where = "return document.querySelector('#rows a.go').getBoundingClientRect().top"
        shown = "; ".join(
            f"document.querySelector('{s}').hidden = false" for s in ("#new", "#live")
        )
        assert self.window.execute_script(where) == self.window.execute_script(
            f"{shown}; {where}"
        ), "news move nothing away"

    def one_rollout(self) -> None:
        self.click("#rows a.go")
        assert "Trained in step 1:2" in self.text("#why")
        path = self.text("#path")
        assert [
            path.index(s)
            for s in ("weights 1:1", "engine", "row", "lease step 2", "step 1:2", "checkpoint")
        ] == sorted(
            path.index(s)
            for s in ("weights 1:1", "engine", "row", "lease step 2", "step 1:2", "checkpoint")
        )
        for colour in ("advantage", "mismatch", "version", "logprob"):
            self.click(f"#colours a[href*='{colour}']")
            shown = self.window.execute_script(
                "return [...document.querySelectorAll('#tokens span')].map(t => t.className)"
            )
            assert "prompt" in shown
            if colour == "advantage":
                assert "The trainer's advantage" in self.text("#taught")
            assert (
                shown[-1][0]
                in {"advantage": "np", "mismatch": "np", "version": "v", "logprob": "s"}[colour]
            )
        assert "trainer's" in self.one("#tokens span:last-of-type").get_attribute("title")
        self.click("#next")
        self.click("#prev")
        self.click("a[href*='/group/']")
        self.click("#rows a.go")
        self.click("a[href*='/task?']")
        assert "weights 1:1" in self.text("main")
        self.click("a.go")
        self.click("#path a[href*='version=']")
        assert "rollouts" in self.text("#count")

    def sql(self) -> None:
        self.click("[data-key=s]")
        self.click("main li a")
        assert "rows" in self.text("#count")
        self.write(
            "#q", "SELECT state, count(*) AS n FROM v_experiences WHERE batch < 2 GROUP BY state"
        )
        self.click("#query button")
        assert self.text("#answer").split() == ["state", "n", "used", "64"]
        self.write("#q", "DELETE FROM experiences")
        self.click("#query button")
        assert "may only read" in self.text(".problem")

    def compare(self, address: str) -> None:
        self.open(address)
        for box in self.window.find_elements("css selector", "input[type=checkbox]"):
            self.window.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
            box.click()
        self.click("form button")
        until(self.window, "Number(document.querySelector('#charts').dataset.drawn) >= 2")
        assert "trainer.total_steps" in self.text("main")

    def keys(self, address: str, run: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.open(f"{address}run/p~g~{run}/")
        body = self.one("body")
        self.window.execute_script("window.left = true")
        body.send_keys("g", "r")
        until(self.window, "!window.left && location.pathname.endsWith('/rollouts')")
        body = self.one("body")
        body.send_keys("j", "j")
        until(self.window, "document.querySelectorAll('#rows tr.at').length === 1")
        self.window.execute_script("window.left = true")
        self.window.switch_to.active_element.send_keys(Keys.ENTER)
        until(self.window, "!window.left && location.pathname.includes('/rollout/')")
        body = self.one("body")
        body.send_keys("?")
        assert self.window.execute_script("return document.querySelector('#help').open")
        body.send_keys(Keys.ESCAPE)
        before = self.window.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )
        self.one("body").send_keys("t")
        assert (
            self.window.execute_script("return getComputedStyle(document.body).backgroundColor")
            != before
        )
        self.fits()


def test_a_report_fits_a_phone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(folder / "p" / "g" / "stored"), "-o", str(out)])
    assert ended.value.code in (None, 0)
    with browser(size="phone") as window:
        window.get(out.as_uri())
        assert window.execute_script("return document.documentElement.scrollWidth") <= 390


def test_hostile_texts_do_nothing_in_a_browser(tmp_path: Path) -> None:
    ids = asyncio.run(hostile(tmp_path / "run"))
    viewer = Run("view", str(tmp_path / "run"), "--port", "0")
    viewer.wait_for("view  http", 60)
    address = next(line.split()[1] for line in viewer.lines if line.startswith("view"))
    try:
        with browser() as window:
            run = f"{address}run/run/"
            for page in (
                "",
                "rollouts",
                "sql?q=SELECT+*+FROM+v_experiences",
                *(f"rollout/{id}" for id in ids[::3]),
                f"group/{ids[0][:27]}",
            ):
                window.get(run + page)
                assert console(window) == [], page
                assert window.execute_script(
                    "return window.hit === undefined && location.href.startsWith(arguments[0])",
                    address,
                ), page
                outside = window.execute_script(
                    "return performance.getEntriesByType('resource').map(e => e.name)"
                )
                assert all(name.startswith(address) for name in outside), outside
    finally:
        viewer.interrupt()
        assert viewer.end(60) == 0
