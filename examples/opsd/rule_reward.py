"""A reward that says what it expected."""

from rft import Score, Task, Transcript, register


@register.reward("rule_reward")
def rule_reward(task: Task, transcript: Transcript) -> Score:
    """1 for the right letters; the reason for a wrong answer is the right one."""
    right = transcript.answer.strip() == task.truth
    return Score(value=float(right), reason="" if right else str(task.truth))
