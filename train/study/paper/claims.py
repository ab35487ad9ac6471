"""The paper's claims, held against the tables' JSON; nothing is typed in."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from train.study.paper.rows import TEACHER

HELD, NOT, OPEN = "held", "not held", "not measured"
SHARED = "ASAP shared coefficients"  # row of the table of designs
POINT = 0.01  # one percentage point of accuracy
Results = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
      text: the claim.
      verdict: ``"held"``, ``"not held"`` or ``"not measured"``.
      figures: by how much, from the tables.
    """

    text: str
    verdict: str
    figures: str


def check(results: Results) -> list[Claim]:
    """All claims, from the JSON values of the tables that exist, by table name."""
    return [
        *(_teacher_and_softmax(results, name) for name in _downstream(results)),
        *(_close_on_text(results, name) for name in _texts(results)),
        *_budgets(results),
        *_design(results),
        _sizes(results),
        *_patches(results),
        _runtime(results),
        _resources(results),
        _switch(results),
    ]


def _claim(text: str, held: bool | None, figures: str) -> Claim:
    return Claim(text, OPEN if held is None else HELD if held else NOT, figures)


def _texts(results: Results) -> list[str]:
    return sorted(name for name in results if name.startswith("text_"))


def _downstream(results: Results) -> list[str]:
    return [*_texts(results), *(name for name in ("cifar", "catsdogs") if name in results)]


def _rows(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows by the name in the paper's table; families of trained models included."""
    return {row["published"]: row for row in (*result.get("families", ()), *result["rows"])}


def _accuracy(row: Mapping[str, Any]) -> str:
    value = row["accuracy"]
    return f"{100 * value['mean']:.2f} ± {100 * value['std']:.2f}"


def _teacher_and_softmax(results: Results, name: str) -> Claim:
    rows = _rows(results[name])
    teacher, softmax = rows[TEACHER], rows["Transformer"]
    gap = teacher["accuracy"]["mean"] - softmax["accuracy"]["mean"]
    figures = f"{_accuracy(teacher)} and {_accuracy(softmax)}, {100 * gap:+.2f} points"
    return _claim(
        f"{name}: the Sinkhorn teacher is at least as accurate as softmax", gap >= 0, figures
    )


def _close_on_text(results: Results, name: str) -> Claim:
    rows = _rows(results[name])
    teacher, asap = rows[TEACHER], rows["ASAP-LS"]
    gap = asap["accuracy"]["mean"] - teacher["accuracy"]["mean"]
    one = rows["ASAP-LS-0"]["accuracy"]["mean"] - teacher["accuracy"]["mean"]
    figures = f"{100 * gap:+.2f} points; ASAP-LS-0 {100 * one:+.2f} points"
    return _claim(f"{name}: ASAP-LS is within 1 point of its teacher", abs(gap) <= POINT, figures)


def _compare(
    results: Results, table: str, text: str, first: str, others: tuple[str, ...], metric: str
) -> Claim:
    """Whether the error of row ``first`` is below that of all ``others``."""
    if table not in results:
        return _claim(text, None, f"table {table} is missing")
    rows = _rows(results[table])
    if missing := [name for name in (first, *others) if name not in rows]:
        return _claim(text, None, f"table {table} has no row {missing[0]}")
    mean = lambda name: rows[name]["metrics"][metric]["mean"]
    held = all(mean(first) < mean(other) for other in others)
    figures = "; ".join(f"{name}: {mean(name):.4g}" for name in (first, *others))
    return _claim(text, held, figures)


def _budgets(results: Results) -> list[Claim]:
    """ASAP-LS against smaller Sinkhorn budgets, in error and in time."""
    budget = "Sinkhorn normalizer (S={})".format
    asap, table = "ASAP-LS (L=32)", "operator_main"
    error = lambda steps: _compare(
        results,
        table,
        f"frozen IMDb layers: ASAP-LS is closer to the teacher than Sinkhorn with S={steps}",
        asap,
        (budget(steps),),
        "rel_l2",
    )
    return [*(error(steps) for steps in (3, 4, 5, 6)), _faster(results, table, asap, budget(3))]


def _faster(results: Results, table: str, first: str, second: str) -> Claim:
    text = f"frozen IMDb layers: {first} is faster than {second}"
    if table not in results:
        return _claim(text, None, f"table {table} is missing")
    rows = _rows(results[table])
    times = [rows[name]["layer"]["mean"] for name in (first, second)]
    return _claim(text, times[0] < times[1], f"{times[0]:.2f} ms and {times[1]:.2f} ms")


def _design(results: Results) -> list[Claim]:
    """The claims on the parametrisation."""
    table = "amortization_design"
    count = _default_size(results)
    asap = f"ASAP, M={count}"
    lower = lambda text, first, others: _compare(results, table, text, first, others, "rel_l2")
    return [
        lower(
            "sliced potentials are closer to the teacher than raw projections and rank "
            "displacement",
            asap,
            ("Raw projections + ASAP transform", "Rank displacement + ASAP transform"),
        ),
        _own_or_shared(results, asap),
        lower(
            "predicting both duals is unstable: its error is larger than that of ASAP-0",
            f"ASAP-0, M={count}",
            ("Predict both duals, no c-transform",),
        ),
    ]


def _own_or_shared(results: Results, own: str) -> Claim:
    """Own coefficients against shared ones; teachers with a single layer say nothing about it."""
    text = "coefficients for every layer are closer than shared ones"
    table, metric = "amortization_design", "rel_l2"
    claim = _compare(results, table, text, own, (SHARED,), metric)
    if claim.verdict == OPEN:
        return claim
    rows = _rows(results[table])
    if rows[own]["metrics"][metric] == rows[SHARED]["metrics"][metric]:
        return _claim(text, None, f"equal, as in teachers with one layer; {claim.figures}")
    return claim


def _default_size(results: Results) -> int:
    """M of the feature rows in the table of designs."""
    rows = _rows(results["amortization_design"]) if "amortization_design" in results else {}
    shared = rows.get(SHARED, {"num_fit": 0})
    return shared["num_fit"]


def _sizes(results: Results) -> Claim:
    """Whether the calibration size hardly matters: less than a tenth of the error."""
    text = "calibration size hardly matters: the error changes by less than a tenth"
    if "amortization_design" not in results:
        return _claim(text, None, "table amortization_design is missing")
    rows = _rows(results["amortization_design"])
    changes = {}
    for kind in ("ASAP-0", "ASAP"):
        errors = {
            row["num_fit"]: row["metrics"]["rel_l2"]["mean"]
            for name, row in rows.items()
            if name.startswith(f"{kind}, M=")
        }
        low, high = min(errors.values()), max(errors.values())
        values = ", ".join(f"M={size}: {error:.4g}" for size, error in sorted(errors.items()))
        changes[f"{kind} {values}"] = (high - low) / high
    figures = "; ".join(f"{name} ({100 * change:.1f} %)" for name, change in changes.items())
    return _claim(text, max(changes.values()) < 0.1, figures)


def _patches(results: Results) -> list[Claim]:
    """Agreement with the MNIST teacher: ASAP against Sinkhorn with S=3."""
    text = "shallow MNIST, patch {}: ASAP agrees with its teacher more often than Sinkhorn with S=3"
    table = "mnist_replacement"
    if table not in results:
        return [_claim(text.format("2 to 14"), None, f"table {table} is missing")]
    found = []
    for patch, lines in results[table]["patches"].items():
        rows = {row["published"]: row["agreement"]["mean"] for row in lines}
        asap, budget = rows["ASAP"], rows["Sinkhorn normalizer (S=3)"]
        figures = f"{100 * asap:.2f} % and {100 * budget:.2f} %"
        found.append(_claim(text.format(patch), asap > budget, figures))
    return found


def _runtime(results: Results) -> Claim:
    """Time of one layer at the largest length: ASAP-LS-0 against Sinkhorn with S=3 and S=20."""
    text = "one layer at the largest length: ASAP-LS-0 is faster than Sinkhorn with S=3 and S=20"
    table = "runtime_speedup"
    if table not in results:
        return _claim(text, None, f"table {table} is missing")
    length, rows = max(results[table]["lengths"].items(), key=lambda item: int(item[0]))
    names = (results[table]["base"], "Sinkhorn (S=3)", "Sinkhorn (S=20)")
    times = [rows[name]["milliseconds"] for name in names]
    if None in times:
        return _claim(text, None, f"N={length}: not all rows ran")
    figures = "; ".join(f"{name}: {ms:.1f} ms" for name, ms in zip(names, times, strict=True))
    return _claim(text, times[0] < min(times[1:]), f"N={length}: {figures}")


def _resources(results: Results) -> Claim:
    """Soft ESP against Sinkhorn with S=10 on the whole IMDb encoder."""
    text = "whole IMDb encoder: soft ESP trains slower and with more memory than Sinkhorn, S=10"
    if "imdb_resources" not in results:
        return _claim(text, None, "table imdb_resources is missing")
    train = results["imdb_resources"]["train"]
    base, esp = train["Sinkformer (S=10)"], train["ESPFormer (Soft)"]
    memory = esp["gib"] / base["gib"] if esp["gib"] and base["gib"] else None
    if esp["milliseconds"] is None or base["milliseconds"] is None or memory is None:
        return _claim(text, None, f"ESP did not run: {esp['reason']}")
    speed = esp["milliseconds"] / base["milliseconds"]
    figures = f"{speed:.1f} times the time, {memory:.1f} times the memory (paper: 14.8 and 5.7)"
    return _claim(text, speed > 1 and memory > 1, figures)


def _switch(results: Results) -> Claim:
    """Exact hard sorting of an ESP model that was trained softly."""
    text = "exact hard sorting restores the marginals of ESP and changes predictions"
    table = "esp_soft_hard_switch"
    if table not in results:
        return _claim(text, None, f"table {table} is missing")
    soft, hard = (results[table]["operators"][name] for name in ("soft", "hard"))
    errors = lambda row: (row["row_error"], row["column_error"])
    restored = all(b < a for a, b in zip(errors(soft), errors(hard), strict=True))
    change = hard["prediction_change"]
    figures = "; ".join(
        f"{name}: row error {row['row_error']:.2e}, column error {row['column_error']:.2e}"
        for name, row in (("soft", soft), ("exact hard", hard))
    )
    figures += f"; {100 * change:.2f} % of the predictions change"
    return _claim(text, restored and change > 0, figures)
