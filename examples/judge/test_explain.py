from plugins.explain import ChildJudge, ExplainTwice

from rft.testing import FakeJudge, ScriptedModel, run_workflow


def test_the_second_answer_is_judged():
    policy = ScriptedModel("Rayleigh scattering.", "Air spreads blue light most.")
    judge = FakeJudge(4)
    result = run_workflow(
        ExplainTwice, "Why is the sky blue?", policy, reward=ChildJudge, models={"judge": judge}
    )
    assert result.reward == 0.8
    assert "Air spreads blue" in judge.calls[0].messages[-1]["content"]
