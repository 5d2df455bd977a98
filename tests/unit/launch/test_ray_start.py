"""Ray waits a fixed 30 s for its own processes: a run on a busy machine starts it again instead of
ending.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import pytest

from rft.errors import SetupError
from rft.launch.cluster import Cluster

LATE = (
    "The current node timed out during startup. This could happen because some of the raylet "
    "failed to startup"
)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """What each coming start of Ray raises; those that are over are taken away."""
    ray = pytest.importorskip("ray")
    coming: list[BaseException | None] = []

    def init(**_: Any) -> None:
        if (error := coming.pop(0)) is not None:
            raise error

    monkeypatch.setattr(ray, "init", init)
    return coming


def test_a_late_start_is_tried_again(starts, caplog):
    starts += [Exception(LATE), Exception(LATE), None]
    Cluster.connect(None).close()
    assert starts == []
    assert sum("starting it again" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize(
    "errors", [[Exception(LATE)] * 3, [RuntimeError("no space")]], ids=["late", "other"]
)
def test_what_does_not_help_is_a_setup_error(errors, starts):
    starts += errors
    with pytest.raises(SetupError, match="could not be started"):
        Cluster.connect(None)
    assert starts == []


def test_an_error_nobody_knows_is_not_hidden(starts):
    starts += [Exception("surprise")]
    with pytest.raises(Exception, match="surprise"):
        Cluster.connect(None)


def test_a_worker_that_ends_late_leaves_nothing_behind(starts, monkeypatch):
    """It writes a file by its name while the folder is being removed."""
    starts += [None]
    cluster = Cluster.connect(None)
    folder = cluster._folder
    (folder / "ray").mkdir()
    rmdir = os.rmdir

    def late(path, *args, **kwargs):
        rmdir(path, *args, **kwargs)
        with contextlib.suppress(FileNotFoundError):
            (folder / "worker.log").touch()

    monkeypatch.setattr(os, "rmdir", late)
    cluster.close()
    assert list(folder.parent.glob(f"{folder.name}*")) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "nowhere.invalid"])
def test_where_nothing_listens_ray_is_not_asked(starts, host):
    """Its library would try for a quarter of an hour."""
    starts += [None]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(
            SetupError, match=r"no Ray answers there .* Start it \(ray start --head\)"
        ):
            Cluster.connect(f"{host}:{free.getsockname()[1]}")
    assert starts == [None]


def test_a_ray_in_the_environment_is_not_joined(monkeypatch):
    """Clusters set RAY_ADDRESS in every shell; without cluster.ray_address the run has a Ray of its
    own.
    """
    ray = pytest.importorskip("ray")
    from ray._private.services import canonicalize_bootstrap_address

    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **how: given.update(how))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6399")
    Cluster.connect(None).close()
    assert canonicalize_bootstrap_address(given.get("address"), given["_temp_dir"]) is None, (
        "it would join that one"
    )
