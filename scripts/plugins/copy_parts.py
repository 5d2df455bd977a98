"""A reward of two parts for the copy task: whether the answer is a digit, and whether it is the right one."""

from rft import Task, Transcript, register


@register.reward("copy_parts")
def copy_parts(task: Task, transcript: Transcript) -> dict[str, float]:
    answer = transcript.answer.strip()
    return {"right": float(answer == task.truth), "digit": float(answer.isdigit())}
