"""Model → normal form: sites joined by linear operations."""

from lipcert.network.build import trace
from lipcert.network.linear import LinearOp
from lipcert.network.normal_form import Network, Site
from lipcert.network.rules import Call, register_rule
from lipcert.network.slopes import Slope

__all__ = ["Call", "LinearOp", "Network", "Site", "Slope", "register_rule", "trace"]
