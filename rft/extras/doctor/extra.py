"""The extra that checks the machine and a model."""

from rft.plugins import Extra, Verb

EXTRA = Extra(
    verbs={
        "doctor": Verb(
            "Show what this machine has, and what is missing.",
            "rft doctor --model runs/model",
            "rft.extras.doctor.doctor_command:doctor",
        ),
    },
)
