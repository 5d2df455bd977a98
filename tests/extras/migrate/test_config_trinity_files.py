"""Files in the form that Trinity-RFT's users have: each passes `rft check`, or is refused with what
to write instead.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.cli import check_command as command
from rft.config.check_report import Report
from rft.config.load import stage_names
from rft.config.schema.source import undotted
from rft.config.verify import check
from rft.errors import ConfigError
from rft.extras.migrate.compat.keys.not_offered import INSTEAD
from rft.extras.migrate.compat.keys.trinity_spellings import IGNORED, MOVED

FILES = {p.stem: p for p in sorted((Path(__file__).parent / "trinity_files").glob("*.yaml"))}


def checked(name: str, *overrides: str) -> Report:
    return check(FILES[name], overrides, schema_only=True)


@pytest.mark.parametrize("name", [n for n in FILES if n != "stages"])
def test_a_file_is_taken_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(name)
    assert not report.errors and report.plan is not None
    # also seats every role on the declared cluster
    command.check([], FILES[name], schema_only=True)
    assert "is fine" in capsys.readouterr().out


def test_stages(capsys: pytest.CaptureFixture[str]) -> None:
    command.check([], FILES["stages"], schema_only=True)
    assert "is fine" in capsys.readouterr().out


def test_a_coefficient_alone_switches_the_kl_loss_on() -> None:
    """Without kl_loss_fn there is no KL loss here (docs/decisions/0009); a written coefficient
    means Trinity-RFT's estimator.
    """
    report = checked("async_trainer")
    assert report.plan is not None and report.plan.learner.algorithm.kl_loss_fn == "k2"
    assert report.outcome.startswith("needs ") and any(
        "so k2 is taken" in w for w in report.warnings
    )


def test_a_batch_that_counts_the_experts_rows_is_told() -> None:
    (said,) = [w for w in checked("mix_math").warnings if "counts the policy's rows" in w]
    assert said.startswith("buffer.train_batch_size 512 ") and said.endswith("write 384"), (
        "as 0.25 of 512 are the expert's"
    )
    assert not any(
        "counts the policy's rows" in w
        for w in checked("mix_math", "buffer.train_batch_size=null").warnings
    )


KINDS: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    "x",
    "${a}",
    [],
    [1],
    {},
    {"x": {"y": [None]}},
    [{"name": 3}],
)


@pytest.mark.parametrize("name", FILES)
def test_mutated_files_end_in_a_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of other kinds, dropped keys, keys of other sections, foreign keys without meaning: no
    traceback, each error with its key.
    """
    for variable in ("TASKSET", "MODEL", "SFT_DATASET", "CRITIC_MODEL"):
        monkeypatch.setenv(f"TRINITY_{variable}_PATH", "org/name")
    draw = random.Random(name)
    given = yaml.safe_load(FILES[name].read_text())
    foreign = [
        *IGNORED,
        *MOVED,
        *INSTEAD,
        "trainer.trainer_config.trainer.x",
        "trainer.trainer_config.actor.megatron.x",
    ]
    for i in range(MUTATIONS):
        tree = copy.deepcopy(given)
        for _ in range(draw.randint(1, 3)):
            places = [(at, k) for at in mappings(tree) for k in at]
            at, k = draw.choice(places)
            match draw.randrange(4):
                case 0:
                    at[k] = copy.deepcopy(draw.choice(KINDS))
                case 1:
                    del at[k]
                case 2:
                    other, name_there = draw.choice(places)
                    at[name_there] = copy.deepcopy(other.get(name_there))
                case 3:
                    put(
                        tree,
                        undotted(draw.choice(foreign).replace("[[]*]", "[0]").replace("*", "x")),
                        draw.choice(KINDS),
                    )
        path = tmp_path / f"{i}.yaml"
        path.write_text(yaml.safe_dump(tree))
        try:
            stages = stage_names(path) or ("",)
        except ConfigError as e:
            assert all(x.message for x in e.errors)
            continue
        for stage in stages:
            report = check(path, schema_only=True, stage=stage)
            assert report.outcome and all(
                e.message and len(str(e)) < 4000 for e in report.errors
            ), (tree, report.errors)


MUTATIONS = 25


def mappings(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [
        *([value] if isinstance(value, dict) else []),
        *(m for item in inner for m in mappings(item)),
    ]


def put(tree: Any, loc: tuple[str | int, ...], value: Any) -> None:
    for step in loc[:-1]:
        if not isinstance(tree, dict) or isinstance(step, int):
            return
        tree = tree.setdefault(step, {})
    if isinstance(tree, dict) and isinstance(loc[-1], str):
        tree[loc[-1]] = copy.deepcopy(value)
