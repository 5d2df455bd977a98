"""The extra that audits a whole set of tasks."""

from rft.plugins import CliCommand, Extra

EXTRA = Extra(
    commands={
        "data": CliCommand(
            "Audit the tasks of a configuration: gold answers, duplicates, lengths.",
            "rft data audit --config my.yaml",
            "rft.extras.data_audit.data_command:data",
        ),
    },
)
