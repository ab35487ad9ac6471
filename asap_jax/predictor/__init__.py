"""The predicted dual: feature families, a head on them, and corrections between closures."""

from asap_jax.predictor.corrections import Correction
from asap_jax.predictor.heads import LinearHead, MLPHead
from asap_jax.predictor.predictor import DualPair, Predictor, predict
from asap_jax.predictor.row_mass import RowMass

__all__ = ["Correction", "DualPair", "LinearHead", "MLPHead", "Predictor", "RowMass", "predict"]
