"""The extra that shows runs in a browser and writes reports."""

from rft.plugins import CliCommand, Extra

EXTRA = Extra(
    commands={
        "view": CliCommand(
            "Show runs in a browser, live or ended, read-only.",
            "rft view runs",
            "rft.extras.view.view_command:view",
        ),
        "report": CliCommand(
            "Write one HTML file about a run, to keep or to send.",
            "rft report runs/rft/tiny -o report.html",
            "rft.extras.view.report_command:report",
        ),
        "compare": CliCommand(
            "Show runs beside each other, and what differs between them.",
            "rft compare runs/rft/one runs/rft/two -o curves.svg",
            "rft.extras.view.report_command:compare",
        ),
        "ls": CliCommand(
            "List the runs below a folder.",
            "rft ls runs",
            "rft.extras.view.ls_command:ls",
        ),
    },
    entries={
        "stored_run": {
            "report": "rft.extras.view.report_command:write_report",
            "compare": "rft.extras.view.report_command:compared",
        }
    },
)
