"""TensorBoard event files, one folder per role.  Writes protocol buffers directly, so torch is not loaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rft.monitor.base import Row, Tracker, markdown, monitor
from rft.monitor.settings import MonitorSettings
from rft.types.metrics import MetricRecord


@monitor("tensorboard")
class TensorBoard(Tracker):
    """run/tensorboard/{explorer,trainer,synchronizer,eval}; look with `tensorboard --logdir run/tensorboard`."""

    requires = ("tensorboard",)

    def __init__(self, settings: MonitorSettings, args: Any) -> None:
        super().__init__(settings, args)
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2

        self._event, self._summary, self._tensor, self._types = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto, types_pb2
        self._writers: dict[str, Any] = {}

    def log(self, record: MetricRecord) -> None:
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
        self._write(record.role, record.step, record.time, values)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        metadata = self._summary.SummaryMetadata(plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text"))
        text = self._tensor(dtype=self._types.DT_STRING, string_val=[markdown(rows).encode()])
        value = self._summary.Summary.Value(tag=f"samples/{name}/text_summary", metadata=metadata, tensor=text)
        self._write("eval", step, time.time(), [value])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _write(self, role: str, step: int, when: float, values: list[Any]) -> None:
        if role not in self._writers:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writers[role] = EventFileWriter(str(self.settings.folder / "tensorboard" / role))
        self._writers[role].add_event(self._event(step=step, wall_time=when, summary=self._summary.Summary(value=values)))
        self._writers[role].flush()
