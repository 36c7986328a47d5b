"""The paper's tables and figures, each by its name."""

from lipcert.reproduce.experiments import EXPERIMENTS
from lipcert.reproduce.invocation import Reproduction, reproduce
from lipcert.reproduce.plan import BUDGETS, PROTOCOLS, Plan

__all__ = ["BUDGETS", "EXPERIMENTS", "PROTOCOLS", "Plan", "Reproduction", "reproduce"]
