"""All tables: what each is, what it trains, how long it takes."""

import dataclasses
import functools
from collections.abc import Callable

from train.study.paper import (
    accuracy,
    esp,
    esp_switch,
    frozen_tables,
    layers,
    mnist,
    replacement,
    whole_model,
)
from train.study.paper.result import Result
from train.study.paper.runs import Models

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One table of the command line.

    Attributes:
      summary: one line on what it shows.
      trains: what it trains if it is missing.
      minutes: about how long it takes from nothing in the small preset, on two CPU cores.
      make: from the models and a function for progress to the result.
    """

    summary: str
    trains: str
    minutes: float
    make: Callable[[Models, Report], Result]


def _frozen(name: str, summary: str, minutes: float) -> Entry:
    table = frozen_tables.TABLES[name]
    trains = "three IMDb encoders with S=20, shared by the four frozen tables"
    return Entry(summary, trains, minutes, functools.partial(replacement.run, table))


def _accuracy(table: Callable[[Models], accuracy.AccuracyTable]) -> Callable:
    return lambda models, report: accuracy.run(table(models), models, report)


_FAMILIES = "Sinkhorn and softmax models of every seed; Diff and ESP of one seed (small preset)"
TEXT = "text"

TABLES: dict[str, Entry] = {
    "operator_main": _frozen("operator_main", "frozen IMDb layers: time, error, accuracy", 55),
    "operator_marginal": _frozen(
        "operator_marginal", "frozen IMDb layers: row and column errors", 50
    ),
    "operator_ablation": _frozen("operator_ablation", "frozen IMDb layers: number of slices", 45),
    "amortization_design": _frozen(
        "amortization_design", "frozen IMDb layers: calibration size, features, sharing", 46
    ),
    **{
        f"{TEXT}_{dataset}": Entry(
            f"text classification: {column}",
            _FAMILIES,
            25,
            _accuracy(lambda models, dataset=dataset: accuracy.text(dataset)),
        )
        for dataset, (_, column) in accuracy.TEXTS.items()
    },
    "mnist_replacement": Entry(
        "shallow MNIST layer: patch sizes, residual fit, refresh",
        "a teacher with S=5 for every patch size and seed",
        50,
        mnist.run,
    ),
    "cifar": Entry(
        "CIFAR with patches of 4: trained families and what replaces the teacher",
        _FAMILIES,
        61,
        _accuracy(lambda models: accuracy.cifar(models.preset)),
    ),
    "catsdogs": Entry(
        "Cats and Dogs: trained families and what replaces the teacher",
        f"{_FAMILIES}; Sinkhorn also with S=3, ESP twice",
        45,
        _accuracy(lambda models: accuracy.CATS),
    ),
    "imdb_resources": Entry(
        "time and memory of the whole IMDb encoder, train step and forward",
        "nothing",
        5,
        functools.partial(whole_model.run, whole_model.IMDB),
    ),
    "catsdogs_resources": Entry(
        "time and memory of the whole Cats and Dogs ViT, train step and forward",
        "nothing",
        9,
        functools.partial(whole_model.run, whole_model.CATS),
    ),
    "runtime_speedup": Entry(
        "forward time of one layer at growing lengths", "nothing", 8, layers.runtime
    ),
    "flashsinkhorn_control": Entry(
        "unit-norm inputs: dense loop, tiles and compiled layers", "nothing", 2, layers.flash
    ),
    "esp_training_sequence": Entry(
        "train step of ESP and Sinkhorn attention at growing lengths", "nothing", 8, esp.sequence
    ),
    "esp_slice_count": Entry(
        "train step of ESP attention at growing numbers of slices", "nothing", 4, esp.slice_count
    ),
    esp_switch.NAME: Entry(
        "one ESP checkpoint, evaluated softly and with hard sorting",
        "the ESP model of table cifar",
        20,
        esp_switch.run,
    ),
}
