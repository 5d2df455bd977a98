"""`rft data audit`: every row is read; what is planted in a set is found, and a good set is found
good.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.extras.data_audit.task_audit import TaskText, near
from tests.helpers.asked_ledger import said
from tests.helpers.runs import TINY

WORDS = "apple river stone cloud lantern harbour meadow copper violin orchard needle marble feather candle tunnel garden".split()


def sentence(i: int) -> str:
    return (
        f"Tell me about the {WORDS[i % 16]} beside the {WORDS[(i * 7 + 3) % 16]} near the "
        f"{WORDS[(i // 16 * 5 + i) % 16]}, item {i} of "
        "the list that my aunt sent us from her house by the sea last summer, in one word."
    )


def rows(first: int, count: int) -> list[dict[str, str]]:
    return [{"prompt": sentence(i), "response": WORDS[i % 16]} for i in range(first, first + count)]


def asked(tmp_path: Path, model: Path) -> list[str]:
    where = "buffer.explorer_input"
    text = "reward_fn_args: {compare: text}"
    return [
        "-c",
        str(TINY),
        f"model.model_path={model}",
        "model.max_prompt_tokens=220",
        f"{where}.taskset.path={tmp_path}/train.jsonl",
        f"{where}.taskset.reward_fn_args={{compare: text}}",
        f"{where}.eval_tasksets=[{{name: held, path: {tmp_path}/eval.jsonl, {text}}}]",
    ]


def audit(
    tmp_path: Path,
    model: Path,
    train: list[dict[str, str]],
    held_out: list[dict[str, str]],
    *more: str,
) -> tuple[dict[str, Any], int]:
    for name, given in (("train", train), ("eval", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in given))
    out, err, code = said(
        "data",
        "audit",
        *asked(tmp_path, model),
        *more,
        "--json",
    )
    return (json.loads(out) if out else {"stderr": err}), code


def whats(found: dict[str, Any]) -> list[str]:
    return [
        f["what"]
        for part in (*(t["findings"] for t in found["tasksets"]), found["between"])
        for f in part
    ]


def test_a_good_set(tmp_path: Path, tiny_model: Path) -> None:
    found, code = audit(tmp_path, tiny_model, rows(0, 300), rows(1000, 40))
    assert code == 0 and found["ok"] and whats(found) == []
    train, held = found["tasksets"]
    assert (
        train["rows"],
        train["read"],
        train["gold_checked"],
        train["gold_full"],
        train["too_long"],
    ) == (300, 300, 300, 300, 0)
    assert (
        held["is_eval"]
        and train["tokens"][0] <= train["tokens"][1] <= train["tokens"][2] < 200
        and train["example"].startswith("<|im_start|>u")
    )
    found, code = audit(tmp_path, tiny_model, rows(0, 300), rows(1000, 40), "--rows", "50")
    assert code == 0 and [t["read"] for t in found["tasksets"]] == [50, 40]


def test_what_is_planted_is_found(tmp_path: Path, tiny_model: Path) -> None:
    train = rows(0, 200)
    train[7] = {**train[3], "prompt": train[3]["prompt"].upper()}  # a duplicate
    train[8] = {**train[3], "response": "otherwise"}  # with another answer
    train[9] = {
        "prompt": train[5]["prompt"].replace("Tell me about", "Tell us about"),
        "response": train[5]["response"],
    }
    train[10] = {"prompt": "long " * 60, "response": "x"}
    train[11] = {"prompt": sentence(11), "response": ""}  # an empty answer gets as much
    held = [
        *rows(1000, 10),
        dict(train[20]),
        {**train[21], "prompt": train[21]["prompt"].replace("in one word", "in 1 word")},
    ]
    held.append(
        {**train[22], "prompt": train[22]["prompt"].replace("in one word", "in one single word")}
    )
    found, code = audit(tmp_path, tiny_model, train, held)
    assert code == 4 and not found["ok"]
    train_set, held_set = found["tasksets"]
    assert (train_set["duplicates"], train_set["near_duplicates"], train_set["too_long"]) == (
        2,
        1,
        1,
    )
    wrong = {f["what"]: f["rows"] for t in found["tasksets"] for f in t["findings"]} | {
        f["what"]: f["rows"] for f in found["between"]
    }
    assert wrong["1 rows ask what an earlier row asks, with another gold answer"] == ["copy[8]"]
    assert wrong["1 rows are nearly the same as an earlier one"] == ["copy[9] ~ [5]"]
    assert wrong["1 of 13 rows of held are in copy too"] == ["held[10] = copy[20]"]
    assert wrong["1 of 13 rows of held are nearly the same as one of copy"] == [
        "held[12] ~ copy[22]"
    ], "another number is another task"
    assert [
        rows
        for what, rows in wrong.items()
        if "longer than model.max_prompt_tokens 220 (longest: 3" in what
    ] == [["copy[10]"]]
    assert held_set["findings"] == []
    out, _, code = said(
        "data", "audit", "-c", str(TINY), f"model.model_path={tiny_model}", "--rows", "64"
    )
    assert code == 0 and "nothing is wrong" in out and "after the chat template" in out


def test_a_reward_that_does_not_know_the_answers(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def half(task, transcript):\n    return 0.5 if int(task.index) % 2 else "
        "float(transcript.answer == task.truth)\n"
    )
    taskset = "buffer.explorer_input.taskset"
    given = (
        f"{taskset}.default_reward_fn_type={tmp_path}/r.py:half",
        f"{taskset}.reward_fn_args={{}}",
    )
    found, code = audit(tmp_path, tiny_model, rows(0, 40), rows(1000, 5), *given)
    assert code == 4 and found["tasksets"][0]["gold_full"] == 20
    assert any(
        w.startswith("20 of 40 gold answers do not get full marks: at most 0.5")
        for w in whats(found)
    )
    (tmp_path / "r2.py").write_text(
        "def half(task, transcript):\n    raise ValueError('no scale')\n"
    )
    other = given[0].replace("r.py", "r2.py")
    found, code = audit(tmp_path, tiny_model, rows(0, 4), rows(1000, 5), other, given[1])
    assert code == 4 and "the reward raised on 4 rows: ValueError: no scale  (answer '')" in whats(
        found
    )


def test_a_reward_without_a_score_says_why(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "r.py").write_text(
        "from rft import Score\ndef no(task, transcript):\n    return Score(value=None, "
        "reason='too short')\n"
    )
    taskset = "buffer.explorer_input.taskset"
    audit(tmp_path, tiny_model, rows(0, 64), rows(1000, 5))
    given = (
        f"{taskset}.default_reward_fn_type={tmp_path}/r.py:no",
        f"{taskset}.reward_fn_args={{}}",
        "buffer.batch_size=8",
    )
    warnings = json.loads(said("check", *asked(tmp_path, tiny_model), *given, "--json")[0])[
        "warnings"
    ]
    assert any("gave no score on the gold answer of row 0: too short" in w for w in warnings), (
        warnings
    )
    assert any(
        "gave no score on it: too short; `rft data audit`" in w for w in warnings
    ) and "inf" not in " ".join(warnings)


def test_check_looks_at_a_sample(tmp_path: Path, tiny_model: Path) -> None:
    train = rows(0, 64)
    held = rows(1000, 5)
    held[0] = {**train[5], "prompt": train[5]["prompt"].replace("Tell me", "Tell us")}
    audit(tmp_path, tiny_model, train, held)
    out, _, code = said(
        "check",
        *asked(tmp_path, tiny_model),
        "buffer.batch_size=8",
        "--json",
    )
    warnings = json.loads(out)["warnings"]
    assert code == 0 and any(
        "1 of the prompts of held that were compared are nearly the same as one of copy, e.g. row "
        "0 and row 5" in w
        for w in warnings
    )


def test_a_truth_that_cannot_be_read_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """G1: by the audit of all rows, and by check, which looks at a sample."""
    train = rows(0, 64)
    held = rows(1000, 5)
    train[32] = {"prompt": sentence(32), "response": ""}
    found, code = audit(tmp_path, tiny_model, train, held)
    assert code == 4
    assert (
        "the reward cannot read the truth on 1 rows: the truth of task copy[32] is ''; it must be "
        "a text" in whats(found)
    )
    out, _, code = said("check", *asked(tmp_path, tiny_model), "buffer.batch_size=8", "--json")
    assert code == 2 and "cannot score row 32: the truth of task copy[32] is ''" in out


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (
            "What is 3 + 4? Answer with the number only, please.",
            "What is 3 + 5? Answer with the number only, please.",
            False,
        ),
        (
            "What is 3 + 4? Answer with the number only, please, now.",
            "What is 3 + 4? Answer with the number only, please, today.",
            True,
        ),
    ],
)
def test_other_numbers_are_other_tasks(a: str, b: str, same: bool) -> None:
    import re

    texts = [
        TaskText(i, t.casefold(), tuple(re.findall(r"\d+", t)), "x") for i, t in enumerate((a, b))
    ]
    assert near(texts) == ([(1, 0)] if same else [])


def test_what_a_task_pipeline_will_make_is_audited_before_it_is_written(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "raw.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in [*rows(0, 20), *rows(0, 3)])
    )
    made = (
        f"data_processor.task_pipeline={{inputs: [{tmp_path}/raw.jsonl], operators: [{{name: "
        f"deduplicate}}]}}"
    )
    more = [made, f"buffer.explorer_input.taskset.path={tmp_path}/made.jsonl"]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows(1000, 4)))
    out, err, code = said("data", "audit", *asked(tmp_path, tiny_model), *more, "--json")
    assert code == 0, err
    assert [t["rows"] for t in json.loads(out)["tasksets"]] == [20, 4] and not (
        tmp_path / "made.jsonl"
    ).exists()
    out, err, code = said(
        "debug", "reward", *asked(tmp_path, tiny_model), *more, "--answer", WORDS[0]
    )
    assert code == 0, err
