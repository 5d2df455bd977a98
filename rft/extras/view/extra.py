"""The extra that shows runs in a browser and writes reports."""

from rft.plugins import Extra, Verb

EXTRA = Extra(
    verbs={
        "view": Verb(
            "Show runs in a browser, live and afterwards; nothing can be changed there.",
            "rft view runs",
            "rft.extras.view.view_command:view",
        ),
        "report": Verb(
            "Write one HTML file about a run, to keep or to send.",
            "rft report runs/rft/tiny -o report.html",
            "rft.extras.view.report_command:report",
        ),
        "compare": Verb(
            "Show runs beside each other, and what differs between them.",
            "rft compare runs/rft/one runs/rft/two -o curves.svg",
            "rft.extras.view.report_command:compare",
        ),
        "ls": Verb(
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
