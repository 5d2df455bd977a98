"""The extra that checks the machine and a model."""

from rft.plugins import CliCommand, Extra

EXTRA = Extra(
    commands={
        "doctor": CliCommand(
            "Show what this machine has, and what is missing.",
            "rft doctor --model runs/model",
            "rft.extras.doctor.doctor_command:doctor",
        ),
    },
)
