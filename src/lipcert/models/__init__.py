"""Networks: the zoo, models by name, and weights in files."""

from lipcert.models import zoo
from lipcert.models.loaded import LoadedModel
from lipcert.models.reading import load_model
from lipcert.models.weights import save_model

__all__ = ["LoadedModel", "load_model", "save_model", "zoo"]
