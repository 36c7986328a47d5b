"""What a run folder is: its files, how they are written when a run is finished, and how they are read."""

from lipcert.runs.finishing import Task, certify_test, finish_folder
from lipcert.runs.folder import RunFolder, read_runs
from lipcert.runs.pretrained import Pretrained, pretrained
from lipcert.runs.result import Run
from lipcert.runs.summary import Accuracy, Summary, read_summary

__all__ = [
    "Accuracy",
    "Pretrained",
    "Run",
    "RunFolder",
    "Summary",
    "Task",
    "certify_test",
    "finish_folder",
    "pretrained",
    "read_runs",
    "read_summary",
]
