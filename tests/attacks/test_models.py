"""Model folders whose files lie, hang or run code: each is refused in one line, and no code of
theirs runs.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.errors import ConfigError
from rft.taskset import template_worker
from tests.attacks.refused import CONFIG, assert_refused, check
from tests.attacks.table import attack

Change = Callable[[Path], object]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def _config(**entries: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))

    return change


def _text(name: str, text: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(
        text if isinstance(text, bytes) else text.encode()
    )


def _pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _tensors(header: Any, tail: bytes = b"", length: int | None = None) -> Change:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return _text(
        "model.safetensors",
        struct.pack("<Q", len(data) if length is None else length) + data + tail,
    )


def _one(**entry: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}}


EVIL = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
FILES: dict[str, tuple[Change, str]] = {
    "10^9 layers": (
        _config(num_hidden_layers=10**9),
        "num_hidden_layers 1,000,000,000, but the weights have 2 layers",
    ),
    "10^30 layers": (
        _config(num_hidden_layers=10**30),
        "must be a positive whole number below 2³¹",
    ),
    "-1 layers": (_config(num_hidden_layers=-1), "num_hidden_layers -1; it must be a positive"),
    "a vocabulary of 10^12": (_config(vocab_size=10**12), "vocab_size"),
    "a text for a size": (_config(hidden_size="x"), "hidden_size 'x'"),
    "no heads": (_config(num_attention_heads=0), "num_attention_heads 0"),
    "10^18 wide": (_config(intermediate_size=10**18), "intermediate_size"),
    "10^30 positions": (_config(max_position_embeddings=10**30), "max_position_embeddings"),
    "a model that brings its own code": (
        _config(model_type="evil", auto_map=EVIL),
        "(auto_map) is not run",
    ),
    "a model of no known kind": (
        _config(model_type="evil"),
        "which the installed transformers does not know",
    ),
    "a list for the kind": (_config(model_type=["llama"]), "model_type a text"),
    "a number for a section": (_config(text_config=5), "text_config must be a mapping"),
    "nested config.json": (_text("config.json", "[" * 100_000), "nested too deeply"),
    "a key of config.json twice": (
        _text("config.json", '{"model_type": "llama", "model_type": "gpt2"}'),
        "is written twice",
    ),
    "a pipe for config.json": (_pipe("config.json"), "is a pipe, not a plain file"),
    "nested tokenizer.json": (_text("tokenizer.json", '{"a":' * 100_000), "nested too deeply"),
    "a list for a tokenizer": (_text("tokenizer.json", "[]"), "must be a mapping"),
    "a number for a tokenizer's model": (
        _text("tokenizer.json", '{"model": 5}'),
        "is no tokenizer",
    ),
    "a pipe for the weights": (_pipe("model.safetensors"), "is a pipe, not a plain file"),
    "a negative shape": (_tensors(_one(shape=[-1, -1]), b"0000"), "integer `-1`, expected usize"),
    "a shape of 10^30": (_tensors(_one(shape=[10**30], data_offsets=[0, 4 * 10**30])), "damaged"),
    "texts for offsets": (
        _tensors(_one(data_offsets=["0", "4"]), b"0000"),
        'string "0", expected usize',
    ),
    "a list for a type": (_tensors(_one(dtype=[]), b"0000"), "invalid JSON in header"),
    "two tensors in the same bytes": (
        _tensors(_one() | {"b": _one()["a"]}, b"0000"),
        "invalid offset for tensor",
    ),
    "a nested header": (_tensors(b"[" * 100_000), "invalid JSON in header"),
    "a pointer of Git LFS": (
        _text("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        "run `git lfs pull` there",
    ),
    "a header of 2^63 bytes": (_tensors({}, length=2**63), "header too large"),
    "a header that is no text": (_tensors(b"\xff" * 10), "invalid UTF-8 in header"),
    "weights of another folder": (
        _text("model.safetensors.index.json", '{"weight_map": {"a": "../../etc/passwd"}}'),
        "the name of a file beside it",
    ),
    "a number for an index": (
        _text("model.safetensors.index.json", '{"weight_map": 5}'),
        "the name of a file beside it",
    ),
    "a list for a file": (
        _text("model.safetensors.index.json", '{"weight_map": {"a": [1]}}'),
        "the name of a file beside it",
    ),
    "weights that are pickles": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "which can run code when they are read",
    ),
    "a template that is no text": (
        _text("chat_template.jinja", b"\xff"),
        "chat_template.jinja is not UTF-8 text",
    ),
    "a pipe for a template": (_pipe("chat_template.jinja"), "is a pipe, not a plain file"),
    "a list of half templates": (
        lambda folder: (
            (folder / "chat_template.jinja").unlink(),
            _text("tokenizer_config.json", '{"chat_template": [{"a": 1}]}')(folder),
        ),
        "chat_template must be a text",
    ),
}


@attack(
    "L",
    "files of a model that lie about sizes, hang, or bring code",
    "refused with file, what it says and what is allowed; no code runs",
)
@pytest.mark.parametrize("name", FILES)
def test_files(name: str, model: Path, tmp_path: Path) -> None:
    change, says = FILES[name]
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change(model)
    assert_refused(check(CONFIG, model), says)
    assert not (tmp_path / "ran").exists()


TEMPLATES = {
    "a long range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "ranges in ranges": (
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
        "did not finish",
    ),
    "a list that doubles": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% "
        "endfor %}",
        "did not finish|MemoryError",
    ),
    "a text times 10^10": ("{{ 'x' * 10**10 }}", "MemoryError"),
    "a power": ("{{ 3 ** (10**9) }}", "did not finish"),
    "a wide format": ("{{ '%999999999d' % 1 }}", "MemoryError"),
    "a wide filter of formats": ("{{ '%0999999999d'|format(1) }}", "MemoryError"),
    "a wide method of formats": ("{{ '{:>9999999999}'.format(1) }}", "MemoryError|ValueError"),
    "a centre": ("{{ 'a'|center(10000000000) }}", "MemoryError"),
    "a method that centres": ("{{ 'a'.ljust(10000000000) }}", "MemoryError"),
    "tabs": ("{{ '\t'.expandtabs(2000000000) }}", "MemoryError"),
    "an indent": ("{{ ('a\n' * 100000)|indent(100000) }}", "MemoryError"),
    "a join": ("{{ range(100000)|join('x' * 100000) }}", "MemoryError"),
    "a replacement": ("{{ ('a' * 100000)|replace('a', 'b' * 100000) }}", "MemoryError"),
    "a text of 100 million": ("{{ 'x' * 10**8 }}", "at most 33554432"),
    "numbers that square": (
        "{% set ns = namespace(a=9**1000) %}{% for i in range(25) %}{% set ns.a = ns.a * ns.a %}"
        "{% endfor %}",
        "did not finish",
    ),
    "a macro that calls itself": (
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "RecursionError",
    ),
    "its class": (
        "{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}",
        "SecurityError|UndefinedError",
    ),
    "its globals": ("{{ cycler.__init__.__globals__.os.system('id') }}", "SecurityError"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "division by nothing": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "what is not there": ("{{ messages[9].x.y }}", "UndefinedError"),
    "half a statement": ("{% if %}", "TemplateSyntaxError"),
}


@pytest.mark.e2e
@attack(
    "L",
    "chat templates that loop, grow, or look for what is behind them",
    "ended at the deadline or refused; what a template reaches is messages",
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, says = TEMPLATES[name]
    monkeypatch.setattr(
        template_worker, "RENDER_S", 0.5 if "did not finish" in says else 60.0
    )  # a busy machine ends no other one early
    with pytest.raises(ConfigError, match=f"chat template .*({says})"):
        template_worker.render(
            source, [{"role": "user", "content": "hi"}], [], {}, [(1, True)], key="k"
        )
    written = template_worker.render("{{ bos }}", [], [], {"bos": "<s>"}, [(0, True)], key="k")
    assert written == ["<s>"]


@attack("L", "a file for a template that is none", "refused with the key")
@pytest.mark.parametrize("kind", ["/dev/zero", "a pipe", "no text"])
def test_no_template(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "no text":
        file.write_bytes(b"\xff")
    else:
        file = Path(kind)
    assert_refused(
        check(CONFIG, tiny_model, f"model.custom_chat_template={file}"),
        "model.custom_chat_template: cannot be read",
    )
