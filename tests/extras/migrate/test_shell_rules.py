"""What is read where a script depends on something outside of it, and that it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.extras.migrate.convert.launch import Argument, Launch, launch_of, read_launch
from rft.extras.migrate.convert.recording import Inputs
from rft.extras.migrate.convert.verl import convert

RUN = "python3 -m verl.trainer.main_ppo "


def read(tmp_path: Path, text: str, inputs: Inputs | None = None) -> Launch:
    path = tmp_path / "run.sh"
    path.write_text(text)
    return read_launch(path, inputs)


def value(tmp_path: Path, before: str, inputs: Inputs | None = None) -> tuple[Argument, str]:
    """The one argument of a launch that gets $A, and the notes."""
    launch = read(tmp_path, f"{before}\n{RUN}trainer.a=$A\n", inputs)
    (argument,) = launch.arguments
    return argument, "\n".join(launch.notes)


@pytest.mark.parametrize(
    ("before", "expected", "note"),
    [
        ("if [ -f x ]; then A=yes; else A=no; fi", "no", ""),
        ("A=no\n[ -d x ] && A=yes", "no", ""),
        ("[ -f x ] || A=made", "made", ""),
        (
            'if [ -z "$X" ]; then A=yes; else A=no; fi',
            "yes",
            "$X is not set by the script, and what depends on it is as it is without",
        ),
        (
            'if [ "$X" = on ]; then A=yes; else A=no; fi',
            "no",
            "$X is not set by the script, and what depends on it",
        ),
        ('A=a\nif [ "$X" != on ]; then exit 1; fi', "a", "`exit` is passed by"),
        ("usage() { echo usage; exit 2; }\nA=a\n[ $# -ge 1 ] || usage", "a", "`exit` is passed by"),
        ("A=a\n[ -e x ] || { echo missing; exit 1; }", "a", "`exit` is passed by"),
        ('if [ -n "$HOME" ]; then A=yes; else A=no; fi', "yes", ""),
        ('if [ "$HOME" = /root ]; then A=yes; else A=no; fi', "no", ""),
        (
            "if python -c 'import vllm'; then A=yes; else A=no; fi",
            "yes",
            "`python … import vllm` is another program",
        ),
        ("if grep -q x y; then A=yes; elif true; then A=elif; fi", "elif", ""),
        ("A=no\nwhile read -r line; do A=$line; done < file", "no", ""),
        ('A=no\nfor a in "$@"; do A=$a; done', "no", ""),
        (
            "source env.sh\nA=${B:-b}",
            "b",
            "line 1: `source env.sh` is not read; what it sets counts as not set",
        ),
        ("B=$1; A=${B:-fallback}", "fallback", "$1 is not set by the script"),
        ("set -euo pipefail\nfalse\ncp a b\nA=${B}c", "${oc.env:B}c", ""),
        ("A=${B:?set B}", "${oc.env:B}", ""),
        ("cd /no/such/folder && A=$PWD", "/no/such/folder", ""),
        ("exec > >(tee log/run.txt) 2>&1\nA=seen", "seen", ""),
        ('A=$(dirname "$0")', None, ""),
        ("A=`seq 1 3 | tail -1 2>/dev/null`; A=x${A}", "x3", ""),
    ],
)
def test_what_depends_on_the_machine(
    tmp_path: Path, before: str, expected: str | None, note: str
) -> None:
    argument, notes = value(tmp_path, before)
    assert argument.value == (str(tmp_path) if expected is None else expected)
    assert note in notes


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("A=$((NODES * 8))", "computed from $NODES, which the script does not set"),
        ("A=$(nvidia-smi -L | wc -l)", "comes from what `nvidia-smi -L` prints"),
        (
            "A=$(nvidia-smi --query-gpu=name --format=csv | grep -c GPU)",
            "comes from what `nvidia-smi --query-gpu=name` prints",
        ),
        ("A=x-$(git rev-parse HEAD)", "comes from what `git rev-parse` prints"),
        ("A=x_$RANDOM", "comes from $RANDOM, which differs from run to run"),
        ("A=run_$$", "comes from $$, which differs from run to run"),
        ("A=/tmp/$UID/x", "comes from $UID, which differs from run to run"),
        ('A="${EUID}"', "comes from $EUID, which differs from run to run"),
        ("A=$#", "depends on whether $1 is given"),
        ("A=$((8 / ($# + 1)))", "depends on whether $1 is given"),
        ("A=$(basename $CKPT)", "cut from $CKPT, which the script does not set"),
        ("A=${HOME##*/}", "cut from one that the script does not tell"),
        (
            "A=$(((512 + 512) / size))",
            "comes from $A, which bash cannot set: (512 + 512) / size: division by 0",
        ),
        (
            "A=$(((512 + 512) / 0))",
            "comes from $A, which bash cannot set: (512 + 512) / 0: division by 0",
        ),
        ("b=$1\nA=$((b + 1))", "computed from $1"),
    ],
)
def test_a_value_that_the_script_does_not_tell(tmp_path: Path, before: str, reason: str) -> None:
    argument, _ = value(tmp_path, before)
    assert argument.value is None and argument.machine
    assert reason in argument.unknown


def test_unknown_numbers_become_questions(tmp_path: Path) -> None:
    """F15: the machine's number is asked for as `$N_GPUS` is, by the name that the script has for
    it.
    """
    files = (
        "data.train_files=/d/a.parquet data.val_files=/d/b.parquet actor_rollout_ref.model.path=/m"
    )
    launch = read(
        tmp_path,
        f"N=$(nvidia-smi -L | wc -l)\n{RUN}{files} trainer.n_gpus_per_node=$N "
        f"trainer.nnodes=$NODES\n",
    )
    done = convert(launch, overrides=["cluster.gpu_per_node=8"])
    assert not done.refused
    counted = (
        "line 2: trainer.n_gpus_per_node is written as $N, and its value comes from what "
        "`nvidia-smi -L` prints"
    )
    assert any(q.startswith(counted) and "veRL's default, 8, is taken" in q for q in done.questions)
    assert any("trainer.nnodes is left to $NODES" in q for q in done.questions)


def test_given_variables_and_arguments_are_used(tmp_path: Path) -> None:
    text = 'A=$B-$1; shift; A+=-$((N * 2))\npython3 -m verl.trainer.main_ppo trainer.a=$A "$@"\n'
    launch = read(tmp_path, text, Inputs({"B": "b", "N": "4"}, ("one", "trainer.c=3")))
    assert [(a.key, a.value) for a in launch.arguments] == [
        ("trainer.a", "b-one-8"),
        ("trainer.c", 3),
    ]
    assert not launch.passed_through


def test_scripts_beside_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text("A=common\n")
    (tmp_path / "inner.sh").write_text(f"{RUN}trainer.a=$1-$A\n")
    argument, _ = value(tmp_path, 'source "$(dirname "$0")/common.sh"')
    assert argument.value == "common"
    launch = read(
        tmp_path, 'cd "$(dirname "${BASH_SOURCE[0]}")"\nexport A=x\nnohup bash inner.sh one &\n'
    )
    assert [a.value for a in launch.arguments] == ["one-x"]


def test_a_launch_may_be_written_out() -> None:
    launch = launch_of(
        [
            "torchrun",
            "--nproc_per_node=4",
            "-m",
            "verl.trainer.fsdp_sft_trainer",
            "optim.lr=1e-4",
            "data.x=a b",
        ]
    )
    assert (launch.program, launch.launcher[:2]) == ("sft", ("torchrun", "--nproc_per_node=4"))
    assert [(a.key, a.value) for a in launch.arguments] == [("optim.lr", 1e-4), ("data.x", "a b")]


def test_the_branch_with_the_launch_is_read_when_no_other_has_one(tmp_path: Path) -> None:
    launch = read(tmp_path, f"if [ -f x ]; then {RUN} a=1; else echo nothing; fi\n")
    assert [a.value for a in launch.arguments] == [1]
    assert "files that it asks for are taken to be there" in "\n".join(launch.notes)
    launch = read(tmp_path, f"if [ -f x ]; then {RUN} a=1; else {RUN} a=2; fi\n")
    assert [a.value for a in launch.arguments] == [2]
    launch = read(tmp_path, f"case $1 in\n train) {RUN} a=3;;\n *) exit 1;;\nesac\n")
    assert [a.value for a in launch.arguments] == [3]
    launch = read(tmp_path, f'TRAIN=${{TRAIN:-0}}\nif [[ "$TRAIN" == 1 ]]; then\n{RUN}a=4\nfi\n')
    assert [a.value for a in launch.arguments] == [4]
    assert "TRAIN is taken as 1" in "\n".join(launch.notes)


def test_a_required_variable_is_read_when_the_run_starts(tmp_path: Path) -> None:
    before = (
        'MODEL=${MODEL:-}\nif [ -z "$MODEL" ]; then\n  echo "MODEL is not set"\n  exit '
        "1\nfi\nA=$MODEL/last"
    )
    assert value(tmp_path, before)[0].value == "${oc.env:MODEL}/last"


def test_an_argument_that_only_the_caller_knows_is_named_after_its_place(tmp_path: Path) -> None:
    launch = read(tmp_path, f"a=$1\nshift 2\nb=$1\n{RUN} x.a=$a x.b=$b/c\n")
    assert [(a.value, a.variables) for a in launch.arguments] == [
        ("${oc.env:ARG1}", ("ARG1",)),
        ("${oc.env:ARG3}/c", ("ARG3",)),
    ]


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    launch = read(tmp_path, f"export WANDB_API_KEY=abc123def\nOPENAI_API_KEY=sk-zzz {RUN} a=1\n")
    assert "abc123def" not in str(launch.notes)
    assert "sk-zzz" not in str(launch.notes)
    assert sum("<hidden>" in n for n in launch.notes) == 2


def test_a_key_written_twice_stays_twice(tmp_path: Path) -> None:
    launch = read(tmp_path, f"{RUN} a=1 b=2 \\\n a=3\n")
    assert [(a.key, a.value) for a in launch.arguments] == [("a", 1), ("b", 2), ("a", 3)]
    assert "line 1: a=1 is replaced by a=3 on line 2" in launch.notes


def test_a_learning_rate_of_the_environment_stays_there(tmp_path: Path) -> None:
    files = "data.train_files=t.parquet data.train_batch_size=64 "
    sizes = "actor_rollout_ref.actor.ppo_mini_batch_size=64 "
    rate = "actor_rollout_ref.actor.optim.lr=$LR"
    made = convert(read(tmp_path, f"{RUN}{files}{sizes}{rate}\n"))
    assert made.values["algorithm"]["optimizer"]["lr"] == "${oc.env:LR}"
    assert not made.questions and not made.errors
    half_of = "${LR}e-6"
    half = convert(read(tmp_path, f"{RUN}{files}{sizes}{rate.replace('$LR', half_of)}\n"))
    assert half.values["algorithm"]["optimizer"]["lr"] == 1e-6 and len(half.questions) == 1
