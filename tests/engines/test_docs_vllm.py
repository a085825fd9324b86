"""What docs/engine-vllm.md shows can be pasted: its imports are there, and its classes can be made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from runner_adapter.adapters.vllm import SchedulerMixin, V1RunnerMixin

PAGE = Path(__file__).parents[2] / "docs" / "engine-vllm.md"


def test_the_page_s_first_example_can_be_pasted() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    made: dict[str, Any] = {"__name__": "stages"}
    exec(compile(code, PAGE.name, "exec"), made)
    assert issubclass(made["StageRunner"], (V1RunnerMixin,)) and issubclass(made["StageScheduler"], SchedulerMixin)
    assert made["StageWorker"].init_device is not made["Worker"].init_device
