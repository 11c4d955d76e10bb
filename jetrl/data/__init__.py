"""Task data in VeRL's format. Heavy imports wait until a task is prepared: reward workers import this package."""

from jetrl.data.prepare import check_columns, prepare
from jetrl.data.task import TaskConfig, load_task, task_names

__all__ = ["TaskConfig", "check_columns", "load_task", "prepare", "task_names"]
