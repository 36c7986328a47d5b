"""The paper's tables and figures, each by its name."""

from lipcert_experiments.experiments import EXPERIMENTS
from lipcert_experiments.invocation import Reproduction, reproduce
from lipcert_experiments.plan import BUDGETS, PROTOCOLS, Plan

__all__ = ["BUDGETS", "EXPERIMENTS", "PROTOCOLS", "Plan", "Reproduction", "reproduce"]
