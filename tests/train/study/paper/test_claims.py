"""The verdicts on the paper's claims, from figures written by hand."""

from train.study.paper import claims

spread = lambda mean: {"mean": mean, "std": 0.01}


def row(name, rel_l2=0.0, accuracy=0.9, milliseconds=1.0, num_fit=None):
    return {
        "published": name,
        "metrics": {"rel_l2": spread(rel_l2)},
        "accuracy": spread(accuracy),
        "layer": spread(milliseconds),
        "num_fit": num_fit,
    }


def verdicts(results):
    return {one.text: one for one in claims.check(results)}


def text_table(teacher, softmax, asap):
    rows = [row("Sinkhorn teacher", accuracy=teacher), row("ASAP-LS", accuracy=asap)]
    rows.append(row("ASAP-LS-0", accuracy=asap))
    return {"rows": rows, "families": [row("Transformer", accuracy=softmax)]}


def test_without_tables_nothing_is_measured():
    assert {one.verdict for one in claims.check({})} == {"not measured"}


def test_accuracies_are_compared_by_their_means():
    held = verdicts({"text_ag_news": text_table(0.90, 0.89, 0.895)})
    close, better = (
        held["text_ag_news: ASAP-LS is within 1 point of its teacher"],
        held["text_ag_news: the Sinkhorn teacher is at least as accurate as softmax"],
    )
    assert (close.verdict, better.verdict) == ("held", "held")
    assert close.figures.startswith("-0.50 points")
    assert "+1.00 points" in better.figures
    failed = verdicts({"text_ag_news": text_table(0.90, 0.91, 0.88)})
    assert {one.verdict for name, one in failed.items() if "ag_news" in name} == {"not held"}


def test_errors_and_times_of_the_frozen_layers():
    rows = [
        row(f"Sinkhorn normalizer (S={s})", error)
        for s, error in zip((3, 4, 5, 6), (4, 2, 2, 1), strict=True)
    ]
    rows.append(row("ASAP-LS (L=32)", 1.5, milliseconds=3.0))
    found = verdicts({"operator_main": {"rows": rows}})
    closer = "frozen IMDb layers: ASAP-LS is closer to the teacher than Sinkhorn with S={}".format
    assert [found[closer(s)].verdict for s in (3, 4, 5, 6)] == ["held"] * 3 + ["not held"]
    assert (
        found["frozen IMDb layers: ASAP-LS (L=32) is faster than Sinkhorn normalizer (S=3)"].verdict
        == "not held"
    )


def test_the_calibration_size_hardly_matters_below_a_tenth():
    def table(small, large):
        rows = [
            row(f"ASAP{kind}, M={m}", error, num_fit=m)
            for kind in ("-0", "")
            for m, error in ((512, small), (4096, large))
        ]
        return {"amortization_design": {"rows": rows}}

    text = "calibration size hardly matters: the error changes by less than a tenth"
    assert verdicts(table(1.05, 1.0))[text].verdict == "held"
    assert verdicts(table(1.2, 1.0))[text].verdict == "not held"


def test_shared_coefficients_of_a_single_layer_say_nothing():
    def table(own, shared):
        rows = [
            row("ASAP-0, M=512", 1.0, num_fit=512),
            row("ASAP, M=512", own, num_fit=512),
            row("ASAP shared coefficients", shared, num_fit=512),
        ]
        return {"amortization_design": {"rows": rows}}

    found = [
        next(one for text, one in verdicts(table(*errors)).items() if "shared ones" in text)
        for errors in ((0.1, 0.1), (0.1, 0.2), (0.2, 0.1))
    ]
    assert [one.verdict for one in found] == ["not measured", "held", "not held"]
    assert "one layer" in found[0].figures


def test_patches_and_lengths_are_compared_one_by_one():
    def patch(asap, budget):
        names = {"ASAP": asap, "Sinkhorn normalizer (S=3)": budget}
        return [{"published": name, "agreement": spread(x)} for name, x in names.items()]

    times = {"base": 1.0, "Sinkhorn (S=3)": 2.0, "Sinkhorn (S=20)": 9.0}
    slow = {**times, "base": 3.0}
    as_rows = lambda found: {name: {"milliseconds": ms} for name, ms in found.items()}
    found = verdicts(
        {
            "mnist_replacement": {"patches": {"7": patch(0.97, 0.8), "14": patch(0.7, 0.8)}},
            "runtime_speedup": {
                "base": "base",
                "lengths": {"500": as_rows(slow), "2000": as_rows(times)},
            },
        }
    )
    text = "shallow MNIST, patch {}: ASAP agrees with its teacher more often than Sinkhorn with S=3"
    assert [found[text.format(patch)].verdict for patch in (7, 14)] == ["held", "not held"]
    runtime = next(one for name, one in found.items() if name.startswith("one layer"))
    assert runtime.verdict == "held"
    assert runtime.figures.startswith("N=2000: base: 1.0 ms")


def test_exact_sorting_must_restore_both_sums_and_change_predictions():
    def table(row_error, change):
        errors = lambda row, change: {
            "row_error": row,
            "column_error": row,
            "prediction_change": change,
        }
        operators = {"soft": errors(0.05, 0.0), "hard": errors(row_error, change)}
        return {"esp_soft_hard_switch": {"operators": operators}}

    text = "exact hard sorting restores the marginals of ESP and changes predictions"
    assert verdicts(table(1e-7, 0.3))[text].verdict == "held"
    assert verdicts(table(0.06, 0.3))[text].verdict == "not held"
    assert verdicts(table(1e-7, 0.0))[text].verdict == "not held"
