from rft.reward.base import reward
from rft.reward.judge.base import Judge
from rft.reward.judge.fence import Scale
from rft.workflow.base import workflow


@workflow("explain_twice")
class ExplainTwice:
    async def run(self, task, ctx):
        messages = task.chat()
        first = await ctx.chat(messages)
        await ctx.chat([*messages, first.message, {"role": "user", "content": "Say it again, for a child."}])
        return ctx.transcript()


@reward("child_judge")
class ChildJudge(Judge):
    scale = Scale(1, 5)

    def prompt(self, case, fence):
        return f"""Is this answer true, and would a child of ten understand it?
{fence("question", case.question)}
{fence("answer", case.answer)}
{fence.ask(score=self.scale)}"""
