"""Benchmarks: speed and memory live here and never in tests."""

from train.bench import (
    device_losses,
    esp_resources,
    features,
    floor,
    gpu,
    imports,
    layer,
    memory_gradient,
    memory_tiles,
    peers,
    trace,
    training_loop,
)

BENCHES = {
    "layer": (layer.run, "softmax, Sinkhorn budgets and compiled layers at growing lengths"),
    "teacher": (peers.run, "the S=20 teacher beside OTT-JAX and a PyTorch loop"),
    "features": (features.run, "predicting a dual from moments and from slices, by itself"),
    "floor": (floor.run, "where a layer's time goes: products, exponentials, closures, prediction"),
    "trace": (trace.run, "the same from the profiler: what the compiled program's parts take"),
    "memory": (memory_tiles.run, "tiles against whole kernels, forward and gradient"),
    "gradient-memory": (memory_gradient.run, "forward and gradient of the S=20 teacher"),
    "esp-resources": (
        esp_resources.run,
        "train steps of ESP attention beside Sinkhorn (the paper's table shape)",
    ),
    "gpu": (gpu.run, "every path checked against float64 on an accelerator, and timed"),
    "parallel": (device_losses.run, "losses on one device, sharded and under pmap, side by side"),
    "loop": (training_loop.run, "the training loop against the bare step, and its share of input"),
    "import": (imports.run, "seconds that `import asap_jax` adds"),
}
"""From a name to the function that runs it and what it measures."""
