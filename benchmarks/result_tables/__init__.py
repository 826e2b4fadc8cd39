"""Tables of the documents that are computed from the files in ``benchmarks/results``.

Each stands between ``<!-- name -->`` and ``<!-- /name -->``: ``show_results.py`` writes it, and a test compares.
"""

from collections.abc import Callable

from . import hunts, plans, speed, training, users

TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    function.__name__: (document, function)
    for document, function in (
        ("README.md", users.first_minutes),
        ("docs/appendix/benchmark_aims.md", speed.against_before),
        ("docs/appendix/benchmark_aims.md", speed.bench_targets),
        ("docs/appendix/benchmark_aims.md", speed.eager),
        ("docs/appendix/benchmark_aims.md", speed.frequency),
        ("docs/appendix/dense_layers.md", training.dense_profile),
        ("docs/appendix/dense_layers.md", training.dense_steps),
        ("docs/appendix/fit.md", users.fits),
        ("docs/appendix/plan_quality.md", plans.dead_units),
        ("docs/appendix/plan_quality.md", plans.other_logs),
        ("docs/appendix/plan_quality.md", plans.plan_synthetic),
        ("docs/appendix/plan_quality.md", plans.plan_targets),
        ("docs/appendix/training_speed.md", training.train_cpu),
        ("docs/appendix/training_speed.md", training.train_gpu),
        ("docs/benchmarks.md", speed.against_fbgemm),
        ("docs/appendix/benchmark_tables.md", speed.against_full),
        ("docs/appendix/plan_quality.md", plans.plan_times),
        ("docs/appendix/plan_quality.md", plans.int8_step),
        ("docs/appendix/plan_quality.md", plans.int8_training),
        ("docs/appendix/plan_quality.md", plans.plan_row_dtypes),
        ("docs/choosing.md", plans.plan_quality),
        ("docs/appendix/compressed_models.md", users.fine_tune),
        ("docs/appendix/compressed_models.md", users.foreign_models),
        ("docs/appendix/data_speed.md", plans.id_orders),
        ("docs/appendix/cpu_kernels.md", speed.cold_start),
        ("docs/appendix/cpu_kernels.md", speed.cpu_latency),
        ("docs/kernels.md", speed.cpu_lookups),
        ("docs/appendix/cpu_kernels.md", speed.cpu_loop),
        ("docs/appendix/reliability_tables.md", hunts.damaged_files),
        ("docs/appendix/reliability_tables.md", hunts.drawn_lookups),
        ("docs/appendix/reliability_tables.md", hunts.drawn_steps),
        ("docs/reliability.md", hunts.kills),
        ("docs/appendix/serving_speed.md", users.serve_load),
        ("docs/appendix/serving_speed.md", users.serve_onnx),
        ("docs/appendix/training_speed.md", training.criteo_sample),
        ("docs/training.md", training.train_gpu_targets),
    )
}
