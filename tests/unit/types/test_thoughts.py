"""What a model wrote is split behind its last closed thought (finding G2)."""

import pytest

from rft.types.thoughts import opens_thought, split_thought


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("4", False, "", "4"),
        ("<think>two and two</think>4", False, "<think>two and two</think>", "4"),
        ("two and two</think>\n4", True, "two and two</think>", "\n4"),
        ("two and two</think>4", False, "two and two</think>", "4"),  # the prompt is not known
        ("<think>two and", False, "<think>two and", ""),
        ("two and", True, "two and", ""),
        ("\n <think>two and", False, "<think>two and", "\n "),
        ("<think>a</think>b<think>c</think>d", False, "<think>a</think>b<think>c</think>", "d"),
        ("<think>a<think>b</think>c</think>d", False, "<think>a<think>b</think>c</think>", "d"),
        ("<think>a</think>4.\n<think>or 5", False, "<think>a</think><think>or 5", "4.\n"),
        ("It is 4. <think>or 5", False, "<think>or 5", "It is 4. "),
        ("</answer><think>or 5", False, "<think>or 5", "</answer>"),
        ("是四。<think>五", False, "<think>五", "是四。"),
        ("The <think> tag is no thought: 4", False, "", "The <think> tag is no thought: 4"),
        ("`<think>` and `</think>` are tags: 4", False, "", "`<think>` and `</think>` are tags: 4"),
        ('a</think>Write "</think>" once: 4', True, "a</think>", 'Write "</think>" once: 4'),
        ('not `</think>` yet: "4"</think>"4"', True, 'not `</think>` yet: "4"</think>', '"4"'),
        ("not `</think>` yet", True, "not `</think>` yet", ""),
        ("", True, "", ""),
    ],
)
def test_an_answer_is_split_behind_its_thought(
    text: str, opened: bool, thought: str, answer: str
) -> None:
    assert split_thought(text, opened=opened) == (thought, answer)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("Think inside <think>.", False),
        ("", False),
    ],
)
def test_a_prompt_may_open_a_thought(prompt: str, opens: bool) -> None:
    assert opens_thought(prompt) is opens
