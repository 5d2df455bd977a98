"""What all tests share: few threads, no network, the tiny models, a PostgreSQL server, a temporary
folder of the session, and the check that a test leaves nothing behind.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# before anything imports torch, transformers or ray
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
# a learner has two threads; one that waits is to leave its core
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.update(
    WANDB_MODE="offline",
    HF_HUB_DISABLE_TELEMETRY="1",
    RAY_USAGE_STATS_ENABLED="0",
    DO_NOT_TRACK="1",
    MPLBACKEND="Agg",
)
# as of a background job; what tests start would ignore it, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
from rft.launch import leftovers
from tests.helpers import guardian

if "RFT_TESTS_TMP" not in os.environ or not os.environ["RFT_TESTS_TMP"].endswith(
    os.environ.get("PYTEST_XDIST_WORKER", "")
):
    # what libraries and killed processes leave in the temporary folder goes with it; each worker
    # has its own, so what another makes does not look left behind; a short name, because sockets
    # are made in it
    # `tmp_path` of the last sessions is kept where it was
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    own = Path(
        os.environ.get("RFT_TESTS_TMP") or tempfile.mkdtemp(prefix="tests-"),
        os.environ.get("PYTEST_XDIST_WORKER", ""),
    )
    own.mkdir(exist_ok=True)
    own.chmod(0o755)  # a PostgreSQL server runs as another user
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["RFT_TESTS_TMP"] = str(own)
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    if leftovers.MARK not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        guardian.start(leftovers.MARK, own)

import hypothesis
import pytest

from rft import secrets as logs
from tests.helpers.postgres import postgres as postgres

hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")  # a test tells how fast it is by what it counts
pytest_plugins = ["tests.helpers.leftovers_plugin"]

# Whole runs on Ray or vLLM: with several workers (-n) one of them plays these, one after the other,
# and begins with them.
ON_RAY = {
    f"test_{name}.py"
    for name in """
    main_job run_doors smoke_run image_run run_trackers run_kill run_engine_kill run_engine_hang sync_faults vllm_engine vllm_models
    vllm_images vllm_experts vllm_adapter vllm_broadcast vllm_interrupted_syncs lora_learning run_broadcast sync_matrix two_machines
    placement_ray run_bad_input run_storages resume_exactness debug_vllm learning_goals memory_estimate colocate serve
    command_line_agents trinity_runs vllm_families soak timeline_ray service_kill run_ray dialects_engines
    """.split()
}

ROOT = Path(__file__).parent.parent
# names of folders of end-to-end tests; `make test` plays their smoke tests alone
EXTRAS = tuple("data_audit doctor judge_lab migrate sandbox serve simulate view worlds".split())
WHOLE_RUNS = {"integration", "fault"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share what it sets up, so they go to one worker; those of ON_RAY all go to the
    same.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "on Ray" if Path(file).name in ON_RAY else file

    # files in the order below, not those of many small tests first
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def has_extra(name: str) -> bool:
    return (ROOT / "rft" / "extras" / name).is_dir()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import files that have only end-to-end tests; files that import an extra
    are skipped where it is missing.
    """
    if not collection_path.match("test_*.py"):
        return None
    needed = re.findall(
        r"(?m)^(?:from|import) (?:rft|tests)\.extras\.(\w+)",
        collection_path.read_text(encoding="utf-8"),
    )
    if any(not has_extra(name) for name in needed):
        return True
    if set(config.option.markexpr.split(" and ")) != {"not slow", "not e2e"}:
        return None
    text = collection_path.read_text(encoding="utf-8")
    whole = WHOLE_RUNS & set(collection_path.parts)
    return ("mark.smoke" not in text if whole else "\npytestmark = pytest.mark.e2e" in text) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: nobody looks for garbage in it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else triton tells of leaks


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if WHOLE_RUNS & set(item.path.parts) and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.e2e)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name not in ON_RAY)
    for item in items:
        for marker in item.iter_markers("extra"):
            missing = [name for name in marker.args or EXTRAS if not has_extra(name)]
            if missing:
                reason = f"not in rft/extras: {', '.join(missing)}"
                item.add_marker(pytest.mark.skip(reason=reason))
    if not importlib.util.find_spec("vllm"):
        _skip(items, "vllm", "vLLM is not installed")
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "this machine has no GPU")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Libraries that a test loads may silence loggers, and secrets are learnt; the next test must
    see its messages.
    """

    def loggers() -> list[logging.Logger]:
        named = logging.root.manager.loggerDict
        return [
            logging.root,
            *(
                x
                for name, x in named.items()
                if name.startswith("rft") and isinstance(x, logging.Logger)
            ),
        ]

    before = {x: (x.level, x.propagate, x.disabled) for x in loggers()}
    silenced = logging.root.manager.disable
    secrets = set(logs._values)
    yield
    if logging.root.manager.disable != silenced:
        logging.disable(silenced)
    logs._values.intersection_update(secrets)
    for x in loggers():
        level, x.propagate, x.disabled = before.get(x, (logging.NOTSET, True, False))
        if x.level != level:  # setting one empties what every logger remembers
            x.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _no_workers_left() -> Iterator[None]:
    """Workers of rewards serve the whole session."""
    yield
    if (job_pool := sys.modules.get("rft.worker.job_pool")) is not None:
        job_pool.close_all()


@pytest.fixture(scope="session", autouse=True)
def _no_script_sandbox_is_left() -> Iterator[None]:
    """Launch scripts are run from a process that `rft convert` keeps until the program ends."""
    yield
    if (recording := sys.modules.get("rft.extras.migrate.convert.recording")) is not None:
        recording.close()


@pytest.fixture(scope="session", autouse=True)
def _private_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Downloads and compiled files of a test run stay in its own folder; an inherited RFT_CACHE is
    respected.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets_cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_plugins_of_other_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests of one file have loaded from temporary folders is not there for those of the
    next one.
    """
    yield
    from tests.helpers.command import forget_plugins

    forget_plugins(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random 0.3 M parameter Llama whose output layer shares the input embedding."""
    from rft.testing import tiny

    return tiny.make(tmp_path_factory.mktemp("models") / "tiny_tied", tied=True)


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its own output layer."""
    from rft.testing import tiny

    return tiny.make(tmp_path_factory.mktemp("models") / "tiny_untied", tied=False)
