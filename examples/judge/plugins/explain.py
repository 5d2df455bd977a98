from rft import Judge, Scale, register


@register.workflow("explain_twice")
class ExplainTwice:
    async def run(self, task, ctx):
        messages = task.chat()
        first = await ctx.chat(messages)
        await ctx.chat(
            [*messages, first.message, {"role": "user", "content": "Say it again, for a child."}]
        )
        return ctx.transcript()


@register.reward("child_judge")
class ChildJudge(Judge):
    scale = Scale(1, 5)  # the reward is the grade / 5

    def prompt(self, case, delimit):  # delimit: marks quoted text; ask: says how to grade
        return f"""Is this answer true, and would a child of ten understand it?
{delimit("question", case.question)}
{delimit("answer", case.answer)}
{delimit.ask(score=self.scale)}"""
