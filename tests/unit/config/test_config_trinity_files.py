"""Files in the form that Trinity-RFT's users have: each passes `rft check`, or is refused with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.cli import check_command as command
from rft.config.check_report import Report
from rft.config.verify import check

FILES = {p.stem: p for p in sorted((Path(__file__).parent / "data" / "trinity").glob("*.yaml"))}
READY: dict[str, set[str]] = {"grpo_gsm8k": set()}
"""What is not active yet in files without an algorithm, a mode or a section of a later release."""


def checked(name: str, *overrides: str) -> Report:
    return check(FILES[name], overrides, schema_only=True)


@pytest.mark.parametrize("name", [n for n in FILES if n not in ("async_trainer", "stages")])
def test_a_file_is_taken_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(name)
    assert not report.errors and report.plan is not None
    assert all(later.instead for later in report.not_active)
    if name in READY:
        assert {later.key for later in report.not_active} == READY[name]
    command.check([], FILES[name], schema_only=True)  # also seats every role on the declared cluster
    assert "is fine" in capsys.readouterr().out


def test_stages(capsys: pytest.CaptureFixture[str]) -> None:
    command.check([], FILES["stages"], schema_only=True)
    assert "is fine" in capsys.readouterr().out


def test_the_one_thing_that_has_to_be_written_differently() -> None:
    """Without kl_loss_fn there is no KL loss here (docs/decisions/0009), so its coefficient alone is refused."""
    (error,) = checked("async_trainer").errors
    assert error.key == "algorithm.kl_loss_fn_args.kl_coef" and "name an estimator in kl_loss_fn, such as k2" in error.message
    report = checked("async_trainer", "algorithm.kl_loss_fn=k2")
    assert not report.errors and report.not_active == ()
