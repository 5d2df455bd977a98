"""A real browser for tests: Debian's chromium, driven by its own driver; tests skip by name where
either is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SIZES = {"wide": (1280, 800), "phone": (390, 844)}


@contextmanager
def browser(*, size: str = "wide", dark: bool = False) -> Iterator[Any]:
    """A window whose inside has this size, in this colour scheme.  Skips where no browser is
    installed.
    """
    selenium = pytest.importorskip(
        "selenium.webdriver", reason="needs selenium, which the extra dev installs"
    )
    chromium = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        width, height = SIZES[size]
        inside = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": size == "phone",
        }
        window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", inside)
        scheme = {
            "features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        }
        window.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
        yield window
    finally:
        window.quit()


def console(window: Any) -> list[str]:
    """What the console has said that is a warning or an error, since it was asked last."""
    return [
        f"{e['level']}: {e['message']}"
        for e in window.get_log("browser")
        if e["level"] in ("WARNING", "SEVERE")
    ]


def until(window: Any, what: str, timeout_s: float = 90.0) -> Any:
    """The value of a JavaScript expression as soon as it is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(window, timeout_s, poll_frequency=0.05).until(
        lambda w: w.execute_script(f"return {what}"), message=what
    )
