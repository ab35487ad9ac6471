"""Doubly-stochastic (Sinkhorn) attention in JAX, compiled to a layer without the loop."""

from asap_jax import linen, metrics, nnx
from asap_jax.artifact import load, save
from asap_jax.attention.costs import CostInputs, squared_euclidean_inputs
from asap_jax.attention.functions import asap_attention, sinkhorn_attention, softmax_attention
from asap_jax.attention.implementation import chosen_implementation
from asap_jax.baselines.diff import diff_attention, diff_lambda_init
from asap_jax.baselines.esp import esp_attention, esp_temperature_schedule
from asap_jax.compiler.amortized import AmortizedState
from asap_jax.compiler.automatic_fit import AutoFit
from asap_jax.compiler.calibration import CompileResult
from asap_jax.compiler.diagnosis import Diagnosis, LayerDiagnosis
from asap_jax.compiler.options import Options
from asap_jax.compiler.paper_fit import PaperFit
from asap_jax.compiler.progress import Progress, progress
from asap_jax.compiler.report import CompileReport, LayerReport, Rung
from asap_jax.compiler.single_fit import CANDIDATES, THOROUGH, Candidate
from asap_jax.features import Codebook, Moments, RankDisplacement, RawProjections, SlicedPotentials
from asap_jax.features.directions import slice_directions
from asap_jax.features.potentials import sliced_potentials
from asap_jax.fitting.kl_objective import kl_objective
from asap_jax.fitting.kl_search import KLFit, fit_kl
from asap_jax.fitting.least_squares import LeastSquaresFit, NormalEquations, fit_ls
from asap_jax.predictor import (
    Correction,
    DualPair,
    LinearHead,
    MLPHead,
    Predictor,
    RowMass,
    predict,
)
from asap_jax.predictor.key_bias import KeyBias
from asap_jax.records import CompiledState
from asap_jax.scores import query_shift, scores
from asap_jax.solvers.ctransform import attention_weights, key_ctransform, query_ctransform
from asap_jax.solvers.duals import SinkhornDuals, sinkhorn_duals
from asap_jax.spec import SinkhornSpec

__version__ = "0.2.0"

__all__ = [
    "CANDIDATES",
    "THOROUGH",
    "AmortizedState",
    "AutoFit",
    "Candidate",
    "Codebook",
    "CompileReport",
    "CompileResult",
    "CompiledState",
    "Correction",
    "CostInputs",
    "Diagnosis",
    "DualPair",
    "KLFit",
    "KeyBias",
    "LayerDiagnosis",
    "LayerReport",
    "LeastSquaresFit",
    "LinearHead",
    "MLPHead",
    "Moments",
    "NormalEquations",
    "Options",
    "PaperFit",
    "Predictor",
    "Progress",
    "RankDisplacement",
    "RawProjections",
    "RowMass",
    "Rung",
    "SinkhornDuals",
    "SinkhornSpec",
    "SlicedPotentials",
    "asap_attention",
    "attention_weights",
    "chosen_implementation",
    "diff_attention",
    "diff_lambda_init",
    "esp_attention",
    "esp_temperature_schedule",
    "fit_kl",
    "fit_ls",
    "key_ctransform",
    "kl_objective",
    "linen",
    "load",
    "metrics",
    "nnx",
    "predict",
    "progress",
    "query_ctransform",
    "query_shift",
    "save",
    "scores",
    "sinkhorn_attention",
    "sinkhorn_duals",
    "slice_directions",
    "sliced_potentials",
    "softmax_attention",
    "squared_euclidean_inputs",
]
