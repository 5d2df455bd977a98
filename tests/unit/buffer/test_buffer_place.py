"""Where a ledger is: names of schemas, what a run's folder says of it, what is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.location import connect, find, leave_pointer, ledger_location, schema_name
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, ConfigError, SetupError
from rft.testing.storage_contract import fill

URL = "postgresql://me:secret-word@db.example:5433/maths?sslmode=require"


@pytest.mark.parametrize(
    ("run", "name", "expected"),
    [
        ("", "mine", "mine"),
        ("rft/maths/one", "experience_buffer", "rft_maths_one_experience_buffer"),
        ("Rft/Ünï-1/x", "b", "rft__n__1_x_b"),
        ("1/2/3", "b", "_1_2_3_b"),
        ("pg/x/y", "b", "run_pg_x_y_b"),
        ("p/g/" + "long" * 30, "b", "_" + ("long" * 30 + "_b")[-62:]),
    ],
)
def test_schemas_are_identifiers(run: str, name: str, expected: str) -> None:
    assert schema_name(run, name) == expected
    assert len(expected) <= 63


def test_what_is_shown_names_the_server_and_nobody(tmp_path: Path) -> None:
    found = ledger_location(BufferSettings(folder=tmp_path, run="p/g/n", ledger_url=URL))
    assert str(found) == "postgresql://db.example:5433/maths schema p_g_n_experience_buffer"
    assert "secret-word" not in repr(found)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:secret-word@h/db", "is a database of mysql; give postgresql://"),
        ("postgresql://u:secret-word@h:port/db", "is no database URL; give postgresql://"),
        ("no url", "is no database URL"),
    ],
)
def test_urls_that_are_refused(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        ledger_location(BufferSettings(folder=tmp_path, ledger_url=url))
    assert "secret-word" not in str(told.value)


def test_a_missing_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SetupError, match=r"needs the package psycopg: pip install"):
        connect(ledger_location(BufferSettings(folder=tmp_path, ledger_url=URL)))


async def test_a_file_elsewhere_is_found_from_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "db/x.db"
    buffer = Buffer(
        BufferSettings(folder=tmp_path / "run/buffer", ledger_url=f"sqlite:///{elsewhere}")
    )
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    await buffer.close()
    assert find(tmp_path / "run").path == elsewhere
    assert audit_run(tmp_path / "run").acked == 8
    moved = elsewhere.rename(tmp_path / "moved.db")
    monkeypatch.setenv("RFT_LEDGER_URL", f"sqlite:///{moved}")
    assert audit_run(tmp_path / "run").acked == 8
    monkeypatch.delenv("RFT_LEDGER_URL")
    here = Buffer(BufferSettings(folder=tmp_path / "run/buffer"))  # begun anew, in the folder
    await here.open()
    await here.close()
    assert audit_run(tmp_path / "run").acked == 0


async def test_a_renamed_folder_keeps_saying_where_its_ledger_in_a_server_is(
    tmp_path: Path,
) -> None:
    """Before the server is asked: an empty schema of the new name would hide the rows, also from
    `rft buffer audit`.
    """

    def settings(run: str, url: str = URL) -> BufferSettings:
        return BufferSettings(folder=tmp_path / "run/buffer", run=run, ledger_url=url)

    leave_pointer(ledger_location(settings("p/g/old")), tmp_path / "run/buffer")
    leave_pointer(
        ledger_location(settings("p/g/old", "postgresql://moved.example/maths")),
        tmp_path / "run/buffer",
    )
    with pytest.raises(
        BufferFailed,
        match=r"the ledger is schema p_g_old_experience_buffer; .*p_g_new_experience_buffer.*old "
        r"name again",
    ):
        await Buffer(settings("p/g/new")).open()
    found = find(tmp_path / "run")
    assert (found.schema, found.url and found.url.host) == (
        "p_g_old_experience_buffer",
        "moved.example",
    )


async def test_a_file_that_cannot_be_opened_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "x.db").mkdir()
    with pytest.raises(
        BufferFailed, match=r"x\.db could not be written or read: unable to open database file"
    ):
        await Buffer(
            BufferSettings(folder=tmp_path / "buffer", ledger_url=f"sqlite:///{tmp_path}/x.db")
        ).open()


def test_a_folder_without_or_with_a_damaged_pointer(tmp_path: Path) -> None:
    with pytest.raises(BufferFailed, match="must hold one buffer"):
        find(tmp_path)
    (tmp_path / "buffer").mkdir()
    pointer = tmp_path / "buffer/b.ledger.json"
    pointer.write_text("{")
    with pytest.raises(BufferFailed, match=r"is damaged .* RFT_LEDGER_URL"):
        find(tmp_path)
    pointer.write_text('{"name": "b", "url": "postgresql://h/db", "schema": "x; DROP TABLE y"}')
    with pytest.raises(BufferFailed, match="which is no identifier"):
        find(tmp_path)
