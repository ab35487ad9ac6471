"""Benchmarks of speed and memory."""

from train.bench import (
    device_losses,
    esp_resources,
    features,
    floor,
    gpu,
    imports,
    layer,
    long,
    memory_gradient,
    memory_tiles,
    peers,
    sharded,
    trace,
    training_loop,
)

BENCHES = {
    "layer": (layer.run, "softmax, Sinkhorn budgets and compiled layers at growing lengths"),
    "teacher": (peers.run, "the S=20 teacher compared with OTT-JAX and a PyTorch loop"),
    "features": (features.run, "only the prediction of a dual, from moments and from slices"),
    "floor": (floor.run, "where a layer's time goes: products, exponentials, closures, prediction"),
    "trace": (trace.run, "where a compiled program's time goes, from the profiler"),
    "memory": (memory_tiles.run, "memory of tiles and of whole kernels, forward and gradient"),
    "long": (long.run, "8,192 and 16,384 tokens in blocks: one call, closures, the loop"),
    "sharded": (sharded.run, "memory of one device when tokens are sharded over 1 to 8 devices"),
    "gradient-memory": (memory_gradient.run, "memory of forward and gradient of the S=20 teacher"),
    "esp-resources": (
        esp_resources.run,
        "train steps of ESP and of Sinkhorn attention (the shapes of the paper's table)",
    ),
    "gpu": (gpu.run, "checks every path against float64 on an accelerator, and times it"),
    "parallel": (device_losses.run, "losses on one device, sharded and under pmap"),
    "loop": (training_loop.run, "the training loop and the bare step, and the time spent on input"),
    "import": (imports.run, "seconds that `import asap_jax` adds"),
}
"""From the name of a benchmark to its function and to what it measures."""
